"""The contents of each partition after a clean stop, stored in `oncelog-contents-checkpoint`.

A segment's file has no length and no checksum of its own. If the file is lost, emptied, or cut after a batch
while no broker runs, the log seems to have a gap, and readers would pass over acknowledged records. With a
shorter `.txnindex` file, they would get aborted records. So a clean stop stores how many segments, bytes and
index entries each partition has. A start that finds fewer bytes stops before it changes a file, because the
records may still be restored. See test_a_start_refuses_a_partition_that_lost_records. After any other
difference, the start reads the whole partition and rebuilds the indexes.

The file counts only if `.kafka_cleanshutdown` has its checksum, and a start removes both. So a stop by Apache
Kafka, or by an Oncelog that does not know the file, leaves nothing to compare. The format is that of
Kafka's checkpoints, with six fields for each partition. A line of one field is the name of a small file,
without which a start would lose ACLs or settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from oncelog.errors import StorageError
from oncelog.log.checkpoint import decode_checkpoint, encode_checkpoint
from oncelog.log.segment import Segment
from oncelog.types import TopicPartition

CONTENTS = "oncelog-contents-checkpoint"


class PartitionContents(NamedTuple):
    """The contents of a partition's files.

    - `log_bytes`: the bytes of all segments' batches.
    - `aborted_count`: the entries in all segments' transaction indexes.
    """

    log_start_offset: int
    segment_count: int
    log_bytes: int
    aborted_count: int

    @classmethod
    def of(cls, log_start_offset: int, segments: Iterable[Segment]) -> PartitionContents:
        sizes = [(segment.size_bytes, len(segment.transactions)) for segment in segments]
        return cls(log_start_offset, len(sizes), sum(size for size, _ in sizes), sum(n for _, n in sizes))

    def difference(self, segments: list[Segment]) -> str:
        """Return how `segments` differ from these contents; an empty string if they do not."""
        found = PartitionContents.of(self.log_start_offset, segments)
        if found == self:
            return ""
        return (
            f"{found.segment_count} segments, {found.log_bytes} bytes and {found.aborted_count} aborted "
            f"transactions, but the last stop left {self.segment_count}, {self.log_bytes} and "
            f"{self.aborted_count}"
        )

    def loss(self, sizes: Sequence[int]) -> str:
        """Return a text about lost bytes, empty if none were lost. `sizes` are the sizes of the log files.

        An empty file may be missing: a power loss after the stop may take the files of a partition that never
        had a record, because they are synced with the first record.
        """
        if sum(sizes) >= self.log_bytes:
            return ""
        found = f"{sum(sizes)} bytes in {len(sizes)} segments"
        return f"{found}, but the last stop left {self.log_bytes} in {self.segment_count}"


class DirectoryContents(NamedTuple):
    """The contents of a data directory: those of its partitions, and the names of the small files that the
    next start needs.
    """

    partitions: Mapping[TopicPartition, PartitionContents]
    files: list[str]


NO_CONTENTS = DirectoryContents({}, [])


def encode_contents(contents: DirectoryContents) -> bytes:
    partitions = sorted(contents.partitions.items())
    lines = [" ".join(map(str, (tp.topic, tp.partition, *fields))) for tp, fields in partitions]
    return encode_checkpoint([*contents.files, *lines])


def decode_contents(data: bytes) -> DirectoryContents:
    """Return the contents that are stored in a file; NO_CONTENTS if it is unreadable, so that nothing is
    compared.
    """
    try:
        lines = [line.split() for line in decode_checkpoint(data)]
        partitions = {
            TopicPartition(line[0], int(line[1])): _contents(line[2:]) for line in lines if len(line) > 1
        }
    except (StorageError, ValueError, TypeError):
        return NO_CONTENTS
    return DirectoryContents(partitions, [line[0] for line in lines if len(line) == 1])


def _contents(fields: list[str]) -> PartitionContents:
    return PartitionContents(*map(int, fields))
