"""The consumer without I/O: it gets responses, and returns records and positions."""

from __future__ import annotations

from typing import Any

import pytest
from support.consumer_core import (
    T0,
    T1,
    T2,
    answer,
    asked_offset,
    batch,
    core,
    marker,
    only_call,
    started,
    values,
)

from oncelog.client.consumer.list_offsets import OffsetAt
from oncelog.errors import (
    CorruptMessage,
    MisuseError,
    OffsetOutOfRange,
    TopicAuthorizationFailed,
    UnknownServerError,
)
from oncelog.wire.batch import stamp
from oncelog.wire.control import encode_end_marker
from oncelog.wire.messages import FetchResponse


def test_records_come_in_order_and_the_position_follows() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(0, b"a", b"b") + batch(2, b"c"))), 1.0, 0)
    assert values(consumer, 2) == [b"a", b"b"]
    assert consumer.position(T0) == 2
    assert values(consumer) == [b"c"]
    assert consumer.position(T0) == 3
    assert values(consumer) == []


def test_max_records_cuts_inside_a_batch() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(0, b"a", b"b", b"c"))), 1.0, 0)
    assert values(consumer, 1) == [b"a"]
    assert consumer.position(T0) == 1
    assert values(consumer, 2) == [b"b", b"c"]


def test_position_inside_a_batch_drops_the_records_below_it() -> None:
    consumer, call = started(offset=1)
    consumer.on_response(call, answer((T0, batch(0, b"a", b"b", b"c"))), 1.0, 0)
    assert values(consumer) == [b"b", b"c"]


def test_truncated_tail_is_fetched_again() -> None:
    consumer, call = started()
    whole = batch(0, b"a")
    consumer.on_response(call, answer((T0, whole + batch(1, b"b" * 100)[:90])), 1.0, 0)
    assert asked_offset(only_call(consumer)) == 1
    assert values(consumer) == [b"a"]


def test_the_next_data_are_fetched_before_the_first_are_taken() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(0, b"a", b"b"))), 1.0, 0)
    assert asked_offset(only_call(consumer)) == 2


def test_a_full_partition_is_not_fetched() -> None:
    consumer, call = started(**{"max.partition.fetch.bytes": 80})
    consumer.on_response(call, answer((T0, batch(0, b"x" * 100))), 1.0, 0)
    assert consumer.plan(lambda tp: 1) == ([], [])
    consumer.take(10, 0)
    assert asked_offset(only_call(consumer)) == 1


def test_a_partition_is_in_one_fetch_and_a_broker_has_two_fetch_connections() -> None:
    consumer = core()
    consumer.assign([T0, T1, T2])
    consumer.seek(T0, 0)
    first = only_call(consumer)
    assert consumer.plan(lambda tp: 1) == ([], [])
    consumer.seek(T1, 0)
    second = only_call(consumer)
    assert [(c.connection, list(c.expected)) for c in (first, second)] == [(0, [T0]), (1, [T1])]
    consumer.seek(T2, 0)
    assert consumer.plan(lambda tp: 1) == ([], [])
    other_broker, _ = consumer.plan(lambda tp: 2)
    assert [(c.node_id, c.connection, list(c.expected)) for c in other_broker] == [(2, 0, [T2])]
    consumer.on_failure(first)
    assert [(only.connection, list(only.expected)) for only in [only_call(consumer)]] == [(0, [T0])]


def test_after_a_seek_the_new_fetch_does_not_wait_for_the_old_response() -> None:
    consumer, old = started()
    consumer.seek(T0, 50)
    new = only_call(consumer)
    assert (old.connection, new.connection, asked_offset(new)) == (0, 1, 50)
    consumer.on_response(old, answer((T0, batch(0, b"a"))), 1.0, 0)
    consumer.on_response(new, answer((T0, batch(50, b"b"))), 1.0, 0)
    assert values(consumer) == [b"b"]


def test_a_seek_voids_fetched_data_and_fetches_in_flight() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(0, b"a"))), 1.0, 0)
    second = only_call(consumer)
    consumer.seek(T0, 50)
    consumer.on_response(second, answer((T0, batch(1, b"b"))), 1.0, 0)
    assert values(consumer) == []
    assert consumer.position(T0) == 50
    assert asked_offset(only_call(consumer)) == 50


def test_markers_and_aborted_records_are_skipped_and_the_position_moves() -> None:
    consumer, call = started()
    records = (
        batch(0, b"bad", producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True)
        + batch(1, b"good", producer_id=8, producer_epoch=0, base_sequence=0, is_transactional=True)
        + marker(2, 7, commit=False)
        + batch(3, b"later", producer_id=7, producer_epoch=0, base_sequence=1, is_transactional=True)
        + marker(4, 7, commit=True)
        + marker(5, 8, commit=True)
    )
    consumer.on_response(call, answer((T0, records), aborted=[(7, 0)]), 1.0, 0)
    assert values(consumer) == [b"good", b"later"]
    assert consumer.position(T0) == 6


def test_data_without_visible_records_still_move_the_position() -> None:
    consumer, call = started()
    records = batch(0, b"bad", producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True)
    consumer.on_response(call, answer((T0, records + marker(1, 7, commit=False)), aborted=[(7, 0)]), 1.0, 0)
    assert values(consumer) == []
    assert consumer.position(T0) == 2
    assert asked_offset(only_call(consumer)) == 2


def test_read_uncommitted_gives_aborted_records_but_no_markers() -> None:
    consumer, call = started(**{"isolation.level": "read_uncommitted"})
    records = batch(0, b"bad", producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True)
    consumer.on_response(call, answer((T0, records + marker(1, 7, commit=False))), 1.0, 0)
    assert values(consumer) == [b"bad"]
    assert consumer.position(T0) == 2


def test_out_of_range_asks_for_a_new_position() -> None:
    consumer, call = started(offset=5)
    consumer.on_response(call, answer((T0, b""), error=OffsetOutOfRange.code), 1.0, 0)
    (reset,) = consumer.resets()
    assert (reset.tp, reset.to) == (T0, "earliest")
    assert consumer.resets() == []
    consumer.on_reset(reset, OffsetAt(42, None, None))
    assert consumer.position(T0) == 42


def test_out_of_range_without_a_policy_is_an_error_that_names_the_place() -> None:
    consumer, call = started(offset=5, **{"auto.offset.reset": "none"})
    consumer.on_response(call, answer((T0, b""), error=OffsetOutOfRange.code), 1.0, 0)
    with pytest.raises(OffsetOutOfRange, match=r"t-0 at offset 5.*auto\.offset\.reset"):
        consumer.raise_error()
    assert consumer.position(T0) == 5


@pytest.mark.parametrize("how", ["seek", "seek to the beginning", "give up"])
def test_an_error_is_forgotten_once_its_position_is_left(how: str) -> None:
    """Both partitions have positions out of range.

    The application gets the error of one partition, and then moves both positions.
    """
    consumer = core(**{"auto.offset.reset": "none"})
    consumer.assign([T0, T1])
    consumer.seek(T0, 5)
    consumer.seek(T1, 6)
    consumer.on_response(
        only_call(consumer), answer((T0, b""), (T1, b""), error=OffsetOutOfRange.code), 1.0, 0
    )
    with pytest.raises(OffsetOutOfRange, match="t-0 at offset 5"):
        consumer.raise_error()
    assert consumer.has_error
    match how:
        case "seek":
            consumer.seek(T1, 0)
        case "give up":
            consumer.assign([T0])
        case _:
            consumer.seek_to([], "earliest")
    assert not consumer.has_error
    consumer.raise_error()


def test_no_position_and_no_policy_is_misuse() -> None:
    consumer = core(**{"auto.offset.reset": "none"})
    consumer.assign([T0])
    with pytest.raises(MisuseError, match="call seek"):
        consumer.raise_error()


def test_a_reset_that_a_seek_overtook_is_void() -> None:
    consumer = core()
    consumer.assign([T0])
    (reset,) = consumer.resets()
    consumer.seek(T0, 9)
    consumer.on_reset(reset, OffsetAt(0, None, None))
    assert consumer.position(T0) == 9


@pytest.mark.parametrize("code", [-1, 3, 5, 6, 9, 56, 74, 75, 78, 100, 103])
def test_answers_that_mean_another_leader_are_not_errors(code: int) -> None:
    consumer, call = started()
    assert consumer.on_response(call, answer((T0, b""), error=code), 1.0, 0) == [T0]
    consumer.raise_error()
    assert asked_offset(only_call(consumer)) == 0


def refused(code: int, *, is_whole: bool) -> FetchResponse:
    """Return the response of a broker that refuses a partition, or the whole fetch."""
    response = answer((T0, b""), error=code)
    response.error_code = code if is_whole else 0
    return response


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_unknown_error_of_the_broker_is_raised_only_if_it_lasts(is_whole: bool) -> None:
    """R1403: poll raised the first one, and a processing loop ended."""
    consumer, call = started()
    failure = refused(UnknownServerError.code, is_whole=is_whole)
    for now_ms in (0, 29_999):
        assert consumer.on_response(call, failure, 1.0, now_ms) == [T0]
        consumer.raise_error()
        call = only_call(consumer)
    assert consumer.on_response(call, answer((T0, b"")), 1.0, 30_000) == []
    for now_ms in (40_000, 69_999):
        assert consumer.on_response(only_call(consumer), failure, 1.0, now_ms) == [T0]
        consumer.raise_error()
    assert consumer.on_response(only_call(consumer), failure, 1.0, 70_000) == []
    with pytest.raises(UnknownServerError):
        consumer.raise_error()


def test_other_errors_reach_the_application_typed() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, b""), error=29), 1.0, 0)
    with pytest.raises(TopicAuthorizationFailed, match="t-0"):
        consumer.raise_error()


def test_a_damaged_batch_is_an_error_and_is_fetched_again() -> None:
    consumer, call = started()
    damaged = bytearray(batch(0, b"a") + batch(1, b"b" * 50))
    damaged[-5] ^= 1
    consumer.on_response(call, answer((T0, bytes(damaged))), 1.0, 0)
    assert values(consumer) == [b"a"]
    with pytest.raises(CorruptMessage, match=r"t-0.*offsets 1 to 1"):
        consumer.raise_error()
    assert consumer.position(T0) == 1
    assert asked_offset(only_call(consumer)) == 1
    consumer.seek(T0, 2)
    assert consumer.position(T0) == 2


def test_batches_in_wrong_order_are_fetched_once() -> None:
    """The batch with the highest offsets comes first in the response. If the next fetch began where the
    second batch ends, at offset 2, it would return both batches again, forever.
    """
    consumer, call = started()
    both = batch(2, b"c", b"d") + batch(0, b"a", b"b")
    consumer.on_response(call, answer((T0, both)), 1.0, 0)
    assert asked_offset(only_call(consumer)) == 4
    assert values(consumer) == [b"c", b"d"]


@pytest.mark.parametrize("ends_at", [1, 2, 3, 4])
def test_records_above_the_reported_high_watermark_are_delivered_once(ends_at: int) -> None:
    """Regression (R810): records above the reported high watermark were delivered twice.

    Apache Kafka reads the high watermark before the data, so a response may have such records.
    """
    consumer, call = started()
    log = [batch(offset, b"%d" % offset) for offset in range(4)]
    consumer.on_response(call, answer((T0, b"".join(log)), high_watermark=ends_at), 1.0, 0)
    first_table = consumer.take_arrow(0)
    call = only_call(consumer)
    consumer.on_response(call, answer((T0, b"".join(log[asked_offset(call) :]))), 1.0, 0)
    later = consumer.take_arrow(0)
    columns = [table.column("offset").to_pylist() for table in (first_table, later) if table is not None]
    assert columns == [[0, 1, 2, 3]]


def test_offsets_behind_the_high_watermark_are_not_believed() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(1_000_000, b"a") + batch(1, b"b"))), 1.0, 0)
    assert asked_offset(only_call(consumer)) == 2


def test_a_batch_that_ends_at_the_last_offset_is_an_error() -> None:
    """Regression: the position after it had more than 64 bits, and the next poll raised OverflowError."""
    consumer, call = started()
    last = bytearray(batch(0, b"b"))
    stamp(last, 0, 2**63 - 1, 0)
    consumer.on_response(call, answer((T0, batch(0, b"a") + bytes(last) + batch(1, b"c"))), 1.0, 0)
    assert values(consumer) == [b"a"]
    call = only_call(consumer)
    assert asked_offset(call) == 1
    consumer.on_response(call, answer((T0, bytes(last))), 1.0, 0)
    with pytest.raises(CorruptMessage, match="t-0 at offset 1"):
        consumer.raise_error()
    assert consumer.position(T0) == 1


def test_a_damaged_marker_is_an_error() -> None:
    """If a damaged COMMIT marker were read as ABORT, a committed transaction would be hidden. The reverse
    would show an aborted one.
    """
    consumer, call = started()
    marker = bytearray(encode_end_marker(7, 0, True, 0, 0))
    stamp(marker, 0, 1, 0)
    marker[-9] ^= 1
    consumer.on_response(call, answer((T0, bytes(batch(0, b"a")) + marker)), 1.0, 0)
    assert values(consumer) == [b"a"]
    call = only_call(consumer)
    assert asked_offset(call) == 1
    consumer.on_response(call, answer((T0, bytes(marker))), 1.0, 0)
    with pytest.raises(CorruptMessage, match=r"t-0 at offset 1"):
        consumer.raise_error()


@pytest.mark.behaviour("T10")
def test_a_damaged_aborted_batch_is_an_error() -> None:
    """Regression: an aborted batch was skipped without a check of its CRC. A flipped bit in its last offset
    moved the position over 4,096 records that were never read.
    """
    consumer, call = started(**{"isolation.level": "read_committed"})
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "is_transactional": True}
    aborted = bytearray(batch(0, b"x", **producer))
    last_offset_delta = 23
    aborted[last_offset_delta + 2] ^= 0x10
    rest = marker(1, 7, commit=False) + batch(2, b"a")
    consumer.on_response(call, answer((T0, bytes(aborted) + rest), aborted=[(7, 0)]), 1.0, 0)
    with pytest.raises(CorruptMessage, match="t-0 at offset 0"):
        consumer.raise_error()
    aborted[last_offset_delta + 2] ^= 0x10
    call = only_call(consumer)
    assert asked_offset(call) == 0
    consumer.on_response(call, answer((T0, bytes(aborted) + rest), aborted=[(7, 0)]), 1.0, 0)
    assert values(consumer) == [b"a"]


def test_check_crcs_off_reads_a_batch_with_a_wrong_checksum() -> None:
    consumer, call = started(**{"check.crcs": False})
    damaged = bytearray(batch(0, b"b" * 50))
    damaged[-5] ^= 1
    consumer.on_response(call, answer((T0, bytes(damaged))), 1.0, 0)
    assert len(values(consumer)) == 1


def test_paused_partitions_are_neither_fetched_nor_delivered() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(0, b"a"))), 1.0, 0)
    consumer.set_paused([T0], True)
    assert values(consumer) == []
    assert consumer.plan(lambda tp: 1) == ([], [])
    consumer.set_paused([T0], False)
    assert values(consumer) == [b"a"]


def test_assign_keeps_positions_of_partitions_that_stay() -> None:
    consumer, _ = started(offset=7)
    consumer.assign([T1, T0])
    assert consumer.position(T0) == 7
    assert consumer.position(T1) is None
    assert [call.tp for call in consumer.resets()] == [T1]


def test_a_partition_assigned_again_takes_no_answer_of_its_earlier_life() -> None:
    consumer, old = started()
    consumer.assign([T1])
    consumer.assign([T0])
    consumer.seek(T0, 9)
    consumer.on_response(old, answer((T0, batch(0, b"a"))), 1.0, 0)
    assert values(consumer) == []
    assert consumer.position(T0) == 9


def test_lag_counts_to_the_end_the_reader_may_reach() -> None:
    consumer, call = started()
    assert consumer.lag(T0) is None
    consumer.on_response(call, answer((T0, batch(0, b"a", b"b")), high_watermark=10), 1.0, 0)
    consumer.take(1, 0)
    assert consumer.lag(T0) == 9
    assert consumer.metric_values(0)["records-lag-max"] == 9


@pytest.mark.behaviour("I22")
def test_metrics_have_kafkas_names() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(0, b"a", b"bc"))), 4.0, 1000)
    consumer.take(10, 1000)
    metrics = consumer.metric_values(2000)
    assert metrics["records-consumed-total"] == 2
    assert metrics["bytes-consumed-total"] == 3
    assert metrics["records-consumed-rate"] == 2
    assert metrics["fetch-latency-avg"] == metrics["fetch-latency-max"] == 4
    assert metrics["fetch-total"] == 1


@pytest.mark.parametrize("call", ["seek", "position", "lag", "pause"])
def test_partitions_that_are_not_assigned_are_misuse(call: str) -> None:
    consumer = core()
    actions: dict[str, Any] = {
        "seek": lambda: consumer.seek(T0, 1),
        "position": lambda: consumer.position(T0),
        "lag": lambda: consumer.lag(T0),
        "pause": lambda: consumer.set_paused([T0], True),
    }
    with pytest.raises(MisuseError, match=r"t-0 is not assigned"):
        actions[call]()


def test_no_partition_starves() -> None:
    consumer = core()
    consumer.assign([T0, T1])
    consumer.seek(T0, 0)
    consumer.seek(T1, 0)
    firsts = set()
    for _ in range(4):
        call = only_call(consumer)
        firsts.add(next(iter(call.expected)))
        consumer.on_failure(call)
    assert firsts == {T0, T1}


def test_arrow_returns_one_fetch_at_a_time_from_the_position_on() -> None:
    consumer, call = started()
    consumer.on_response(call, answer((T0, batch(0, b"a", b"b", b"c"))), 1.0, 0)
    assert values(consumer, 1) == [b"a"]
    table = consumer.take_arrow(0)
    assert table is not None
    assert table.column("value").to_pylist() == [b"b", b"c"]
    assert table.column("offset").to_pylist() == [1, 2]
    assert consumer.position(T0) == 3
    assert consumer.take_arrow(0) is None
