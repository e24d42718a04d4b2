"""The contents of each partition after a clean stop, stored in `oncelog-contents-checkpoint`.

A segment's file has no length and no checksum of its own. If the file is lost, emptied, or cut after a batch
while no broker runs, the log seems to have a gap, and readers would pass over acknowledged records. With a
shorter `.txnindex` file, they would get aborted records. So a clean stop stores the size of each segment, and
the log end and the number of index entries of each partition. A start that finds a smaller segment stops
before it changes a file, because the records may still be restored. See
test_a_start_refuses_a_partition_that_lost_records. After any other difference, the start reads the whole
partition and rebuilds the indexes.

The file is used only if `.kafka_cleanshutdown` contains its checksum. A start removes both at its end. So a
stop by Apache Kafka, or by an Oncelog that does not know the file, leaves nothing to compare. The format is
that of Kafka's checkpoints. A partition has the fields topic, number, log start, log end, number of aborted
transactions, and `offset:bytes` of each segment. A line of one field is the name of a small file, without
which a start would lose ACLs or settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from oncelog.errors import StorageError
from oncelog.log.checkpoint import decode_checkpoint, encode_checkpoint
from oncelog.log.segment import LOG_SUFFIX, Segment, file_name
from oncelog.types import TopicPartition

CONTENTS = "oncelog-contents-checkpoint"


class PartitionContents(NamedTuple):
    """The contents of a partition's files.

    - `aborted_count`: the entries in all segments' transaction indexes.
    - `segments`: the base offset and the bytes of each segment, ascending.
    """

    log_start_offset: int
    log_end_offset: int
    aborted_count: int
    segments: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, log_start_offset: int, segments: Iterable[Segment]) -> PartitionContents:
        listed = list(segments)
        aborted_count = sum(len(segment.transactions) for segment in listed)
        sizes = tuple((segment.base_offset, segment.size_bytes) for segment in listed)
        return cls(log_start_offset, listed[-1].end_offset, aborted_count, sizes)

    @property
    def log_bytes(self) -> int:
        return sum(size for _, size in self.segments)

    def end_of(self, base_offset: int, size_bytes: int) -> int | None:
        """Return the stored log end if the segment is the last stored one and has its stored size; otherwise
        None.

        The base offset in the header of the last batch may be damaged, and no checksum covers it. See
        test_a_damaged_base_offset_of_the_last_batch_does_not_move_the_log_end.
        """
        return self.log_end_offset if self.segments[-1:] == ((base_offset, size_bytes),) else None

    def difference(self, segments: list[Segment], *, is_replayed: bool = False) -> str:
        """Return how `segments` differ from these contents; an empty string if they do not.

        Before the replay, a rebuilt index lacks entries, so the aborted transactions are not compared.
        """
        found = PartitionContents.of(self.log_start_offset, segments)
        if not is_replayed and any(segment.lacks_entries for segment in segments):
            found = found._replace(aborted_count=self.aborted_count)
        if found == self:
            return ""
        return (
            f"{len(found.segments)} segments, {found.log_bytes} bytes, {found.aborted_count} aborted "
            f"transactions and the end {found.log_end_offset}, but the last stop left {len(self.segments)}, "
            f"{self.log_bytes}, {self.aborted_count} and {self.log_end_offset}"
        )

    def loss(self, sizes: Mapping[int, int]) -> str:
        """Return the first segment that lost bytes, as text; an empty string if none did. `sizes` maps the
        base offsets of the log files to their sizes in bytes.

        The sum of the sizes is not enough: a copy from before a compaction is larger. See
        test_an_older_copy_with_more_bytes_is_refused. An empty file may be missing: a power loss after the
        stop may take the files of a partition that never had a record, because they are synced with the first
        record.
        """
        for base_offset, size in self.segments:
            found = sizes.get(base_offset)
            if (found or 0) < size:
                text = "is missing" if found is None else f"has {found} bytes"
                return f"{file_name(base_offset, LOG_SUFFIX)} {text}, but the last stop left {size} bytes"
        return ""


class DirectoryContents(NamedTuple):
    """The contents of a data directory: those of its partitions, and the names of the small files that the
    next start needs.
    """

    partitions: Mapping[TopicPartition, PartitionContents]
    files: list[str]


NO_CONTENTS = DirectoryContents({}, [])


def encode_contents(contents: DirectoryContents) -> bytes:
    lines = [
        f"{tp.topic} {tp.partition} {fields.log_start_offset} {fields.log_end_offset} {fields.aborted_count} "
        + " ".join(f"{base_offset}:{size}" for base_offset, size in fields.segments)
        for tp, fields in sorted(contents.partitions.items())
    ]
    return encode_checkpoint([*contents.files, *lines])


def decode_contents(data: bytes) -> DirectoryContents:
    """Return the contents that are stored in a file; NO_CONTENTS if it is unreadable, so that nothing is
    compared.
    """
    try:
        lines = [line.split() for line in decode_checkpoint(data)]
        partitions = dict(_partition(*line) for line in lines if len(line) > 1)
    except (StorageError, ValueError, TypeError):
        return NO_CONTENTS
    return DirectoryContents(partitions, [line[0] for line in lines if len(line) == 1])


def _partition(
    topic: str, number: str, log_start: str, log_end: str, aborted_count: str, *segments: str
) -> tuple[TopicPartition, PartitionContents]:
    pairs = (segment.split(":") for segment in segments)
    sizes = tuple((int(base_offset), int(size)) for base_offset, size in pairs)
    contents = PartitionContents(int(log_start), int(log_end), int(aborted_count), sizes)
    return TopicPartition(topic, int(number)), contents
