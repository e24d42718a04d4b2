"""Compaction: the dirty range, keys, tombstones, markers, and the last batches of producers."""

from __future__ import annotations

from typing import Any

import pytest

from oncelog.rules.storage.compaction import (
    Aborted,
    BatchFacts,
    Cleaner,
    DirtyRange,
    LastOfProducer,
    LatestOffsets,
    SeenTransactions,
    Span,
    UnindexedAborts,
    find_dirty,
)

SPANS = [Span(0, 10, 100, 1_000), Span(10, 20, 200, 2_000), Span(20, 30, 300, 3_000)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, DirtyRange(0, 30, 0, 600, 1_000)),
        ({"cleaned_to": 10}, DirtyRange(10, 30, 100, 500, 2_000)),
        ({"cleaned_to": 30}, None),
        ({"stable_offset": 29}, DirtyRange(0, 20, 0, 300, 1_000)),
        ({"stable_offset": 9}, None),
        ({"min_lag_ms": 5_000, "now_ms": 7_500}, DirtyRange(0, 20, 0, 300, 1_000)),
        ({"min_lag_ms": 5_000, "now_ms": 5_999}, None),
        ({"min_lag_ms": 5_000, "now_ms": 8_000}, DirtyRange(0, 30, 0, 600, 1_000)),
        ({"min_lag_ms": 1, "now_ms": 3_000}, DirtyRange(0, 20, 0, 300, 1_000)),
        # An earlier round had room for too few keys, so it ended in the middle of a segment.
        ({"cleaned_to": 15}, DirtyRange(15, 30, 100, 500, 2_000)),
    ],
)
def test_the_dirty_range_is_that_of_the_table(how: dict[str, Any], expected: DirtyRange | None) -> None:
    known = {"cleaned_to": 0, "stable_offset": 30, "min_lag_ms": 0, "now_ms": 10_000}
    assert find_dirty(SPANS, **{**known, **how}) == expected


def test_nothing_behind_a_young_segment_is_cleaned() -> None:
    spans = [Span(0, 10, 100, 1_000), Span(10, 20, 200, 9_000), Span(20, 30, 300, 3_000)]
    dirty = find_dirty(spans, cleaned_to=0, stable_offset=30, min_lag_ms=5_000, now_ms=10_000)
    assert dirty == DirtyRange(0, 10, 0, 100, 1_000)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100_000])
def test_keys_of_any_length_are_told_apart(length: int) -> None:
    latest = LatestOffsets(10)
    latest.note(b"a" * length, 0)
    latest.note(b"a" * (length - 1) + b"b", 5)
    assert not latest.is_superseded(b"a" * length, 0)
    assert latest.is_superseded(b"a" * (length - 1) + b"b", 4)
    assert not latest.is_superseded(b"c" * length, 0)
    assert all(len(key) <= 16 for key in latest._offsets)


def test_a_record_of_the_future_does_not_put_compaction_off() -> None:
    spans = [Span(0, 10, 100, 9_000_000, 1_000), Span(10, 20, 100, 2_000, 500), Span(20, 30, 100, 3_000)]
    dirty = find_dirty(spans, cleaned_to=0, stable_offset=30, min_lag_ms=0, now_ms=10_000)
    assert dirty is not None and dirty.oldest_ms == 500
    assert dirty.is_due(1.1, 5_000, 10_000)


@pytest.mark.parametrize(
    ("dirty_bytes", "oldest_ms", "is_due"),
    [(49, 0, False), (50, 0, True), (1, -1_000, True), (1, -999, False)],
)
def test_a_dirty_range_is_due_by_its_share_or_age(dirty_bytes: int, oldest_ms: int, is_due: bool) -> None:
    dirty = DirtyRange(0, 1, 100 - dirty_bytes, dirty_bytes, oldest_ms)
    assert dirty.is_due(0.5, 1_000, 0) is is_due


def cleaning(
    latest: LatestOffsets | None = None,
    aborted: tuple[tuple[int, int, int, int], ...] = (),
    producers: dict[int, LastOfProducer] | None = None,
    now_ms: int = 1_000,
) -> Cleaner:
    seen = SeenTransactions(aborted)
    return Cleaner(latest or LatestOffsets(10), seen, (producers or {}).get, end_offset=100, now_ms=now_ms)


def facts(last_offset: int, pid: int | None = None, **how: Any) -> BatchFacts:
    known = {"producer_epoch": 0, "is_transactional": False, "is_control": False, "delete_horizon_ms": None}
    return BatchFacts(last_offset, pid, **{**known, **how})


def data(last_offset: int, pid: int) -> BatchFacts:
    return facts(last_offset, pid, is_transactional=True)


def marker(offset: int, pid: int, horizon_ms: int | None = None) -> BatchFacts:
    return facts(offset, pid, is_transactional=True, is_control=True, delete_horizon_ms=horizon_ms)


@pytest.mark.parametrize("key", [b"k", b"long" * 20])
@pytest.mark.parametrize(
    ("offset", "has_value", "horizon_ms", "kept"),
    [
        (5, True, None, True),
        (4, True, None, False),
        (6, True, None, True),
        (5, False, None, True),
        (5, False, 1_001, True),
        (5, False, 1_000, False),
        (5, True, 1_000, True),
    ],
)
def test_records(key: bytes, offset: int, has_value: bool, horizon_ms: int | None, kept: bool) -> None:
    latest = LatestOffsets(10)
    for each in (1, 3, 5):
        latest.note(key, each)
    assert cleaning(latest).keeps(key, offset, has_value, horizon_ms) is kept
    assert cleaning(latest).keeps(b"other", offset, True, None)
    assert not cleaning(latest).keeps(None, offset, True, None)


def test_committed_data_keeps_its_marker() -> None:
    walk = cleaning()
    assert walk.retention(data(3, 7))[::2] == (False, False)
    assert walk.retention(marker(4, 7))[:3] == (False, False, False)


def test_a_marker_without_data_goes_in_two_steps() -> None:
    assert cleaning().retention(marker(4, 7))[:3] == (False, False, True)
    assert cleaning().retention(marker(4, 7, 1_001))[:3] == (False, False, True)
    assert cleaning().retention(marker(4, 7, 1_000))[:3] == (True, False, True)


def test_aborted_data_goes_at_once_and_its_marker_stays_noted() -> None:
    entry = (7, 2, 6, 2)
    walk = cleaning(aborted=(entry,))
    assert not walk.retention(data(1, 7)).drops_all, "before the transaction"
    assert walk.retention(data(3, 7)).drops_all
    assert not walk.retention(data(4, 8)).drops_all, "of another producer"
    assert walk.retention(data(5, 7)).drops_all
    judged = walk.retention(marker(6, 7))
    assert not judged.is_empty_end and judged.noted == entry
    assert not walk.retention(data(8, 7)).drops_all, "the next transaction"
    assert walk.retention(marker(9, 7))[:3] == (False, False, False)


def test_an_abort_whose_data_is_gone_is_not_noted_any_more() -> None:
    judged = cleaning(aborted=((7, 2, 6, 2),)).retention(marker(6, 7))
    assert judged.is_empty_end and judged.noted is None


def test_aborts_that_ended_before_the_walk() -> None:
    walk = cleaning(aborted=((7, 2, 6, 2), (7, 10, 14, 10)))
    assert not walk.retention(data(8, 7)).drops_all
    assert walk.retention(data(11, 7)).drops_all


def test_aborts_are_taken_in_the_order_of_their_offsets() -> None:
    walk = cleaning(aborted=((7, 10, 14, 10), (7, 2, 6, 2)))
    # This record is in the transaction of producer 7 that begins at offset 2.
    assert walk.retention(data(2, 7)).drops_all
    assert walk.retention(marker(6, 7)).noted == (7, 2, 6, 2)
    assert not walk.retention(data(8, 7)).drops_all
    assert walk.retention(marker(9, 7)).noted is None
    assert walk.retention(data(11, 7)).drops_all
    assert walk.retention(marker(14, 7)).noted == (7, 10, 14, 10)


def test_a_second_marker_has_no_data_of_its_own() -> None:
    walk = cleaning()
    assert walk.retention(data(3, 7))[::2] == (False, False)
    assert not walk.retention(marker(6, 7)).is_empty_end
    assert walk.retention(marker(9, 7)).is_empty_end


def test_a_batch_outside_of_transactions_is_not_dropped_with_one() -> None:
    walk = cleaning(aborted=((7, 2, 6, 2),))
    assert not walk.retention(facts(3, 7)).drops_all
    assert walk.retention(data(4, 7)).drops_all


def test_aborts_with_data_and_without_an_index_entry_are_found() -> None:
    walk = UnindexedAborts({20})
    for producer_id, offset in ((7, 2), (7, 4), (8, 5), (9, 6)):
        walk.data(producer_id, offset)
    assert walk.marker(7, 10, is_abort=True) == Aborted(7, 2, 10, 0)
    assert walk.marker(7, 11, is_abort=True) is None, "without data"
    assert walk.marker(8, 12, is_abort=False) is None, "committed"
    assert walk.marker(9, 20, is_abort=True) is None, "has an entry"
    walk.data(7, 21)
    walk.gap()
    assert walk.marker(7, 22, is_abort=True) is None, "the gap may have had its marker"


@pytest.mark.parametrize(
    ("last", "batch", "kept"),
    [
        (LastOfProducer(0, 5), facts(5, 7), True),
        (LastOfProducer(0, 5), facts(4, 7), False),
        (LastOfProducer(0, 5), marker(6, 7), False),
        (LastOfProducer(0, None), marker(6, 7), True),
        (LastOfProducer(1, None), marker(6, 7), False),
        (LastOfProducer(0, None), facts(6, 7), False),
        (None, facts(5, 7), False),
        (None, facts(99, 7), True),
        (None, facts(99), True),
        (None, facts(98), False),
    ],
)
def test_only_a_producers_last_batch_keeps_its_header(
    last: LastOfProducer | None, batch: BatchFacts, kept: bool
) -> None:
    assert cleaning(producers={} if last is None else {7: last}).retention(batch).keeps_header is kept


def test_a_full_map_says_so() -> None:
    latest = LatestOffsets(2)
    latest.note(b"a", 1)
    assert not latest.is_full
    latest.note(b"a", 2)
    latest.note(b"b", 3)
    assert latest.is_full and len(latest) == 2
