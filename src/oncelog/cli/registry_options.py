"""The schema registry of commands: `--schema-registry URL`, its settings, and records as JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import click

from oncelog.cli.common import ClientConfig, say
from oncelog.config import SCHEMA_REGISTRY
from oncelog.errors import DeserializationError, SchemaDataError, SchemaRegistryError
from oncelog.settings import SettingsTable
from oncelog.types import Record

F = TypeVar("F", bound=Callable[..., Any])

_URL = "schema.registry.url"
_NOT_FOUND = 404
MAX_WARNINGS = 10
_TYPES = {".avsc": "AVRO", ".json": "JSON"}

registry_option = click.option(
    "--schema-registry",
    "registry_url",
    metavar="URL",
    help="The schema registry with the schemas of keys and values. -X sets its other settings, such as "
    "basic.auth.user.info.  [default: schema.registry.url of -X, the environment, --command-config or the "
    "profile]",
)


def take_registry(
    client_config: ClientConfig,
    url: str | None,
    table: SettingsTable,
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> Any | None:
    """Return a SchemaRegistryClient for a command's options, or None if none of them names a registry.

    The end of the command closes it. The settings that only a registry has are removed from `client_config`.
    `table` has the settings of the command's client. `defaults` has settings of the registry that the options
    may override. Raises ConfigError.
    """
    config = {key: value for key, value in client_config.items() if SCHEMA_REGISTRY.get(key) is not None}
    if url is not None:
        config[_URL] = url
    if not config.get(_URL):
        return None
    for key in config:
        if table.get(key) is None:
            client_config.pop(key, None)
    from oncelog.schema_registry.client import SchemaRegistryClient

    registry = SchemaRegistryClient({**defaults, **config})
    click.get_current_context().call_on_close(registry.close)
    return registry


class RecordDecoder:
    """A converter of keys and values in the registry's wire format to JSON text in UTF-8.

    Bytes that cannot be in the wire format stay unchanged. Bytes with an unknown schema id, and bytes that do
    not fit their schema, stay unchanged too, and a warning is printed.
    """

    def __init__(self, registry: Any) -> None:
        from oncelog.schema_registry.any_schema import AnyDeserializer

        # Show a value even if it does not fit its JSON Schema.
        shown = {"json.fail.invalid.schema": False}
        self._deserializer = AnyDeserializer(registry, config=shown, remembers_unknown=True)
        self._warnings: set[str] = set()

    def __call__(self, record: Record) -> Record:
        """Return the record with JSON text. Raises DeserializationError if the registry does not answer."""
        return record._replace(key=self._part(record, "key"), value=self._part(record, "value"))

    def _part(self, record: Record, part: str) -> bytes | None:
        from oncelog.schema_registry.any_schema import to_json
        from oncelog.schema_registry.wire_format import is_framed

        data: bytes | None = getattr(record, part)
        if data is None or not is_framed(data):
            return data
        try:
            return to_json(self._deserializer.deserialize(record.topic, data)).encode(errors="replace")
        except SchemaRegistryError as error:
            if error.status != _NOT_FOUND:
                raise DeserializationError(
                    f"the {part} of {record.topic}-{record.partition} at offset {record.offset}: {error}",
                    part=part,
                    record=record,
                ) from error
            self._warn(str(error))
        except SchemaDataError as error:
            self._warn(f"{part} of {record.topic}-{record.partition} at offset {record.offset}: {error}")
        return data

    def _warn(self, text: str) -> None:
        if text not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(text)
            say(f"oncelog: printed as stored: {text}", err=True)


def text_encoder(registry: Any, topic: str, schema: str, *, is_key: bool) -> Callable[[bytes], bytes]:
    """Return a function that converts JSON text to the wire format with the schema that an option names.

    `schema` is an id, or a file: .avsc for Avro, .json for JSON Schema. The function raises ValueError for
    text that is not JSON or does not fit the schema, and SchemaRegistryError. Raises click.UsageError for
    another file.
    """
    from oncelog.schema_registry.any_schema import JsonValueSerializer
    from oncelog.schema_registry.schemas import Schema

    if schema.isascii() and schema.isdecimal():
        chosen = {"use.schema.id": schema, "auto.register.schemas": False}
        serializer = JsonValueSerializer(registry, is_key=is_key, config=chosen)
    else:
        option, path = "--key-schema" if is_key else "--value-schema", Path(schema)
        if path.suffix not in _TYPES:
            raise click.UsageError(f"{option} {schema}: expected a schema id, or a file *.avsc or *.json")
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise click.UsageError(f"{option} {schema}: {reason}") from None
        declared = Schema(text, "AVRO" if path.suffix == ".avsc" else "JSON")
        serializer = JsonValueSerializer(registry, declared, is_key=is_key)

    def encode(data: bytes) -> bytes:
        return serializer.serialize(topic, json.loads(data))

    return encode
