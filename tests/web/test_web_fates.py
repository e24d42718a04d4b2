"""Fates of stored batches, remembered batches, past transactions and charts: pure functions."""

from __future__ import annotations

import pytest

from oncelog.rules.transactions.entry import TransactionEntry, TransactionState
from oncelog.types import TopicPartition
from oncelog.web.charts import batch_blocks, offsets_bar, sparkline, transaction_lanes
from oncelog.web.fates import Fate, StoredBatch, fates, remembered
from oncelog.web.timeline import PastTransaction, newest_init, past_transactions

# Each word is a batch: its offset and its kind. "t1" is a transactional batch of producer 1. "c1" and "a1"
# are its COMMIT and ABORT markers. "p" is a plain batch. "+" and "-" mean that a read_committed fetch
# delivers or hides the batch.
TABLE = """
0p                              plain
0t1+ 1c1                        committed plain
0t1- 1a1                        aborted plain
0t1                             open
0t1 1t2 2c2                     open committed plain
0t1 1a1 2t1                     aborted plain open
0t1 1a1 2t1 3c1                 aborted plain committed plain
0t2 1t1 2c1 3a2                 aborted committed plain plain
"""


def batch(word: str, *, epoch: int = 0, sequence: int | None = 0, count: int = 1) -> StoredBatch:
    offset, kind = int(word[0]), word[1:]
    verdict = {"+": False, "-": True}.get(kind[-1])
    marker = {"c": "COMMIT", "a": "ABORT"}.get(kind[0])
    producer_id = int(kind[1]) if len(kind) > 1 else None
    is_numbered = producer_id is not None and marker is None
    return StoredBatch(
        offset, offset + count - 1, 0, producer_id, None if producer_id is None else epoch,
        sequence if is_numbered else None, count, 100, kind[0] != "p", marker, verdict,
    )  # fmt: skip


@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_a_batch_has_the_fate_that_the_markers_give_it(row: str) -> None:
    words, expected = row[:32].split(), row[32:].split()
    assert [fate.value for fate in fates([batch(word) for word in words])] == expected


def test_only_the_last_five_batches_of_the_newest_epoch_are_remembered() -> None:
    seven = [batch(f"{offset}t1", sequence=offset) for offset in range(7)]
    assert [kept.base_sequence for kept in remembered(seven)[1]] == [2, 3, 4, 5, 6]
    newer = batch("8t1", epoch=1, sequence=0)
    assert remembered([*seven, newer, batch("9t1", epoch=0, sequence=7)])[1] == [newer]


def test_a_marker_with_a_higher_epoch_forgets_the_batches() -> None:
    stored = [batch("0t1", sequence=0), batch("1c1", epoch=1)]
    assert remembered(stored) == {1: []}
    assert remembered([stored[0], batch("1c1", epoch=0)]) == {1: [stored[0]]}


def test_a_record_has_the_sequence_of_its_place_in_the_batch() -> None:
    last = batch("3t1", sequence=(1 << 31) - 2, count=4)
    assert [last.sequence_of(offset) for offset in (3, 4, 5, 6)] == [(1 << 31) - 2, (1 << 31) - 1, 0, 1]
    assert last.last_sequence == 1
    assert batch("0p").sequence_of(0) is None and batch("0p").last_sequence is None


TP = TopicPartition("t", 0)


def entry(state: TransactionState, at_ms: int, start_ms: int, *tps: TopicPartition) -> TransactionEntry:
    return TransactionEntry("id", 7, 3, 60_000, state, frozenset(tps), start_ms, at_ms)


def test_past_transactions_have_their_steps() -> None:
    other = TopicPartition("t", 1)
    found = past_transactions(
        [
            entry(TransactionState.EMPTY, 0, -1),
            entry(TransactionState.ONGOING, 10, 10, TP),
            entry(TransactionState.ONGOING, 12, 10, TP, other),
            entry(TransactionState.PREPARE_COMMIT, 20, 10, TP, other),
            entry(TransactionState.COMPLETE_COMMIT, 21, 10),
            entry(TransactionState.ONGOING, 30, 30, TP),
            entry(TransactionState.PREPARE_ABORT, 35, 30, TP),
            entry(TransactionState.COMPLETE_ABORT, 36, 30),
            entry(TransactionState.ONGOING, 40, 40, TP),
        ]
    )
    assert found == [
        PastTransaction(7, 3, 10, [(10, TP), (12, other)], 20, 21, "commit"),
        PastTransaction(7, 3, 30, [(30, TP)], 35, 36, "abort"),
        PastTransaction(7, 3, 40, [(40, TP)]),
    ]


@pytest.mark.parametrize(
    ("state", "epoch", "client_version", "is_fenced"),
    [
        (TransactionState.PREPARE_ABORT, 4, 0, True),
        (TransactionState.PREPARE_ABORT, 4, 1, True),
        (TransactionState.COMPLETE_ABORT, 4, 0, True),
        (TransactionState.PREPARE_ABORT, 3, 0, False),  # the client's own abort
        (TransactionState.PREPARE_ABORT, 4, 2, False),  # any end raises the epoch
        (TransactionState.PREPARE_COMMIT, 4, 2, False),
    ],
)
def test_an_abort_that_fenced_the_producer_is_named_if_the_log_proves_it(
    state: TransactionState, epoch: int, client_version: int, is_fenced: bool
) -> None:
    end = entry(state, 35, 30, TP)._replace(producer_epoch=epoch, client_version=client_version)
    (txn,) = past_transactions([entry(TransactionState.ONGOING, 30, 30, TP), end])
    assert txn.is_fenced == is_fenced


def test_the_newest_init_is_shown_if_it_raised_the_epoch() -> None:
    first = entry(TransactionState.EMPTY, 1, -1)._replace(producer_epoch=0)
    ongoing, second = entry(TransactionState.ONGOING, 2, 2, TP), entry(TransactionState.EMPTY, 9, -1)
    assert newest_init([]) is newest_init([first, ongoing]) is None
    assert newest_init([first, second, ongoing]) == second


def test_a_transaction_whose_beginning_was_compacted_is_shown() -> None:
    found = past_transactions([entry(TransactionState.COMPLETE_ABORT, 36, 30)])
    assert found == [PastTransaction(7, 3, 30, [], None, 36, "abort")]


def test_charts_say_their_content_and_escape_names() -> None:
    hostile = '"><script>&'
    assert "<script>" not in sparkline([1.0, None, 3.0, 2.0], hostile)
    assert "aria-label='\"&gt;&lt;script&gt;&amp;: now 2, at most 3'" in sparkline([1.0, 3.0, 2.0], hostile)
    assert sparkline([1.0], "one value") == "" and sparkline([], "none") == ""
    assert "sequences 5 to 6 at offset 3" in batch_blocks([batch("3t1", sequence=5, count=2)])
    assert transaction_lanes([], 0) == ""
    lanes = transaction_lanes([PastTransaction(7, 3, 10, [(10, TP)], 20, 21, "commit")], 100)
    assert 'class="txn committed"' in lanes and "committed, 11 ms" in lanes


@pytest.mark.parametrize(
    ("ends", "seen"),
    [
        ((0, 10, 10), ["100.00"]),
        ((0, 10, 4), ["40.00"]),
        ((0, 1_000_000, 999_999), ["97.00"]),
        ((5, 5, 5), []),
    ],
)
def test_the_bar_shows_what_is_held_back(ends: tuple[int, int, int], seen: list[str]) -> None:
    from oncelog.client.consumer.partition_ends import PartitionEnds

    start, end, stable = ends
    drawn = offsets_bar(PartitionEnds(start, end, stable, None))
    assert all(f'class="seen" width="{width}"' in drawn for width in seen)
    assert ("held" in drawn) == (stable < end)
    assert Fate.OPEN.value == "open"
