"""The options of a consume-transform-produce loop, checked, and the settings of its consumer and producer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from oncelog.client.arguments import names_of, topic_of
from oncelog.config import CONSUMER, PRODUCER
from oncelog.errors import ConfigError, MisuseError

Sources = str | Collection[str] | re.Pattern[str]
"""Names of topics, or a pattern that matches whole names."""


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """The options of the application. `plan_of` checks them."""

    sources: Sources
    group_id: str
    transactional_id: str
    dead_letter_topic: str | None = None
    max_attempts: int = 3
    max_records: int = 1_000
    commit_interval_ms: int = 100
    has_state: bool = False
    """True if the application has passed a `restore` function."""


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The options, and the settings of both clients."""

    options: LoopOptions
    consumer_settings: dict[str, object]
    producer_settings: dict[str, object]
    transaction_timeout_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    idle_timeout_ms: int | None
    """consumer.timeout.ms: the loop ends after that time without a record. None means that it waits without
    limit.
    """


def plan_of(
    options: LoopOptions, config: Mapping[str, object] | None, settings: Mapping[str, object]
) -> LoopPlan:
    """Check the options, and pass each setting to the clients that know it.

    Raises ConfigError for an unknown setting, for a group.id or transactional.id among the settings, and if
    `commit_interval_ms` is not below transaction.timeout.ms. Raises MisuseError for an invalid option, and
    for another value of a setting that the loop requires.
    """
    _check_options(options)
    consumer: dict[str, object] = {
        "auto.offset.reset": "earliest",
        "group.instance.id": options.transactional_id,
    }
    producer: dict[str, object] = {}
    for raw_key, value in {**(config or {}), **settings}.items():
        key = raw_key if CONSUMER.get(raw_key) or PRODUCER.get(raw_key) else raw_key.replace("_", ".")
        if not CONSUMER.get(key) and not PRODUCER.get(key):
            near = difflib.get_close_matches(key, [*CONSUMER.key_names(), *PRODUCER.key_names()], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown setting {raw_key!r} of a consumer or producer{hint}")
        if key in ("group.id", "transactional.id"):
            raise ConfigError(f"{key} is the argument {key.replace('.', '_')} of the loop, not a setting")
        if CONSUMER.get(key):
            consumer[key] = value
        if PRODUCER.get(key):
            producer[key] = value
    for key, required, reason in _REQUIRED:
        if CONSUMER.parse({key: consumer.get(key, required)})[key] != required:
            raise MisuseError(f"{key}={consumer[key]!r} is not possible here: {reason}")
    consumer |= {
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "group.id": options.group_id,
    }
    producer |= {"transactional.id": options.transactional_id}
    reading, writing = CONSUMER.parse(consumer), PRODUCER.parse(producer)
    if options.commit_interval_ms >= writing["transaction.timeout.ms"]:
        raise ConfigError(
            f"commit_interval_ms={options.commit_interval_ms} must be below "
            f"transaction.timeout.ms={writing['transaction.timeout.ms']}: the coordinator would abort each "
            "transaction"
        )
    return LoopPlan(
        options,
        consumer,
        producer,
        writing["transaction.timeout.ms"],
        writing["retry.backoff.ms"],
        writing["retry.backoff.max.ms"],
        reading["consumer.timeout.ms"],
    )


_REQUIRED: tuple[tuple[str, object, str], ...] = (
    (
        "enable.auto.commit",
        False,
        "automatic commits would also commit the positions of aborted records, and those records would be "
        "lost",
    ),
    (
        "isolation.level",
        "read_committed",
        "the output would contain what was made of records whose transaction is aborted later",
    ),
)


def _check_options(options: LoopOptions) -> None:
    for name, value in (("group_id", options.group_id), ("transactional_id", options.transactional_id)):
        if not isinstance(value, str) or not value:
            raise MisuseError(f"{name} must be a name, not {value!r}")
    minima = {"max_attempts": 1, "max_records": 1, "commit_interval_ms": 0}
    for name, least in minima.items():
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise MisuseError(f"{name} must be a whole number of at least {least}, not {value!r}")
    sources, target = options.sources, options.dead_letter_topic
    if not isinstance(sources, re.Pattern) and not names_of(sources):
        raise MisuseError("name at least one source topic")
    if target is None:
        return
    topic_of(target)
    is_source = sources.fullmatch(target) if isinstance(sources, re.Pattern) else target in names_of(sources)
    if is_source:
        raise MisuseError(
            f"the dead-letter topic {target!r} is a source topic too: its records would come again"
        )
