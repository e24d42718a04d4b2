"""Options of `format("oncelog")`: checks and parsing that the source and the sink share."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oncelog.errors import ConfigError
from oncelog.settings import SettingsTable

_CLIENT_PREFIX = "kafka."


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    `default` None means that the option is unset by default. `mode` is the kind of query that may set the
    option.
    """

    name: str
    default: str | None
    mode: Literal["both", "batch", "stream"]
    meaning: str


def refuse_unknown(options: Mapping[str, str], known: Mapping[str, Option], what: str) -> None:
    """Raise ConfigError for an unknown option name. `options` and `known` have lower-case names."""
    for name in options:
        if name in known or name.startswith(_CLIENT_PREFIX):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {known[near[0]].name}?" if near else "; docs/spark.md lists all"
        raise ConfigError(f"unknown option {name!r} of {what}{hint}")


def client_settings(
    options: Mapping[str, str],
    table: SettingsTable,
    defaults: Mapping[str, object],
    instead_of: Mapping[str, str],
) -> dict[str, object]:
    """Return the client settings: `defaults`, overridden by the options `kafka.*` without this prefix.

    `instead_of` maps each setting that a user cannot set to advice for the error text. Raises ConfigError for
    a setting in `instead_of`, for a value that `table` refuses, and if bootstrap servers are missing.
    """
    client: dict[str, object] = {"client.id": "oncelog-spark", **defaults}
    for name, value in options.items():
        if not name.startswith(_CLIENT_PREFIX):
            continue
        key = name.removeprefix(_CLIENT_PREFIX)
        if key in instead_of:
            raise ConfigError(f"{name} cannot be set: {instead_of[key]}")
        client[key] = value
    if not client.get("bootstrap.servers"):
        raise ConfigError("kafka.bootstrap.servers is not set: set it to HOST:PORT of a broker")
    try:
        table.parse(client)
    except ConfigError as error:
        raise ConfigError(f"option kafka.*: {error}") from None
    return client
