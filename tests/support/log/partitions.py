"""Partitions and batches for the tests of the log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oncelog.config import TOPIC
from oncelog.limits import Limits
from oncelog.log.config import LogConfig
from oncelog.log.disk import Disk
from oncelog.log.partition import Appended, Partition
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.control import decode_control, encode_end_marker
from oncelog.wire.header import iter_batches
from oncelog.wire.records import NewRecord, decode_records

NOW_MS = 1_700_000_000_000
TP = TopicPartition("orders", 0)
TOPIC_ID = bytes(range(16))


def config(expiration_ms: int = 86_400_000, *, limits: Limits | None = None, **settings: Any) -> LogConfig:
    """Return topic settings. Keywords are setting names with underscores; all others have their defaults."""
    return LogConfig.from_settings(TOPIC.parse(settings), expiration_ms, limits or Limits())


def limit(partition: Partition, **limits: Any) -> None:
    """Replace some limits of an open partition."""
    partition.reconfigure(replace(partition.config, limits=Limits(**limits)))


def open_partition(disk: Disk | None = None, log_config: LogConfig | None = None, **how: Any) -> Partition:
    """Open a partition. Sync the directory if it is new, as the creation of a topic does."""
    how = {"topic_id": TOPIC_ID, "now_ms": NOW_MS, "clean_shutdown": False, **how}
    disk = MemoryDisk() if disk is None else disk
    is_new = not disk.exists(str(TP))
    partition = Partition.open(disk, str(TP), TP, log_config or config(), **how)
    if is_new:
        disk.sync_directory()
    return partition


def batch(
    sequence: int | None = None,
    count: int = 1,
    *,
    pid: int | None = None,
    epoch: int = 0,
    value: bytes = b"v",
    key: bytes | None = b"k",
    timestamp_ms: int = NOW_MS,
    **how: Any,
) -> memoryview:
    """Return a batch as a client sends it.

    With a `sequence` it is idempotent; its producer id is then 7 by default.
    """
    if sequence is not None:
        pid = 7 if pid is None else pid
        how |= {"producer_id": pid, "producer_epoch": epoch, "base_sequence": sequence}
    records = [NewRecord(timestamp_ms + index, key, value) for index in range(count)]
    return memoryview(build_batch(records, **how))


def marker(pid: int, *, commit: bool, epoch: int = 0, coordinator_epoch: int = 0) -> memoryview:
    return memoryview(encode_end_marker(pid, epoch, commit, coordinator_epoch, NOW_MS))


def put(partition: Partition, data: memoryview, *, now_ms: int = NOW_MS) -> Appended:
    return partition.append(data, origin=Origin.CLIENT, now_ms=now_ms)


def put_marker(partition: Partition, data: memoryview, *, now_ms: int = NOW_MS) -> Appended:
    return partition.append(data, origin=Origin.COORDINATOR, now_ms=now_ms)


def read_all(partition: Partition, max_bytes: int = 1 << 20) -> bytes:
    """Return every stored byte, read in pieces of at most `max_bytes`."""
    offset, parts = partition.log_start_offset, []
    while offset < partition.log_end_offset:
        found = partition.read(offset, max_bytes)
        assert found.next_offset > offset, f"nothing can be read at offset {offset}"
        parts.append(bytes(found.records))
        offset = found.next_offset
    return b"".join(parts)


def values_and_markers(partition: Partition) -> list[str]:
    """Return the values of a partition's records, and `<commit>` or `<abort>` for each marker, in order."""
    found: list[str] = []
    offset = 0
    while offset < partition.log_end_offset:
        piece = partition.read(offset, 1 << 20)
        data, offset = memoryview(piece.records), piece.next_offset
        for position, header in iter_batches(data):
            batch = data[position : position + header.size_bytes]
            control = decode_control(batch) if header.is_control else None
            if control is not None and control.type is not None:
                found.append(f"<{control.type.name.lower()}>")
            else:
                found += [(record.value or b"").decode() for record in decode_records(batch)]
    return found
