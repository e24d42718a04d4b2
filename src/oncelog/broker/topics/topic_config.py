"""The effective settings of a topic, and the validation of its own settings.

A topic's own setting overrides the broker's setting, which overrides the default in `oncelog.config`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from oncelog.config import INT64_MAX, TOPIC
from oncelog.errors import ConfigError, InvalidConfig
from oncelog.settings import Settings

BROKER_DEFAULT_OF = {
    "cleanup.policy": "log.cleanup.policy",
    "compression.type": "compression.type",
    "delete.retention.ms": "log.cleaner.delete.retention.ms",
    "file.delete.delay.ms": "log.segment.delete.delay.ms",
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "log.flush.interval.ms",
    "index.interval.bytes": "log.index.interval.bytes",
    "max.message.bytes": "message.max.bytes",
    "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
    "message.timestamp.type": "log.message.timestamp.type",
    "max.compaction.lag.ms": "log.cleaner.max.compaction.lag.ms",
    "min.cleanable.dirty.ratio": "log.cleaner.min.cleanable.ratio",
    "min.compaction.lag.ms": "log.cleaner.min.compaction.lag.ms",
    "min.insync.replicas": "min.insync.replicas",
    "retention.bytes": "log.retention.bytes",
    "retention.ms": "log.retention.ms",
    "segment.bytes": "log.segment.bytes",
    "segment.index.bytes": "log.index.size.max.bytes",
    "segment.ms": "log.roll.ms",
}
"""Map topic settings to the broker settings that are their defaults."""

THROTTLED_REPLICAS = {"leader.replication.throttled.replicas", "follower.replication.throttled.replicas"}
_REPLICA = re.compile(r"\s*(?:[0-9]+:[0-9]+)?\s*")

MIN_SEGMENT_BYTES = 1 << 20
"""Smallest segment.bytes that a client may set, in bytes. Source: kafka LogConfig (4.0)."""
MAX_OWN_CHARACTERS = 2_048
"""Largest total length of the values of a topic's own settings, in characters.

Every change of a topic writes the settings of all topics. See
test_the_own_settings_of_a_topic_have_a_maximum_length.
"""


def topic_settings(broker: Settings, overrides: Mapping[str, str]) -> Settings:
    """Return the effective settings of a topic. `overrides` are its own settings.

    Raises InvalidConfig, which names the invalid setting.
    """
    defaults = {key: broker[broker_key] for key, broker_key in BROKER_DEFAULT_OF.items()}
    try:
        own = TOPIC.parse(overrides)
    except ConfigError as error:
        raise InvalidConfig(str(error)) from None
    return own.replaced({key: value for key, value in defaults.items() if not own.is_user_set(key)})


def stored_overrides(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return a topic's own settings, as they were stored, in a spelling that is valid today.

    Versions before 0.5.0 accepted numbers as Python parses them: with underscores, of any size, nan. If they
    were rejected now, the broker could not start.
    """
    return {key: text for key, stored in overrides.items() if (text := _stored(key, stored)) is not None}


def _stored(key: str, text: str) -> str | None:
    """Return the value in a spelling that is valid today; None if the setting's default applies."""
    row = TOPIC.get(key)
    try:
        if row is not None:
            row.parse(text)
        return text
    except ConfigError:
        assert row is not None
    try:
        if row.kind == "int":
            low, high = (
                (-(2**63) if row.low is None else row.low),
                (INT64_MAX if row.high is None else row.high),
            )
            return str(int(min(max(int(text), low), high)))
        if row.kind == "float":
            value = float(text)
            return None if math.isnan(value) else str(value)
    except ValueError:
        # No version accepted this value. Return it: the caller raises an error that names the setting.
        pass
    return text


def check_overrides(
    broker: Settings, overrides: Mapping[str, str | None], existing: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a topic's new own settings as strings.

    `existing` has its previous own settings. Values that only older versions accepted may stay unchanged: a
    small segment.bytes, gzip level 0, throttled replicas of any form. Raises InvalidConfig if a setting is
    unknown, malformed, null or too small, or if the settings are too long and longer than before.
    """
    for key, value in overrides.items():
        if value is None:
            raise InvalidConfig(f"{key}: null is not a value of a setting")
        if TOPIC.get(key) is None:
            raise InvalidConfig(f"unknown topic setting {key!r}")
    texts = {key: str(value) for key, value in overrides.items()}
    length, length_before = (sum(map(len, own.values())) for own in (texts, existing or {}))
    if length > max(MAX_OWN_CHARACTERS, length_before):
        longest = max(texts, key=lambda key: len(texts[key]))
        raise InvalidConfig(
            f"the topic's own settings have {length} characters; the limit is {MAX_OWN_CHARACTERS}; the "
            f"longest is {longest}"
        )
    settings = topic_settings(broker, texts)
    changed = {key for key in texts if existing is None or texts[key] != existing.get(key)}
    if "segment.bytes" in changed and settings["segment.bytes"] < MIN_SEGMENT_BYTES:
        raise InvalidConfig(f"segment.bytes={texts['segment.bytes']}: must be at least {MIN_SEGMENT_BYTES}")
    if "compression.gzip.level" in changed and settings["compression.gzip.level"] == 0:
        raise InvalidConfig("compression.gzip.level=0: must be -1 or 1 to 9")
    for key in changed & THROTTLED_REPLICAS:
        replicas = settings[key]
        if replicas != ["*"] and not all(_REPLICA.fullmatch(replica) for replica in replicas):
            raise InvalidConfig(f"{key}={texts[key]}: must be * or PARTITION:BROKER, separated by commas")
    return texts
