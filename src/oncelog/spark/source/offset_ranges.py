"""Which offsets are read, by which task, and whether some are lost: pure planning, no cluster, no Spark.

A stream's position is JSON in Spark's checkpoint, in the shape of Spark's own Kafka source with notes
under names that no topic can have:

    {"flights": {"0": 120, "1": 118},
     "@ids": {"flights": "b3J..."},          topic ids: a topic created again is another topic
     "@begin": {"flights": {"1": 0}}}        where this micro-batch begins, if not at the start position

`@begin` makes the ranges a function of (start, end) alone: for the first micro-batch (whose start Spark
does not keep), for partitions added, and where lost offsets are skipped.
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
"""Special offsets in option JSON, as Spark and Kafka's ListOffsets number them."""
LARGEST = 2**63 - 1
"""The largest offset or time that Kafka's requests hold."""

Offsets = dict[TopicPartition, int]


class DataLossError(OncelogError):
    """Offsets that were wanted are gone; the text names topic, partition and both ranges."""


@dataclass(frozen=True, slots=True)
class OffsetsSpec:
    """Where a range begins or ends, as `option` says; exactly one further field is set.

    `special`: EARLIEST or LATEST for all. `offsets`: per partition, with the special numbers.
    `timestamp_ms` for all, `timestamps_ms` per partition: the first record at or after.
    """

    option: str
    special: int | None = None
    offsets: Mapping[TopicPartition, int] | None = None
    timestamp_ms: int | None = None
    timestamps_ms: Mapping[TopicPartition, int] | None = None

    def uses(self, special: int) -> bool:
        """Whether EARLIEST or LATEST is meant for any partition."""
        return self.special == special or special in (self.offsets or {}).values()

    def times(self, partitions: Iterable[TopicPartition]) -> Offsets | None:
        """The times to look up; None when none are needed. Raises ConfigError for a partition left out."""
        if self.timestamp_ms is not None:
            return dict.fromkeys(partitions, self.timestamp_ms)
        if self.timestamps_ms is None:
            return None
        _check_same_partitions(self.option, self.timestamps_ms, partitions)
        return dict(self.timestamps_ms)

    def resolve(self, earliest: Offsets, latest: Offsets) -> Offsets:
        """Offsets for the partitions of `earliest`. Raises ConfigError when the user's do not name all."""
        if self.offsets is None:
            return dict(earliest if self.special == EARLIEST else latest)
        _check_same_partitions(self.option, self.offsets, earliest)
        special = {EARLIEST: earliest, LATEST: latest}
        return {tp: special[at][tp] if at in special else at for tp, at in self.offsets.items()}


def check_order(starting: OffsetsSpec, ending: OffsetsSpec) -> None:
    """Raise ConfigError when what the user wrote ends before it begins."""
    wrong: dict[object, tuple[int, int]] = {}
    if starting.timestamp_ms is not None and ending.timestamp_ms is not None:
        wrong["the topic"] = starting.timestamp_ms, ending.timestamp_ms
    pairs = (starting.offsets, ending.offsets), (starting.timestamps_ms, ending.timestamps_ms)
    for starts, ends in pairs:
        wrong |= {tp: (at, ends[tp]) for tp, at in (starts or {}).items() if ends and tp in ends}
    for what, (start, end) in wrong.items():
        if 0 <= end < start:
            raise ConfigError(
                f"{starting.option} begins {what} at {start}, behind its end at {end} by {ending.option}: "
                "swap or correct them"
            )


def _check_same_partitions(
    option: str, given: Iterable[TopicPartition], partitions: Iterable[TopicPartition]
) -> None:
    given, wanted = set(given), set(partitions)
    if given != wanted:
        missing = ", ".join(map(str, sorted(wanted - given))) or "none"
        foreign = ", ".join(map(str, sorted(given - wanted))) or "none"
        raise ConfigError(
            f"{option} must name exactly the partitions that are read; "
            f"left out: {missing}; not read: {foreign} (-2 means earliest, -1 latest)"
        )


# What users write


def parse_offsets(option: str, text: str) -> OffsetsSpec:
    """`earliest`, `latest` or JSON {topic: {partition: offset}}. Raises ConfigError naming `option`."""
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return OffsetsSpec(option, special=EARLIEST if word == "earliest" else LATEST)
    return OffsetsSpec(option, offsets=_parse_by_partition(option, text, low=EARLIEST))


def parse_timestamps(option: str, text: str) -> Offsets:
    """JSON {topic: {partition: milliseconds}}. Raises ConfigError naming `option`."""
    return _parse_by_partition(option, text, low=0)


def parse_partitions(option: str, text: str) -> tuple[TopicPartition, ...]:
    """JSON {topic: [partition, ...]}. Raises ConfigError naming `option`."""
    document = _parse_json(option, text)
    found = [
        TopicPartition(topic, number)
        for topic, numbers in document.items()
        for number in (numbers if isinstance(numbers, list) else [None])
        if type(number) is int and number >= 0
    ]
    if not found or len(found) != sum(len(n) if isinstance(n, list) else 1 for n in document.values()):
        raise ConfigError(f'{option}={text!r}: expected JSON like {{"flights": [0, 1]}}')
    return tuple(sorted(set(found)))


def _parse_by_partition(option: str, text: str, low: int) -> Offsets:
    found: Offsets = {}
    for topic, rows in _parse_json(option, text).items():
        for number, value in rows.items() if isinstance(rows, dict) else [("", None)]:
            if not number.isdecimal() or type(value) is not int or not low <= value <= LARGEST:
                raise ConfigError(
                    f'{option}={text!r}: expected JSON like {{"{topic}": {{"0": 23}}}}, numbers from {low} '
                    f"to {LARGEST}"
                )
            found[TopicPartition(topic, int(number))] = value
    return found


def _parse_json(option: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}={text!r} is neither a known word nor JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{option}={text!r}: expected a JSON object of topics")
    return document


# Ranges and tasks


class OffsetRange(NamedTuple):
    """Offsets [start, end) of one partition, read by one task."""

    tp: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many offsets; not all need hold a record."""
        return self.end - self.start


def ranges_between(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """What is not empty between two positions, in the order of partitions."""
    return [OffsetRange(tp, start[tp], end[tp]) for tp in sorted(end) if tp in start and start[tp] < end[tp]]


def split_ranges(
    ranges: Sequence[OffsetRange], *, min_partitions: int | None = None, max_records: int | None = None
) -> list[OffsetRange]:
    """At least `min_partitions` ranges (while there are offsets enough), none above `max_records` offsets.

    Every range keeps at least one piece; further pieces go to the ranges with the largest pieces.
    The same offsets in the same order as before, so a pure function of its arguments.
    """
    pieces = [1 if max_records is None else -(-r.size // max_records) for r in ranges]
    # A heap: looking at all ranges for each piece took 8 s for 3,000 ranges and minPartitions=10000.
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
    """`end` moved back so that at most `limit` offsets are taken (None: all).

    Each partition gets its share by what waits in it, the remainders go to the largest fractions (ties by
    partition order): no partition starves, since what is left waiting grows its next share.
    """
    waiting = {tp: end[tp] - start[tp] for tp in sorted(end) if end[tp] > start.get(tp, end[tp])}
    total = sum(waiting.values())
    if limit is None or total <= limit:
        return dict(end)
    shares = {tp: limit * count // total for tp, count in waiting.items()}
    by_fraction = sorted(waiting, key=lambda tp: (-(limit * waiting[tp] % total), tp))
    for tp in by_fraction[: limit - sum(shares.values())]:
        shares[tp] += 1
    return {tp: start[tp] + shares[tp] if tp in shares else at for tp, at in end.items()}


# Positions of a stream


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stream stands: the next offset per partition.

    `topic_ids` of brokers without topic ids are left out. `begin`: see the module's text.
    """

    offsets: Offsets
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    begin: Offsets = field(default_factory=dict)
    is_initial: bool = False

    def to_json(self) -> dict[str, Any]:
        """A document of plain values with a fixed order of keys."""
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
        """Raises ConfigError for a checkpoint that another source has written."""
        try:
            return cls(
                _flatten({name: rows for name, rows in document.items() if not name.startswith("@")}),
                dict(document.get("@ids", {})),
                _flatten(document.get("@begin", {})),
                bool(document.get("@initial", False)),
            )
        except (AttributeError, TypeError, ValueError):
            raise ConfigError(
                f"the checkpoint holds no position of format('oncelog'): {json.dumps(document)[:200]}; "
                "use the query's own checkpointLocation"
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
    """The ranges of the micro-batch from `start` to `end`: pure, the same on every replay."""
    return ranges_between({**start.offsets, **end.begin}, end.offsets)


@dataclass(frozen=True, slots=True)
class Available:
    """What a cluster holds now: `latest` is the end a reader may see, `written` the high watermark."""

    earliest: Offsets
    latest: Offsets
    written: Offsets
    topic_ids: Mapping[str, str] = field(default_factory=dict)


class Loss(NamedTuple):
    """Offsets wanted that are not there. `resume` is where to go on without them; None: nowhere."""

    tp: TopicPartition
    resume: int | None
    explanation: str


def next_position(
    start: Position, now: Available, *, limit: int | None, target: Offsets | None = None
) -> tuple[Position, list[Loss]]:
    """The end of the micro-batch that begins at `start`, and what was lost before it.

    `target`: offsets not to pass, and partitions not to go beyond (Trigger.AvailableNow); None: no bound.
    The position is `start` itself when there is nothing to read.
    """
    losses = find_losses(start, now)
    begin, bound = _window(start, now, losses, target)
    end = limit_end(begin, bound, limit)
    if end == start.offsets and not losses:
        return start, losses
    noted = begin if start.is_initial else {tp: at for tp, at in begin.items() if start.offsets.get(tp) != at}
    return Position(end, now.topic_ids, noted), losses


def count_waiting(start: Position, now: Available) -> int:
    """How many offsets a micro-batch without a limit would take."""
    begin, bound = _window(start, now, find_losses(start, now), None)
    return sum(bound[tp] - begin[tp] for tp in begin)


def _window(
    start: Position, now: Available, losses: Sequence[Loss], target: Offsets | None
) -> tuple[Offsets, Offsets]:
    """From where to where a micro-batch could go; never backwards.

    A partition that is not in `target` stays where it is: without its offset it would begin at 0 later.
    """
    begin = {
        tp: start.offsets.get(tp, 0)
        for tp in now.latest
        if target is None or tp in target or tp in start.offsets
    }
    begin |= {loss.tp: loss.resume for loss in losses if loss.resume is not None and loss.tp in begin}
    bound = now.latest if target is None else {tp: min(now.latest[tp], target.get(tp, 0)) for tp in begin}
    return begin, {tp: max(bound[tp], begin[tp]) for tp in begin}


def find_losses(start: Position, now: Available) -> list[Loss]:
    """Every partition whose wanted offsets are gone, with the reason."""
    found = [_loss_of(tp, at, start, now) for tp, at in sorted(start.offsets.items())]
    found += [
        Loss(
            tp, now.earliest[tp], f"{tp} was added, and its offsets below {now.earliest[tp]} are gone already"
        )
        for tp in sorted(now.earliest)
        if tp not in start.offsets and now.earliest[tp] > 0
    ]
    return [loss for loss in found if loss is not None]


def _loss_of(tp: TopicPartition, at: int, start: Position, now: Available) -> Loss | None:
    if tp not in now.earliest:
        return Loss(tp, None, f"{tp}: offset {at} was wanted, and the partition is gone (topic deleted?)")
    low, high = now.earliest[tp], now.written[tp]
    held = f"{tp}: offset {at} was wanted, and it holds offsets {low} up to (not including) {high}"
    before, after = start.topic_ids.get(tp.topic), now.topic_ids.get(tp.topic)
    if before and after and before != after:
        return Loss(tp, low, f"{held}; topic {tp.topic!r} was deleted and created again since")
    if at < low:
        return Loss(tp, low, f"{held}: {low - at} offsets were removed (retention or delete-records)")
    if at > high:
        return Loss(tp, high, f"{held}: the log was cut back or the topic created again")
    return None


def describe_change(before: Available, after: Available) -> str | None:
    """Return how a topic of `before` is another in `after`; None where only log starts and ends moved on."""
    for tp, written in sorted(before.written.items()):
        old, new = before.topic_ids.get(tp.topic), after.topic_ids.get(tp.topic)
        if old and new and old != new:
            return f"topic {tp.topic!r} was deleted and created again"
        if tp not in after.written:
            return f"{tp} was deleted"
        if after.written[tp] < written:
            text = f"the end of {tp} went back from {written} to {after.written[tp]}"
            return f"{text} (created again, or cut back)"
    return None


def loss_text(losses: Sequence[Loss]) -> str:
    """What was lost and what to do, for the user."""
    return (
        "; ".join(loss.explanation for loss in losses)
        + ". Records may be lost to this query. To go on with what is there, set failOnDataLoss to false: "
        "the lost offsets are then skipped with a warning. To read all that is left, take a new checkpoint"
    )
