"""The decision that ends a transaction whose marker a power loss took."""

from __future__ import annotations

import pytest

from oncelog.rules.idempotence.lost_markers import abort_of, decided_transaction, is_awaited, lost_end
from oncelog.rules.idempotence.sequencer import MAX_EPOCH, ProducerIdAndEpoch
from oncelog.rules.transactions.coordinator import Append, complete, decide_add, decide_end, fence, retire
from oncelog.rules.transactions.entry import EXHAUSTED_EPOCH, TransactionEntry, TransactionState
from oncelog.types import TopicPartition

S = TransactionState
HERE, THERE = TopicPartition("t", 0), TopicPartition("t", 1)

# Records of the coordinator. `decides` is the epoch of the transaction whose outcome the record decides, or
# "-" for none.
RECORDS = """
state            epoch  version  decides
PREPARE_COMMIT   1      2        0
PREPARE_ABORT    8      2        7
PREPARE_COMMIT   32766  2        32765
PREPARE_ABORT    32767  2        -        a fenced producer's epoch, whatever its transaction had
PREPARE_COMMIT   1      0        -        classic transactions share an epoch
PREPARE_COMMIT   1      1        -
PREPARE_ABORT    0      2        -        no transaction had an epoch before
COMPLETE_COMMIT  1      2        -        names no partitions
COMPLETE_ABORT   1      2        -
ONGOING          1      2        -
EMPTY            1      2        -
"""


@pytest.mark.parametrize("line", RECORDS.strip().splitlines()[1:])
def test_a_record_decides_the_transaction_of_the_table(line: str) -> None:
    state, epoch, version, decides, *_ = line.split()
    entry = TransactionEntry(
        "x", 5, int(epoch), 60_000, S[state], frozenset({HERE}), client_version=int(version)
    )
    expected = None if decides == "-" else ProducerIdAndEpoch(5, int(decides))
    assert decided_transaction(entry) == expected


def ongoing(epoch: int, *partitions: TopicPartition) -> TransactionEntry:
    return TransactionEntry("x", 5, epoch, 60_000, S.ONGOING, frozenset(partitions), client_version=2)


@pytest.mark.parametrize("is_commit", [True, False])
def test_the_record_of_an_end_decides_the_transaction_that_was_open(is_commit: bool) -> None:
    before = ongoing(3, HERE)
    verdict = decide_end(
        before, ProducerIdAndEpoch(5, 3), is_commit, client_version=2, new_producer_id=None, now_ms=0
    )
    assert decided_transaction(verdict.entry) == ProducerIdAndEpoch(5, 3)  # type: ignore[union-attr]


def test_the_record_of_a_fence_decides_the_transaction_that_was_open() -> None:
    fenced = fence(ongoing(3, HERE), server_version=2, new_producer_id=None, now_ms=0)
    assert decided_transaction(fenced) == ProducerIdAndEpoch(5, 3)  # type: ignore[arg-type]
    last = fence(ongoing(EXHAUSTED_EPOCH, HERE), server_version=2, new_producer_id=6, now_ms=0)
    assert decided_transaction(last) == ProducerIdAndEpoch(5, EXHAUSTED_EPOCH)  # type: ignore[arg-type]
    assert decided_transaction(retire(ongoing(3, HERE), 0)) is None


def test_a_marker_is_lost_only_if_newer_records_of_the_id_follow() -> None:
    decision = fence(ongoing(3, HERE), server_version=2, new_producer_id=None, now_ms=0)
    assert isinstance(decision, TransactionEntry)
    done = complete(decision, now_ms=1)
    added = decide_add(done, ProducerIdAndEpoch(5, 4), [THERE], now_ms=2)
    assert isinstance(added, Append)
    leftover = ProducerIdAndEpoch(5, 3)
    assert lost_end(HERE, leftover, decision, decision) is None, "its markers follow"
    assert lost_end(HERE, leftover, decision, done) == decision
    assert lost_end(HERE, leftover, decision, added.entry) == decision
    assert lost_end(HERE, leftover, decision, None) == decision, "the id has expired since"
    assert lost_end(THERE, leftover, decision, done) is None, "the transaction was not there"


def test_an_open_transaction_of_an_abandoned_producer_id_is_aborted() -> None:
    leftover, abort = ProducerIdAndEpoch(5, EXHAUSTED_EPOCH), abort_of(ProducerIdAndEpoch(5, EXHAUSTED_EPOCH))
    own, other = ongoing(EXHAUSTED_EPOCH, THERE), ongoing(0, HERE)._replace(producer_id=6)
    assert lost_end(HERE, leftover, None, own) is None
    assert lost_end(HERE, leftover, None, other) == abort
    assert lost_end(HERE, leftover, None, None) == abort, "the id has expired"
    coming = complete(other, now_ms=0)._replace(next_producer_id=5)
    assert lost_end(HERE, leftover, None, coming) is None, "the end before is not complete yet"


def test_the_end_of_a_transaction_ends_what_is_open_in_its_partitions() -> None:
    assert is_awaited(HERE, ProducerIdAndEpoch(5, 2), ongoing(3, HERE))
    assert not is_awaited(THERE, ProducerIdAndEpoch(5, 2), ongoing(3, HERE))
    assert not is_awaited(HERE, ProducerIdAndEpoch(5, 4), ongoing(3, HERE)), (
        "the power loss took the newer epoch"
    )
    assert not is_awaited(HERE, ProducerIdAndEpoch(6, 2), ongoing(3, HERE))


@pytest.mark.parametrize(("epoch", "marker_epoch"), [(0, 1), (7, 8), (MAX_EPOCH, MAX_EPOCH)])
def test_an_undecided_transaction_is_aborted_with_the_next_epoch(epoch: int, marker_epoch: int) -> None:
    decision = abort_of(ProducerIdAndEpoch(5, epoch))
    assert (decision.producer_id, decision.producer_epoch) == (5, marker_epoch)
    assert decision.state is S.PREPARE_ABORT
