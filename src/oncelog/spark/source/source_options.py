# ruff: noqa: E501 (the table keeps one option per line)
"""The options of reading with `format("oncelog")`: their table, and their parsed values.

Each option has the same name, default and meaning as in Spark's own Kafka source (KafkaSourceProvider),
unless its description says otherwise. Spark passes option names in lower case, so names are compared without
regard to case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from oncelog.config import CONSUMER
from oncelog.errors import ConfigError
from oncelog.spark.option_docs import Option, client_settings, refuse_unknown
from oncelog.spark.source.offset_ranges import (
    EARLIEST,
    LARGEST,
    LATEST,
    OffsetsSpec,
    check_order,
    parse_offsets,
    parse_partitions,
    parse_timestamps,
)
from oncelog.types import TopicPartition

Mode = Literal["batch", "stream"]


def _rows(*rows: tuple[str, str | None, Literal["both", "batch", "stream"], str]) -> tuple[Option, ...]:
    return tuple(Option(*row) for row in rows)


# fmt: off
OPTIONS = _rows(
    ("kafka.bootstrap.servers", None, "both", "HOST:PORT of one or more brokers. Required."),
    ("subscribe", None, "both", "Topics, separated by commas. Set exactly one of subscribe, subscribePattern and assign."),
    ("subscribePattern", None, "both", "A regular expression that must match a whole topic name."),
    ("assign", None, "both", 'Partitions as JSON: {"flights": [0, 1]}.'),
    ("startingOffsets", None, "both", 'earliest, latest, or JSON {"flights": {"0": 23, "1": -2}} for every partition (-2 earliest, -1 latest). Default: earliest in a batch, latest in a stream. A stream uses it only without a checkpoint.'),
    ("endingOffsets", "latest", "batch", "latest, or JSON as in startingOffsets (-1 latest). The end is exclusive."),
    ("startingTimestamp", None, "both", "Milliseconds since the epoch: start at the first record at or after that time. Replaces startingOffsets."),
    ("endingTimestamp", None, "batch", "Milliseconds since the epoch: end before the first record at or after that time."),
    ("startingOffsetsByTimestamp", None, "both", 'Per partition, as JSON: {"flights": {"0": 1700000000000}}.'),
    ("endingOffsetsByTimestamp", None, "batch", "As startingOffsetsByTimestamp, for the end."),
    ("startingOffsetsByTimestampStrategy", "error", "both", "The reaction if no record is at or after the time: error, or latest (start at the end)."),
    ("maxOffsetsPerTrigger", None, "stream", "Maximum number of offsets per micro-batch, divided among partitions in proportion to their waiting offsets."),
    ("minOffsetsPerTrigger", None, "stream", "A micro-batch waits for this many offsets, except the first one of a run and those of Trigger.AvailableNow."),
    ("maxTriggerDelay", "15m", "stream", "Longest wait for minOffsetsPerTrigger: a number with ms, s, m, h or d; without a unit, milliseconds."),
    ("minPartitions", None, "both", "Minimum number of Spark partitions: large ranges of offsets are split."),
    ("maxRecordsPerPartition", None, "both", "Maximum number of offsets per Spark partition."),
    ("commitOffsetsToGroup", None, "stream", "A consumer group to which the offsets of finished micro-batches are committed, so that tools show the query's lag. They are never read back."),
    ("includeHeaders", "false", "both", "Add the column headers."),
    ("failOnDataLoss", "true", "both", "Fail if requested offsets no longer exist (retention, DeleteRecords, deleted or re-created topics). false: skip them with a warning."),
    ("kafka.*", None, "both", "Any consumer setting by its Kafka name. kafka.isolation.level is read_committed by default, unlike in Spark's own source."),
    ("groupIdPrefix", None, "both", "Accepted without effect: no consumer group is used to read. See commitOffsetsToGroup."),
    ("kafkaConsumer.pollTimeoutMs", None, "both", "Accepted without effect: kafka.request.timeout.ms bounds every wait."),
    ("fetchOffset.numRetries", None, "both", "Accepted without effect: requests for offsets are retried for kafka.request.timeout.ms."),
    ("fetchOffset.retryIntervalMs", None, "both", "Accepted without effect: see kafka.retry.backoff.ms."),
)
# fmt: on

_NAMES = {option.name.lower(): option for option in OPTIONS}
_UNITS_MS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SINK_GROUPS = "oncelog-"
_INSTEAD_OF = {
    "auto.offset.reset": "use startingOffsets",
    "enable.auto.commit": "offsets are kept in Spark's checkpoint",
    "key.deserializer": "keys are binary columns; use cast() or from_json()",
    "value.deserializer": "values are binary columns; use cast() or from_json()",
    "interceptor.classes": "there are no interceptors",
}


@dataclass(frozen=True, slots=True)
class Subscription:
    """The topics or partitions to read. Exactly one of the three fields is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    partitions: tuple[TopicPartition, ...] = ()

    def matches(self, topic: str) -> bool:
        """Return True if `pattern` is set and matches the entire topic name."""
        return self.pattern is not None and re.fullmatch(self.pattern, topic) is not None


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The parsed options of the source. Limits that the user did not set are None.

    `latest_without_record`: if True, a partition without a record at or after the starting time is read from
    its end. If False, the query fails with ConfigError. `client` contains the consumer settings of the
    options `kafka.*`.
    """

    subscription: Subscription
    starting: OffsetsSpec
    ending: OffsetsSpec
    latest_without_record: bool
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_ms: int
    min_partitions: int | None
    max_records_per_partition: int | None
    include_headers: bool
    fail_on_data_loss: bool
    client: dict[str, object] = field(repr=False)
    commit_offsets_to_group: str | None = None


def parse_options(given: Mapping[str, str], mode: Mode | None = None) -> SourceOptions:
    """Return the parsed options. Raises ConfigError for unknown, invalid, missing or contradictory options.

    `mode` is None while Spark asks only for the schema, before the kind of query is certain.
    """
    options = {name.lower(): value for name, value in given.items()}
    refuse_unknown(options, _NAMES, "format('oncelog')")
    if mode is not None:
        _check_mode(options, mode)
    _check_companions(options)
    starting = _parse_edge(options, "starting", LATEST if mode == "stream" else EARLIEST)
    ending = _parse_edge(options, "ending", LATEST)
    if mode == "batch" and starting.uses(LATEST):
        raise ConfigError("startingOffsets: latest (-1) cannot begin a batch, which would always be empty")
    if ending.uses(EARLIEST):
        raise ConfigError("endingOffsets: earliest (-2) cannot end a batch, which would always be empty")
    check_order(starting, ending)
    max_offsets, min_offsets = (
        _parse_count(options, f"{bound}OffsetsPerTrigger") for bound in ("max", "min")
    )
    if max_offsets is not None and min_offsets is not None and min_offsets > max_offsets:
        raise ConfigError(
            f"minOffsetsPerTrigger={min_offsets} is above maxOffsetsPerTrigger={max_offsets}: lower the former or "
            "raise the latter"
        )
    return SourceOptions(
        subscription=_parse_subscription(options),
        starting=starting,
        ending=ending,
        latest_without_record=_parse_strategy(options),
        max_offsets_per_trigger=max_offsets,
        min_offsets_per_trigger=min_offsets,
        max_trigger_delay_ms=_parse_duration(options, "maxTriggerDelay"),
        min_partitions=_parse_count(options, "minPartitions"),
        max_records_per_partition=_parse_count(options, "maxRecordsPerPartition"),
        include_headers=_parse_bool(options, "includeHeaders"),
        fail_on_data_loss=_parse_bool(options, "failOnDataLoss"),
        client=client_settings(options, CONSUMER, {}, _INSTEAD_OF),
        commit_offsets_to_group=_parse_group(options),
    )


def _check_mode(options: Mapping[str, str], mode: Mode) -> None:
    why = {
        "batch": "has no meaning in a batch, which reads everything at once",
        "stream": "has no meaning in a stream, which has no end",
    }
    for name in options:
        option = _NAMES.get(name)
        if option is not None and option.mode not in ("both", mode):
            raise ConfigError(f"{option.name} {why[mode]}; remove it")


def _check_companions(options: Mapping[str, str]) -> None:
    """Raise ConfigError if two options contradict each other, or if an option needs another one that is
    missing.
    """
    for edge, what in (("starting", "start"), ("ending", "end")):
        if len(names := [name for name in _edge_names(edge) if name.lower() in options]) > 1:
            raise ConfigError(f"{' and '.join(names)} both set the {what}; keep one of them")
    times = ("startingTimestamp", "startingOffsetsByTimestamp")
    for name, needed in (
        ("startingOffsetsByTimestampStrategy", times),
        ("maxTriggerDelay", ("minOffsetsPerTrigger",)),
    ):
        if name.lower() in options and not any(other.lower() in options for other in needed):
            raise ConfigError(
                f"{name} has no effect without {' or '.join(needed)}: set one of these, or remove {name}"
            )


def _edge_names(edge: str) -> tuple[str, str, str]:
    return f"{edge}Timestamp", f"{edge}OffsetsByTimestamp", f"{edge}Offsets"


def _parse_edge(options: Mapping[str, str], edge: Literal["starting", "ending"], default: int) -> OffsetsSpec:
    timestamp, by_timestamp, offsets = _edge_names(edge)
    if (text := options.get(timestamp.lower())) is not None:
        return OffsetsSpec(timestamp, timestamp_ms=_whole(timestamp, text, 0))
    if (text := options.get(by_timestamp.lower())) is not None:
        return OffsetsSpec(by_timestamp, timestamps_ms=parse_timestamps(by_timestamp, text))
    text = options.get(offsets.lower())
    return OffsetsSpec(offsets, special=default) if text is None else parse_offsets(offsets, text)


def _parse_subscription(options: Mapping[str, str]) -> Subscription:
    names = [name for name in ("subscribe", "subscribePattern", "assign") if options.get(name.lower())]
    if len(names) != 1:
        present = " and ".join(names) if names else "none of them"
        raise ConfigError(f"set exactly one of subscribe, subscribePattern and assign; found {present}")
    text = options[names[0].lower()]
    if names[0] == "assign":
        return Subscription(partitions=parse_partitions("assign", text))
    if names[0] == "subscribe":
        topics = dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
        if not topics:
            raise ConfigError(f"subscribe={text!r}: expected one or more topics")
        return Subscription(topics=tuple(topics))
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"subscribePattern={text!r} is not a regular expression: {error}") from None
    return Subscription(pattern=text)


def _parse_strategy(options: Mapping[str, str]) -> bool:
    text = options.get("startingoffsetsbytimestampstrategy", "error").lower()
    if text not in ("error", "latest"):
        raise ConfigError(f"startingOffsetsByTimestampStrategy={text!r}: expected error or latest")
    return text == "latest"


def _parse_group(options: Mapping[str, str]) -> str | None:
    group = options.get("commitoffsetstogroup")
    if group is None:
        return None
    if not group.strip():
        raise ConfigError(
            "commitOffsetsToGroup is empty: set it to the name of a consumer group, or remove it"
        )
    if group.startswith(_SINK_GROUPS):
        # Refuse this group: its commit for a marker topic of the sink would replace a marker.
        raise ConfigError(
            f"commitOffsetsToGroup={group!r}: groups that begin with {_SINK_GROUPS} are those of the sink, "
            "which keeps its markers there; choose another name"
        )
    return group


def _parse_count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name.lower())
    return None if text is None else _whole(name, text, 1)


def _parse_duration(options: Mapping[str, str], name: str) -> int:
    text = options.get(name.lower(), _NAMES[name.lower()].default or "0")
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS_MS:
        raise ConfigError(f"{name}={text!r}: expected a duration like 500ms, 30s, 15m or 2h")
    return int(match[1]) * _UNITS_MS[match[2]]


def _whole(name: str, text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a whole number") from None
    if not low <= value <= LARGEST:
        raise ConfigError(f"{name}={text!r}: must be from {low} to {LARGEST}")
    return value


def _parse_bool(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name.lower(), _NAMES[name.lower()].default or "false").strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name}={text!r}: expected true or false")
    return text == "true"
