"""Convert a server.properties of Apache Kafka to settings of this broker. Settings are renamed, left out or
refused.

Only settings whose absence changes no promise are left out: threads, buffers, replication, controllers, share
groups, tiered storage. Any other setting that this broker does not have stays an error, because leaving it
out could lift a restriction, such as a policy class. `log.dirs` is left out too, so that this broker takes
over Apache Kafka's directory only if --data-dir names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from oncelog.config import BROKER
from oncelog.errors import ConfigError
from oncelog.settings import SCOPE

_WITHOUT_EFFECT = re.compile(
    r"""
    (?:controller|group\.share|group\.streams|share|replica|remote|metadata|internal\.metadata|metrics|zookeeper
      |alter\.log\.dirs|replication\.quota|controlled\.shutdown|kafka\.metrics|add\.partitions\.to\.txn
      |leader\.imbalance|unclean\.leader|initial\.broker|log\.cleaner\.io|log\.local|log\.roll\.jitter
      |group\.coordinator\.(?:append|background|cached)
      |group\.consumer\.(?:assignment|(?:min|max)\.assignment|migration|regex))\..+
    |(?:fetch|producer|delete\.records)\.purgatory\.purge\.interval\.requests
    |compression\.(?:gzip|lz4|zstd)\.level
    |socket\.(?:send|receive)\.buffer\.bytes | socket\.listen\.backlog\.size
    |num\.(?:network|io|replica\.fetchers|replica\.alter\.log\.dirs|recovery).*
    |broker\.(?:rack|heartbeat\.interval\.ms|session\.timeout\.ms|id\.generation\.enable)
    |inter\.broker\.(?:listener\.name|protocol\.version) | security\.inter\.broker\.protocol
    |sasl\.mechanism\.(?:inter\.broker|controller)\.protocol
    |auto\.(?:leader\.rebalance\.enable|include\.jmx\.reporter) | background\.threads
    |early\.start\.listeners
    |follower\.fetch\.last\.tiered\.offset\.enable | group\.coordinator\.threads
    |log\.cleaner\.(?:threads|dedupe\.buffer\.size) | log\.dirs? | log\.dir\.failure\.timeout\.ms
    |log\.flush\.(?:scheduler\.interval\.ms|start\.offset\.checkpoint\.interval\.ms)
    |log\.initial\.task\.delay\.ms | log\.message\.format\.version | log\.preallocate | metric\.reporters
    |offsets\.(?:commit\.timeout\.ms|load\.buffer\.size|topic\.compression\.codec) | process\.roles
    |queued\.max\.requests | request\.timeout\.ms | server\.max\.startup\.time\.ms | telemetry\.max\.bytes
    |transaction\.state\.log\.load\.buffer\.size
    """,
    re.VERBOSE,
)
_ONLY_FALSE = ("remote.log.storage.system.enable", "transaction.two.phase.commit.enable")
"""Boolean settings that are left out if they are `false`. With any other value they stay, and the broker
refuses them.
"""
_IN_MS = (
    ("log.retention.minutes", "log.retention.ms", 60_000),
    ("log.retention.hours", "log.retention.ms", 3_600_000),
    ("log.roll.hours", "log.roll.ms", 3_600_000),
)
"""Kafka's setting, this broker's setting in ms, and the factor between them.

If several settings have the same counterpart in ms, the first one that is set wins. A value of -1 (no limit)
stays -1.
"""


@dataclass(frozen=True, slots=True)
class KafkaProperties:
    """A file's settings that apply to this broker, and the names of those that were left out."""

    settings: dict[str, str]
    without_effect: list[str]


def adapt(properties: Mapping[str, str]) -> KafkaProperties:
    """Return the settings of a server.properties as settings of this broker. Raises ConfigError for a
    controller's file or an invalid time.
    """
    rest = dict(properties)
    without_effect = _leave_out_controller(rest)
    for theirs, ours, factor in _IN_MS:
        value = rest.pop(theirs, None)
        time_ms = None if value is None else _in_ms(theirs, value, factor)
        if time_ms is None or ours in rest:
            continue
        # Apache Kafka refuses 0 as well. A retention of 0 would delete all records. Guard:
        # test_a_time_of_0_hours_or_minutes_is_refused.
        if time_ms == "0":
            raise ConfigError(f"{theirs}={value!r}: must not be 0")
        rest[ours] = time_ms
    if "broker.id" in rest:
        rest.setdefault("node.id", rest.pop("broker.id"))
    for key, value in list(rest.items()):
        if BROKER.get(key) is not None:
            continue
        is_off = value.strip().lower() == "false"
        if is_off if key in _ONLY_FALSE else _WITHOUT_EFFECT.fullmatch(key):
            without_effect.append(key)
            del rest[key]
    return KafkaProperties(rest, sorted(without_effect))


def _leave_out_controller(properties: dict[str, str]) -> list[str]:
    """Drop the controller's listeners, which only brokers and controllers use, and their settings.

    Return the keys of those settings. Raises ConfigError.
    """
    roles = _items(properties.get("process.roles", ""))
    if roles == ["controller"]:
        raise ConfigError("process.roles=controller: this file is for a controller, and Oncelog is a broker")
    names = {name.upper() for name in _items(properties.get("controller.listener.names", ""))}
    for key, separator in (
        ("listeners", "://"),
        ("advertised.listeners", "://"),
        ("listener.security.protocol.map", ":"),
    ):
        if names and key in properties:
            kept = [
                item
                for item in _items(properties[key])
                if item.partition(separator)[0].strip().upper() not in names
            ]
            properties[key] = ",".join(kept)
    scopes = tuple(f"{SCOPE}{name}.".lower() for name in names)
    own = [key for key in properties if key.lower().startswith(scopes)]
    for key in own:
        del properties[key]
    return own


def _in_ms(key: str, value: str, factor: int) -> str:
    try:
        number = int(value)
    except ValueError:
        raise ConfigError(f"{key}={value!r}: expected a whole number") from None
    return str(number * factor if number >= 0 else number)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
