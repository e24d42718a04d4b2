"""Named clusters in ~/.config/oncelog/config.toml ($XDG_CONFIG_HOME): bootstrap servers and client settings.

current = "prod"

[profiles.prod]
"bootstrap.servers" = "broker1:9093,broker2:9093"
"security.protocol" = "SASL_SSL"
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncelog.errors import ConfigError

SERVERS = "bootstrap.servers"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ESCAPED = re.compile(r'[\x00-\x1f\x7f"\\]')
_USER_INFO = re.compile(r"//[^/,\s]*@")
_HEAD = "# `oncelog profile` writes this file. It may contain passwords.\n"


@dataclass(slots=True)
class Profiles:
    """The contents of the file: settings by profile, and the name of the profile in use, or None."""

    current: str | None = None
    profiles: dict[str, dict[str, str]] = field(default_factory=dict)

    def get(self, name: str) -> dict[str, str]:
        """Return the settings of a profile. If it does not exist, raise ConfigError, whose text names a
        similar profile.
        """
        if name not in self.profiles:
            near = difflib.get_close_matches(name, self.profiles, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see `oncelog profile list`"
            raise ConfigError(f"there is no profile {name!r}; {hint}")
        return self.profiles[name]


def config_path() -> Path:
    """Return the path of the profiles file. A relative $XDG_CONFIG_HOME is ignored, as the XDG specification
    demands.
    """
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".config") / "oncelog" / "config.toml"


def check_name(name: str) -> None:
    """Raise ConfigError if `name` cannot be the name of a profile."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"profile {name!r}: use up to 64 letters, digits, dots, hyphens and underscores")


def parse_profiles(text: str) -> Profiles:
    """Return the profiles in the text of a profiles file. Raises ConfigError for invalid text."""
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"it is not TOML: {error}") from None
    current, tables = document.pop("current", None), document.pop("profiles", {})
    if document:
        raise ConfigError(
            f"{min(document)!r} is not known; there are `current` and the tables [profiles.NAME]"
        )
    if not isinstance(tables, dict) or not isinstance(current, str | None):
        raise ConfigError("`current` must be text, and `profiles` tables")
    profiles = Profiles(current)
    for name, table in tables.items():
        check_name(name)
        if not isinstance(table, dict) or not isinstance(table.get(SERVERS), str):
            raise ConfigError(f'profile {name!r} needs "{SERVERS}" = "HOST:PORT"')
        profiles.profiles[name] = {key: _text(name, key, value) for key, value in table.items()}
    if current is not None:
        profiles.get(current)
    return profiles


def _text(name: str, key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"profile {name!r}: {key} must be text or a number; keys with dots need quotes")


def format_profiles(profiles: Profiles) -> str:
    """Return the text of the profiles file for `profiles`."""
    lines = [_HEAD]
    if profiles.current is not None:
        lines.append(f"current = {_quoted(profiles.current)}\n")
    for name, settings in sorted(profiles.profiles.items()):
        lines.append(f"\n[profiles.{_quoted(name)}]\n")
        lines += [f"{_quoted(key)} = {_quoted(value)}\n" for key, value in settings.items()]
    return "".join(lines)


def _quoted(text: str) -> str:
    return '"' + _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + '"'


def read_profiles() -> Profiles:
    """Return the user's profiles; an empty Profiles if there is no file. Raises ConfigError, whose text names
    the file.
    """
    path = config_path()
    try:
        return parse_profiles(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return Profiles()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: it is not UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_profiles(profiles: Profiles) -> Path:
    """Write the profiles file, readable only by its owner because it has passwords, and return its path."""
    path = config_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = path.resolve()  # replace the target if the file is a symbolic link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(format_profiles(profiles))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def hidden(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings with `(hidden)` in place of passwords, also of those in a URL."""
    from oncelog.config import ADMIN, CONSUMER, PRODUCER, SCHEMA_REGISTRY

    tables = (ADMIN, CONSUMER, PRODUCER, SCHEMA_REGISTRY)
    secret = {s.key for table in tables for s in table.settings if s.kind == "password"}
    shown = {key: "(hidden)" if key in secret else value for key, value in settings.items()}
    return {key: _USER_INFO.sub("//(hidden)@", value) for key, value in shown.items()}
