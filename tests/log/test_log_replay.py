"""Replay in blocks equals replay batch by batch, and a scan of headers reads few bytes."""

from __future__ import annotations

from random import Random

import pytest
from support.log.partitions import NOW_MS, batch, config, marker, open_partition, put, put_marker

from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.log import scan
from oncelog.log.background import BackgroundQueue
from oncelog.log.producers import PartitionProducers
from oncelog.log.scan import HeaderBlock, ScannedBatch, replayed_headers, scan_headers
from oncelog.log.snapshot import Snapshots
from oncelog.testing.memory_disk import MemoryDisk, MemoryFile
from oncelog.wire.batch import HEADER_BYTES, read_header, stamp


def _producers() -> PartitionProducers:
    return PartitionProducers(Snapshots(MemoryDisk(), ""), BackgroundQueue())


def _random_headers(rng: Random) -> bytes:
    """Return random batches with changing epochs: of several producers, without a producer id, and of
    coordinators.
    """
    headers, offset = [], rng.randrange(1000)
    for _ in range(rng.randrange(1, 60)):
        count = rng.randrange(1, 4)
        pid = rng.choice([None, 1, 2, 3])
        sequence = rng.choice([None, rng.randrange(100), 2**31 - 1])
        data = batch(count=count, timestamp_ms=NOW_MS + rng.randrange(50), producer_id=pid,
                     producer_epoch=rng.choice([None, 0, 1, 1, 1, 2]), base_sequence=sequence)  # fmt: skip
        stamp(data, 0, offset, 0)
        headers.append(bytes(data[:HEADER_BYTES]))
        offset += count
    return b"".join(headers)


@pytest.mark.behaviour("I17", "I20")
@pytest.mark.parametrize("seed", range(150))
def test_a_block_of_headers_says_the_same_as_its_batches(seed: int) -> None:
    rng = Random(seed)
    one_by_one, in_blocks = _producers(), _producers()
    for round_ms in range(3):
        headers = _random_headers(rng)
        for position in range(0, len(headers), HEADER_BYTES):
            header = read_header(headers, position)
            if header.producer_id is None or header.producer_epoch is None:
                continue
            one_by_one.replay(header, memoryview(b""), NOW_MS + round_ms)
        replayed = replayed_headers(HeaderBlock(0, len(headers), headers), 0, 2**63 - 1)
        in_blocks.replay_plain(headers, replayed.batches, NOW_MS + round_ms, lambda _: True)
        assert dict(in_blocks.table.items()) == dict(one_by_one.table.items())


class CountingFile(MemoryFile):
    """A file that counts the bytes read from it."""

    def __init__(self, disk: MemoryDisk, path: str) -> None:
        super().__init__(disk, disk.inode(path), path)
        self.read_bytes = 0

    def pread(self, size: int, position: int) -> bytes:
        data = super().pread(size, position)
        self.read_bytes += len(data)
        return data


def _log_of(values: list[bytes]) -> CountingFile:
    disk = MemoryDisk()
    partition = open_partition(disk)
    for number, value in enumerate(values):
        put(partition, batch(number, value=value))
    return CountingFile(disk, f"orders-0/{0:020d}.log")


@pytest.mark.parametrize("block", [1, 7, 4096])
def test_blocks_hold_every_header_once(block: int) -> None:
    limits = Limits(scan_block_headers=block)
    file = _log_of([bytes(size) for size in (10, 90_000, 20, 5000, 70_000, 1, 1)])
    found = list(scan_headers(file, 0, file.size(), limits))
    expected = [item for item in scan.scan(file, 0, file.size()) if isinstance(item, ScannedBatch)]
    headers = b"".join(part.headers for part in found)
    positions = range(0, len(headers), HEADER_BYTES)
    assert [read_header(headers, position) for position in positions] == [item.header for item in expected]
    assert [part.position for part in found[1:]] == [part.end for part in found[:-1]]
    assert (found[0].position, found[-1].end) == (0, file.size())


def test_of_large_batches_only_headers_are_read() -> None:
    limits = Limits(scan_chunk_bytes=1 << 12)
    file = _log_of([bytes(50_000)] * 20)
    assert sum(len(part.headers) for part in scan_headers(file, 0, file.size(), limits)) == 20 * HEADER_BYTES
    assert file.read_bytes < 10_000


def test_looking_for_one_batch_reads_little() -> None:
    file = _log_of([bytes(10)] * 500)
    next(scan.scan(file, 0, file.size()))
    assert file.read_bytes == DEFAULT_LIMITS.scan_first_chunk_bytes


def test_a_header_that_leads_nowhere_ends_the_scan() -> None:
    file = _log_of([bytes(10)] * 3)
    end = file.size()
    position = list(scan_headers(file, 0, end))[-1].end
    assert position == end
    file.pwrite(b"\xff\xff\xff\xff", end // 3 + 8)
    assert list(scan_headers(file, 0, end))[-1].end == end // 3


@pytest.mark.behaviour("I17")
def test_transactions_between_plain_batches_are_replayed() -> None:
    log_config = config(index_interval_bytes=100, limits=Limits(scan_block_headers=3))
    disk = MemoryDisk()
    partition = open_partition(disk, log_config)
    for number in range(4):
        put(partition, batch(number, pid=1))
    put(partition, batch(0, pid=2, is_transactional=True))
    put_marker(partition, marker(2, commit=False))
    for number in range(4, 9):
        put(partition, batch(number, pid=1))
    put(partition, batch(1, pid=2, is_transactional=True))
    before = partition.describe_producers()
    again = open_partition(disk.after_kill(), log_config)
    assert again.describe_producers() == before
    assert again.last_stable_offset == partition.last_stable_offset == 11
    assert again.aborted_transactions(0, 100) == partition.aborted_transactions(0, 100)


def test_batches_to_be_verified_are_kept_for_a_bounded_number_of_producers() -> None:
    """Any client can send producer ids that were never assigned, so their number must be bounded."""
    log = _producers()
    count = DEFAULT_LIMITS.max_verifying_producers
    for producer_id in range(count + 10):
        log.begin_verification(producer_id, 0, 5, raises_epoch=False)
    assert len(log.verifying) == count
    log.begin_verification(count, 0, 3, raises_epoch=False)
    assert log.verifying[count].lowest_sequence == 3
    log.end_verification(count)
    assert count not in log.verifying
