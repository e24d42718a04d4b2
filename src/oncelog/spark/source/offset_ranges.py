"""Decide which offsets a micro-batch and its tasks read, and which requested offsets are lost.

This module talks neither to a cluster nor to Spark. The position of a stream is stored as JSON in Spark's
checkpoint. The JSON has the form of Spark's own Kafka source, with additional keys that cannot be topic
names:

    {"flights": {"0": 120, "1": 118},
     "@ids": {"flights": "b3J..."},          topic ids; a re-created topic has another id
     "@begin": {"flights": {"1": 0}},        where this micro-batch starts, if not at the previous position
     "@initial": true}                       the position at which the query starts without a checkpoint

With `@begin`, the ranges of a micro-batch follow from its start and end position alone, so a replay reads the
same offsets. `@begin` is written for every partition in the first micro-batch, because Spark does not store
the initial position. Later it is written for added partitions and where lost offsets are skipped.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from oncelog.errors import ConfigError, OncelogError
from oncelog.types import TopicPartition

LATEST, EARLIEST = -1, -2
"""Special offsets in options. Spark and Kafka's ListOffsets use the same numbers."""
LARGEST = 2**63 - 1
"""The largest offset or timestamp in Kafka's protocol."""

Offsets = dict[TopicPartition, int]


class DataLossError(OncelogError):
    """Requested offsets no longer exist.

    The text names the partition, the requested and the existing offsets.
    """


@dataclass(frozen=True, slots=True)
class OffsetsSpec:
    """The start or end of a read, as the user set it. Exactly one field besides `option` is set.

    `option` is the option's name, for error texts. `special` is EARLIEST or LATEST, for all partitions.
    `offsets` has one offset per partition and may contain EARLIEST and LATEST. `timestamp_ms` (for all
    partitions) and `timestamps_ms` (per partition) mean the first record at or after that time.
    """

    option: str
    special: int | None = None
    offsets: Mapping[TopicPartition, int] | None = None
    timestamp_ms: int | None = None
    timestamps_ms: Mapping[TopicPartition, int] | None = None

    def uses(self, special: int) -> bool:
        """Return True if the user set `special` (EARLIEST or LATEST) for any partition."""
        return self.special == special or special in (self.offsets or {}).values()

    def times(self, partitions: Iterable[TopicPartition]) -> Offsets | None:
        """Return the times to look up in ms since the epoch, or None if the user gave no times.

        Raises ConfigError if the user set times for a different set of partitions than `partitions`.
        """
        if self.timestamp_ms is not None:
            return dict.fromkeys(partitions, self.timestamp_ms)
        if self.timestamps_ms is None:
            return None
        _check_same_partitions(self.option, self.timestamps_ms, partitions)
        return dict(self.timestamps_ms)

    def resolve(self, earliest: Offsets, latest: Offsets) -> Offsets:
        """Return the offset of each partition, with EARLIEST and LATEST replaced by the offsets in `earliest`
        and `latest`.

        Raises ConfigError if the user set offsets for a different set of partitions.
        """
        if self.offsets is None:
            return dict(earliest if self.special == EARLIEST else latest)
        _check_same_partitions(self.option, self.offsets, earliest)
        special = {EARLIEST: earliest, LATEST: latest}
        return {
            tp: special[offset][tp] if offset in special else offset for tp, offset in self.offsets.items()
        }


def check_order(starting: OffsetsSpec, ending: OffsetsSpec) -> None:
    """Raise ConfigError if the user set an end that is before the start."""
    wrong: dict[object, tuple[int, int]] = {}
    if starting.timestamp_ms is not None and ending.timestamp_ms is not None:
        wrong["the topic"] = starting.timestamp_ms, ending.timestamp_ms
    pairs = (starting.offsets, ending.offsets), (starting.timestamps_ms, ending.timestamps_ms)
    for starts, ends in pairs:
        wrong |= {tp: (start, ends[tp]) for tp, start in (starts or {}).items() if ends and tp in ends}
    for what, (start, end) in wrong.items():
        if 0 <= end < start:
            raise ConfigError(
                f"{starting.option} starts {what} at {start}, after {ending.option} ends it "
                f"at {end}: swap or correct them"
            )


def _check_same_partitions(
    option: str, named: Iterable[TopicPartition], partitions: Iterable[TopicPartition]
) -> None:
    named, read = set(named), set(partitions)
    if named != read:
        missing = ", ".join(map(str, sorted(read - named))) or "none"
        foreign = ", ".join(map(str, sorted(named - read))) or "none"
        raise ConfigError(
            f"{option} must contain exactly the partitions that are read; missing: {missing}; "
            f"not read: {foreign} (-2 means earliest, -1 latest)"
        )


# Values of options


def parse_offsets(option: str, text: str) -> OffsetsSpec:
    """Parse `earliest`, `latest` or JSON {topic: {partition: offset}}. Raises ConfigError."""
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return OffsetsSpec(option, special=EARLIEST if word == "earliest" else LATEST)
    return OffsetsSpec(option, offsets=_parse_by_partition(option, text, low=EARLIEST))


def parse_timestamps(option: str, text: str) -> Offsets:
    """Parse JSON {topic: {partition: milliseconds since the epoch}}. Raises ConfigError."""
    return _parse_by_partition(option, text, low=0)


def parse_partitions(option: str, text: str) -> tuple[TopicPartition, ...]:
    """Parse JSON {topic: [partition, ...]} into sorted, distinct partitions. Raises ConfigError."""
    document = _parse_json(option, text)
    partitions = [
        TopicPartition(topic, number)
        for topic, numbers in document.items()
        for number in (numbers if isinstance(numbers, list) else [None])
        if type(number) is int and number >= 0
    ]
    if not partitions or len(partitions) != sum(
        len(n) if isinstance(n, list) else 1 for n in document.values()
    ):
        raise ConfigError(f'{option}={text!r}: expected JSON like {{"flights": [0, 1]}}')
    return tuple(sorted(set(partitions)))


def _parse_by_partition(option: str, text: str, low: int) -> Offsets:
    values: Offsets = {}
    for topic, rows in _parse_json(option, text).items():
        for number, value in rows.items() if isinstance(rows, dict) else [("", None)]:
            if not number.isdecimal() or type(value) is not int or not low <= value <= LARGEST:
                raise ConfigError(
                    f'{option}={text!r}: expected JSON like {{"{topic}": {{"0": 23}}}}, numbers from {low} '
                    f"to {LARGEST}"
                )
            values[TopicPartition(topic, int(number))] = value
    return values


def _parse_json(option: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{option}={text!r} is not a keyword of this option and not valid JSON: {error}"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{option}={text!r}: expected a JSON object of topics")
    return document


# Ranges and tasks


class OffsetRange(NamedTuple):
    """The offsets [start, end) of one partition. One task reads them."""

    tp: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        """Return the number of offsets. The number of records can be lower."""
        return self.end - self.start


def ranges_between(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """Return the non-empty ranges between two positions, sorted by partition."""
    return [OffsetRange(tp, start[tp], end[tp]) for tp in sorted(end) if tp in start and start[tp] < end[tp]]


def split_ranges(
    ranges: Sequence[OffsetRange], *, min_partitions: int | None = None, max_records: int | None = None
) -> list[OffsetRange]:
    """Split ranges into at least `min_partitions` pieces of at most `max_records` offsets.

    Every range has at least one piece. Additional pieces go to the ranges whose pieces are largest. There are
    fewer than `min_partitions` pieces only if the ranges contain fewer offsets than that.
    """
    pieces = [1 if max_records is None else -(-r.size // max_records) for r in ranges]
    # Use a heap: a scan of all ranges for each additional piece took 8 s (3,000 ranges, minPartitions=10000).
    by_size = [(-r.size / count, index) for index, (r, count) in enumerate(zip(ranges, pieces, strict=True))]
    heapq.heapify(by_size)
    for _ in range((min_partitions or 0) - sum(pieces)):
        if not by_size or ranges[by_size[0][1]].size <= pieces[by_size[0][1]]:
            break
        largest = by_size[0][1]
        pieces[largest] += 1
        heapq.heapreplace(by_size, (-ranges[largest].size / pieces[largest], largest))
    return [piece for r, count in zip(ranges, pieces, strict=True) for piece in _cut(r, count)]


def _cut(whole: OffsetRange, count: int) -> list[OffsetRange]:
    bounds = [whole.start + whole.size * index // count for index in range(count + 1)]
    return [OffsetRange(whole.tp, low, high) for low, high in pairwise(bounds)]


def limit_end(start: Offsets, end: Offsets, limit: int | None) -> Offsets:
    """Return `end`, moved back so that at most `limit` offsets are read. If `limit` is None, return `end`
    unchanged.

    Each partition gets a share in proportion to its waiting offsets, rounded down. The offsets left over by
    rounding go to the partitions with the largest fractions, and on a tie to the lowest partition. No
    partition starves, because its share grows with its waiting offsets.
    """
    waiting = {tp: end[tp] - start[tp] for tp in sorted(end) if end[tp] > start.get(tp, end[tp])}
    total = sum(waiting.values())
    if limit is None or total <= limit:
        return dict(end)
    shares = {tp: limit * count // total for tp, count in waiting.items()}
    by_fraction = sorted(waiting, key=lambda tp: (-(limit * waiting[tp] % total), tp))
    for tp in by_fraction[: limit - sum(shares.values())]:
        shares[tp] += 1
    return {tp: start[tp] + shares[tp] if tp in shares else offset for tp, offset in end.items()}


# Positions of a stream


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a stream: the next offset per partition.

    `topic_ids` is empty if the broker has no topic ids. The module's docstring explains `begin` and
    `is_initial`.
    """

    offsets: Offsets
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    begin: Offsets = field(default_factory=dict)
    is_initial: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the position as a JSON document with keys in a fixed order."""
        document: dict[str, Any] = _nest(self.offsets)
        if self.topic_ids:
            document["@ids"] = dict(sorted(self.topic_ids.items()))
        if self.begin:
            document["@begin"] = _nest(self.begin)
        if self.is_initial:
            document["@initial"] = True
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Position:
        """Return the position in a JSON document. Raises ConfigError if another source wrote the document."""
        try:
            return cls(
                _flatten({name: rows for name, rows in document.items() if not name.startswith("@")}),
                dict(document.get("@ids", {})),
                _flatten(document.get("@begin", {})),
                bool(document.get("@initial", False)),
            )
        except (AttributeError, TypeError, ValueError):
            raise ConfigError(
                "the checkpoint contains no position of format('oncelog'): "
                f"{json.dumps(document)[:200]}; use the query's own checkpointLocation"
            ) from None


def _nest(offsets: Offsets) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for tp in sorted(offsets):
        nested.setdefault(tp.topic, {})[str(tp.partition)] = offsets[tp]
    return nested


def _flatten(nested: Mapping[str, Mapping[str, int]]) -> Offsets:
    return {
        TopicPartition(topic, int(number)): int(offset)
        for topic, rows in nested.items()
        for number, offset in rows.items()
    }


def ranges_of_batch(start: Position, end: Position) -> list[OffsetRange]:
    """Return the ranges of the micro-batch from `start` to `end`, the same on every replay."""
    return ranges_between({**start.offsets, **end.begin}, end.offsets)


@dataclass(frozen=True, slots=True)
class Available:
    """The offsets that existed in each partition when they were looked up.

    `earliest` has the log start offsets, `latest` the ends for the query's isolation level, and `written` the
    high watermarks.
    """

    earliest: Offsets
    latest: Offsets
    written: Offsets
    topic_ids: Mapping[str, str] = field(default_factory=dict)


class DataLoss(NamedTuple):
    """Requested offsets that do not exist.

    A stream continues at `resume`, or no longer reads the partition if `resume` is None. A batch read does
    not use `resume`.
    """

    tp: TopicPartition
    resume: int | None
    explanation: str


def next_position(
    start: Position, now: Available, *, limit: int | None, target: Offsets | None = None
) -> tuple[Position, list[DataLoss]]:
    """Return the end of the micro-batch that begins at `start`, and the losses before that end.

    For Trigger.AvailableNow, `target` gives the offsets to stop at, and partitions outside `target` are not
    read. If `target` is None, there is no bound. If there is nothing to read, the end is `start` itself.
    """
    losses = find_losses(start, now)
    begin, bound = _window(start, now, losses, target)
    end = limit_end(begin, bound, limit)
    if end == start.offsets and not losses:
        return start, losses
    if not start.is_initial:
        begin = {tp: offset for tp, offset in begin.items() if start.offsets.get(tp) != offset}
    return Position(end, now.topic_ids, begin), losses


def count_waiting(start: Position, now: Available) -> int:
    """Return the number of offsets that a micro-batch without a limit would read."""
    begin, bound = _window(start, now, find_losses(start, now), None)
    return sum(bound[tp] - begin[tp] for tp in begin)


def _window(
    start: Position, now: Available, losses: Sequence[DataLoss], target: Offsets | None
) -> tuple[Offsets, Offsets]:
    """Return the start and the furthest end of a micro-batch per partition. No end is before its start.

    A partition that `target` lacks keeps its offset in the position. If the partition were missing from the
    position, a later micro-batch would read it from offset 0.
    """
    begin = {
        tp: start.offsets.get(tp, 0)
        for tp in now.latest
        if target is None or tp in target or tp in start.offsets
    }
    begin |= {loss.tp: loss.resume for loss in losses if loss.resume is not None and loss.tp in begin}
    bound = now.latest if target is None else {tp: min(now.latest[tp], target.get(tp, 0)) for tp in begin}
    return begin, {tp: max(bound[tp], begin[tp]) for tp in begin}


def find_losses(start: Position, now: Available) -> list[DataLoss]:
    """Return the losses: one for each partition whose position is outside the existing offsets. A partition
    that is gone, that is re-created, or that was added and has already lost its first offsets is also lost.
    """
    losses = [_loss_of(tp, offset, start, now) for tp, offset in sorted(start.offsets.items())]
    losses += [
        DataLoss(
            tp, now.earliest[tp], f"{tp} was added, and its offsets below {now.earliest[tp]} no longer exist"
        )
        for tp in sorted(now.earliest)
        if tp not in start.offsets and now.earliest[tp] > 0
    ]
    return [loss for loss in losses if loss is not None]


def _loss_of(tp: TopicPartition, offset: int, start: Position, now: Available) -> DataLoss | None:
    if tp not in now.earliest:
        return DataLoss(
            tp,
            None,
            f"{tp}: offset {offset} was requested, but the partition is gone (topic deleted?)",
        )
    low, high = now.earliest[tp], now.written[tp]
    held = (
        f"{tp}: offset {offset} was requested, but the partition contains offsets {low} to {high} (exclusive)"
    )
    before, after = start.topic_ids.get(tp.topic), now.topic_ids.get(tp.topic)
    if before and after and before != after:
        return DataLoss(tp, low, f"{held}; topic {tp.topic!r} was deleted and re-created since")
    if offset < low:
        return DataLoss(tp, low, f"{held}: {low - offset} offsets were removed (retention or DeleteRecords)")
    if offset > high:
        return DataLoss(tp, high, f"{held}: the log was truncated or the topic re-created")
    return None


def describe_change(before: Available, after: Available) -> str | None:
    """Return as text how a topic was replaced since `before`, or None if offsets only moved forward."""
    for tp, written in sorted(before.written.items()):
        old, new = before.topic_ids.get(tp.topic), after.topic_ids.get(tp.topic)
        if old and new and old != new:
            return f"topic {tp.topic!r} was deleted and re-created"
        if tp not in after.written:
            return f"{tp} was deleted"
        if after.written[tp] < written:
            text = f"the end of {tp} moved back from {written} to {after.written[tp]}"
            return f"{text} (re-created or truncated)"
    return None


def loss_text(losses: Sequence[DataLoss]) -> str:
    """Return a text for the user that names the losses and what to do."""
    return (
        "; ".join(loss.explanation for loss in losses)
        + ". This query may have lost records. To skip the lost offsets with a warning, set "
        "failOnDataLoss to false. To read all remaining records, use a new checkpoint"
    )
