"""The append rule: a table of decisions, and a comparison with a naive model that remembers every batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.append_notation import BATCH_MS, NOW_MS, format_entry, parse_batch, parse_entry, rows

from oncelog.rules.idempotence.append import (
    Duplicate,
    ProducedBatch,
    Reject,
    Store,
    Verification,
    decide_append,
)
from oncelog.rules.idempotence.sequence import SEQUENCE_MAX, advance
from oncelog.types import Origin

CASES = list(rows("append.txt"))


def _verdict(entry: str, batch: str, origin: Origin = Origin.CLIENT, **how: Any) -> str:
    return _format(
        decide_append(parse_entry(entry), parse_batch(batch), origin, base_offset=100, now_ms=NOW_MS, **how)
    )


@pytest.mark.behaviour("I5", "I6", "I7", "I8", "I14", "I15")
@pytest.mark.parametrize(
    ("entry", "batch", "origin", "expected"), [row[1:] for row in CASES], ids=[row[0] for row in CASES]
)
def test_row(entry: str, batch: str, origin: str, expected: str) -> None:
    assert _verdict(entry, batch, Origin(origin)) == expected


def _format(verdict: Store | Duplicate | Reject) -> str:
    match verdict:
        case Store(entry):
            assert (entry.last_timestamp_ms, entry.last_append_ms) == (BATCH_MS, NOW_MS)
            return f"store {format_entry(entry)}"
        case Duplicate(first, last, timestamp_ms):
            assert timestamp_ms == BATCH_MS
            return f"duplicate {first}-{last}"
        case Reject(error, reason):
            assert "producer id 7" in reason
            return f"refuse {error.code}"


@pytest.mark.behaviour("I14", "T6")
@pytest.mark.parametrize(
    ("entry", "batch", "expected"),
    [
        ("-", "e0 0+2t", "store e0 0-1@100 txn@100"),
        ("-", "e0 1+1t", "refuse 45"),
        ("e?", "e0 1+1t", "refuse 45"),
        ("e3 c1", "e3 1+1t", "refuse 45"),
        ("e3 c1", "e3 0+1t", "store e3 0-0@100 txn@100 c1"),
        ("e3 0-4@10 c1", "e4 1+1t", "refuse 45"),
        ("e3 0-4@10 c1", "e2 5+1t", "refuse 47"),
        ("e3 0-4@10 c1", "e3 5+1t", "store e3 0-4@10 5-5@100 txn@100 c1"),
        ("e3 0-4@10 c1", "e3 0+5t", "duplicate 10-14"),
    ],
)
def test_a_transaction_with_an_epoch_of_its_own_begins_with_sequence_0(
    entry: str, batch: str, expected: str
) -> None:
    assert _verdict(entry, batch, begins_epoch=True) == expected


@pytest.mark.behaviour("T5")
@pytest.mark.parametrize(
    ("asked", "entry", "batch", "expected"),
    [
        ([(0, 0)], "-", "e0 0+2t", "store e0 0-1@100 txn@100"),
        ([(0, 0)], "-", "e0 2+1t", "refuse 45"),
        ([(0, 2), (0, 0)], "-", "e0 2+1t", "refuse 45"),
        ([(0, 0), (0, 2)], "-", "e0 2+1t", "refuse 45"),
        ([(0, 2)], "-", "e0 2+1t", "store e0 2-2@100 txn@100"),
        ([(0, 0), (1, 3)], "-", "e1 3+1t", "store e1 3-3@100 txn@100"),
        ([(1, 3), (0, 0)], "-", "e1 3+1t", "store e1 3-3@100 txn@100"),
        ([(3, 5)], "e3 0-4@10 c1", "e3 5+1t", "store e3 0-4@10 5-5@100 txn@100 c1"),
        ([(3, 5)], "e3 0-4@10 c1", "e3 0+5t", "duplicate 10-14"),
        ([(3, 5)], "e3 0-5@10 c1", "e3 6+1t", "refuse 45"),
    ],
)
def test_no_batch_overtakes_one_that_waits_to_be_verified(
    asked: list[tuple[int, int]], entry: str, batch: str, expected: str
) -> None:
    """`asked` has the (epoch, sequence) of each batch about which the partition has asked the coordinator."""
    verification = Verification(*asked[0], raises_epoch=False)
    for epoch, sequence in asked[1:]:
        verification = verification.with_batch(epoch, sequence)
    assert _verdict(entry, batch, verification=verification) == expected


@pytest.mark.behaviour("T5", "I14")
@pytest.mark.parametrize(
    ("entry", "batch", "expected"),
    [
        ("-", "e1 3+1t", "refuse 45"),
        ("-", "e1 0+1t", "store e1 0-0@100 txn@100"),
        ("e1 c1", "e1 3+1t", "refuse 45"),
        ("e1 0-2@10 c1", "e1 3+1t", "store e1 0-2@10 3-3@100 txn@100 c1"),
    ],
)
def test_a_transaction_that_raises_the_epoch_does_not_begin_late(
    entry: str, batch: str, expected: str
) -> None:
    verification = Verification(1, 3, raises_epoch=True)
    assert _verdict(entry, batch, verification=verification) == expected


def test_a_batch_without_a_sequence_has_neither_first_nor_last() -> None:
    batch, remembered = parse_batch("e0 none+2t"), parse_entry("e0 none@10+2")
    assert batch.last_sequence is None
    assert remembered is not None and remembered.batches[0].first_sequence is None


def test_a_replay_remembers_the_newest_five_batches() -> None:
    entry = None
    for number in range(7):
        batch = ProducedBatch(7, 0, number, 0, BATCH_MS, False)
        verdict = decide_append(entry, batch, Origin.REPLAY, base_offset=10 + number, now_ms=NOW_MS)
        assert isinstance(verdict, Store)
        entry = verdict.entry
    assert entry is not None
    assert [remembered.last_offset for remembered in entry.batches] == [12, 13, 14, 15, 16]


def test_names_are_unique() -> None:
    assert len({row[0] for row in CASES}) == len(CASES)


class Everything:
    """The naive model: every batch of one producer id that was ever stored."""

    def __init__(self) -> None:
        self.stored: list[tuple[ProducedBatch, int]] = []
        self.next_offset = 0

    def expect(self, batch: ProducedBatch) -> str:
        epochs = [stored.producer_epoch for stored, _ in self.stored]
        same = [(b, o) for b, o in self.stored if b.producer_epoch == batch.producer_epoch]
        if self.stored and batch.producer_epoch < max(epochs):
            return "47"
        if self.stored and not same:
            return "store" if batch.base_sequence == 0 else "45"
        if not self.stored:
            return "store"
        for known, offset in same[-5:]:
            known_numbers = (known.base_sequence, known.last_offset_delta)
            if known_numbers == (batch.base_sequence, batch.last_offset_delta):
                return f"duplicate {offset}"
        newest = same[-1][0]
        follows = (newest.base_sequence + newest.last_offset_delta + 1) % 2**31
        return "store" if batch.base_sequence == follows else "45"

    def store(self, batch: ProducedBatch) -> None:
        self.stored.append((batch, self.next_offset))
        self.next_offset += batch.last_offset_delta + 1


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("next"), st.integers(1, 4)),
        st.tuples(st.just("again"), st.integers(1, 8)),
        st.tuples(st.just("gap"), st.integers(1, 4)),
        st.tuples(st.just("new epoch"), st.integers(1, 4)),
        st.tuples(st.just("old epoch"), st.integers(1, 4)),
        st.tuples(st.just("shorter"), st.integers(1, 8)),
    ),
    max_size=40,
)


@pytest.mark.behaviour("I7", "I8", "I14")
@settings(deadline=None, max_examples=200)
@given(steps=_STEPS, start=st.sampled_from([0, 5, SEQUENCE_MAX - 3, SEQUENCE_MAX]))
def test_agrees_with_a_model_that_forgets_nothing(steps: list[tuple[str, int]], start: int) -> None:
    model, entry, epoch, sequence = Everything(), None, 3, start
    for kind, number in steps:
        batch = _make(kind, number, model, epoch, sequence)
        verdict = decide_append(entry, batch, Origin.CLIENT, base_offset=model.next_offset, now_ms=0)
        expected = model.expect(batch)
        match verdict:
            case Store(successor):
                assert expected == "store"
                assert len(successor.batches) <= 5
                entry = successor
                model.store(batch)
                epoch, sequence = batch.producer_epoch, advance(batch.base_sequence or 0, number)
            case Duplicate(base_offset, _, _):
                assert expected == f"duplicate {base_offset}"
            case Reject(error, _):
                assert expected == str(error.code)


def _make(kind: str, number: int, model: Everything, epoch: int, sequence: int) -> ProducedBatch:
    if kind in ("again", "shorter") and model.stored:
        old = model.stored[-min(number, len(model.stored))][0]
        return old if kind == "again" else old._replace(last_offset_delta=old.last_offset_delta + 1)
    base = {"gap": advance(sequence, 1), "new epoch": 0}.get(kind, sequence)
    step = {"new epoch": 1, "old epoch": -1}.get(kind, 0)
    return ProducedBatch(1, epoch + step, base, number - 1, 0, False)
