"""`read_table`: the records of topics, up to the end as of the call, as one Arrow table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from oncelog.client.arguments import items_of, names_of
from oncelog.client.consumer.blocking import Consumer
from oncelog.client.times import Time, time_ms_of
from oncelog.errors import MisuseError
from oncelog.runtime import system
from oncelog.runtime.optional import check_pyarrow
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa


def read_table(
    topics: Collection[str] | str,
    config: Mapping[str, object] | None = None,
    *,
    since: Time | None = None,
    until: Time | None = None,
    partitions: Collection[int] | int | None = None,
    include_headers: bool = False,
    **settings: object,
) -> pa.Table:
    """Return the records of topics as a pyarrow.Table, up to the end offsets as of the call.

        table = oncelog.read_table("orders", {"bootstrap.servers": "127.0.0.1:9092"}, since="1h")

    The complete table is in memory. It has the columns of `Consumer.fetch_range`, and the rows of each
    partition in the order of their offsets. Records of open and aborted transactions are missing, unless
    isolation.level=read_uncommitted.

    `since` and `until` choose offsets, as for `oncelog consume`. Each partition begins with its first record
    at or after `since`, and ends before its first record at or after `until`. A time is a datetime (without a
    time zone: local time), a timedelta before now, ms since 1970, or a text such as "1h", "7d" or
    "2026-11-28T10:00".

    Raises UnknownTopicOrPartition, OffsetOutOfRange if records are deleted during the call, and MisuseError
    for invalid arguments.
    """
    check_pyarrow("read_table")
    names = names_of(topics)
    numbers = None if partitions is None else items_of(partitions, int, "partition numbers (int)")
    now_ms = system.current().wall_ns() // 1_000_000
    try:
        since_ms = None if since is None else time_ms_of(since, now_ms)
        until_ms = None if until is None else time_ms_of(until, now_ms)
    except ValueError as error:
        raise MisuseError(str(error)) from error
    import pyarrow as pa

    from oncelog.wire.columns import fetch_schema

    batches: list[Any] = []
    with Consumer({**(config or {}), **settings}) as consumer:
        tps = [tp for name in names for tp in _partitions(consumer, name, numbers)]
        for tp, (start, end) in _ranges(consumer, tps, since_ms, until_ms).items():
            batches += consumer.fetch_range(tp, start, end, include_headers=include_headers)
    return pa.Table.from_batches(batches, fetch_schema(include_headers))


def _partitions(consumer: Consumer, topic: str, numbers: list[int] | None) -> list[TopicPartition]:
    """Return the chosen partitions of a topic. Raises MisuseError if one of `numbers` does not exist."""
    existing = sorted(info.partition for info in consumer.partitions_for(topic))
    missing = sorted(set(numbers or ()).difference(existing))
    if missing:
        raise MisuseError(f"{topic} has the partitions {existing}, and not {missing}")
    return [TopicPartition(topic, number) for number in existing if numbers is None or number in numbers]


def _ranges(
    consumer: Consumer, tps: list[TopicPartition], since_ms: int | None, until_ms: int | None
) -> dict[TopicPartition, tuple[int, int]]:
    """Return the first offset to read and the offset after the last one, for partitions with records."""
    ends = consumer.end_offsets(tps)
    starts = consumer.beginning_offsets(tps)
    if since_ms is not None:
        for tp, first in consumer.offsets_for_times(dict.fromkeys(tps, since_ms)).items():
            starts[tp] = ends[tp] if first is None or first.offset is None else first.offset
    if until_ms is not None:
        for tp, first in consumer.offsets_for_times(dict.fromkeys(tps, until_ms)).items():
            if first is not None and first.offset is not None:
                ends[tp] = min(ends[tp], first.offset)
    return {tp: (starts[tp], ends[tp]) for tp in tps if starts[tp] < ends[tp]}
