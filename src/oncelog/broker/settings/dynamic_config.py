"""Settings of the broker and of groups that clients change while the broker runs.

Each change durably replaces the whole file `oncelog-configs.json`. Settings of this broker override those of
the whole cluster, and both override the configuration with which the broker was started.
Source: KIP-226; kafka DynamicBrokerConfig; GroupConfig of KIP-848.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from oncelog.broker.state_file import read_state, write_state
from oncelog.broker.stepwise import Work
from oncelog.broker.topics.topic_config import BROKER_DEFAULT_OF, MIN_SEGMENT_BYTES
from oncelog.config import BROKER, GROUP
from oncelog.errors import ConfigError, InvalidConfig, InvalidRequest, StorageError
from oncelog.log.disk import Disk
from oncelog.settings import Settings

FILE_NAME = "oncelog-configs.json"
CLUSTER = ""
"""The resource name that means all brokers of the cluster."""
MAX_GROUPS = 10_000
"""Largest number of groups with settings. The number is limited, because each change writes all groups'
settings.
"""
MAX_GROUP_NAME_CHARS = 256
"""Longest name of a group with settings, in characters. With names of 32 KB the file could have 300 MB."""
DYNAMIC = frozenset(BROKER_DEFAULT_OF.values()) | {
    "producer.id.expiration.ms",
    "transaction.partition.verification.enable",
}
"""Broker settings that clients can change.

A setting can be in this set only if it is read at every use, or is the default of a topic setting.
"""

GROUP_DEFAULT_OF = {
    "consumer.session.timeout.ms": "group.consumer.session.timeout.ms",
    "consumer.heartbeat.interval.ms": "group.consumer.heartbeat.interval.ms",
}
"""Map group settings to the broker settings that are their defaults."""
_BOUNDS_OF = {
    "consumer.session.timeout.ms": (
        "group.consumer.min.session.timeout.ms",
        "group.consumer.max.session.timeout.ms",
    ),
    "consumer.heartbeat.interval.ms": (
        "group.consumer.min.heartbeat.interval.ms",
        "group.consumer.max.heartbeat.interval.ms",
    ),
}


class DynamicConfig:
    """The dynamic settings. Those of the broker and the cluster override `settings`."""

    def __init__(self, disk: Disk, settings: Settings) -> None:
        self._disk, self._settings = disk, settings
        self._broker_name = str(settings["node.id"])
        self._brokers: dict[str, dict[str, str]] = {}
        self._groups: dict[str, dict[str, str]] = {}
        self.is_being_altered = False
        """True while a request changes settings in steps. Other such requests wait until it is False."""
        stored = read_state(disk, FILE_NAME, _parse)
        if stored is not None:
            self._brokers, self._groups = stored
            try:
                self._apply()
            except (ConfigError, InvalidRequest) as error:
                raise StorageError(f"{FILE_NAME}: {error}; correct the file, or remove it") from None

    def of_broker(self, name: str) -> Mapping[str, str]:
        """Return the dynamic settings with this resource name: this broker's id, or CLUSTER."""
        return self._brokers.get(name, {})

    def of_group(self, group_id: str) -> Mapping[str, str]:
        """Return the settings that a group itself has."""
        return self._groups.get(group_id, {})

    def groups(self) -> Iterable[str]:
        """Return the ids of the groups that have settings."""
        return self._groups

    def group_ms(self, group_id: str, key: str) -> int:
        """Return the effective value in ms of a group's setting: the group's own, else the broker's."""
        own = self._groups.get(group_id)
        if own is not None and key in own:
            return int(own[key])
        default: int = self._settings[GROUP_DEFAULT_OF[key]]
        return default

    def check_broker_name(self, name: str) -> None:
        """Raise InvalidRequest unless the name is this broker's id, or CLUSTER."""
        if name not in (CLUSTER, self._broker_name):
            raise InvalidRequest(f"broker {name!r} does not exist; this is broker {self._broker_name}")

    def check_room(self, more_count: int) -> None:
        """Raise InvalidRequest if another group with settings would exceed MAX_GROUPS.

        `more_count` is the number of groups that the same request has already given their first settings.
        """
        if len(self._groups) + more_count >= MAX_GROUPS:
            raise InvalidRequest(
                f"{MAX_GROUPS} groups have settings already, which is the limit; delete the "
                "settings of a group first"
            )

    def store(
        self, brokers: Mapping[str, dict[str, str]], groups: Mapping[str, dict[str, str]]
    ) -> Work[None]:
        """Replace the settings of these resources durably, with one write in another thread.

        The values are already validated. Only one request at a time may do this. Raises StorageError.
        """
        changed_brokers, changed_groups = _with(self._brokers, brokers), _with(self._groups, groups)
        content = {"brokers": changed_brokers, "groups": changed_groups}
        yield partial(write_state, self._disk, FILE_NAME, content)
        self._brokers, self._groups = changed_brokers, changed_groups
        if brokers:
            self._apply()

    def validate_group_settings(self, values: Mapping[str, str | None]) -> dict[str, str]:
        """Return a group's settings in canonical spelling. Raises InvalidConfig for an unknown key, a value
        outside the broker's bounds, and a session timeout that is not above the heartbeat interval.
        """
        for key in values:
            if GROUP.get(key) is None:
                raise InvalidConfig(f"unknown group setting {key!r}")
        try:
            parsed = GROUP.parse(values)
        except ConfigError as error:
            raise InvalidConfig(str(error)) from None
        for key, bounds in _BOUNDS_OF.items():
            low, high = (self._settings[bound] for bound in bounds)
            if parsed.is_user_set(key) and not low <= parsed[key] <= high:
                raise InvalidConfig(
                    f"{key}={parsed[key]}: must be within {bounds[0]}={low} and {bounds[1]}={high}"
                )
        session_ms, heartbeat_ms = (
            parsed[key] if parsed.is_user_set(key) else self._settings[default]
            for key, default in GROUP_DEFAULT_OF.items()
        )
        if values and session_ms <= heartbeat_ms:
            raise InvalidConfig(
                f"consumer.session.timeout.ms={session_ms} must be above"
                f" consumer.heartbeat.interval.ms={heartbeat_ms}"
            )
        return {key: str(parsed[key]) for key in values}

    def _apply(self) -> None:
        layers = self.of_broker(self._broker_name), self.of_broker(CLUSTER)
        for layer in layers:
            _parse_broker_settings(layer)
        self._settings.lay_over(layers)


def _with(
    resources: Mapping[str, dict[str, str]], changed: Mapping[str, dict[str, str]]
) -> dict[str, dict[str, str]]:
    """Return `resources` updated with `changed`, without resources whose settings are all gone."""
    return {name: values for name, values in {**resources, **changed}.items() if values}


def check_retention(retention_ms: int) -> None:
    """Raise ConfigError if log.retention.ms is 0, which would delete all records. Kafka refuses it, too."""
    if not retention_ms:
        raise ConfigError("log.retention.ms must not be 0; use -1 to keep records for any time")


def validate_broker_settings(values: Mapping[str, str | None]) -> dict[str, str]:
    """Return the settings of a broker without null values.

    As in Kafka, raises InvalidRequest if a value is invalid or the setting cannot be changed at run time.
    """
    parsed = _parse_broker_settings(values)
    # Only changes are checked. A value that an earlier version stored must not prevent the start.
    if parsed.is_user_set("log.retention.ms"):
        try:
            check_retention(parsed["log.retention.ms"])
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None
    return {key: value for key, value in values.items() if value is not None}


def _parse_broker_settings(values: Mapping[str, str | None]) -> Settings:
    static = [key for key in values if key not in DYNAMIC]
    if static:
        raise InvalidRequest(
            f"cannot be changed while the broker runs: {', '.join(static)}; use --config or "
            "--set and restart the broker"
        )
    try:
        parsed = BROKER.parse(values)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from None
    if parsed.is_user_set("log.segment.bytes") and parsed["log.segment.bytes"] < MIN_SEGMENT_BYTES:
        raise InvalidRequest(f"log.segment.bytes must be at least {MIN_SEGMENT_BYTES}")
    return parsed


def _parse(content: dict[str, Any]) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    brokers, groups = (
        {name: {k: str(value) for k, value in own.items()} for name, own in content[key].items()}
        for key in ("brokers", "groups")
    )
    return brokers, groups
