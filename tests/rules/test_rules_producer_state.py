"""The producer table: a comparison with a dict, the packed form, and its memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.append_notation import format_entry, parse_entry

from oncelog.limits import DEFAULT_LIMITS
from oncelog.rules.idempotence.append import (
    Duplicate,
    ProducedBatch,
    ProducerEntry,
    RememberedBatch,
    Store,
    decide_append,
)
from oncelog.rules.idempotence.producer_state import (
    PLAIN,
    ProducerTable,
    append_time_ms,
    has_open_transaction,
    joined,
    pack_entry,
    unpack_entry,
    with_older,
)
from oncelog.types import Origin

_PLAIN_BYTES = 43
INT64 = st.integers(-(2**63), 2**63 - 1)
OFFSETS = st.integers(0, 2**63 - 1) | st.integers(0, 1000)
TIMES = INT64 | st.integers(0, 10**13)
BATCHES = st.builds(
    RememberedBatch, st.none() | st.integers(0, 2**31 - 1), OFFSETS, st.integers(0, 2**31 - 1), TIMES
)
ENTRIES = st.builds(
    ProducerEntry,
    st.none() | st.integers(0, 32767),
    st.none() | st.integers(0, 2**31 - 1),
    TIMES,
    TIMES,
    st.none() | OFFSETS,
    st.lists(BATCHES, max_size=5).map(tuple),
)


@settings(deadline=None)
@given(ENTRIES)
def test_packing_loses_nothing(entry: ProducerEntry) -> None:
    assert unpack_entry(pack_entry(entry)) == entry


def test_packing_keeps_the_first_and_no_sequence_of_batches_that_lie_far_apart() -> None:
    known = (RememberedBatch(0, 5, 0, 9), RememberedBatch(None, 2**40, 0, 9))
    entry = ProducerEntry(0, None, 9, 9, None, known)
    assert unpack_entry(pack_entry(entry)) == entry
    assert pack_entry(entry._replace(batches=known[1:])).endswith(b"\xff" * 4)


def test_a_plain_entry_has_its_newest_batch_in_its_first_bytes() -> None:
    entry = _entry(3)
    packed, newest = pack_entry(entry), pack_entry(entry._replace(batches=entry.batches[-1:]))
    assert (packed[0], len(newest), len(packed)) == (PLAIN, _PLAIN_BYTES, _PLAIN_BYTES + 4 * 16)
    assert packed[:_PLAIN_BYTES] == newest


@pytest.mark.parametrize(
    ("first_offset", "timestamp_ms", "is_tight"),
    [
        (2**32 + 4, 9, True),
        (5, 9, True),
        (4, 9, False),
        (2**33, 9, False),  # above the offset of the newest batch
        (5, 9 + 2**31 - 1, True),
        (5, 9 + 2**31, False),
    ],
)
def test_batches_that_lie_close_together_are_packed_tightly(
    first_offset: int, timestamp_ms: int, is_tight: bool
) -> None:
    known = (RememberedBatch(0, first_offset, 0, timestamp_ms), RememberedBatch(1, 2**32 + 4, 0, 9))
    entry = ProducerEntry(0, None, 9, 9, None, known)
    packed = pack_entry(entry)
    assert unpack_entry(packed) == entry
    assert (packed[0] == PLAIN, len(packed)) == (is_tight, _PLAIN_BYTES + 16 if is_tight else 19 + 2 * 24)


@pytest.mark.parametrize("first_offset", [None, 0, 7])
@pytest.mark.parametrize("coordinator_epoch", [None, 4])
def test_a_packed_entry_tells_its_transaction_and_its_time(
    first_offset: int | None, coordinator_epoch: int | None
) -> None:
    entry = ProducerEntry(None, coordinator_epoch, 5, 77, first_offset, ())
    packed = pack_entry(entry)
    assert (has_open_transaction(packed), append_time_ms(packed)) == (first_offset is not None, 77)


def test_epochs_are_told_of_ids_that_have_one() -> None:
    table = ProducerTable(max_active=2, shard_entries=2)
    for pid in range(8):
        table.put(pid, _entry(pid)._replace(producer_epoch=None if pid % 2 else pid + 10))
    assert sorted(table.epochs_of({0, 1, 2, 6, 7, 9})) == [(0, 10), (2, 12), (6, 16)]
    assert sorted(table.epochs_of(range(100))) == [(0, 10), (2, 12), (4, 14), (6, 16)]


def test_many_packed_entries_at_once_are_spread_over_shards() -> None:
    table = ProducerTable(max_active=2, shard_entries=2)
    packed = pack_entry(_entry(1))
    table.put_packed(dict.fromkeys(range(10), packed))
    assert sorted(map(len, table.image().idle)) == [1, 2, 2, 2, 3]
    table.put_packed(dict.fromkeys(range(10, 16), packed))
    assert sorted(map(len, table.image().idle)) == [2] * 8


@pytest.mark.parametrize(
    ("age_ms", "first_offset", "is_expired"),
    [(599, None, False), (600, None, True), (601, None, True), (600, 0, False), (9000, 5, False)],
)
@pytest.mark.parametrize("is_idle", [False, True])
def test_an_id_expires_by_the_time_of_its_last_append(
    is_idle: bool, age_ms: int, first_offset: int | None, is_expired: bool
) -> None:
    table = ProducerTable()
    entry = _entry(1, append_ms=10_000 - age_ms)._replace(current_txn_first_offset=first_offset)
    if is_idle:
        table.put_packed({1: pack_entry(entry)})
    else:
        table.put(1, entry)
    assert table.expire(10_000, 600) == is_expired
    assert (table.get(1) is None, len(table)) == (is_expired, not is_expired)


@pytest.mark.parametrize(("max_examined", "expired"), [(0, 0), (1, 2), (2, 2), (3, 4), (4, 4), (None, 8)])
def test_expiry_examines_whole_shards_up_to_a_number(max_examined: int | None, expired: int) -> None:
    table = ProducerTable(shard_entries=2)
    table.put_packed(dict.fromkeys(range(8), pack_entry(_entry(1))))
    assert sorted(map(len, table.image().idle)) == [2, 2, 2, 2]
    assert table.expire(2_000_000_000_000, 600, max_examined) == expired
    assert len(table) == 8 - expired


@pytest.mark.parametrize(
    ("entry", "earlier", "expected"),
    [
        ("e0 5-5@15", "e0 3-3@13 4-4@14", "e0 3-3@13 4-4@14 5-5@15"),
        ("e0 5-5@15", "e0 4-4@14 5-5@15 6-6@16", "e0 4-4@14 5-5@15"),
        ("e0 6-9@16", "e0 1-1@1 2-2@2 3-3@3 4-4@4 5-5@5", "e0 2-2@2 3-3@3 4-4@4 5-5@5 6-9@16"),
        ("e1 0-0@15", "e0 3-3@13 4-4@14", "e1 0-0@15"),
        ("e0 c1", "e0 3-3@13", "e0 3-3@13 c1"),
    ],
)
def test_batches_of_the_deleted_part_of_a_log_stay_known(entry: str, earlier: str, expected: str) -> None:
    known, before = parse_entry(entry), parse_entry(earlier)
    assert known is not None and before is not None
    assert format_entry(with_older(known, before)) == expected


@pytest.mark.parametrize(
    ("replayed", "stored", "expected"),
    [
        ("e0 5-5@15", "e0 3-3@13 4-4@14", "e0 3-3@13 4-4@14 5-5@15"),
        ("e0 3-3@13", "e0 4-4@14 5-5@15", "e0 3-3@13 4-4@14 5-5@15"),
        ("e0 3-3@13 6-9@19", "e0 1-1@1 2-2@2 4-4@14 5-5@15", "e0 2-2@2 3-3@13 4-4@14 5-5@15 6-9@19"),
        ("e0 3-3@13", "e1 c0", "e1 c0"),
        ("e1 0-0@15", "e0 3-3@13 4-4@14", "e1 0-0@15"),
        ("e0 3-3@13 c1", "e0 3-3@13 c2", "e0 3-3@13 c2"),
    ],
)
def test_a_replay_and_a_snapshot_give_the_newer_state(replayed: str, stored: str, expected: str) -> None:
    read, kept = parse_entry(replayed), parse_entry(stored)
    assert read is not None and kept is not None
    assert format_entry(joined(read, kept)) == expected


@pytest.mark.parametrize("stored_epoch", [0, 1])
def test_the_log_says_which_transaction_is_open(stored_epoch: int) -> None:
    read = _entry(1)._replace(producer_epoch=0, current_txn_first_offset=7)
    kept = read._replace(producer_epoch=stored_epoch, current_txn_first_offset=None)
    assert joined(read, kept) == read
    assert joined(kept, read).current_txn_first_offset is None


def test_the_largest_id_is_found_among_those_at_work_and_idle_ones() -> None:
    table = ProducerTable(max_active=2, shard_entries=2)
    assert table.largest_id == -1
    for pid in (9, 30, 4, 5, 6, 7):
        table.put(pid, _entry(pid))
    assert table.largest_id == 30
    table.put(31, _entry(31))
    assert table.largest_id == 31


def _entry(pid: int, batches: int = 5, append_ms: int = 1_700_000_000_000) -> ProducerEntry:
    known = tuple(RememberedBatch(n, pid * 7 + n, 0, append_ms + n) for n in range(batches))
    return ProducerEntry(0, None, append_ms + batches, append_ms, None, known)


@pytest.mark.behaviour("I19")
@pytest.mark.parametrize(("batches", "limit_bytes"), [(1, 199), (5, 253)])
def test_memory_per_idle_producer(batches: int, limit_bytes: int) -> None:
    """A million producer ids take at most 253 MB with five batches each, and 199 MB with one.

    The table has an eighth of the default number of active entries, so fewer producer ids show the same.
    """
    count, max_active = 15_000, DEFAULT_LIMITS.max_producers_at_work // 8
    gc.collect()
    tracemalloc.start()
    table = ProducerTable(max_active)
    for pid in range(count):
        table.put(10_000_000 + pid, _entry(pid, batches))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(table) == count
    assert used / count < limit_bytes
    assert table.get(10_000_000) == _entry(0, batches)
    # Only active entries are objects; idle ones are packed into bytes, which the garbage collector does not
    # visit.
    assert len(table.active) == max_active


@pytest.mark.soak
@pytest.mark.behaviour("I19")
@pytest.mark.parametrize("batches", [1, 5])
def test_a_million_idle_producers_fit_into_250_mb(batches: int) -> None:
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    table = ProducerTable()
    for pid in range(1_000_000):
        table.put(10_000_000 + pid, _entry(pid, batches))
    assert len(table) == 1_000_000
    assert process.memory_info().rss - before < 250_000_000


@pytest.mark.behaviour("I19")
def test_expiry_goes_through_a_large_table_in_slices() -> None:
    table = ProducerTable()
    for pid in range(20_000):
        table.put(pid, _entry(pid, 1, append_ms=pid))
    slices = []
    while len(table) > 10_000:
        slices.append(table.expire(now_ms=10_000, expiration_ms=1, max_examined=1000))
    assert len(slices) > 15
    assert max(slices) < 1200
    assert {pid for pid, _ in table.items()} == set(range(10_000, 20_000))


def test_a_table_that_shrank_gives_its_memory_back() -> None:
    table = ProducerTable()
    tracemalloc.start()
    for pid in range(20_000):
        table.put(pid, _entry(pid, 1))
    full = tracemalloc.get_traced_memory()[0]
    assert table.expire(2_000_000_000_000, 1) == 20_000
    empty = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert (len(table), list(table.items())) == (0, [])
    assert empty < full / 10


def _joined(parts: Iterable[dict[int, bytes]]) -> dict[int, bytes]:
    return {pid: packed for part in parts for pid, packed in part.items()}


class TableMachine(RuleBasedStateMachine):
    """Append batches of many producers through the append rule and the table.

    Compare with a list of all stored batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = ProducerTable(max_active=4, shard_entries=2)
        self.history: dict[int, list[tuple[int, int, int]]] = {}
        self.last_append: dict[int, int] = {}
        self.next_offset = 0
        self.now_ms = 1000
        self.image = self.table.image()
        self.imaged: dict[int, bytes] = {}

    def _decide(self, pid: int, epoch: int, sequence: int, count: int) -> object:
        batch = ProducedBatch(pid, epoch, sequence, count - 1, 5, False)
        entry = self.table.get(pid)
        return decide_append(entry, batch, Origin.CLIENT, base_offset=self.next_offset, now_ms=self.now_ms)

    @rule(pid=st.integers(0, 30), count=st.integers(1, 3), bump=st.booleans())
    def append_next(self, pid: int, count: int, bump: bool) -> None:
        history = self.history.get(pid, [])
        epoch, sequence = (history[-1][0], history[-1][1]) if history else (0, 0)
        if bump and history:
            epoch, sequence = epoch + 1, 0
        verdict = self._decide(pid, epoch, sequence, count)
        assert isinstance(verdict, Store)
        self.table.put(pid, verdict.entry)
        # (epoch, next sequence, base offset)
        self.history.setdefault(pid, []).append((epoch, sequence + count, self.next_offset))
        self.last_append[pid] = self.now_ms
        self.next_offset += count

    @precondition(lambda self: self.history)
    @rule(data=st.data(), back=st.integers(1, 8))
    def append_again(self, data: st.DataObject, back: int) -> None:
        pid = data.draw(st.sampled_from(sorted(self.history)))
        history = self.history[pid]
        if back > len(history):
            return
        epoch, end, offset = history[-back]
        before = history[-back - 1] if back < len(history) else None
        start = before[1] if before and before[0] == epoch else 0
        verdict = self._decide(pid, epoch, start, end - start)
        is_known = back <= 5 and epoch == history[-1][0]
        assert isinstance(verdict, Duplicate) == is_known
        assert not isinstance(verdict, Store)
        if isinstance(verdict, Duplicate):
            assert verdict.base_offset == offset

    @rule()
    def take_image(self) -> None:
        assert _joined(self.image.drain()) == self.imaged
        self.image = self.table.image()
        self.imaged = {pid: pack_entry(entry) for pid, entry in self.table.items()}
        assert self.image.entry_count == len(self.imaged)

    @invariant()
    def image_stays_as_it_was(self) -> None:
        assert _joined(self.image.parts()) == self.imaged

    @rule(step_ms=st.integers(1, 500))
    def expire(self, step_ms: int) -> None:
        self.now_ms += step_ms
        expired = {pid for pid, at in self.last_append.items() if self.now_ms - at >= 600}
        assert self.table.expire(self.now_ms, 600) == len(expired)
        for pid in expired:
            del self.history[pid], self.last_append[pid]

    @invariant()
    def knows_the_same(self) -> None:
        assert len(self.table) == len(self.history)
        assert {pid for pid, _ in self.table.items()} == set(self.history)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTableMachine = pytest.mark.behaviour("I6", "I7", "I8", "I19")(TestTableMachine)
