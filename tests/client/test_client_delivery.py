"""Delivery without I/O: positions and commits follow the delivered records, even if the application's loop is
interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.consumer_core import T0, T1, T2, answer, batch, core, only_call, started

from oncelog.client.consumer.core import ConsumerCore
from oncelog.errors import OffsetOutOfRange
from oncelog.types import TopicPartition


def next_values(consumer: ConsumerCore, count: int) -> list[bytes | None]:
    rows: list[bytes | None] = []
    while len(rows) < count:
        row = consumer.delivery.next_record()
        if row is not None:
            rows.append(row.value)
        elif not consumer.prepare_records(500, 0):
            break
    return rows


def filled(**options: Any) -> ConsumerCore:
    """Return a core with all records fetched: T0 with offsets 0 to 4, T1 with 0 and 1."""
    consumer = core(**options)
    consumer.assign([T0, T1])
    consumer.seek(T0, 0)
    consumer.seek(T1, 0)
    rows = (T0, batch(0, b"a", b"b", b"c", b"d", b"e")), (T1, batch(0, b"x", b"y"))
    consumer.on_response(only_call(consumer), answer(*rows), 1.0, 0)
    return consumer


def test_the_position_follows_records_delivered_one_by_one() -> None:
    consumer = filled()
    assert consumer.prepare_records(500, 0)
    assert (consumer.position(T0), consumer.position(T1)) == (0, 0), "ready, but nobody has them"
    first = next_values(consumer, 2)
    assert len(first) == 2
    positions = consumer.position(T0), consumer.position(T1)
    assert positions in ((2, 0), (0, 2)), "one partition after the other"
    assert sorted(next_values(consumer, 10) + first, key=str) == [b"a", b"b", b"c", b"d", b"e", b"x", b"y"]
    assert (consumer.position(T0), consumer.position(T1)) == (5, 2)


def test_a_poll_returns_the_records_that_a_loop_left() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(0, b"a", b"b", b"c"))), 1.0, 0)
    assert next_values(consumer, 1) == [b"a"]
    assert [row.value for row in consumer.take(1, 0)] == [b"b"]
    assert consumer.position(T0) == 2
    assert next_values(consumer, 5) == [b"c"]


def test_lag_counts_undelivered_records() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(0, b"a", b"b", b"c")), high_watermark=3), 1.0, 0)
    assert next_values(consumer, 1) == [b"a"]
    assert consumer.lag(T0) == 2


def move_away(consumer: ConsumerCore) -> None:
    consumer.seek(T0, 40)


def begin_again(consumer: ConsumerCore) -> None:
    consumer.seek_to([T0], "earliest")


def take_away(consumer: ConsumerCore) -> None:
    consumer.assign([T1])


@pytest.mark.parametrize("change", [move_away, begin_again, take_away])
def test_a_seek_or_assignment_drops_undelivered_records(change: Callable[[ConsumerCore], None]) -> None:
    consumer = filled()
    consumer.prepare_records(500, 0)
    change(consumer)
    assert next_values(consumer, 10) == [b"x", b"y"]


def test_a_partition_that_comes_back_begins_without_what_its_earlier_life_left() -> None:
    consumer = filled()
    consumer.prepare_records(500, 0)
    take_away(consumer)
    consumer.assign([T0, T1])
    consumer.seek(T0, 3)
    assert next_values(consumer, 10) == [b"x", b"y"]
    assert consumer.position(T0) == 3


def test_paused_records_are_kept_until_resume() -> None:
    consumer = filled()
    consumer.prepare_records(500, 0)
    consumer.set_paused([T0], True)
    assert next_values(consumer, 10) == [b"x", b"y"]
    assert consumer.position(T0) == 0
    consumer.set_paused([T0], False)
    assert next_values(consumer, 10) == [b"a", b"b", b"c", b"d", b"e"]


def test_columns_return_what_records_left_and_conversely() -> None:
    consumer, call = started()
    records = answer((T0, batch(0, b"a", b"b", b"c")))
    consumer.on_response(call, records, 1.0, 0)
    assert next_values(consumer, 1) == [b"a"]
    assert not consumer.prepare_columns(0), "they are fetched again"
    consumer.on_response(only_call(consumer), records, 1.0, 0)
    assert consumer.prepare_columns(0)
    assert consumer.position(T0) == 1
    assert not consumer.prepare_records(500, 0)
    consumer.on_response(only_call(consumer), records, 1.0, 0)
    table = consumer.take_arrow(0)
    assert table.column("value").to_pylist() == [b"b", b"c"]
    assert consumer.position(T0) == 3


def test_out_of_range_is_not_asked_again_while_records_wait() -> None:
    """Regression: after OFFSET_OUT_OF_RANGE, the consumer sent thousands of requests a second until the
    application polled the fetched records.
    """
    consumer, call = started(**{"max.poll.records": 1})
    consumer.on_response(call, answer((T0, batch(0, b"a", b"b"))), 1.0, 0)
    consumer.on_response(only_call(consumer), answer((T0, b""), error=OffsetOutOfRange.code), 1.0, 0)
    assert consumer.plan(lambda tp: 1) == ([], [])
    assert [row.value for row in consumer.take(1, 0)] == [b"a"]
    consumer.prepare_records(1, 0)
    assert consumer.plan(lambda tp: 1) == ([], []), "b is ready, but nobody has it"
    assert [row.value for row in consumer.take(1, 0)] == [b"b"]
    consumer.on_response(only_call(consumer), answer((T0, b""), error=OffsetOutOfRange.code), 1.0, 0)
    assert [reset.to for reset in consumer.resets()] == ["earliest"]


def test_out_of_range_without_a_policy_is_told_after_the_records_that_wait() -> None:
    consumer, call = started(**{"auto.offset.reset": "none"})
    consumer.on_response(call, answer((T0, batch(0, b"a"))), 1.0, 0)
    consumer.on_response(only_call(consumer), answer((T0, b""), error=OffsetOutOfRange.code), 1.0, 0)
    consumer.raise_error()
    assert [row.value for row in consumer.take(1, 0)] == [b"a"]
    consumer.on_response(only_call(consumer), answer((T0, b""), error=OffsetOutOfRange.code), 1.0, 0)
    with pytest.raises(OffsetOutOfRange):
        consumer.raise_error()


def test_positions_of_paused_partitions_are_looked_up() -> None:
    consumer = core()
    consumer.assign([T0])
    consumer.set_paused([T0], True)
    assert [reset.tp for reset in consumer.resets()] == [T0]


def test_a_fetch_or_look_up_is_repeated_however_it_ends() -> None:
    consumer, call = started()
    consumer.end_fetch(call)
    again = only_call(consumer)
    consumer.end_fetch(call)
    assert consumer.plan(lambda tp: 1) == ([], []), "only its own lane is freed"
    assert again.connection == call.connection
    consumer.seek_to([T0], "latest")
    calls = consumer.resets()
    consumer.end_resets(calls)
    assert consumer.resets() == calls


LOG = {
    T0: [*range(40)],
    T1: [offset for offset in range(60) if offset % 7],
    T2: [3, 4, 11, 30, 31, 32, 33, 50],
}
"""The offsets that have a record; each batch has one record."""
ENDS = {T0: 40, T1: 60, T2: 51}
PARTITIONS = st.sampled_from(sorted(LOG))


class ReadingMachine(RuleBasedStateMachine):
    """An application that polls, iterates, leaves loops, is interrupted, pauses, seeks and loses partitions.

    The model is one number per partition: the application's position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.core = core(**{"max.partition.fetch.bytes": 400})
        self.position: dict[TopicPartition, int] = {}
        self.committed = dict.fromkeys(LOG, 0)
        self.paused: set[TopicPartition] = set()
        self.calls: list[Any] = []
        self.assign(sorted(LOG))

    @rule(partitions=st.lists(PARTITIONS, unique=True))
    def assign(self, partitions: list[TopicPartition]) -> None:
        """Rebalance: commit the positions, and start added partitions at their committed offsets."""
        for tp in self.position:
            position = self.core.position(tp)
            assert position is not None
            self.committed[tp] = position
        self.core.assign(partitions)
        self.position = {tp: self.position.get(tp, self.committed[tp]) for tp in partitions}
        for tp in partitions:
            if self.core.position(tp) is None:
                self.core.seek(tp, self.committed[tp])
        self.paused &= set(partitions)

    @rule(tp=PARTITIONS, offset=st.integers(0, 60))
    def seek(self, tp: TopicPartition, offset: int) -> None:
        if tp in self.position:
            self.position[tp] = min(offset, ENDS[tp])
            self.core.seek(tp, self.position[tp])

    @rule(tp=PARTITIONS, paused=st.booleans())
    def pause(self, tp: TopicPartition, paused: bool) -> None:
        if tp in self.position:
            self.core.set_paused([tp], paused)
            (self.paused.add if paused else self.paused.discard)(tp)

    @rule(count=st.integers(1, 3))
    def fetch(self, count: int) -> None:
        self.calls += self.core.plan(lambda tp: 1)[0]
        for call in self.calls[:count]:
            rows = []
            for tp, (start, _) in call.expected.items():
                offsets = islice((offset for offset in LOG[tp] if offset >= start), 4)
                rows.append((tp, b"".join(batch(offset, b"%d" % offset) for offset in offsets)))
            self.core.on_response(call, answer(*rows), 1.0, 0)
        self.calls = self.calls[count:]

    @rule()
    def lose_answers(self) -> None:
        for call in self.calls:
            self.core.on_failure(call)
        self.calls = []

    def given(self, tp: TopicPartition, offset: int) -> None:
        assert tp in self.position and tp not in self.paused
        assert offset == next(logged for logged in LOG[tp] if logged >= self.position[tp])
        self.position[tp] = offset + 1

    @rule(count=st.integers(1, 20))
    def poll(self, count: int) -> None:
        for row in self.core.take(count, 0):
            self.given(TopicPartition(row.topic, row.partition), row.offset)

    @rule(count=st.integers(1, 20))
    def interrupted_poll(self, count: int) -> None:
        self.core.prepare_records(count, 0)

    @rule(count=st.integers(1, 5))
    def iterate_and_break(self, count: int) -> None:
        self.core.prepare_records(20, 0)
        for _ in range(count):
            row = self.core.delivery.next_record()
            if row is None:
                break
            self.given(TopicPartition(row.topic, row.partition), row.offset)

    @rule(interrupted=st.booleans())
    def poll_columns(self, interrupted: bool) -> None:
        if interrupted:
            self.core.prepare_columns(0)
        elif (table := self.core.take_arrow(0)) is not None:
            for topic, partition, offset in zip(
                *(table.column(name).to_pylist() for name in ("topic", "partition", "offset")), strict=True
            ):
                self.given(TopicPartition(topic, partition), offset)

    @invariant()
    def positions_are_where_the_application_is(self) -> None:
        for tp, position in self.position.items():
            mine = self.core.position(tp)
            assert mine is not None
            between = range(min(mine, position), max(mine, position))
            assert not any(offset in between for offset in LOG[tp]), (tp, mine, position)

    def teardown(self) -> None:
        """Deliver all remaining records, and check that the application got every record from its positions
        on.
        """
        for tp in self.position:
            self.pause(tp, False)
        for _ in range(80):
            self.fetch(3)
            self.poll(20)
        for tp, position in self.position.items():
            assert not [offset for offset in LOG[tp] if offset >= position]


TestReading = ReadingMachine.TestCase
TestReading.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
