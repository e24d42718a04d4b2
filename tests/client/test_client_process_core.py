"""The consume-transform-produce loop over a broker in memory: every error at every step, and rebalances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.process_loop import Fault, MemoryIO

from oncelog.client.process.core import OpenTransaction, ProcessLoop, outputs_of, run_now
from oncelog.client.process.loop_plan import LoopOptions, plan_of
from oncelog.errors import (
    AuthenticationError,
    ConfigError,
    CorruptMessage,
    IllegalGeneration,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTopicException,
    InvalidTxnState,
    MessageTooLarge,
    MisuseError,
    NotConnectedError,
    ProducerFenced,
    TimedOut,
    TopicAuthorizationFailed,
    TransactionAbortable,
    UnknownServerError,
)
from oncelog.rules.transactions.client_session import State
from oncelog.rules.transactions.process_loop import MAX_ERRORS
from oncelog.types import ProducerRecord, Record, TopicPartition

ONE, TWO = TopicPartition("source", 0), TopicPartition("source", 1)


def copy(record: Record) -> ProducerRecord:
    return ProducerRecord("target", record.value, record.key)


def values(io: MemoryIO, topic: str = "target") -> list[bytes]:
    return sorted(output.value or b"" for output in io.visible if output.topic == topic)


def expected(io: MemoryIO) -> list[bytes]:
    return sorted(
        b"%d-%d" % (tp.partition, offset) for tp, end in io.sources.items() for offset in range(end)
    )


def finished(io: MemoryIO, **options: Any) -> ProcessLoop:
    """Run a loop until every record is processed, and check that each was processed once."""
    loop = io.loop(**{"max_records": 4, **options})
    run_now(loop.run())
    assert values(io) == expected(io)
    assert io.committed == io.sources
    assert io.is_closed
    return loop


def test_records_are_processed_in_transactions_of_at_most_max_records() -> None:
    io = MemoryIO({ONE: 10, TWO: 3}, copy)
    metrics = finished(io).metrics.to_dict()
    assert metrics["records-consumed-total"] == metrics["records-produced-total"] == 13
    assert metrics["transactions-committed-total"] >= 4
    assert metrics["records-in-flight"] == 0 and "abort" not in io.calls


FAULTS = {
    "poll": [Fault(TimedOut()), Fault(NotConnectedError())],
    "begin": [Fault(InvalidTxnState(), State.FATAL)],
    "send": [
        Fault(TimedOut()),
        Fault(TransactionAbortable(), State.ABORTABLE_ERROR),
        Fault(InvalidTxnState(), State.FATAL),
    ],
    "send_offsets": [
        Fault(TimedOut()),
        Fault(IllegalGeneration(), State.ABORTABLE_ERROR),
        Fault(InvalidTxnState(), State.FATAL),
    ],
    "commit": [
        Fault(TimedOut(), State.COMMITTING),
        Fault(TimedOut(), State.COMMITTING, is_done=True),
        Fault(TransactionAbortable(), State.ABORTABLE_ERROR),
        Fault(InvalidTxnState(), State.FATAL),
        Fault(InvalidTxnState(), State.FATAL, is_done=True),
    ],
    "abort": [
        Fault(TimedOut(), State.ABORTING),
        Fault(UnknownServerError(), State.FATAL),
        Fault(UnknownServerError(), State.ABORTABLE_ERROR),
    ],
    "go_back": [Fault(TimedOut())],
    "open_producer": [Fault(TimedOut()), Fault(NotConnectedError())],
}
"""For each call, the errors that it may raise and from which the loop recovers."""
EVERY_FAULT = [(name, number) for name, faults in FAULTS.items() for number in range(len(faults))]


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize(("name", "number"), EVERY_FAULT)
def test_an_error_at_any_step_loses_and_doubles_nothing(name: str, number: int, has_state: bool) -> None:
    """Some steps are reached only after an error in another step. For these, the test first adds that
    error.
    """
    io = MemoryIO({ONE: 9, TWO: 2}, copy)
    if name in ("abort", "go_back"):
        io.faults["commit"].append(Fault(TransactionAbortable(), State.ABORTABLE_ERROR))
    elif name == "open_producer":
        io.faults["send"].append(Fault(InvalidTxnState(), State.FATAL))
    io.faults[name].extend(
        [FAULTS[name][number]] if name in ("abort", "go_back") else [None, FAULTS[name][number]]
    )
    finished(io, has_state=has_state)
    assert not io.faults[name], "the error was not reached"


_NAMES = sorted(set(FAULTS) - {"begin"})
_SCRIPTS = st.fixed_dictionaries(
    {name: st.lists(st.none() | st.sampled_from(FAULTS[name]), max_size=8) for name in _NAMES}
)
_MOVES = st.lists(st.sampled_from(["none", "revoke", "lose", "give"]), max_size=12)


def move_of(io: MemoryIO, move: str) -> Callable[[ProcessLoop], Any] | None:
    async def rebalance(loop: ProcessLoop) -> None:
        if move == "give" and TWO not in io.assignment:
            io.assign([ONE, TWO])
            await loop.assigned([TWO])
        elif move != "give" and TWO in io.assignment:
            await (loop.revoked if move == "revoke" else loop.lost)([TWO])
            io.assign([ONE])

    return None if move == "none" else rebalance


@pytest.mark.behaviour("T16")
@given(script=_SCRIPTS, moves=_MOVES, has_state=st.booleans(), max_records=st.integers(1, 6))
def test_any_sequence_of_errors_and_rebalances_loses_and_doubles_nothing(
    script: dict[str, list[Fault | None]], moves: list[str], has_state: bool, max_records: int
) -> None:
    io = MemoryIO({ONE: 9, TWO: 5}, copy)
    script["open_producer"].insert(0, None)
    # The loop gives up after MAX_ERRORS successive errors, unless they are outages. So the number of faults
    # is limited.
    count = 0
    for name, faults in script.items():
        for number, fault in enumerate(faults):
            count += fault is not None
            faults[number] = fault if count < MAX_ERRORS else None
        io.faults[name].extend(faults)
    io.events.extend([*(move_of(io, move) for move in moves), None, move_of(io, "give")])
    finished(io, has_state=has_state, max_records=max_records)


@pytest.mark.behaviour("T16")
def test_an_unclear_commit_is_repeated_with_the_same_producer() -> None:
    io = MemoryIO({ONE: 3}, copy)
    io.faults["commit"].extend([Fault(TimedOut(), State.COMMITTING, is_done=True)] * 3)
    loop = finished(io)
    assert io.calls.count("open_producer") == 1 and "abort" not in io.calls
    assert loop.metrics.to_dict()["commits-repeated-total"] == 3


@pytest.mark.behaviour("T16")
def test_a_fenced_loop_stops_and_names_its_transactional_id() -> None:
    io = MemoryIO({ONE: 3}, copy)
    io.faults["commit"].append(Fault(ProducerFenced("old epoch"), State.FATAL))
    with pytest.raises(ProducerFenced, match=r"another producer with transactional\.id='loop-1'") as info:
        run_now(io.loop().run())
    assert isinstance(info.value.__cause__, ProducerFenced) and info.value.reaction == "fatal"
    assert io.visible == [] and io.calls.count("open_producer") == 1


def test_a_transaction_that_the_coordinator_aborted_for_its_age_needs_a_new_producer() -> None:
    io = MemoryIO({ONE: 3}, copy)

    def slow(record: Record) -> ProducerRecord:
        io.clock_ms += 30_000 if io.calls.count("open_producer") == 1 else 0
        return copy(record)

    io._transform = slow
    io.faults["commit"].append(Fault(ProducerFenced("late"), State.FATAL))
    loop = finished(io, commit_interval_ms=70_000)
    assert loop.metrics.to_dict()["producers-replaced-total"] == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_a_loop_that_was_stuck_does_not_fence_its_successor(is_known: bool) -> None:
    """R1173: the stuck loop made a new producer, which fenced the successor. Then its own consumer was
    fenced, because the successor had taken over the group.instance.id. So both loops ended.
    """
    io = MemoryIO({ONE: 3}, copy)
    io.has_successor = True

    def slow(record: Record) -> ProducerRecord:
        io.clock_ms += 61_000 if record.offset == 1 else 0
        return copy(record)

    io._transform = slow
    io.faults["send_offsets"].append(Fault(ProducerFenced("late"), State.FATAL))
    if not is_known:
        io.faults["is_replaced"].append(Fault(TimedOut("DescribeTransactions")))
        finished(io)
        return
    with pytest.raises(ProducerFenced, match="another producer with transactional"):
        run_now(io.loop().run())
    assert io.calls.count("open_producer") == 1 and io.visible == []
    assert io.may_have_timed_out


def test_a_commit_that_a_successor_interrupts_does_not_fence_the_successor() -> None:
    """R1226: while a successor's start aborts the transaction, the coordinator answers a commit with
    INVALID_TXN_STATE.
    """
    io = MemoryIO({ONE: 3}, copy)
    io.has_successor = True
    io.faults["commit"].append(Fault(InvalidTxnState("aborted"), State.FATAL))
    with pytest.raises(ProducerFenced, match="another producer with transactional"):
        run_now(io.loop().run())
    assert io.calls.count("open_producer") == 1 and io.visible == []
    assert not io.may_have_timed_out


def test_a_successor_with_another_producer_id_is_not_fenced() -> None:
    """R1290: the stuck loop fenced a successor that had got another producer id, and both loops ended."""
    io = MemoryIO({ONE: 3}, copy)
    io.has_successor = True
    io.faults["send_offsets"].append(Fault(InvalidProducerIdMapping(), State.FATAL))
    with pytest.raises(ProducerFenced, match="another producer with transactional"):
        run_now(io.loop().run())
    assert io.calls.count("open_producer") == 1 and io.visible == []


def test_the_epoch_of_a_loops_own_commit_is_not_taken_for_a_successors() -> None:
    """The commit has raised the epoch, and `is_replaced` would take that for a successor's start."""
    io = MemoryIO({ONE: 3}, copy)
    io.has_successor = True
    io.faults["commit"].append(Fault(UnknownServerError(), State.FATAL, is_done=True))
    finished(io)
    assert "is_replaced" not in io.calls


def test_a_transaction_is_not_too_old_before_the_coordinator_knows_it() -> None:
    """R1173: a loop took long to transform its first record. Fenced afterwards, it believed that
    its transaction had timed out.
    """
    io = MemoryIO({ONE: 1}, copy)

    def slow(record: Record) -> ProducerRecord:
        io.clock_ms += 61_000
        return copy(record)

    io._transform = slow
    io.faults["send_offsets"].append(Fault(ProducerFenced("old epoch"), State.FATAL))
    with pytest.raises(ProducerFenced, match="another producer with transactional"):
        run_now(io.loop().run())


@pytest.mark.parametrize("state", [State.FATAL, State.ABORTABLE_ERROR])
def test_a_record_that_always_takes_longer_than_a_transaction_may_be_open_is_processed(state: State) -> None:
    """R1172: each attempt began the transaction with a quicker record and then ran out of time. So the
    coordinator aborted it ten times, and the loop gave up.
    """
    io = MemoryIO({ONE: 5}, copy)

    def slow(record: Record) -> ProducerRecord:
        if record.offset == 2:
            if io._sent:  # once a record was sent, the coordinator knows the transaction and aborts it
                io.faults["send_offsets"].append(Fault(InvalidProducerEpoch("late"), state))
            io.clock_ms += 61_000
        return copy(record)

    io._transform = slow
    assert finished(io, max_records=5).metrics.aborts == 1


def test_a_slow_transform_commits_within_the_records_of_one_poll() -> None:
    io = MemoryIO({ONE: 4}, copy)

    def slow(record: Record) -> ProducerRecord:
        io.clock_ms += 150
        return copy(record)

    io._transform = slow
    assert finished(io).metrics.commits == 4


@given(st.integers(0, 10**13), st.integers(0, 10**7))
@example(5_303_640, 3_000)
def test_a_commit_is_due_at_the_end_of_its_interval_for_all_floats(begun_us: int, interval_ms: int) -> None:
    """R1161: in floats, 8303.64 - 5303.64 is less than 3000. The commit was not due, so the loop polled
    without a pause.
    """
    io = MemoryIO({ONE: 1}, copy)
    loop = io.loop(commit_interval_ms=interval_ms)
    loop._open = OpenTransaction(begun_us / 1000, {ONE: 1})
    io.now_ms = lambda: (begun_us + interval_ms * 1000) / 1000  # type: ignore[method-assign]
    assert loop._ms_until_commit() == 0
    if interval_ms:
        io.now_ms = lambda: (begun_us + interval_ms * 1000 - 2) / 1000  # type: ignore[method-assign]
        left_ms = loop._ms_until_commit()
        assert left_ms is not None and left_ms > 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("open_producer", NotConnectedError("no broker")),
        ("poll", AuthenticationError("wrong password")),
        ("commit", TopicAuthorizationFailed()),
        ("poll", MisuseError("closed")),
    ],
)
def test_an_error_that_a_repetition_cannot_mend_ends_the_loop(name: str, error: Exception) -> None:
    io = MemoryIO({ONE: 3}, copy)
    io.faults[name].append(Fault(error))  # type: ignore[arg-type]
    with pytest.raises(type(error)) as info:
        run_now(io.loop().run())
    assert info.value is error and io.visible == [] and io.is_closed


def test_an_error_that_comes_again_and_again_ends_the_loop() -> None:
    io = MemoryIO({ONE: 3}, copy)
    io.faults["commit"].extend([Fault(TransactionAbortable(), State.ABORTABLE_ERROR)] * 50)
    with pytest.raises(TransactionAbortable) as info:
        run_now(io.loop().run())
    assert f"after {MAX_ERRORS} errors in a row" in info.value.__notes__[0]
    assert io.pauses[:4] == [0.1, 0.2, 0.4, 0.8] and max(io.pauses) == 1.0


def test_errors_of_polls_are_forgotten_with_the_next_poll() -> None:
    """An idle loop may commit nothing for days, so a poll without an error must reset the count of successive
    errors.
    """
    io = MemoryIO({ONE: 3}, copy)
    io.faults["poll"].extend([Fault(CorruptMessage()), None] * (2 * MAX_ERRORS))
    finished(io)
    io = MemoryIO({ONE: 3}, copy)
    io.faults["poll"].extend([Fault(CorruptMessage())] * MAX_ERRORS)
    with pytest.raises(CorruptMessage):
        run_now(io.loop().run())


def test_an_outage_is_waited_for_however_long_it_is() -> None:
    io = MemoryIO({ONE: 3}, copy)
    io.faults["send_offsets"].extend([Fault(TimedOut())] * (3 * MAX_ERRORS))
    finished(io)


def test_a_stopped_loop_does_not_wait_for_the_end_of_an_outage() -> None:
    io = MemoryIO({ONE: 3}, copy)
    loop = io.loop()
    io.faults["commit"].extend([Fault(TimedOut("no response"), State.COMMITTING)] * 5)

    def stop(record: Record) -> ProducerRecord:
        loop.stop()
        return copy(record)

    io._transform = stop
    with pytest.raises(TimedOut):
        run_now(loop.run())
    assert io.calls.count("commit") == 1 and io.visible == []


# Failed records


def failing(*bad: bytes) -> Callable[[Record], ProducerRecord]:
    def transform(record: Record) -> ProducerRecord:
        if record.value in bad:
            raise ValueError(f"cannot read {record.value!r}")
        return copy(record)

    return transform


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize("has_state", [False, True])
def test_a_record_that_always_fails_goes_to_the_dead_letter_topic_once(has_state: bool) -> None:
    calls: Counter[bytes | None] = Counter()

    def transform(record: Record) -> ProducerRecord:
        calls[record.value] += 1
        return failing(b"0-2")(record)

    io = MemoryIO({ONE: 6}, transform)
    loop = io.loop(dead_letter_topic="dead", max_attempts=3, has_state=has_state)
    run_now(loop.run())
    assert values(io) == [value for value in expected(io) if value != b"0-2"]
    assert values(io, "dead") == [b"0-2"] and io.committed == {ONE: 6}
    assert calls[b"0-2"] == 3
    (dead,) = [output for output in io.visible if output.topic == "dead"]
    headers = dict(dead.headers)
    assert headers["__oncelog.errors.topic"] == b"source"
    assert headers["__oncelog.errors.partition"] == b"0"
    assert headers["__oncelog.errors.offset"] == b"2"
    assert headers["__oncelog.errors.timestamp"] == b"7"
    assert headers["__oncelog.errors.exception"] == b"builtins.ValueError"
    assert headers["__oncelog.errors.message"] == b"cannot read b'0-2'"
    assert headers["__oncelog.errors.attempts"] == b"3"
    assert headers["__oncelog.errors.group"] == b"group"
    metrics = loop.metrics.to_dict()
    assert metrics["records-dead-lettered-total"] == 1 and metrics["failed-attempts-total"] == 3
    assert len(io.restored) == (4 if has_state else 0), "at the start, and after each failure"


@pytest.mark.behaviour("T16")
def test_without_a_dead_letter_topic_the_error_is_raised_and_nothing_of_the_batch_is_committed() -> None:
    io = MemoryIO({ONE: 6}, failing(b"0-2"))
    with pytest.raises(ValueError, match="cannot read") as info:
        run_now(io.loop(max_records=10).run())
    assert "source-0 at offset 2, attempt 3 of 3" in info.value.__notes__[0]
    assert io.visible == [] and io.committed == {}


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize("has_topic", [False, True])
def test_an_output_that_the_broker_refuses_is_found_and_blamed(has_topic: bool) -> None:
    """The error of a batch names no record, so the records are processed one by one."""
    io = MemoryIO({ONE: 12}, copy)
    io.refuses = lambda output: (
        MessageTooLarge() if (output.topic, output.value) == ("target", b"0-5") else None
    )
    loop = io.loop(max_records=8, dead_letter_topic="dead" if has_topic else None)
    if not has_topic:
        with pytest.raises(MessageTooLarge) as info:
            run_now(loop.run())
        assert "source-0 at offset 5" in info.value.__notes__[0]
        assert values(io) == [b"0-%d" % number for number in range(5)]
        return
    run_now(loop.run())
    assert values(io, "dead") == [b"0-5"] and io.committed == {ONE: 12}
    assert len(values(io)) == 11 and loop._single_records == 0


def test_an_output_that_cannot_be_sent_is_blamed_on_its_record() -> None:
    io = MemoryIO({ONE: 3}, lambda record: [copy(record), copy(record)])
    io.faults["send"].extend(
        [None] * 3 + [Fault(MessageTooLarge())] + [None] * 3 + [Fault(TypeError("not bytes"))]
    )
    loop = io.loop(max_attempts=2, dead_letter_topic="dead")
    run_now(loop.run())
    assert values(io, "dead") == [b"0-1"] and values(io) == [b"0-0", b"0-0", b"0-2", b"0-2"]


@pytest.mark.parametrize("is_refused_by_broker", [False, True])
def test_an_output_to_a_topic_that_cannot_exist_is_blamed_on_its_record(is_refused_by_broker: bool) -> None:
    """R1174: one record with such an output ended the loop after ten errors, and again after each restart."""
    io = MemoryIO({ONE: 6}, copy)
    if is_refused_by_broker:  # for example, because the topic is internal
        io.refuses = lambda output: (
            InvalidTopicException() if (output.topic, output.value) == ("target", b"0-3") else None
        )
    else:
        io.faults["send"].extend([None] * 3 + [Fault(InvalidTopicException("topic 'a b'"))])
        io.faults["send"].extend([None] * 3 + [Fault(InvalidTopicException("topic 'a b'"))])
    run_now(io.loop(max_attempts=2, dead_letter_topic="dead").run())
    assert values(io, "dead") == [b"0-3"] and io.committed == {ONE: 6}
    assert values(io) == [value for value in expected(io) if value != b"0-3"]


@pytest.mark.parametrize("is_refused_by_broker", [False, True])
def test_a_dead_letter_that_cannot_be_sent_ends_the_loop(is_refused_by_broker: bool) -> None:
    io = MemoryIO({ONE: 4}, failing(b"0-2"))
    if is_refused_by_broker:
        io.refuses = lambda output: MessageTooLarge() if output.topic == "dead" else None
    else:
        io.faults["send"].extend([None, None, Fault(MessageTooLarge())])
    with pytest.raises(MessageTooLarge):
        run_now(io.loop(dead_letter_topic="dead").run())
    assert values(io, "dead") == [] and io.committed.get(ONE, 0) <= 2


def test_a_loop_is_not_idle_before_the_group_has_assigned_partitions() -> None:
    io = MemoryIO({ONE: 3}, copy)
    io.assignment = []

    async def give(loop: ProcessLoop) -> None:
        io.assign([ONE])
        await loop.assigned([ONE])

    async def subscribe(sources: object, loop: ProcessLoop) -> None:
        io._loop = loop

    io.subscribe = subscribe  # type: ignore[method-assign]
    io.events.extend([*[None] * 20, give])
    finished(io)


def test_an_interrupt_leaves_nothing_of_the_transaction() -> None:
    def interrupt(record: Record) -> ProducerRecord:
        if record.offset == 2:
            raise KeyboardInterrupt
        return copy(record)

    io = MemoryIO({ONE: 5}, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_now(io.loop().run())
    assert io.visible == [] and io.is_closed


def test_an_error_of_restore_ends_the_loop() -> None:
    io = MemoryIO({ONE: 5}, copy)

    async def fail() -> None:
        raise TimedOut("the state cannot be read")

    io.restore = fail  # type: ignore[method-assign]
    with pytest.raises(TimedOut, match="the state"):
        run_now(io.loop(has_state=True).run())


# Rebalances


@pytest.mark.behaviour("T16")
def test_a_partitions_records_are_committed_before_it_is_revoked() -> None:
    io = MemoryIO({ONE: 2, TWO: 2}, copy)
    committed: dict[TopicPartition, int] = {}

    async def revoke(loop: ProcessLoop) -> None:
        await loop.revoked([TWO])
        committed.update(io.committed)
        io.assign([ONE])

    io.events.extend([None, revoke])
    run_now(io.loop(commit_interval_ms=5_000).run())
    assert committed == {ONE: 2, TWO: 2}


@pytest.mark.behaviour("T16")
def test_nothing_is_committed_after_partitions_were_lost() -> None:
    io = MemoryIO({ONE: 2, TWO: 2}, copy)
    seen: list[dict[TopicPartition, int]] = []

    async def lose(loop: ProcessLoop) -> None:
        await loop.lost([ONE, TWO])
        seen.append(dict(io.committed))
        io.assign([])

    io.events.extend([None, lose])
    run_now(io.loop(commit_interval_ms=5_000).run())
    assert seen == [{}] and io.visible == []


def test_a_commit_that_fails_at_a_rebalance_is_aborted_and_the_rest_is_read_again() -> None:
    io = MemoryIO({ONE: 3, TWO: 2}, copy)

    async def revoke(loop: ProcessLoop) -> None:
        io.faults["send_offsets"].append(Fault(IllegalGeneration(), State.ABORTABLE_ERROR))
        await loop.revoked([TWO])
        io.assign([ONE])

    async def give(loop: ProcessLoop) -> None:
        io.assign([ONE, TWO])
        await loop.assigned([TWO])

    io.events.extend([None, revoke, None, give])
    assert finished(io, max_records=100, commit_interval_ms=5_000).metrics.aborts == 1


def test_records_polled_before_the_loop_went_back_are_not_skipped() -> None:
    """A poll during which partitions are lost may still return records of other partitions, and moves their
    positions.
    """
    io = MemoryIO({ONE: 4, TWO: 4}, copy)

    async def lose(loop: ProcessLoop) -> None:
        await loop.lost([TWO])
        io.assign([ONE])

    async def give(loop: ProcessLoop) -> None:
        io.assign([ONE, TWO])
        await loop.assigned([TWO])

    io.events.extend([None, lose, give])
    finished(io, max_records=2, commit_interval_ms=5_000)


# Positions after an abort


def test_records_behind_a_committed_offset_that_is_gone_are_processed_after_an_abort() -> None:
    """R1170: with auto.offset.reset=latest, the loop went back to a committed offset that no longer exists,
    and the reset skipped the aborted records.

    In this test, the consumer has reset its position from 1 to 4.
    """
    io = MemoryIO({ONE: 9}, copy)
    io.committed, io.positions = {ONE: 1}, {ONE: 4}
    io.faults["commit"].append(Fault(TransactionAbortable(), State.ABORTABLE_ERROR))
    run_now(io.loop(max_records=4).run())
    assert values(io) == expected(io)[4:] and io.committed == {ONE: 9}


@pytest.mark.parametrize("is_open", [False, True])
def test_records_of_a_topic_that_was_created_again_are_processed_after_an_abort(is_open: bool) -> None:
    """R1171: the loop went back to the last offset that it had committed in the deleted topic.

    With `is_open`, the topic is created again while a transaction has records of the deleted one.
    """
    io = MemoryIO({ONE: 6}, copy)
    io.committed, io.positions = {ONE: 2}, {ONE: 2}

    async def create_again(loop: ProcessLoop) -> None:
        assert (loop._open is not None) is is_open
        io.sources, io.positions, io.committed = {ONE: 9}, {ONE: 0}, {}
        io.visible.clear()
        io.faults["commit"].append(Fault(TransactionAbortable(), State.ABORTABLE_ERROR))

    io.events.extend([None, create_again])
    run_now(io.loop(commit_interval_ms=5_000 if is_open else 0, max_records=8).run())
    assert values(io) == expected(io) and io.committed == {ONE: 9}


# Options


def plan(
    config: dict[str, object] | None = None, settings: dict[str, object] | None = None, **options: Any
) -> Any:
    chosen = {"sources": "source", "group_id": "g", "transactional_id": "t", **options}
    return plan_of(LoopOptions(**chosen), config, settings or {})


def test_each_setting_reaches_the_clients_that_know_it() -> None:
    made = plan({"bootstrap.servers": "b:1", "fetch.max.wait.ms": 7}, {"linger_ms": 3, "client_id": "me"})
    common = {"bootstrap.servers": "b:1", "client.id": "me"}
    assert made.producer_settings == {**common, "linger.ms": 3, "transactional.id": "t"}
    assert made.consumer_settings == {
        **common,
        "fetch.max.wait.ms": 7,
        "auto.offset.reset": "earliest",
        "group.instance.id": "t",
        "group.id": "g",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
    }
    assert plan({"group.instance.id": None}).consumer_settings["group.instance.id"] is None


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize(
    ("settings", "options", "error", "text"),
    [
        ({"enable_auto_commit": True}, {}, MisuseError, "positions of aborted records"),
        ({"enable.auto.commit": "true"}, {}, MisuseError, "positions of aborted records"),
        ({"isolation_level": "read_uncommitted"}, {}, MisuseError, "is aborted later"),
        ({"group_id": "other"}, {}, ConfigError, "is the argument group_id"),
        ({"lingerms": 3}, {}, ConfigError, "did you mean linger.ms"),
        ({}, {"commit_interval_ms": 60_000}, ConfigError, "must be below transaction.timeout.ms=60000"),
        ({}, {"max_records": 0}, MisuseError, "at least 1"),
        ({}, {"max_attempts": True}, MisuseError, "whole number"),
        ({}, {"group_id": ""}, MisuseError, "group_id must be a name"),
        ({}, {"sources": []}, MisuseError, "at least one source topic"),
        ({}, {"dead_letter_topic": "source"}, MisuseError, "is a source topic too"),
    ],
)
def test_options_that_cannot_work_are_refused(
    settings: dict[str, object], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        plan(settings, **options)


def test_a_transform_returns_nothing_one_record_or_several() -> None:
    one = ProducerRecord("t", b"v")
    assert outputs_of(None) == [] and outputs_of(one) == [one]
    assert outputs_of([one, one]) == outputs_of(iter((one, one))) == [one, one]
    for wrong in (b"value", "value", 7, {"topic": "t"}, ("topic", b"value"), [b"value"]):
        with pytest.raises(MisuseError, match="must return ProducerRecords or None"):
            outputs_of(wrong)
