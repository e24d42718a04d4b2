"""Columns of Spark from data in the wire format of a schema registry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from oncelog.config import SCHEMA_REGISTRY
from oncelog.errors import ConfigError, SchemaDataError, SchemaRegistryError

if TYPE_CHECKING:
    from pyspark.sql import Column

MODES = ("FAILFAST", "PERMISSIVE")
_NOT_FOUND = 404


def registry_json(column: Column | str, config: Mapping[str, object], *, mode: str = "FAILFAST") -> Column:
    """Return the column's keys or values as JSON text, with the schemas that they were written with.

        value = oncelog.spark.registry_json("value", {"schema.registry.url": "http://127.0.0.1:8081"})
        rows.select(from_json(value, "id LONG, item STRING").alias("order")).select("order.*")

    `config` has the settings of a SchemaRegistryClient. Each Python worker asks the registry once for each
    schema id. Null stays null. `mode` is Spark's name for what happens with data that is not in the wire
    format, that does not fit its schema, or whose schema id the registry does not have: FAILFAST fails the
    query, PERMISSIVE makes it null. A registry that does not answer always fails the task.

    The settings, with passwords, are part of the query's plan. Raises ConfigError for invalid settings.
    """
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    if mode not in MODES:
        raise ConfigError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
    SCHEMA_REGISTRY.parse(config)
    is_strict = mode == "FAILFAST"
    # The key of a worker's cache, so a list of URLs must become a tuple.
    settings = tuple(
        (key, tuple(value) if isinstance(value, list) else value) for key, value in config.items()
    )

    def json_texts(values: Any) -> Any:
        return values.map(lambda data: _json_text(settings, is_strict, data))

    # Spark takes the kind of function from the annotations, which must be classes here.
    json_texts.__annotations__ = {"values": pd.Series, "return": pd.Series}
    return pandas_udf(json_texts, "string")(column)


def _json_text(settings: tuple[tuple[str, object], ...], is_strict: bool, data: Any) -> str | None:
    from oncelog.schema_registry.any_schema import to_json

    if data is None:
        return None
    try:
        return to_json(_deserializer(settings).deserialize("", bytes(data)))
    except SchemaRegistryError as error:
        if is_strict or error.status != _NOT_FOUND:
            raise
    except SchemaDataError:
        if is_strict:
            raise
    return None


@lru_cache(maxsize=8)
def _deserializer(settings: tuple[tuple[str, object], ...]) -> Any:
    """Return the deserializer of this Python worker for some settings."""
    from oncelog.schema_registry.any_schema import AnyDeserializer
    from oncelog.schema_registry.client import SchemaRegistryClient

    return AnyDeserializer(SchemaRegistryClient(dict(settings)), remembers_unknown=True)
