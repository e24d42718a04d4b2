"""The loops of `oncelog.log.scan` over many batches, in Python and in C, compared with a scan batch by
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from support.log.partitions import NOW_MS, TP, batch, config, open_partition
from support.row_loops import c_module

from oncelog.limits import Limits
from oncelog.log import scan, segment
from oncelog.log.scan import (
    HEADER_BYTES,
    count_plausible,
    find_headers,
    headers_to_replay,
    index_headers,
    scan_whole,
    whole_batches,
)
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Origin
from oncelog.wire.header import HEADER, iter_batches

DAMAGE = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=2)
BATCHES = st.lists(
    st.tuples(
        st.integers(1, 4),  # number of records
        st.sampled_from([0, 0, 30, 300]),  # bytes of a record
        st.sampled_from([0, 0, 0, 1, 7]),  # offsets that are missing before the batch
        st.sampled_from([0, 1, 2, 9, -3, -NOW_MS - 1]),  # the timestamp, relative to now
        st.sampled_from([None, 7, 8]),  # the producer id
    ),
    max_size=20,
)
Batch = tuple[int, int, int, int, int | None]


def log_of(batches: list[Batch], damage: Sequence[tuple[int, int]] = ()) -> bytearray:
    """Return a log with these batches. `damage` lists positions, and the bits to flip in the bytes there."""
    data, offset = bytearray(), 0
    for count, size, gap, late_ms, pid in batches:
        sequence = None if pid is None else offset
        records = batch(sequence, count, pid=pid, value=bytes(size), timestamp_ms=max(NOW_MS + late_ms, -1))
        offset += gap
        HEADER.pack_into(records, 0, offset, *HEADER.unpack_from(records)[1:])
        offset += count
        data += records
    for position, change in damage:
        if data:
            data[position % len(data)] ^= change
    return data


@given(BATCHES, DAMAGE, st.integers(0, 200))
def test_whole_batches_are_those_with_right_checksums(
    batches: list[Batch], damage: list[tuple[int, int]], cut: int
) -> None:
    data = bytes(log_of(batches, damage))
    data = data[: max(len(data) - cut, 0)]
    headers, end = whole_batches(data, crc32c)
    one_by_one = [
        found for found in scan.scan(MemoryFile(data), 0, len(data), verify=True)
        if isinstance(found, scan.ScannedBatch)
    ]  # fmt: skip
    assert end == sum(found.header.size_bytes for found in one_by_one)
    assert headers == b"".join(found.bytes()[:HEADER_BYTES] for found in one_by_one)
    assert c_module("oncelog.log._scan").whole_batches(data, crc32c) == (headers, end)


@given(BATCHES, DAMAGE, st.integers(-70, 4000), st.integers(0, 4000), st.integers(0, 20))
def test_headers_are_found_alike_in_both_languages(
    batches: list[Batch], damage: list[tuple[int, int]], position: int, limit: int, max_count: int
) -> None:
    data = bytes(log_of(batches, damage))
    for start in (0, max(position, 0)):
        found = find_headers(data, start, limit, max_count)
        assert c_module("oncelog.log._scan").find_headers(data, start, limit, max_count) == found
    assert c_module("oncelog.log._scan").find_headers(data, position, 1 << 40, 1 << 40)[1] >= position


FIELDS = {"base_offset": 0, "batch_length": 1, "leader_epoch": 2, "magic": 3, "attributes": 5, "delta": 6,
          "max_timestamp_ms": 8, "producer_id": 9, "producer_epoch": 10, "records_count": 12}  # fmt: skip
INT64 = st.sampled_from([0, 1, 5, -1, -(2**63), 2**62, 2**63 - 2, 2**63 - 1])
INT32 = st.sampled_from([0, 1, -1, -(2**31), 2**31 - 1])
EXTREMES = {
    **dict.fromkeys(["base_offset", "max_timestamp_ms", "producer_id"], INT64),
    **dict.fromkeys(["batch_length", "leader_epoch", "delta", "records_count"], INT32),
    **dict.fromkeys(["attributes"], st.sampled_from([0, 0x10, 0x20, 0x30, 7, -1, -(2**15)])),
    **dict.fromkeys(["producer_epoch"], st.sampled_from([0, -1, 2**15 - 1, -(2**15)])),
    **dict.fromkeys(["magic"], st.sampled_from([2, 1, -1, 127])),
}
CHANGES = st.lists(
    st.sampled_from(sorted(EXTREMES)).flatmap(
        lambda name: st.tuples(st.integers(0, 100), st.just(FIELDS[name]), EXTREMES[name])
    ),
    max_size=3,
)
"""Fields that get extreme values: the number of the header, the number of the field, and the value."""
BASES = st.sampled_from([0, 0, 3, 2**62, 2**63 - 2**31, 2**63 - 1])


def headers_of(batches: list[Batch], changes: list[tuple[int, int, int]], base_offset: int) -> bytes:
    """Return the headers of a log that begins at `base_offset`, with these changes."""
    data = bytes(log_of(batches))
    rows = [list(HEADER.unpack_from(data, position)) for position, _ in iter_batches(data)]
    for row in rows:
        row[0] = min(row[0] + base_offset, 2**63 - 1)
    for number, field, value in changes:
        if rows:
            rows[number % len(rows)][field] = value
    return b"".join(HEADER.pack(*row) for row in rows)


@given(BATCHES, CHANGES, BASES, BASES)
def test_plausible_headers_are_counted_alike_in_both_languages(
    batches: list[Batch], changes: list[tuple[int, int, int]], first_offset: int, base_offset: int
) -> None:
    headers = headers_of(batches, changes, first_offset)
    count, size = count_plausible(headers, base_offset)
    assert c_module("oncelog.log._scan").count_plausible(headers, base_offset) == (count, size)
    assert 0 <= count * HEADER_BYTES <= len(headers)
    for position in range(0, count * HEADER_BYTES, HEADER_BYTES):
        fields = HEADER.unpack_from(headers, position)
        assert fields[3] == 2 and fields[6] >= 0 and 0 <= fields[0] - base_offset < 2**31


@given(
    BATCHES,
    CHANGES,
    BASES,
    st.sampled_from([-1, 0, 3, 1 << 40, 2**63 - 2]),
    st.tuples(st.integers(0, 1 << 40), st.sampled_from([-2, 0, 0, 5]), st.integers(0, 999), INT64, INT64),
    st.sampled_from([0, 100, 400, 2**31 - 1]),
)
def test_headers_are_indexed_alike_in_both_languages(
    batches: list[Batch],
    changes: list[tuple[int, int, int]],
    base_offset: int,
    max_offset: int,
    state: tuple[int, int, int, int, int],
    interval_bytes: int,
) -> None:
    headers = headers_of(batches, changes, base_offset)
    state = (state[0], base_offset + max(state[1], -base_offset), *state[2:])
    if state[1] >= 2**63 or abs(state[4] - base_offset) >= 2**63:
        return
    how = headers, state, base_offset, max_offset, interval_bytes
    assert c_module("oncelog.log._scan").index_headers(*how) == index_headers(*how)


@given(BATCHES, CHANGES, BASES, st.integers(0, 1 << 40), INT64, INT64)
def test_headers_are_replayed_alike_in_both_languages(
    batches: list[Batch],
    changes: list[tuple[int, int, int]],
    base_offset: int,
    position: int,
    start: int,
    end: int,
) -> None:
    headers = headers_of(batches, changes, base_offset)
    in_python = headers_to_replay(headers, position, start, end)
    in_c = c_module("oncelog.log._scan").headers_to_replay(headers, position, start, end)
    assert in_c == in_python
    assert list(in_c[2]) == list(in_python[2]), "the order of producers is that of their first batches"


def test_the_loops_in_c_refuse_arguments_of_more_than_64_bits() -> None:
    module = c_module("oncelog.log._scan")
    for call in (
        lambda: module.count_plausible(b"", 2**63),
        lambda: module.index_headers(b"", (0, 0, 0, 0, 2**63), 0, 0, 0),
        lambda: module.headers_to_replay(b"", 0, 0, 2**63),
    ):
        with pytest.raises(OverflowError):
            call()
    assert module.index_headers(bytes(60), (1, 2, 3, 4, 5), 0, 0, 0) == (
        (1, 2, 3, 4, 5),
        False,
        2,
        [],
        [],
        [],
        [],
    )
    with pytest.raises(TypeError):
        module.index_headers(b"", (0, 0), 0, 0, 0)


def test_the_loops_in_c_compare_numbers_at_the_ends_of_64_bits() -> None:
    """Sanitizers found an overflow in the first call. The second one noted a leader epoch too many."""
    module = c_module("oncelog.log._scan")
    data = bytes(log_of([(1, 0, 0, 0, None)] * 2))
    assert module.find_headers(data, 1, -(2**63), 9) == find_headers(data, 1, -(2**63), 9) == (b"", 1)
    header = HEADER.pack(-(2**63), 49, 0, 2, 0, 0, -1, 0, 0, 7, 0, 0, 1)
    below = headers_to_replay(header, 0, -(2**63), 2**63 - 1)
    assert module.headers_to_replay(header, 0, -(2**63), 2**63 - 1) == below == ({}, False, {})


def test_the_loops_in_c_pass_an_error_of_the_checksum_on() -> None:
    module = c_module("oncelog.log._scan")
    data = bytes(log_of([(1, 0, 0, 0, None)]))
    with pytest.raises(ZeroDivisionError):
        module.whole_batches(data, lambda view: 1 // 0)
    with pytest.raises(TypeError):
        module.whole_batches(data, lambda view: "no number")
    with pytest.raises(OverflowError):
        module.whole_batches(data, lambda view: -1)


class MemoryFile:
    """A log file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def pread(self, size: int, position: int) -> bytes:
        return self.data[position : position + size]


@pytest.mark.parametrize("chunk_bytes", [61, 100, 1 << 20])
@pytest.mark.parametrize("loops", ["Python", "C"])
def test_a_batch_larger_than_a_chunk_is_read_whole(
    chunk_bytes: int, loops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_c", None if loops == "Python" else c_module("oncelog.log._scan"))
    data = bytes(log_of([(1, 0, 0, 0, None), (2, 300, 0, 0, 7), (1, 0, 1, 0, None)]))
    blocks = list(scan_whole(MemoryFile(data), 0, len(data), Limits(scan_chunk_bytes=chunk_bytes)))
    headers = b"".join(block.headers for block in blocks)
    assert headers == b"".join(data[position : position + HEADER_BYTES] for position, _ in iter_batches(data))
    assert (blocks[0].position, blocks[-1].end) == (0, len(data))
    # A batch that ends beyond the file is not read. If the file is shorter than expected, the scan ends
    # there.
    assert not list(scan_whole(MemoryFile(data[:65]), 0, 65, Limits(scan_chunk_bytes=61)))
    assert not list(scan_whole(MemoryFile(data[:65]), 0, len(data), Limits(scan_chunk_bytes=chunk_bytes)))


@given(
    batches=BATCHES,
    damage=DAMAGE,
    recovery_point=st.integers(0, 30),
    interval_bytes=st.sampled_from([0, 100, 400]),
    chunk_bytes=st.sampled_from([61, 500, 1 << 20]),
)
@settings(deadline=None)
def test_batches_are_indexed_alike_one_by_one_and_in_blocks(
    batches: list[Batch],
    damage: list[tuple[int, int]],
    recovery_point: int,
    interval_bytes: int,
    chunk_bytes: int,
) -> None:
    data = bytes(log_of(batches, damage))
    limits = Limits(scan_chunk_bytes=chunk_bytes, index_run_entries=2)
    how = {
        "recovery_point": recovery_point,
        "log_config": config(index_interval_bytes=interval_bytes, limits=limits),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "scan_whole", lambda *arguments: iter(()))
        one_by_one = outcome_of(data, **how)
    assert outcome_of(data, **how) == one_by_one


def outcome_of(data: bytes, **how: Any) -> dict[str, Any]:
    """Recover a partition whose log has these bytes. Return its state and its files after an append."""
    disk = MemoryDisk()
    disk.mkdir(str(TP))
    file = disk.open(f"{TP}/{0:020d}.log", create=True)
    file.pwrite(data, 0)
    partition = open_partition(disk, **how)
    active = partition.log.segments.active
    state = {
        "end": partition.log_end_offset,
        "warnings": partition.recovery_warnings,
        "producers": partition.describe_producers(),
        "damaged": active.damaged,
        "has_gaps": active.has_gaps,
        "times": (active.first_timestamp_ms, active.max_timestamp_ms, active.max_timestamp_offset),
    }
    partition.append(batch(), origin=Origin.CLIENT, now_ms=NOW_MS)
    partition.close(NOW_MS)
    return state | {name: disk.read(f"{TP}/{name}") for name in disk.list(str(TP))}
