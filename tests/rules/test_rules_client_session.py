"""Tests of the operations that a session allows, and of its reactions to coordinator errors."""

from __future__ import annotations

import pytest

from oncelog.errors import (
    DisconnectedError,
    MisuseError,
    NotConnectedError,
    OutOfOrderSequenceNumber,
    PeerError,
    ProducerFenced,
    TimedOut,
    TransactionAbortable,
    error_for_code,
)
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions import coordinator
from oncelog.rules.transactions.client_session import (
    ABORT_OWN_EPOCH,
    ADD_OFFSETS,
    ADD_PARTITIONS,
    COMMIT_OFFSETS,
    DESCRIBE,
    END,
    END_IF_BEGUN,
    INIT,
    SUCCESSOR_PATIENCE_MS,
    CoordinatorEntry,
    ErrorAction,
    OffsetsCall,
    Operation,
    RequestKind,
    Session,
    State,
    error_action,
    fenced_abort_action,
    has_successor,
    may_have_succeeded,
    operation_at_close,
)
from oncelog.rules.transactions.entry import EXHAUSTED_EPOCH, TransactionEntry, TransactionState
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

S, C = State, Operation
ALLOWED = {
    (S.UNINITIALIZED, C.INIT),
    (S.READY, C.BEGIN),
    (S.IN_TRANSACTION, C.SEND),
    (S.IN_TRANSACTION, C.SEND_OFFSETS),
    (S.IN_TRANSACTION, C.SHARE),
    (S.IN_TRANSACTION, C.HAND_OVER),
    (S.IN_TRANSACTION, C.COMMIT),
    (S.IN_TRANSACTION, C.ABORT),
    (S.ABORTABLE_ERROR, C.ABORT),
    (S.COMMITTING, C.COMMIT),
    (S.ABORTING, C.ABORT),
}


@pytest.mark.behaviour("T4")
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("operation", Operation)
def test_every_operation_in_every_state(state: State, operation: Operation) -> None:
    session = Session()
    session.state = state
    has_error = state in (S.ABORTABLE_ERROR, S.FATAL)
    session.error = OutOfOrderSequenceNumber("what happened") if has_error else None
    if (state, operation) in ALLOWED:
        session.check(operation)
        return
    with pytest.raises(OutOfOrderSequenceNumber if has_error else MisuseError) as raised:
        session.check(operation)
    assert has_error or "()" in str(raised.value), "the hint names the operation to call instead"


@pytest.mark.behaviour("T13")
def test_an_unanswered_commit_is_repeated_and_never_aborted() -> None:
    session = Session()
    session.enter(S.COMMITTING)
    session.check(C.COMMIT)
    with pytest.raises(MisuseError, match=r"call commit_transaction\(\) again"):
        session.check(C.ABORT)


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (S.IN_TRANSACTION, S.ABORTABLE_ERROR),
        (S.COMMITTING, S.ABORTABLE_ERROR),
        (S.ABORTING, S.ABORTING),
        (S.READY, S.READY),
        (S.FATAL, S.FATAL),
    ],
)
def test_a_failure_makes_an_open_transaction_one_to_be_aborted(state: State, after: State) -> None:
    session = Session()
    session.state = state
    session.set_abortable_error(TimedOut("late"))
    assert session.state is after
    session.enter(S.READY)
    assert session.error is None


def test_the_first_fatal_error_stays() -> None:
    session = Session()
    first = ProducerFenced("first")
    session.set_fatal_error(first)
    session.set_fatal_error(ProducerFenced("second"))
    assert session.error is first


@pytest.mark.behaviour("T13")
def test_a_commit_waits_for_every_call_for_offsets_to_return() -> None:
    session, tp = Session(), TopicPartition("t", 0)
    first = OffsetsCall.of(ConsumerGroupMetadata("g"), {tp: OffsetAndMetadata(1)})
    second = OffsetsCall.of(ConsumerGroupMetadata("g"), {tp: OffsetAndMetadata(2)})
    session.enter(S.IN_TRANSACTION)
    session.begin_offsets(first)
    session.begin_offsets(second)
    session.confirm_offsets(second)
    for operation in (C.COMMIT, C.HAND_OVER):
        with pytest.raises(TransactionAbortable, match="same arguments"):
            session.check(operation)
    session.check(C.ABORT)
    session.begin_offsets(OffsetsCall.of(ConsumerGroupMetadata("g"), {tp: OffsetAndMetadata(1)}))
    session.confirm_offsets(first)
    session.check(C.COMMIT)


def test_unconfirmed_offsets_end_with_their_transaction() -> None:
    session = Session()
    session.enter(S.IN_TRANSACTION)
    session.begin_offsets(OffsetsCall.of(ConsumerGroupMetadata("g"), {}))
    session.enter(S.ABORTING)
    assert session.unconfirmed
    session.enter(S.READY)
    session.enter(S.IN_TRANSACTION)
    session.check(C.COMMIT)


ENDING = {
    S.UNINITIALIZED: None,
    S.READY: None,
    S.IN_TRANSACTION: C.ABORT,
    S.ABORTABLE_ERROR: C.ABORT,
    S.COMMITTING: C.COMMIT,
    S.ABORTING: C.ABORT,
    S.FATAL: None,
}


@pytest.mark.parametrize("state", State)
def test_closing_a_producer_ends_its_transaction_as_the_table_says(state: State) -> None:
    ending = operation_at_close(state)
    assert ending is ENDING[state]
    assert ending is None or (state, ending) in ALLOWED


def test_offsets_of_an_unknown_topic_are_retried_for_a_moment_only() -> None:
    unknown = error_for_code(3)
    assert error_action(COMMIT_OFFSETS, unknown, 3_000) is ErrorAction.RETRY
    assert error_action(COMMIT_OFFSETS, unknown, 3_001) is ErrorAction.ABORT
    assert error_action(ADD_PARTITIONS, unknown, 3_001) is ErrorAction.RETRY


R = ErrorAction
ANY = (INIT, ADD_PARTITIONS, ADD_OFFSETS, COMMIT_OFFSETS, END)
CODES = [
    (14, ANY, R.RETRY),
    (51, ANY, R.RETRY),
    (7, ANY, R.RETRY),
    (15, ANY, R.FIND_COORDINATOR),
    (16, ANY, R.FIND_COORDINATOR),
    (47, ANY, R.FAIL_PRODUCER),
    (90, ANY, R.FAIL_PRODUCER),
    (53, ANY, R.FAIL_PRODUCER),
    (48, ANY, R.FAIL_PRODUCER),
    (50, (INIT,), R.FAIL_PRODUCER),
    (49, (INIT,), R.FAIL_PRODUCER),
    (49, (ADD_PARTITIONS, ADD_OFFSETS, COMMIT_OFFSETS, END), R.ABORT),
    (120, (ADD_PARTITIONS, ADD_OFFSETS, COMMIT_OFFSETS, END), R.ABORT),
    (3, (ADD_PARTITIONS, COMMIT_OFFSETS), R.RETRY),
    (22, (COMMIT_OFFSETS,), R.ABORT),
    (25, (COMMIT_OFFSETS,), R.ABORT),
    (82, (COMMIT_OFFSETS,), R.ABORT),
    (29, (ADD_PARTITIONS,), R.ABORT),
    (30, (ADD_OFFSETS, COMMIT_OFFSETS), R.ABORT),
    (13, ANY, R.FIND_COORDINATOR),
    (55, (ADD_PARTITIONS,), R.RETRY),
    (59, (INIT,), R.FAIL_PRODUCER),
    (59, (ADD_PARTITIONS, ADD_OFFSETS, COMMIT_OFFSETS, END), R.ABORT),
    (113, (COMMIT_OFFSETS,), R.ABORT),
    (3, (END, END_IF_BEGUN), R.FAIL_PRODUCER),
    (48, (END_IF_BEGUN,), R.ABORT),
    (90, (ABORT_OWN_EPOCH,), R.RAISE),
    (47, (ABORT_OWN_EPOCH,), R.FAIL_PRODUCER),
    (51, (ABORT_OWN_EPOCH,), R.RETRY),
    (49, (ABORT_OWN_EPOCH,), R.ABORT),
    (53, (DESCRIBE,), R.RAISE),
    (105, (DESCRIBE,), R.RAISE),
    (16, (DESCRIBE,), R.FIND_COORDINATOR),
]


@pytest.mark.parametrize(
    ("code", "kind", "expected"), [(code, kind, said) for code, many, said in CODES for kind in many]
)
def test_each_error_leads_to_the_action_of_the_table(
    code: int, kind: RequestKind, expected: ErrorAction
) -> None:
    assert error_action(kind, error_for_code(code)) is expected


@pytest.mark.parametrize("kind", ANY)
def test_a_missing_response_leads_to_a_coordinator_lookup(kind: RequestKind) -> None:
    assert error_action(kind, DisconnectedError("gone")) is R.FIND_COORDINATOR
    assert error_action(kind, TimedOut("late")) is R.FIND_COORDINATOR
    assert error_action(kind, PeerError("garbage")) is R.FAIL_PRODUCER


@pytest.mark.behaviour("T13")
def test_some_errors_leave_the_outcome_unknown() -> None:
    assert may_have_succeeded(DisconnectedError("gone"))
    assert may_have_succeeded(TimedOut("late"))
    assert not may_have_succeeded(NotConnectedError("never sent"))
    undecided = {code for code in range(-1, 121) if code and may_have_succeeded(error_for_code(code))}
    assert undecided >= {-1, 7, 13, 15}
    assert not undecided & {14, 16, 47, 48, 49, 51, 53, 90, 120}


def test_a_call_for_offsets_that_is_refused_leaves_the_session_unchanged() -> None:
    session = Session()
    with pytest.raises(MisuseError):
        session.begin_offsets(OffsetsCall.of(ConsumerGroupMetadata("g"), {}))
    assert not session.unconfirmed


def test_a_second_initialization_is_refused_as_such() -> None:
    session = Session()
    session.enter(S.READY)
    with pytest.raises(MisuseError, match="only once"):
        session.check(C.INIT)


def test_only_what_ran_out_of_time_is_turned_into_an_error_that_says_to_abort() -> None:
    session = Session()
    session.enter(S.IN_TRANSACTION)
    late = TimedOut("late")
    session.set_abortable_error(late)
    assert isinstance(session.error, TransactionAbortable) and session.error.__cause__ is late
    session.enter(S.IN_TRANSACTION)
    refused = OutOfOrderSequenceNumber("refused")
    session.set_abortable_error(refused)
    assert session.error is refused


@pytest.mark.parametrize("state", State)
def test_a_transaction_goes_on_until_it_ends_or_is_aborted(state: State) -> None:
    session = Session()
    assert session.number == 0
    for number in (1, 2):
        session.enter(S.READY)
        session.enter(S.IN_TRANSACTION)
        assert session.number == number
    session.enter(state)
    number = session.number
    goes_on = state in (S.IN_TRANSACTION, S.ABORTABLE_ERROR, S.COMMITTING)
    assert session.is_open(number) is goes_on
    assert not session.is_open(number - 1)


def test_arguments_that_cannot_be_written_abort_where_they_are_the_applications() -> None:
    error = MisuseError("the group's name is too long")
    assert error_action(ADD_OFFSETS, error) is R.ABORT
    assert error_action(COMMIT_OFFSETS, error) is R.ABORT
    assert {error_action(kind, error) for kind in (INIT, ADD_PARTITIONS, END)} == {R.FAIL_PRODUCER}


OURS = ProducerIdAndEpoch(7, 3)
PREPARED = [CoordinatorEntry(OURS, state) for state in ("PrepareCommit", "PrepareAbort")]
ANOTHER = [
    *(CoordinatorEntry(OURS, state) for state in ("Empty", "Ongoing", "CompleteCommit", "CompleteAbort")),
    *(
        CoordinatorEntry(other, "PrepareAbort")
        for other in (ProducerIdAndEpoch(7, 2), ProducerIdAndEpoch(7, 4), ProducerIdAndEpoch(8, 3))
    ),
    CoordinatorEntry(ProducerIdAndEpoch(7, 4), "Empty"),
]


@pytest.mark.behaviour("T4")
@pytest.mark.parametrize(
    ("entries", "previous", "expected"),
    [
        (PREPARED, [None, *PREPARED, *ANOTHER], R.RETRY),
        (ANOTHER, [None, *PREPARED], R.RETRY),
        (ANOTHER, ANOTHER, R.FAIL_PRODUCER),
        ([None], [None, *PREPARED, *ANOTHER], R.FAIL_PRODUCER),
    ],
)
def test_a_fenced_abort_is_judged_by_the_coordinators_entry(
    entries: list[CoordinatorEntry | None], previous: list[CoordinatorEntry | None], expected: ErrorAction
) -> None:
    for entry in entries:
        for before in previous:
            assert fenced_abort_action(entry, OURS, before) is expected, (entry, before)


LATE = SUCCESSOR_PATIENCE_MS


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize(
    ("raises", "state", "completed_for_ms", "timely", "overdue"),
    [
        (-1, "Ongoing", 0, False, False),
        (0, "Ongoing", 0, False, False),
        (0, "CompleteAbort", LATE, False, False),
        (1, "Empty", 0, True, True),
        (1, "Ongoing", 0, True, True),
        (1, "PrepareEpochFence", LATE, True, None),
        (1, "PrepareAbort", 0, True, None),
        (1, "PrepareAbort", LATE, True, None),
        (1, "CompleteAbort", 0, True, None),
        (1, "CompleteAbort", LATE - 1, True, None),
        (1, "CompleteAbort", LATE, True, False),
        (2, "CompleteAbort", 0, True, True),
        (2, "Empty", 0, True, True),
    ],
)
def test_whether_a_producer_has_a_successor(
    raises: int, state: str, completed_for_ms: float, timely: bool, overdue: bool | None
) -> None:
    """R1226: the result is `timely` if the transaction cannot have timed out yet, and `overdue` if it can
    have.
    """
    producer_id, epoch = OURS
    entry = CoordinatorEntry(ProducerIdAndEpoch(producer_id, epoch + raises), state)
    results = [
        has_successor(entry, OURS, may_have_timed_out=is_overdue, completed_for_ms=completed_for_ms)
        for is_overdue in (False, True)
    ]
    assert results == [timely, overdue]


@pytest.mark.parametrize("may_have_timed_out", [True, False])
def test_a_new_producer_id_is_a_successors_and_an_unknown_one_is_nobodys(may_have_timed_out: bool) -> None:
    """Epoch 32767 is the last one of a producer id, so a successor may have another producer id."""
    other = CoordinatorEntry(ProducerIdAndEpoch(OURS.producer_id + 1, 0), "Empty")
    assert has_successor(other, OURS, may_have_timed_out=may_have_timed_out)
    assert has_successor(None, OURS, may_have_timed_out=may_have_timed_out) is False


@pytest.mark.parametrize("raises_id", [True, False])
def test_an_abort_at_the_last_epoch_is_not_a_successors_for_sure(raises_id: bool) -> None:
    """R1272: a loop's transaction had timed out at the last epoch. The loop took that for a successor, and
    stopped.
    """
    ours = ProducerIdAndEpoch(7, EXHAUSTED_EPOCH)
    tps = frozenset({TopicPartition("t", 0)})
    ongoing = TransactionEntry("x", *ours, 60_000, TransactionState.ONGOING, tps, start_ms=0)
    level, new_id = (2, 8) if raises_id else (0, None)
    fenced = coordinator.fence(ongoing, server_version=level, new_producer_id=new_id, now_ms=61_000)
    assert isinstance(fenced, TransactionEntry)
    done = coordinator.complete(fenced, now_ms=61_001)

    def found(entry: TransactionEntry, *, may_have_timed_out: bool, for_ms: float = 0) -> bool | None:
        identity = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        seen = CoordinatorEntry(identity, entry.state.label)
        return has_successor(seen, ours, may_have_timed_out=may_have_timed_out, completed_for_ms=for_ms)

    assert done.producer_id == (8 if raises_id else 7)
    assert found(fenced, may_have_timed_out=True) is None
    assert found(done, may_have_timed_out=True) is None
    assert found(done, may_have_timed_out=True, for_ms=LATE) is False
    assert found(done, may_have_timed_out=False) is True
    started = coordinator.decide_init(
        done, "x", None, timeout_ms=60_000, server_version=level, new_producer_id=9, now_ms=61_002
    )
    assert isinstance(started, coordinator.Append)
    assert found(started.entry, may_have_timed_out=True) is True
