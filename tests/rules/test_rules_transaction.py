"""Tests of the transaction coordinator's decisions, one for each cell of their tables."""

from __future__ import annotations

import itertools

import pytest

from oncelog.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidTxnState,
    ProducerFenced,
    TransactionAbortable,
)
from oncelog.rules.idempotence.append import Reject
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.coordinator import (
    Append,
    FenceAndAbort,
    NeedsProducerId,
    NoChange,
    complete,
    decide_add,
    decide_end,
    decide_init,
    decide_verify,
    fence,
    is_expired,
    is_timed_out,
    retire,
)
from oncelog.rules.transactions.entry import TransactionEntry, TransactionState
from oncelog.types import TopicPartition

NOW_MS = 50_000
AT, OTHER = TopicPartition("t", 0), TopicPartition("t", 1)
S = TransactionState
STATES = list(S)


def entry(state: TransactionState, producer_id: int = 7, epoch: int = 5, **more: object) -> TransactionEntry:
    is_open = state is S.ONGOING or state.is_prepared
    values = {"partitions": frozenset({AT}) if is_open else frozenset(), "start_ms": 40_000, **more}
    return TransactionEntry("id", producer_id, epoch, 60_000, state, last_update_ms=41_000, **values)  # type: ignore[arg-type]


def init(
    known: TransactionEntry | None,
    given: ProducerIdAndEpoch | None,
    *,
    new: int | None = None,
    version: int = 0,
) -> object:
    return decide_init(
        known, "id", given, timeout_ms=9_000, server_version=version, new_producer_id=new, now_ms=NOW_MS
    )


def refused_with(verdict: object) -> type[Exception] | None:
    return verdict.error if isinstance(verdict, Reject) else None


# InitProducerId


@pytest.mark.behaviour("T3")
def test_a_new_id_gets_a_new_producer_id_at_epoch_0() -> None:
    assert init(None, None) == NeedsProducerId()
    verdict = init(None, None, new=3)
    assert isinstance(verdict, Append)
    made = verdict.entry
    assert (made.producer_id, made.producer_epoch, made.state, made.timeout_ms) == (3, 0, S.EMPTY, 9_000)
    assert (made.start_ms, made.last_update_ms, made.last_producer_epoch) == (-1, NOW_MS, -1)


def test_a_client_with_a_producer_id_that_nobody_knows_gets_a_new_one() -> None:
    verdict = init(None, ProducerIdAndEpoch(99, 4), new=3)
    assert isinstance(verdict, Append)
    assert (verdict.entry.producer_id, verdict.entry.producer_epoch) == (3, 0)


@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
@pytest.mark.parametrize(
    ("given", "last", "expected"),
    [
        (None, -1, (7, 6, -1)),  # A new instance fences all others.
        (ProducerIdAndEpoch(7, 5), -1, (7, 6, 5)),  # The same instance starts again.
        # The response was lost, so the repetition gets the same epoch.
        (ProducerIdAndEpoch(7, 4), 4, (7, 5, 4)),
        (ProducerIdAndEpoch(7, 4), -1, ProducerFenced),  # An older instance is fenced.
        (ProducerIdAndEpoch(7, 6), -1, ProducerFenced),  # An epoch that was never handed out.
        (ProducerIdAndEpoch(8, 5), -1, ProducerFenced),  # Another producer id.
    ],
)
def test_without_an_open_transaction_the_epoch_is_raised(
    state: TransactionState, given: ProducerIdAndEpoch | None, last: int, expected: object
) -> None:
    verdict = init(entry(state, last_producer_epoch=last, client_version=2), given)
    if isinstance(verdict, Append):
        made = verdict.entry
        assert (made.producer_id, made.producer_epoch, made.last_producer_epoch) == expected
        assert (made.state, made.partitions, made.timeout_ms) == (S.EMPTY, frozenset(), 9_000)
        assert (made.client_version, made.next_producer_id) == (0, -1)
    else:
        assert refused_with(verdict) is expected


@pytest.mark.parametrize("state", [S.PREPARE_COMMIT, S.PREPARE_ABORT])
def test_while_markers_are_written_a_client_waits(state: TransactionState) -> None:
    assert refused_with(init(entry(state), None)) is ConcurrentTransactions
    assert refused_with(init(entry(state), ProducerIdAndEpoch(8, 5))) is ProducerFenced


@pytest.mark.behaviour("T3")
@pytest.mark.parametrize(("version", "epoch"), [(0, 6), (1, 6), (2, 6)])
def test_an_open_transaction_is_aborted_first_under_a_higher_epoch(version: int, epoch: int) -> None:
    verdict = init(entry(S.ONGOING), None, version=version)
    assert isinstance(verdict, FenceAndAbort)
    assert (verdict.entry.state, verdict.entry.producer_epoch) == (S.PREPARE_ABORT, epoch)
    assert verdict.entry.partitions == {AT}
    # While a transaction is open, the coordinator compares only the client's producer id, and not its epoch.
    assert isinstance(init(entry(S.ONGOING), ProducerIdAndEpoch(7, 1)), FenceAndAbort)
    assert refused_with(init(entry(S.ONGOING), ProducerIdAndEpoch(8, 5))) is ProducerFenced


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (9, 0, -1)),
        (ProducerIdAndEpoch(7, 32_766), (9, 0, 32_766)),
        (ProducerIdAndEpoch(7, 32_765), ProducerFenced),
        (ProducerIdAndEpoch(8, 32_766), ProducerFenced),
    ],
)
def test_an_exhausted_epoch_takes_a_new_producer_id(
    given: ProducerIdAndEpoch | None, expected: object
) -> None:
    known = entry(S.COMPLETE_COMMIT, epoch=32_766)
    if expected is ProducerFenced:
        assert refused_with(init(known, given, new=9)) is ProducerFenced
        return
    assert init(known, given) == NeedsProducerId()
    verdict = init(known, given, new=9)
    assert isinstance(verdict, Append)
    made = verdict.entry
    assert (made.producer_id, made.producer_epoch, made.last_producer_epoch) == expected
    assert made.previous_producer_id == 7


def test_the_answer_with_the_last_epoch_may_be_asked_for_again() -> None:
    verdict = init(
        entry(S.EMPTY, epoch=32_766, last_producer_epoch=32_765), ProducerIdAndEpoch(7, 32_765), new=9
    )
    assert isinstance(verdict, Append)
    assert (verdict.entry.producer_id, verdict.entry.producer_epoch) == (7, 32_766)


def test_the_answer_of_a_new_producer_id_may_be_asked_for_again() -> None:
    known = entry(S.EMPTY, 9, 0, previous_producer_id=7, last_producer_epoch=32_766)
    verdict = init(known, ProducerIdAndEpoch(7, 32_766))
    assert isinstance(verdict, Append)
    assert (verdict.entry.producer_id, verdict.entry.producer_epoch) == (9, 0)
    assert refused_with(init(known, ProducerIdAndEpoch(7, 32_765))) is ProducerFenced


# Adding partitions


@pytest.mark.behaviour("T4")
@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_the_first_partition_begins_the_transaction(state: TransactionState) -> None:
    verdict = decide_add(entry(state), ProducerIdAndEpoch(7, 5), [AT, OTHER], now_ms=NOW_MS)
    assert isinstance(verdict, Append)
    added = verdict.entry
    assert (added.state, added.partitions, added.start_ms) == (S.ONGOING, {AT, OTHER}, NOW_MS)


def test_more_partitions_join_and_the_start_stays() -> None:
    verdict = decide_add(entry(S.ONGOING), ProducerIdAndEpoch(7, 5), [OTHER], now_ms=NOW_MS)
    assert isinstance(verdict, Append)
    assert (verdict.entry.partitions, verdict.entry.start_ms) == ({AT, OTHER}, 40_000)
    assert decide_add(entry(S.ONGOING), ProducerIdAndEpoch(7, 5), [AT], now_ms=NOW_MS) == NoChange()


@pytest.mark.parametrize(
    ("known", "who", "error"),
    [
        (None, ProducerIdAndEpoch(7, 5), InvalidProducerIdMapping),
        (entry(S.EMPTY), ProducerIdAndEpoch(8, 5), InvalidProducerIdMapping),
        (entry(S.EMPTY), ProducerIdAndEpoch(7, 4), ProducerFenced),
        (entry(S.ONGOING), ProducerIdAndEpoch(7, 6), ProducerFenced),
        (entry(S.PREPARE_COMMIT), ProducerIdAndEpoch(7, 5), ConcurrentTransactions),
        (entry(S.PREPARE_ABORT), ProducerIdAndEpoch(7, 5), ConcurrentTransactions),
    ],
)
def test_a_producer_that_may_not_add_a_partition_may_not_write_either(
    known: TransactionEntry | None, who: ProducerIdAndEpoch, error: type[Exception]
) -> None:
    assert refused_with(decide_add(known, who, [AT], now_ms=NOW_MS)) is error
    assert refused_with(decide_verify(known, who, AT)) is error


@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_only_partitions_of_an_open_transaction_are_verified(state: TransactionState) -> None:
    assert refused_with(decide_verify(entry(state), ProducerIdAndEpoch(7, 5), AT)) is TransactionAbortable
    assert (
        refused_with(decide_verify(entry(S.ONGOING), ProducerIdAndEpoch(7, 5), OTHER)) is TransactionAbortable
    )
    assert decide_verify(entry(S.ONGOING), ProducerIdAndEpoch(7, 5), AT) is None


# Ending

OK = NoChange
CLASSIC = {
    S.ONGOING: (S.PREPARE_COMMIT, S.PREPARE_ABORT),
    S.COMPLETE_COMMIT: (OK, InvalidTxnState),
    S.COMPLETE_ABORT: (InvalidTxnState, OK),
    S.PREPARE_COMMIT: (ConcurrentTransactions, ConcurrentTransactions),
    S.PREPARE_ABORT: (ConcurrentTransactions, ConcurrentTransactions),
    S.EMPTY: (InvalidTxnState, InvalidTxnState),
}
"""For each state of the coordinator: the results of a COMMIT and of an ABORT."""

WITH_EPOCH = {
    S.ONGOING: (ProducerFenced, S.PREPARE_COMMIT, ProducerFenced, S.PREPARE_ABORT),
    S.COMPLETE_COMMIT: (OK, InvalidTxnState, InvalidTxnState, S.PREPARE_ABORT),
    S.COMPLETE_ABORT: (InvalidTxnState, InvalidTxnState, OK, S.PREPARE_ABORT),
    S.PREPARE_COMMIT: (
        ConcurrentTransactions,
        ConcurrentTransactions,
        InvalidTxnState,
        ConcurrentTransactions,
    ),
    S.PREPARE_ABORT: (
        InvalidTxnState,
        ConcurrentTransactions,
        ConcurrentTransactions,
        ConcurrentTransactions,
    ),
    S.EMPTY: (ProducerFenced, InvalidTxnState, ProducerFenced, S.PREPARE_ABORT),
}
"""For each state of the coordinator: the results of a repeated COMMIT, a COMMIT, a repeated ABORT and an
ABORT.

A repeated request has the previous epoch.
"""


def end(
    known: TransactionEntry | None,
    who: ProducerIdAndEpoch,
    is_commit: bool,
    version: int,
    new: int | None = None,
) -> object:
    return decide_end(known, who, is_commit, client_version=version, new_producer_id=new, now_ms=NOW_MS)


def outcome(verdict: object) -> object:
    if isinstance(verdict, Append):
        return verdict.entry.state
    return verdict.error if isinstance(verdict, Reject) else type(verdict)


@pytest.mark.behaviour("T13")
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("is_commit", [True, False])
def test_a_classic_end_follows_the_table(state: TransactionState, is_commit: bool) -> None:
    verdict = end(entry(state), ProducerIdAndEpoch(7, 5), is_commit, 0)
    assert outcome(verdict) is CLASSIC[state][0 if is_commit else 1]
    if isinstance(verdict, Append):
        ended = verdict.entry
        assert (ended.producer_epoch, ended.partitions, ended.start_ms) == (5, {AT}, 40_000)
    assert refused_with(end(entry(state), ProducerIdAndEpoch(7, 4), is_commit, 0)) is ProducerFenced
    assert refused_with(end(entry(state), ProducerIdAndEpoch(7, 6), is_commit, 0)) is ProducerFenced
    assert refused_with(end(entry(state), ProducerIdAndEpoch(8, 5), is_commit, 0)) is InvalidProducerIdMapping
    assert refused_with(end(None, ProducerIdAndEpoch(7, 5), is_commit, 0)) is InvalidProducerIdMapping


@pytest.mark.behaviour("T13")
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("is_again", [True, False])
def test_an_end_that_raises_the_epoch_follows_the_table(
    state: TransactionState, is_commit: bool, is_again: bool
) -> None:
    verdict = end(entry(state, client_version=2), ProducerIdAndEpoch(7, 4 if is_again else 5), is_commit, 2)
    assert outcome(verdict) is WITH_EPOCH[state][(0 if is_commit else 2) + (0 if is_again else 1)]
    if isinstance(verdict, Append):
        ended = verdict.entry
        assert (ended.producer_epoch, ended.last_producer_epoch, ended.client_version) == (6, 5, 2)
        assert ended.start_ms >= 0
        assert ended.partitions == ({AT} if state is S.ONGOING else frozenset())
    known = entry(state, client_version=2)
    assert refused_with(end(known, ProducerIdAndEpoch(7, 3), is_commit, 2)) is ProducerFenced
    assert refused_with(end(known, ProducerIdAndEpoch(7, 6), is_commit, 2)) is ProducerFenced
    assert refused_with(end(known, ProducerIdAndEpoch(8, 5), is_commit, 2)) is InvalidProducerIdMapping
    assert refused_with(end(None, ProducerIdAndEpoch(7, 5), is_commit, 2)) is InvalidProducerIdMapping


@pytest.mark.parametrize("state", [S.PREPARE_COMMIT, S.PREPARE_ABORT])
def test_the_next_producer_id_waits_for_the_markers_of_the_last_epoch(state: TransactionState) -> None:
    known = entry(state, epoch=32_767, client_version=2, next_producer_id=9)
    for who, error in [
        (ProducerIdAndEpoch(9, 0), ConcurrentTransactions),
        (ProducerIdAndEpoch(9, 1), InvalidProducerIdMapping),
        (ProducerIdAndEpoch(8, 0), InvalidProducerIdMapping),
        (ProducerIdAndEpoch(-1, 0), InvalidProducerIdMapping),
    ]:
        assert refused_with(decide_add(known, who, {AT}, now_ms=NOW_MS)) is error
        assert refused_with(decide_verify(known, who, AT)) is error
        for is_commit, version in itertools.product((False, True), (0, 2)):
            assert refused_with(end(known, who, is_commit, version)) is error
        fenced = ProducerFenced if error is InvalidProducerIdMapping else error
        assert refused_with(init(known, who, version=2)) is fenced
    none_given = known._replace(next_producer_id=-1)
    assert (
        refused_with(decide_add(none_given, ProducerIdAndEpoch(-1, 0), {AT}, now_ms=NOW_MS))
        is InvalidProducerIdMapping
    )


def test_an_end_takes_no_new_producer_id_before_the_last_epoch() -> None:
    verdict = end(entry(S.ONGOING, client_version=2), ProducerIdAndEpoch(7, 5), True, 2, new=9)
    assert isinstance(verdict, Append) and verdict.entry.next_producer_id == -1


@pytest.mark.parametrize("state", STATES)
def test_after_a_restored_backup_no_epoch_of_the_producer_id_is_taken(state: TransactionState) -> None:
    known = entry(state, previous_producer_id=6, last_producer_epoch=4, next_producer_id=9)
    retired = retire(known, NOW_MS)
    assert retired.state is (S.PREPARE_ABORT if state is S.ONGOING else state)
    assert (retired.producer_id, retired.producer_epoch, retired.last_producer_epoch) == (7, 32_767, -1)
    assert (retired.previous_producer_id, retired.next_producer_id) == (-1, -1)
    assert (retired.partitions, retired.last_update_ms) == (known.partitions, NOW_MS)


def test_the_last_epoch_ends_with_a_new_producer_id() -> None:
    known = entry(S.ONGOING, epoch=32_766, client_version=2)
    assert end(known, ProducerIdAndEpoch(7, 32_766), True, 2) == NeedsProducerId()
    verdict = end(known, ProducerIdAndEpoch(7, 32_766), True, 2, new=9)
    assert isinstance(verdict, Append)
    prepared = verdict.entry
    assert (prepared.producer_id, prepared.producer_epoch, prepared.next_producer_id) == (7, 32_767, 9)
    done = complete(prepared, now_ms=NOW_MS)
    assert (done.producer_id, done.producer_epoch, done.next_producer_id) == (9, 0, -1)
    assert done.previous_producer_id == 7
    # The response was lost, and the client repeats the request.
    assert outcome(end(done, ProducerIdAndEpoch(7, 32_766), True, 2)) is NoChange
    assert refused_with(end(done, ProducerIdAndEpoch(7, 32_766), False, 2)) is InvalidTxnState


@pytest.mark.parametrize(
    ("prepared", "done"), [(S.PREPARE_COMMIT, S.COMPLETE_COMMIT), (S.PREPARE_ABORT, S.COMPLETE_ABORT)]
)
@pytest.mark.parametrize("version", [0, 2])
def test_a_completed_entry_has_the_decided_outcome(
    prepared: TransactionState, done: TransactionState, version: int
) -> None:
    completed = complete(entry(prepared, client_version=version), now_ms=NOW_MS)
    assert (completed.state, completed.partitions, completed.last_update_ms) == (done, frozenset(), NOW_MS)
    assert (completed.producer_id, completed.producer_epoch) == (7, 5)


# Time


def fenced(known: TransactionEntry, version: int, new: int | None = None) -> TransactionEntry:
    made = fence(known, server_version=version, new_producer_id=new, now_ms=NOW_MS)
    assert isinstance(made, TransactionEntry)
    return made


@pytest.mark.behaviour("T8")
@pytest.mark.parametrize("state", STATES)
def test_only_open_transactions_time_out(state: TransactionState) -> None:
    late_ms = 40_000 + 60_000
    assert not is_timed_out(entry(state), late_ms)
    assert is_timed_out(entry(state), late_ms + 1) is (state is S.ONGOING)


@pytest.mark.behaviour("T8")
def test_a_timed_out_producer_is_fenced() -> None:
    aborted = complete(fenced(entry(S.ONGOING), 0), now_ms=NOW_MS)
    assert (aborted.state, aborted.producer_epoch) == (S.COMPLETE_ABORT, 6)
    assert refused_with(decide_add(aborted, ProducerIdAndEpoch(7, 5), [AT], now_ms=NOW_MS)) is ProducerFenced
    assert refused_with(end(aborted, ProducerIdAndEpoch(7, 5), True, 0)) is ProducerFenced
    assert refused_with(init(aborted, ProducerIdAndEpoch(7, 5))) is ProducerFenced


@pytest.mark.parametrize("version", [0, 2])
def test_fencing_never_passes_the_highest_epoch(version: int) -> None:
    aborted = fenced(entry(S.ONGOING, epoch=32_766), version, new=9)
    assert aborted.producer_epoch == 32_767
    again = init(complete(aborted, now_ms=NOW_MS), None, new=9)
    assert isinstance(again, Append)
    assert (again.entry.producer_id, again.entry.producer_epoch) == ((9, 0) if version == 0 else (9, 1))


@pytest.mark.behaviour("T8")
@pytest.mark.parametrize("epoch", [32_766, 32_767])
def test_a_producer_at_the_last_epoch_that_times_out_goes_on_with_a_new_producer_id(epoch: int) -> None:
    """Older versions left the entry at epoch 32767, where no higher epoch could fence the producer."""
    known = entry(S.ONGOING, epoch=epoch, client_version=2)
    assert fence(known, server_version=2, new_producer_id=None, now_ms=NOW_MS) == NeedsProducerId()
    aborted = fenced(known, 2, new=9)
    assert (aborted.producer_epoch, aborted.next_producer_id) == (32_767, 9)
    assert aborted.state is S.PREPARE_ABORT
    assert refused_with(init(aborted, ProducerIdAndEpoch(7, epoch), version=2)) is ConcurrentTransactions
    done = complete(aborted, now_ms=NOW_MS)
    assert (done.producer_id, done.producer_epoch) == (9, 0)
    assert (
        refused_with(decide_add(done, ProducerIdAndEpoch(7, epoch), [AT], now_ms=NOW_MS))
        is InvalidProducerIdMapping
    )
    if epoch == 32_766:
        verdict = init(done, ProducerIdAndEpoch(7, epoch), version=2)
        assert isinstance(verdict, Append)
        assert (verdict.entry.producer_id, verdict.entry.producer_epoch) == (9, 0)


def test_a_new_instance_over_a_transaction_at_the_last_epoch_waits_for_a_new_producer_id() -> None:
    known = entry(S.ONGOING, epoch=32_766, client_version=2)
    assert init(known, None, version=2) == NeedsProducerId()
    verdict = init(known, None, new=9, version=2)
    assert isinstance(verdict, FenceAndAbort)
    assert (verdict.entry.producer_epoch, verdict.entry.next_producer_id) == (32_767, 9)


def test_no_client_gets_the_highest_epoch() -> None:
    """In version 0.4.1, a time-out could raise the epoch to 32767. A client that then repeats its request
    with the previous epoch gets a new producer id.
    """
    known = entry(S.COMPLETE_ABORT, epoch=32_767, last_producer_epoch=32_766)
    assert init(known, ProducerIdAndEpoch(7, 32_766)) == NeedsProducerId()
    verdict = init(known, ProducerIdAndEpoch(7, 32_766), new=9)
    assert isinstance(verdict, Append)
    assert (verdict.entry.producer_id, verdict.entry.producer_epoch) == (9, 0)


@pytest.mark.behaviour("T9")
@pytest.mark.parametrize("known", [ProducerIdAndEpoch(7, 6), ProducerIdAndEpoch(9, 0)])
@pytest.mark.parametrize("is_commit", [True, False])
def test_a_fenced_producer_is_not_given_the_identity_of_the_one_that_fenced_it(
    known: ProducerIdAndEpoch, is_commit: bool
) -> None:
    """The new instance uses the classic protocol, in which its epoch stays the same.

    The requests of the old instance raise the epoch. They must not get the new instance's epoch.
    """
    old = ProducerIdAndEpoch(7, known.producer_epoch - 1 if known.producer_epoch else 32_766)
    verdict = init(entry(S.EMPTY, epoch=old.producer_epoch), None, new=9)
    assert isinstance(verdict, Append)
    assert (verdict.entry.producer_id, verdict.entry.producer_epoch) == known
    added = decide_add(verdict.entry, known, [AT], now_ms=NOW_MS)
    assert isinstance(added, Append)
    ended = end(added.entry, known, is_commit, 0)
    assert isinstance(ended, Append)
    assert refused_with(end(ended.entry, old, is_commit, 2)) is ProducerFenced
    done = complete(ended.entry, now_ms=NOW_MS)
    assert refused_with(end(done, old, is_commit, 2)) is ProducerFenced


def test_an_end_does_not_give_out_the_epoch_of_a_classic_fence() -> None:
    aborted = complete(fenced(entry(S.ONGOING, epoch=32_766), 0), now_ms=NOW_MS)
    assert (aborted.state, aborted.producer_epoch) == (S.COMPLETE_ABORT, 32_767)
    assert refused_with(end(aborted, ProducerIdAndEpoch(7, 32_766), False, 2)) is ProducerFenced


@pytest.mark.parametrize("epoch", [32_766, 32_767])
@pytest.mark.parametrize("is_commit", [True, False])
def test_the_end_at_the_last_epochs_may_be_asked_for_again(epoch: int, is_commit: bool) -> None:
    known, who = entry(S.ONGOING, epoch=epoch, client_version=2), ProducerIdAndEpoch(7, epoch)
    verdict = end(known, who, is_commit, 2, new=9)
    assert isinstance(verdict, Append)
    assert refused_with(end(verdict.entry, who, is_commit, 2)) is ConcurrentTransactions
    done = complete(verdict.entry, now_ms=NOW_MS)
    assert outcome(end(done, who, is_commit, 2)) is NoChange
    assert refused_with(end(done, who, not is_commit, 2)) is InvalidTxnState


@pytest.mark.behaviour("T9")
@pytest.mark.parametrize("state", STATES)
def test_only_idle_ids_expire(state: TransactionState) -> None:
    assert not is_expired(entry(state), 41_999, 1_000)
    assert is_expired(entry(state), 42_000, 1_000) is state.is_idle


def test_states_have_kafkas_names() -> None:
    assert [state.label for state in STATES] == [
        "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"
    ]  # fmt: skip
