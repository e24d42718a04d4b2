"""Settings: the definition of one setting, the parser of its value, and the parsed settings of one table.

The tables are in config.py.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from oncelog.errors import ConfigError

Kind = Literal["int", "float", "bool", "str", "list", "password"]

_WHOLE = re.compile(r"[+-]?[0-9]+")
_INT64 = range(-(2**63), 2**63)

SCOPE = "listener.name."
"""Prefix of a key that is set for one listener only: listener.name.NAME.KEY, as in Kafka."""


class Password:
    """A secret, `value`, that prints as [hidden]. Logs and error texts therefore do not show it."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "[hidden]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Password) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


SettingValue = int | float | bool | str | list[str] | Password | None


@dataclass(frozen=True, slots=True)
class Setting:
    """The definition of one setting. `choices`, if not empty, are the only valid values. `default` None means
    that the setting is unset by default.

    `low` and `high` are inclusive bounds. For a list, `low` is the minimum length.
    """

    key: str
    kind: Kind
    default: SettingValue
    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def parse(self, raw: object) -> SettingValue:
        """Convert a raw value to the setting's type, and check it against choices and bounds. None stays
        None.

        Raises ConfigError, whose text names the key.
        """
        if raw is None:
            return None
        value = _PARSERS[self.kind](self, raw)
        if self.choices and any(part not in self.choices for part in _parts(value)):
            raise ConfigError(f"{self.key}={raw!r}: expected {self._expected()}")
        if isinstance(value, list) and self.low is not None and len(value) < self.low:
            raise ConfigError(f"{self.key}={raw!r}: name at least {self.low:g}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if self.low is not None and value < self.low:
                raise ConfigError(f"{self.key}={raw!r}: must be at least {self.low:g}")
            if self.high is not None and value > self.high:
                raise ConfigError(f"{self.key}={raw!r}: must be at most {self.high:g}")
        return value

    def _expected(self) -> str:
        several = "any of" if self.kind == "list" else "one of"
        return f"{several} {', '.join(self.choices)}"


def _parts(value: SettingValue) -> list[str]:
    """Return the texts to compare with the setting's choices."""
    if isinstance(value, list):
        return value
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def _parse_int(setting: Setting, raw: object) -> int:
    try:
        # As Java's parser does, reject underscores and numbers of more than 64 bits. Python's int() accepts
        # both.
        if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
            raise ValueError
        if isinstance(raw, str) and not _WHOLE.fullmatch(raw.strip()):
            raise ValueError
        value = int(raw)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{setting.key}={raw!r}: expected a whole number") from None
    if value not in _INT64:
        raise ConfigError(f"{setting.key}={raw!r}: does not fit into 64 bits")
    return int(value)


def _parse_float(setting: Setting, raw: object) -> float:
    try:
        value = float(raw)  # type: ignore[arg-type]
        if not math.isfinite(value) or (isinstance(raw, str) and "_" in raw):
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"{setting.key}={raw!r}: expected a number") from None
    return value


def _parse_bool(setting: Setting, raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    if text in ("true", "false"):
        return text == "true"
    raise ConfigError(f"{setting.key}={raw!r}: expected true or false")


def _parse_str(setting: Setting, raw: object) -> str:
    return str(raw).strip() if setting.choices else str(raw)


def _parse_list(setting: Setting, raw: object) -> list[str]:
    if isinstance(raw, str) and setting.choices:
        # Kafka parses cleanup.policy in this way: an empty text is an empty list, and duplicates are dropped.
        parts = [part.strip() for part in raw.split(",")] if raw.strip() else []
        return list(dict.fromkeys(parts))
    if isinstance(raw, str):
        return [part.strip() for part in raw.split(",") if part.strip()]
    if isinstance(raw, (list, tuple)):
        return [str(part) for part in raw]
    raise ConfigError(f"{setting.key}={raw!r}: expected a list or a comma-separated string")


def _parse_password(setting: Setting, raw: object) -> Password:
    return raw if isinstance(raw, Password) else Password(str(raw))


_PARSERS: dict[Kind, Callable[[Setting, object], SettingValue]] = {
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "str": _parse_str,
    "list": _parse_list,
    "password": _parse_password,
}


class Settings(Mapping[str, Any]):
    """The parsed settings of one table, by key: `settings["linger.ms"]`. `is_user_set` returns True for a key
    that the user has set.

    `layers`: values that were set at run time, as text. Earlier layers override later ones.
    """

    __slots__ = ("_configured", "_table", "_user", "_values", "layers")

    def __init__(self, table: SettingsTable, values: dict[str, Any], user: frozenset[str]) -> None:
        self._table = table
        self._values = self._configured = values
        self._user = user
        self.layers: tuple[Mapping[str, str], ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values_now(self) -> object:
        """An object that another one replaces whenever the values change."""
        return self._values

    def is_user_set(self, key: str) -> bool:
        """Return True if the user set this key."""
        return key in self._user

    def user_set(self) -> dict[str, Any]:
        """Return the values of the keys that the user set."""
        return {key: self._values[key] for key in self._values if key in self._user}

    def configured(self, key: str) -> Any:
        """Return the value that the setting has without `layers`."""
        return self._configured[key]

    def lay_over(self, layers: Sequence[Mapping[str, str]]) -> None:
        """Replace `layers`. All code that uses this object sees the new values immediately. Raises
        ConfigError for an invalid setting, and then changes nothing.
        """
        values = self._configured
        for layer in reversed(layers):
            parsed = self._table.parse(layer)
            values = {**values, **parsed.user_set()}
        self._values, self.layers = values, tuple(layers)

    def replaced(self, changes: Mapping[str, Any]) -> Settings:
        """Return a copy with changed values and without layers. `is_user_set` has the same results for the
        copy.
        """
        return Settings(self._table, {**self._values, **changes}, self._user)


@dataclass(frozen=True)
class SettingsTable:
    """A named set of settings. `parse` rejects an unknown key and suggests the most similar known one.

    `scoped`: prefixes of the keys that can also be set for one listener, as listener.name.NAME.KEY.
    """

    name: str
    settings: tuple[Setting, ...]
    scoped: tuple[str, ...] = ()

    def get(self, key: str) -> Setting | None:
        return self._by_key.get(key)

    @cached_property
    def _by_key(self) -> dict[str, Setting]:
        return {s.key: s for s in self.settings}

    @cached_property
    def _by_underscore(self) -> dict[str, str]:
        return {s.key.replace(".", "_"): s.key for s in self.settings}

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {s.key: s.default for s in self.settings}

    def key_names(self) -> list[str]:
        return [s.key for s in self.settings]

    def parse(self, values: Mapping[str, object]) -> Settings:
        """Parse `values` and return all settings. Settings that are not in `values` have their defaults.

        Keys may be written with dots or underscores. Raises ConfigError for an unknown key or an invalid
        value.
        """
        by_key, by_underscore = self._by_key, self._by_underscore
        parsed = self._defaults.copy()
        user: set[str] = set()
        for raw_key, raw in values.items():
            key = raw_key if raw_key in by_key else by_underscore.get(raw_key, raw_key)
            row = by_key.get(key) or self._of_listener(key)
            if row is None:
                near = difflib.get_close_matches(key, by_key, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown {self.name} setting {raw_key!r}{hint}")
            parsed[key] = row.parse(raw)
            user.add(key)
        return Settings(self, parsed, frozenset(user))

    def _of_listener(self, scoped: str) -> Setting | None:
        """Return the setting for a key listener.name.NAME.KEY; None for any other key, or if KEY is unknown.

        Raises ConfigError if KEY cannot be set per listener.
        """
        if not self.scoped or not scoped.startswith(SCOPE):
            return None
        _, _, key = scoped.removeprefix(SCOPE).partition(".")
        row = self.get(key)
        if row is not None and not key.startswith(self.scoped):
            raise ConfigError(f"{scoped}: {key} applies to all listeners; set it without {SCOPE}NAME")
        return row and replace(row, key=scoped)
