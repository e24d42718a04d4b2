"""`ProvenanceFilter` drops repeated records, and keeps its state together with the committed position."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
from support.topics import new_topic, producer_of

import oncelog
from oncelog import Consumer, OffsetAndMetadata, ProvenanceFilter, Record, TopicPartition
from oncelog.errors import MisuseError, ProvenanceError
from oncelog.rules.idempotence.provenance import OFFSET, PARTITION, TOPIC
from oncelog.types import TimestampType

pytestmark = pytest.mark.behaviour("P11")

EXAMPLE = Path(__file__).parents[2] / "examples" / "distinct_copy.py"
TP = TopicPartition("t", 0)


def headers(offset: int, partition: int = 0) -> tuple[tuple[str, bytes | None], ...]:
    return ((TOPIC, b"s"), (PARTITION, b"%d" % partition), (OFFSET, b"%d" % offset))


def record(offset: int, source_offset: int | None, tp: TopicPartition = TP) -> Record:
    marked = () if source_offset is None else headers(source_offset)
    return Record(*tp, offset, 0, TimestampType.CREATE_TIME, None, b"v", marked)


def accepted(distinct: ProvenanceFilter, records: Iterable[Record]) -> list[int]:
    return [record.offset for record in records if distinct.accept(record)]


def test_repetitions_are_dropped_in_each_partition_by_itself() -> None:
    other = TopicPartition("t", 1)
    distinct = ProvenanceFilter()
    for tp in (TP, other):
        distinct.start(tp)
    log = [record(n, source) for n, source in enumerate((0, 1, 0, 1, 2))]
    assert accepted(distinct, log) == [0, 1, 4]
    assert accepted(distinct, [record(0, 1, other), record(1, 1, other)]) == [0]


def test_the_state_is_kept_with_the_position() -> None:
    distinct = ProvenanceFilter()
    distinct.start(TP)
    assert distinct.committable(TP) == OffsetAndMetadata(0, None, '{"oncelog.provenance":{}}')
    accepted(distinct, [record(0, 7), record(3, 8)])
    kept = distinct.committable(TP)
    assert kept == OffsetAndMetadata(4, None, '{"oncelog.provenance":{"s":{"0":8}}}')
    successor = ProvenanceFilter()
    successor.start(TP, kept)
    assert accepted(successor, [record(4, 7), record(5, 8), record(6, 9)]) == [6]


def test_going_back_needs_the_state_of_that_position() -> None:
    distinct = ProvenanceFilter()
    with pytest.raises(MisuseError, match=r"call start\(t-0\) before the first record"):
        distinct.accept(record(0, 0))
    with pytest.raises(MisuseError, match=r"call start\(t-0\) first"):
        distinct.committable(TP)
    distinct.start(TP)
    accepted(distinct, [record(0, 0)])
    kept = distinct.committable(TP)
    assert accepted(distinct, [record(1, 1)]) == [1]
    # Without the error, the filter would drop the record as a repetition, although it was never processed.
    with pytest.raises(MisuseError, match="the record at offset 1 is below the filter's position 2"):
        distinct.accept(record(1, 1))
    distinct.start(TP, kept)
    assert accepted(distinct, [record(1, 1)]) == [1]


@pytest.mark.parametrize(
    "text",
    [
        *("", "text", "[]", "3", "{}", '{"oncelog.provenance":3}', '{"oncelog.provenance":{"s":{"x":1}}}'),
        *('{"oncelog.provenance":{"s":{"0":Infinity}}}', "[" * 4096),
    ],
)
def test_a_position_without_a_state_is_refused(text: str) -> None:
    with pytest.raises(MisuseError, match=r"t-0: the committed offset 5 has no state of a ProvenanceFilter"):
        ProvenanceFilter().start(TP, OffsetAndMetadata(5, None, text))


def test_a_record_without_provenance_is_an_error_or_passes() -> None:
    malformed = record(1, 1)._replace(headers=headers(1)[:2])
    for odd, reason in (
        (record(0, None), "it has no provenance headers"),
        (malformed, f"the header {OFFSET} is missing"),
    ):
        strict, lax = ProvenanceFilter(), ProvenanceFilter(pass_unmarked=True)
        for distinct in (strict, lax):
            distinct.start(TP)
        with pytest.raises(ProvenanceError, match=f"^t-0, offset {odd.offset}: {reason}$") as raised:
            strict.accept(odd)
        error = raised.value
        assert (error.topic, error.partition, error.offset, error.reason) == ("t", 0, odd.offset, reason)
        assert strict.committable(TP).offset == 0  # the filter did not advance over the record
        assert lax.accept(odd) and lax.committable(TP).offset == odd.offset + 1


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_distinct_copy", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def values(servers: str, topic: str) -> list[bytes]:
    table = oncelog.read_table(topic, {"bootstrap.servers": servers, "isolation.level": "read_committed"})
    return sorted(table.column("value").to_pylist())


def test_a_copier_that_is_restarted_between_repetitions_copies_each_record_once(ours: str) -> None:
    source, target = new_topic(ours, 2), new_topic(ours, 1)
    copy = load_example().copy

    def write(offsets: Iterable[int]) -> None:
        with producer_of(ours) as producer:
            for n in offsets:
                # Choose the partition by the number, as Spark's partitioner does by the key, so that each
                # attempt writes a number to the same partition.
                producer.send(source, b"%03d" % n, partition=n % 2, headers=headers(n, n // 2 % 2))

    def run_to_the_end() -> None:
        tps = [TopicPartition(source, partition) for partition in range(2)]
        with Consumer({"bootstrap.servers": ours, "group.id": f"distinct-{source}-{target}"}) as consumer:
            ends = consumer.end_offsets(tps)

            def is_behind() -> bool:
                done = consumer.committed(tps)
                return any((done[tp] or OffsetAndMetadata(0)).offset < ends[tp] for tp in tps)

            copy(ours, source, target, is_behind)

    write(range(20))
    write(range(10, 30))
    run_to_the_end()
    assert values(ours, target) == [b"%03d" % n for n in range(30)]
    write(range(5, 40))
    run_to_the_end()
    assert values(ours, target) == [b"%03d" % n for n in range(40)]
    assert len(values(ours, source)) == 75
