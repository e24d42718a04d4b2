"""A producer's settings, checked against each other before it connects (behaviour I3, docs/behaviours.md).

    transactional.id   enable.idempotence   acks, retries, in flight   result
    set                false                any                        ConfigError naming both settings
    set                not set, or true     in conflict                ConfigError naming both settings
    not set            set to true          in conflict                ConfigError naming both settings
    not set            not set              in conflict                idempotence off, with a warning
    not set            false                any                        idempotence off
    set or not set     not set, or true     no conflict                idempotence on

Source: Kafka's ProducerConfig.postProcessAndValidateIdempotenceConfigs, configureDeliveryTimeout.
"""

from __future__ import annotations

from dataclasses import dataclass

from oncelog.errors import ConfigError
from oncelog.rules.idempotence.error_policy import Mode
from oncelog.rules.idempotence.sequencer import MAX_UNACKNOWLEDGED
from oncelog.settings import Settings
from oncelog.types import Compression
from oncelog.wire.compression import compress

_IN_FLIGHT = "max.in.flight.requests.per.connection"
_UNSAFE = "oncelog.unsafe.max.in.flight"


@dataclass(frozen=True, slots=True)
class IdempotenceReport:
    """The state of idempotence, and the settings that decide it.

    With `enabled`, no retry of this producer stores a record twice. `producer_id` and
    `producer_epoch` are None if idempotence is off, and until the broker has assigned an id. `max_in_flight`
    counts requests per connection. `reason` is text: why idempotence is on or off.
    """

    enabled: bool
    producer_id: int | None
    producer_epoch: int | None
    acks: str
    retries: int
    max_in_flight: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """The settings in the form that the core uses. A compression `level` of None is the codec's default."""

    mode: Mode
    reason: str
    acks: int
    retries: int
    max_in_flight: int
    safe_mode: bool
    delivery_timeout_ms: int
    request_timeout_ms: int
    linger_ms: int
    batch_bytes: int
    buffer_bytes: int
    max_block_ms: int
    metadata_max_idle_ms: int
    max_request_bytes: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    compression: Compression
    level: int | None
    partitioner: str
    transactional_id: str | None
    transaction_timeout_ms: int

    @property
    def is_idempotent(self) -> bool:
        """Return True if batches carry a producer id and sequences."""
        return self.mode is not Mode.PLAIN

    def report(self, producer_id: int | None, producer_epoch: int | None) -> IdempotenceReport:
        """Return whether idempotence is on, and the settings that decide it, as `Producer.idempotence` shows
        them.
        """
        acks = "all" if self.acks == -1 else str(self.acks)
        return IdempotenceReport(
            self.is_idempotent,
            producer_id,
            producer_epoch,
            acks,
            self.retries,
            self.max_in_flight,
            self.reason,
        )


def conflicts_with_idempotence(settings: Settings) -> list[str]:
    """Return the settings that contradict idempotence, each as `key=value (needs ...)`."""
    conflicts = []
    if settings["acks"] not in ("all", "-1"):
        conflicts.append(f"acks={settings['acks']} (needs acks=all)")
    if settings["retries"] == 0:
        conflicts.append("retries=0 (needs retries of 1 or more)")
    if settings[_IN_FLIGHT] > MAX_UNACKNOWLEDGED and settings[_UNSAFE] is None:
        conflicts.append(f"{_IN_FLIGHT}={settings[_IN_FLIGHT]} (needs {MAX_UNACKNOWLEDGED} or less)")
    return conflicts


def decide_idempotence(settings: Settings) -> tuple[bool, str]:
    """Return whether idempotence is on, and why.

    Raises ConfigError if other settings contradict idempotence that the user or transactional.id requires.
    """
    is_requested = settings.is_user_set("enable.idempotence")
    conflicts = conflicts_with_idempotence(settings)
    if settings["transactional.id"] is not None:
        return True, _check_transactional(settings, conflicts)
    if not settings["enable.idempotence"]:
        return False, "switched off by enable.idempotence=false"
    if conflicts and is_requested:
        raise ConfigError(
            f"enable.idempotence=true contradicts {' and '.join(conflicts)}; change the "
            "latter, or set enable.idempotence=false and accept lost or duplicated records"
        )
    if conflicts:
        return (
            False,
            f"switched off because of {' and '.join(conflicts)}; enable.idempotence was not set",
        )
    if settings[_UNSAFE] is not None:
        return True, f"on, but unsafe: {_UNSAFE}={settings[_UNSAFE]} may duplicate records"
    return True, "set by enable.idempotence=true" if is_requested else "on by default"


def _check_transactional(settings: Settings, conflicts: list[str]) -> str:
    if not settings["transactional.id"]:
        raise ConfigError("transactional.id='': set it to a name, or leave it out")
    if not settings["enable.idempotence"]:
        conflicts = ["enable.idempotence=false (needs true)", *conflicts]
    if conflicts:
        raise ConfigError(
            f"transactional.id={settings['transactional.id']!r} contradicts "
            f"{' and '.join(conflicts)}; change the latter, or leave transactional.id out"
        )
    return "implied by transactional.id"


def resolve(settings: Settings) -> ProducerOptions:
    """Return the options after checking the settings against each other. Raises ConfigError for a
    contradiction, and for a codec whose library is missing.
    """
    is_transactional = settings["transactional.id"] is not None
    is_idempotent, reason = decide_idempotence(settings)
    compression = Compression[settings["compression.type"].upper()]
    level = _level(settings, compression)
    compress(compression, b"", level)  # raises ConfigError now for a missing codec, not at the first batch
    acks = settings["acks"]
    unsafe = settings[_UNSAFE] if is_idempotent else None
    return ProducerOptions(
        mode=Mode.TRANSACTIONAL if is_transactional else Mode.IDEMPOTENT if is_idempotent else Mode.PLAIN,
        reason=reason,
        acks=-1 if acks == "all" else int(acks),
        retries=settings["retries"],
        max_in_flight=settings[_IN_FLIGHT] if unsafe is None else unsafe,
        safe_mode=unsafe is None,
        delivery_timeout_ms=_delivery_timeout_ms(settings),
        request_timeout_ms=settings["request.timeout.ms"],
        linger_ms=settings["linger.ms"],
        batch_bytes=min(settings["batch.size"], settings["max.request.size"]),
        buffer_bytes=settings["buffer.memory"],
        max_block_ms=settings["max.block.ms"],
        metadata_max_idle_ms=settings["metadata.max.idle.ms"],
        max_request_bytes=settings["max.request.size"],
        retry_backoff_ms=settings["retry.backoff.ms"],
        retry_backoff_max_ms=settings["retry.backoff.max.ms"],
        compression=compression,
        level=level,
        partitioner=settings["partitioner"],
        transactional_id=settings["transactional.id"],
        transaction_timeout_ms=settings["transaction.timeout.ms"],
    )


def _level(settings: Settings, compression: Compression) -> int | None:
    key = f"compression.{compression.name.lower()}.level"
    return settings[key] if key in settings and settings.is_user_set(key) else None


def _delivery_timeout_ms(settings: Settings) -> int:
    timeout_ms = settings["delivery.timeout.ms"]
    min_timeout_ms = settings["linger.ms"] + settings["request.timeout.ms"]
    if timeout_ms >= min_timeout_ms:
        return int(timeout_ms)
    if settings.is_user_set("delivery.timeout.ms"):
        raise ConfigError(
            f"delivery.timeout.ms={timeout_ms} is less than linger.ms + request.timeout.ms = "
            f"{settings['linger.ms']} + {settings['request.timeout.ms']}; raise "
            "delivery.timeout.ms, or lower the other two"
        )
    return int(min_timeout_ms)
