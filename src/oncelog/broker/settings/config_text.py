"""Settings as DescribeConfigs returns them: values as text, with their sources, synonyms and types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from oncelog.broker.settings.dynamic_config import DYNAMIC, GROUP_DEFAULT_OF
from oncelog.broker.topics.topic_config import BROKER_DEFAULT_OF, topic_settings
from oncelog.config import BROKER, GROUP, INT32_MAX, TOPIC
from oncelog.settings import Password, Setting, Settings, SettingValue


class Source(IntEnum):
    """The sources of a value. Source: kafka DescribeConfigsResponse.ConfigSource."""

    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    GROUP = 8


_LAYERS = (Source.DYNAMIC_BROKER, Source.DYNAMIC_DEFAULT_BROKER)
"""The sources of `Settings.layers`, in the same order. An earlier layer overrides a later one."""


class ResourceType(IntEnum):
    """The types of resources with settings. Source: kafka ConfigResource.Type."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


@dataclass(frozen=True, slots=True)
class Synonym:
    """A source of a setting's value, and its value there.

    In a list of synonyms, the first one is in effect.
    """

    name: str
    value: str | None
    source: Source


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One setting. `value` is the effective value as text; None if it is unset or a password.

    `wire_type` is the config_type of DescribeConfigs.
    """

    name: str
    value: str | None
    source: Source
    synonyms: tuple[Synonym, ...]
    wire_type: int
    doc: str
    is_sensitive: bool
    is_read_only: bool = False


def to_text(value: SettingValue) -> str | None:
    """Return a value in Kafka's spelling: true or false, lists with commas. A password becomes None."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(value)
    return None if value is None or isinstance(value, Password) else str(value)


def topic_entries(broker: Settings, overrides: Mapping[str, str]) -> Iterator[ConfigEntry]:
    """Yield every topic setting, but internal ones only if the topic has them.

    The synonyms of a setting are the topic's own value, the broker's and the default.
    """
    settings = topic_settings(broker, overrides)
    for row in TOPIC.settings:
        if row.key.startswith("internal.") and row.key not in overrides:
            continue
        synonyms = []
        if row.key in overrides:
            synonyms.append(Synonym(row.key, to_text(settings[row.key]), Source.TOPIC))
        broker_key = BROKER_DEFAULT_OF.get(row.key)
        if broker_key is not None:
            synonyms += _broker_synonyms(broker, broker_key)
        else:
            synonyms.append(Synonym(row.key, to_text(row.default), Source.DEFAULT))
        yield _entry(row, settings[row.key], synonyms)


def group_entries(broker: Settings, own: Mapping[str, str]) -> Iterator[ConfigEntry]:
    """Yield every group setting. Its synonyms are the group's own value, the broker's and the default."""
    for row in GROUP.settings:
        broker_key = GROUP_DEFAULT_OF[row.key]
        synonyms = [Synonym(row.key, own[row.key], Source.GROUP)] if row.key in own else []
        synonyms += _broker_synonyms(broker, broker_key)
        value = row.parse(own[row.key]) if row.key in own else broker[broker_key]
        yield _entry(row, value, synonyms)


def broker_entries(broker: Settings) -> Iterator[ConfigEntry]:
    """Yield every broker setting. Those that are not in DYNAMIC are read-only."""
    for row in BROKER.settings:
        entry = _entry(row, broker[row.key], _broker_synonyms(broker, row.key))
        yield replace(entry, is_read_only=row.key not in DYNAMIC)


def cluster_entries(own: Mapping[str, str]) -> Iterator[ConfigEntry]:
    """Yield the settings in `own`: the dynamic ones that apply to all brokers of the cluster."""
    for key, text in own.items():
        row = BROKER.get(key)
        if row is not None:
            synonym = Synonym(key, text, Source.DYNAMIC_DEFAULT_BROKER)
            yield replace(_entry(row, row.default, [synonym]), value=text)


def _broker_synonyms(broker: Settings, key: str) -> list[Synonym]:
    row = BROKER.get(key)
    synonyms = [
        Synonym(key, layer[key], source)
        for layer, source in zip(broker.layers, _LAYERS, strict=False)
        if key in layer
    ]
    if broker.is_user_set(key):
        synonyms.append(Synonym(key, to_text(broker.configured(key)), Source.STATIC_BROKER))
    return [*synonyms, Synonym(key, to_text(row.default if row else None), Source.DEFAULT)]


def _entry(row: Setting, value: SettingValue, synonyms: list[Synonym]) -> ConfigEntry:
    return ConfigEntry(
        row.key,
        to_text(value),
        synonyms[0].source,
        tuple(synonyms),
        _wire_type(row),
        row.doc,
        is_sensitive=row.kind == "password",
    )


def _wire_type(row: Setting) -> int:
    """Return Kafka's ConfigType: 1 boolean, 2 string, 3 int, 5 long, 6 double, 7 list, 9 password."""
    if row.high == INT32_MAX:
        return 3
    if row.kind == "int":
        is_long = row.key.endswith((".ms", "retention.bytes"))
        fits = isinstance(row.default, int) and row.default <= INT32_MAX and not is_long
        return 3 if fits else 5
    return {"bool": 1, "str": 2, "float": 6, "list": 7, "password": 9}[row.kind]
