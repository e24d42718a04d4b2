"""Find the offsets that the filters of a batch query exclude, so that they are not read.

Spark pushes filters down to the source and still checks each row itself. The source leaves out only offsets
that cannot contain a matching row. An upper bound on `timestamp` excludes nothing. Timestamps need not rise
with offsets, and Kafka cannot find the last record before a time. See
test_conditions_of_a_query_reduce_the_offsets_that_are_read.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.variant_utils import VariantUtils

from oncelog.spark.source.offset_ranges import OffsetRange, Offsets

_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Span:
    """A range of integers from `low` to `high`, both inclusive."""

    low: int = 0
    high: int = _MAX

    def intersect(self, other: Span) -> Span:
        """Return the span of the numbers that are in both spans. If there are none, its `high` is below its
        `low`.
        """
        return Span(max(self.low, other.low), min(self.high, other.high))


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The offsets, partitions and topics that can contain matching rows.

    `topics` None means all topics. Records with a timestamp before `since_ms` (ms since the epoch) do not
    match; None means no bound.
    """

    offsets: Span = Span()
    partitions: Span = Span()
    topics: frozenset[str] | None = None
    since_ms: int | None = None

    def apply(self, ranges: Sequence[OffsetRange], firsts: Offsets | None = None) -> list[OffsetRange]:
        """Return the parts of `ranges` that can contain matching rows.

        `firsts` maps each partition to its first offset at or after `since_ms`, and lacks partitions that
        have no such offset. If `firsts` is None, `since_ms` excludes nothing.
        """
        kept = []
        for tp, start, end in ranges:
            if not self.partitions.low <= tp.partition <= self.partitions.high:
                continue
            if self.topics is not None and tp.topic not in self.topics:
                continue
            low = max(start, self.offsets.low, 0 if firsts is None else firsts.get(tp, end))
            high = min(end, self.offsets.high + 1)
            if low < high:
                kept.append(OffsetRange(tp, low, high))
        return kept


def combine_filters(filters: Iterable[Filter]) -> PushedFilters:
    """Return the offsets, partitions and topics that can contain rows which satisfy all of `filters`."""
    found = PushedFilters()
    for condition in filters:
        match getattr(condition, "attribute", None):
            case ("offset",):
                found = replace(found, offsets=found.offsets.intersect(_span(condition)))
            case ("partition",):
                found = replace(found, partitions=found.partitions.intersect(_span(condition)))
            case ("topic",) if (names := _names(condition)) is not None:
                found = replace(found, topics=names if found.topics is None else found.topics & names)
            case ("timestamp",) if (low_ms := _low_ms(condition)) is not None:
                found = replace(found, since_ms=max(low_ms, found.since_ms or 0))
    return found


def _span(condition: Filter) -> Span:
    """Return the numbers that can satisfy a filter. The span may be too wide, but never too narrow."""
    match condition:
        case EqualTo(_, int(value)) | EqualNullSafe(_, int(value)):
            return Span(value, value)
        case GreaterThan(_, int(value)):
            return Span(low=value + 1)
        case GreaterThanOrEqual(_, int(value)):
            return Span(low=value)
        case LessThan(_, int(value)):
            return Span(high=value - 1)
        case LessThanOrEqual(_, int(value)):
            return Span(high=value)
        case In(_, values) if numbers := _without_nulls(values, int):
            return Span(min(numbers), max(numbers))
        case _:
            return Span()


def _names(condition: Filter) -> frozenset[str] | None:
    match condition:
        case EqualTo(_, str(value)) | EqualNullSafe(_, str(value)):
            return frozenset([value])
        case In(_, values) if names := _without_nulls(values, str):
            return frozenset(names)
        case _:
            return None


def _low_ms(condition: Filter) -> int | None:
    """Return the earliest time (ms since the epoch) that satisfies a filter, or None for no bound.

    Bounds of 0 or less are ignored, because records without a timestamp have -1, and ListOffsets accepts no
    negative time. Times without a time zone are also ignored.
    """
    match condition:
        case (
            EqualTo(_, datetime.datetime() as value)
            | EqualNullSafe(_, datetime.datetime() as value)
            | GreaterThan(_, datetime.datetime() as value)
            | GreaterThanOrEqual(_, datetime.datetime() as value)
        ) if value.tzinfo is not None:
            low_ms: int = (value - _EPOCH) // _MILLISECOND
            return low_ms if low_ms > 0 else None
        case _:
            return None


@contextmanager
def times_beyond_python() -> Iterator[None]:
    """Make PySpark replace filter times that Python cannot represent, until the end of the `with` block.

    A Python datetime is limited to the years 1 to 9999 (UTC). For a time outside this range, PySpark raises
    OverflowError while it plans the query, before it calls the source. A user can write such a time: midnight
    of '0001-01-01' east of Greenwich. The nearest datetime replaces it. As a lower bound, the nearest
    datetime excludes no more rows than the time itself. See
    test_conditions_with_extreme_timestamps_give_the_right_rows.
    """
    original = VariantUtils._get_timestamp

    def read(cls: type[VariantUtils], value: bytes, position: int, zone_id: str) -> datetime.datetime:
        try:
            time: datetime.datetime = original(value, position, zone_id)
        except OverflowError:
            is_early = cls._read_long(value, position + 1, 8, signed=True) < 0
            nearest = datetime.datetime.min if is_early else datetime.datetime.max
            return nearest.replace(tzinfo=datetime.UTC)
        return time

    VariantUtils._get_timestamp = classmethod(read)
    try:
        yield
    finally:
        VariantUtils._get_timestamp = original


def _without_nulls(values: Iterable[Any], kind: type) -> list[Any]:
    """Return the values without nulls, or an empty list if any value is not of type `kind`."""
    present = [value for value in values if value is not None]
    return present if all(type(value) is kind for value in present) else []
