"""Read and write Kafka's small text files: offset checkpoints, leader epochs and partition.metadata.

A checkpoint consists of UTF-8 lines: version 0, the number of entries, one entry per line.
Source: Kafka's CheckpointFile, OffsetCheckpointFile, LeaderEpochCheckpointFile, PartitionMetadataFile.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping

from oncelog.config import INT64_MAX
from oncelog.errors import StorageError
from oncelog.log.disk import Disk
from oncelog.types import TopicPartition

RECOVERY_POINTS = "recovery-point-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
HIGH_WATERMARKS = "replication-offset-checkpoint"
CLEANED_OFFSETS = "cleaner-offset-checkpoint"
INDEXED_OFFSETS = "oncelog-txnindex-checkpoint"
"""For each partition, the offset below which its transaction indexes are complete: compaction has kept every
entry below this offset, or a restart has restored the lost ones.
"""
INDEX_STARTS = "oncelog-txnindex-start-checkpoint"
"""For each partition, the base offset from which every segment was created with a transaction index file. If
a segment at or above this offset lacks the file, the file was lost.
"""
LEADER_EPOCHS = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"
_MAX_EPOCH = 2**31 - 1


def encode_checkpoint(entries: Iterable[str]) -> bytes:
    lines = list(entries)
    return "".join(f"{line}\n" for line in ("0", str(len(lines)), *lines)).encode()


def decode_checkpoint(data: bytes) -> list[str]:
    """Return the entry lines of a checkpoint. Raises StorageError if the version or the count is wrong."""
    try:
        lines = data.decode().splitlines()
        version, count = int(lines[0]), int(lines[1])
    except (UnicodeDecodeError, ValueError, IndexError) as error:
        raise StorageError(f"the checkpoint is unreadable: {error}") from error
    entries = [line for line in lines[2:] if line.strip()]
    if version != 0 or count != len(entries):
        raise StorageError(f"the checkpoint has version {version} and {len(entries)} of {count} entries")
    return entries


def encode_offsets(offsets: Mapping[TopicPartition, int]) -> bytes:
    return encode_checkpoint(f"{tp.topic} {tp.partition} {offset}" for tp, offset in sorted(offsets.items()))


def read_offsets(disk: Disk, path: str) -> dict[TopicPartition, int]:
    """Return the offsets in a checkpoint file.

    The result is empty if the file is missing or unreadable. A partition without an entry gets a safe
    default, such as recovery point 0.
    """
    try:
        data = disk.read(path)
    except FileNotFoundError:
        return {}
    try:
        return decode_offsets(data)
    except StorageError:
        return {}


def decode_offsets(data: bytes) -> dict[TopicPartition, int]:
    """Return the offsets in the bytes of a checkpoint. Raises StorageError if they cannot be decoded."""
    try:
        lines = (line.split() for line in decode_checkpoint(data))
        return {TopicPartition(t, int(p)): _offset(offset) for t, p, offset in lines}
    except ValueError as error:
        raise StorageError(f"the checkpoint is unreadable: {error}") from error


def _offset(text: str) -> int:
    """Return the offset that a text contains. Raises ValueError if it does not fit the files of a log."""
    offset = int(text)
    if offset > INT64_MAX:
        raise ValueError(f"offset {offset} is too large")
    return offset


def write_epochs(disk: Disk, directory: str, epochs: Iterable[tuple[int, int]], *, sync: bool = True) -> None:
    """Write the leader epoch file: (epoch, start offset) pairs, both increasing."""
    lines = [f"{epoch} {start_offset}" for epoch, start_offset in epochs]
    disk.replace(f"{directory}/{LEADER_EPOCHS}", encode_checkpoint(lines), sync=sync)


def read_epochs(disk: Disk, directory: str) -> list[tuple[int, int]] | None:
    """Return the (epoch, start offset) pairs in the leader epoch file. Return None if the file is missing or
    unreadable.
    """
    try:
        lines = decode_checkpoint(disk.read(f"{directory}/{LEADER_EPOCHS}"))
        epochs = [(int(epoch), int(start)) for epoch, start in (line.split() for line in lines)]
    except (FileNotFoundError, StorageError, ValueError):
        return None
    # No batch can be stamped with a larger epoch, so every append would fail.
    return epochs if all(epoch <= _MAX_EPOCH for epoch, _ in epochs) else None


def encode_uuid(uuid: bytes) -> str:
    """Return a 16-byte id in Kafka's notation: 22 characters of base64url."""
    return base64.urlsafe_b64encode(uuid).decode().rstrip("=")


def decode_uuid(text: str) -> bytes:
    """Return the 16 bytes of an id. Raises StorageError unless it is 22 characters of base64url."""
    try:
        uuid = base64.urlsafe_b64decode(text + "==")
    except (binascii.Error, ValueError) as error:
        raise StorageError(f"{text!r} is not an id: {error}") from error
    if len(uuid) != 16:
        raise StorageError(f"{text!r} is not an id of 22 characters")
    return uuid


def write_partition_metadata(disk: Disk, directory: str, topic_id: bytes) -> None:
    """Write partition.metadata without a sync.

    The first flush of the partition syncs the file. Until then, only oncelog-topics.json has the id after a
    power loss.
    """
    text = f"version: 0\ntopic_id: {encode_uuid(topic_id)}\n"
    disk.replace(f"{directory}/{PARTITION_METADATA}", text.encode(), sync=False)


def read_partition_metadata(disk: Disk, directory: str) -> bytes | None:
    """Return the topic id in partition.metadata, None if the file is missing.

    Raises StorageError if the file is unreadable.
    """
    try:
        text = disk.read(f"{directory}/{PARTITION_METADATA}").decode(errors="replace")
    except FileNotFoundError:
        return None
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    if fields.get("version") != "0" or "topic_id" not in fields:
        path = disk.describe(f"{directory}/{PARTITION_METADATA}")
        raise StorageError(f"{path}: expected version 0 and topic_id")
    return decode_uuid(fields["topic_id"])
