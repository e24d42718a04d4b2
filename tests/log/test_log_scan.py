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
from oncelog.log.scan import HEADER_BYTES, find_headers, scan_whole, whole_batches
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
