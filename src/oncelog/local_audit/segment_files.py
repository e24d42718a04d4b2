"""Segment files for the audit: find them, and read the headers of their batches.

pyarrow.fs opens the files, which are read a megabyte at a time. `.txnindex` files list the aborted
transactions, as they do for the broker. So the audit learns which batches a read_committed reader gets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
from pyarrow import fs

from oncelog.audit.findings import StoredBatch
from oncelog.errors import ConfigError, CorruptMessage, InvalidRecord, StorageError
from oncelog.local_audit.stored_batches import no_batch, stored_batch
from oncelog.local_audit.tables.table import without_login
from oncelog.log.checkpoint import CLEANED_OFFSETS, LOG_STARTS, RECOVERY_POINTS, decode_offsets
from oncelog.log.index import decode_aborted
from oncelog.log.scan import BASE_AND_LENGTH, BadBatch, ScannedBatch, find_batch, find_behind, scan
from oncelog.log.segment import LOG_SUFFIX, TXN_SUFFIX
from oncelog.log.segment_swap import CLEANED, SWAP
from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.batch import HEADER_BYTES, BatchHeader, read_header

_PARTITION_NAME = re.compile(r"(.+)-(\d+)")
_SEGMENT_NAME = re.compile(r"(\d{20})" + re.escape(LOG_SUFFIX))
_SWAP_NAME = re.compile(r"(\d{20})\.[a-z]+" + re.escape(SWAP))
_MAX_PARTITION, _MAX_OFFSET = 2**31 - 1, 2**63 - 1
_INTERNAL = "__"
_TOPICS_FILE = "oncelog-topics.json"
_ZEROS_AT_ONCE = 1 << 20


class Segment(NamedTuple):
    """A `.log` file. `has_index` is True if the segment also has a `.txnindex` file that is not empty."""

    base_offset: int
    size_bytes: int
    has_index: bool


class PartitionFiles(NamedTuple):
    """A partition directory in the file system of `root`, with at least one segment. `segments` is sorted by
    offset.

    The `.txnindex` files cover every marker below `indexed_to`. A broker had synced everything below
    `recovery_point`, which is None if there is no checkpoint file. Records below `log_start_offset` were
    removed (DeleteRecords, retention), although the first segment may still contain them.
    """

    tp: TopicPartition
    root: str
    directory: str
    segments: list[Segment]
    is_compacted: bool
    indexed_to: int
    recovery_point: int | None
    log_start_offset: int

    def path(self, segment: Segment, suffix: str = LOG_SUFFIX) -> str:
        return f"{self.directory}/{segment.base_offset:020}{suffix}"

    def to_plain(self) -> list[Any]:
        """Return a list of values that JSON can store. `from_plain` reads the list."""
        return list(self)

    @classmethod
    def from_plain(cls, values: list[Any]) -> Self:
        tp, root, directory, segments, *rest = values
        return cls(TopicPartition(*tp), root, directory, [Segment(*segment) for segment in segments], *rest)


# Listing


def file_system(root: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URI, and the path in it.

    Raises ConfigError for an unsupported URI.
    """
    if "://" not in root and not root.startswith("file:"):
        return fs.LocalFileSystem(), str(Path(root).absolute())
    try:
        system, path = fs.FileSystem.from_uri(re.sub("^s3a:", "s3:", root))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        # A URI of `s3:` may have an access key and its secret.
        text = f"{root}: cannot open a file system for this path: {error}"
        raise ConfigError(without_login(text)) from None
    return system, path.rstrip("/")


def find_segments(roots: Sequence[str]) -> list[PartitionFiles]:
    """Return the partition directories among `roots` and directly below them.

    An internal topic's partition is found only if its directory is itself a root. Raises ConfigError for a
    root without segments, for a partition that occurs twice (replicas), and for an interrupted compaction.
    """
    found: dict[TopicPartition, PartitionFiles] = {}
    for root in roots:
        partitions = list(_partitions_in(root))
        if not partitions:
            raise ConfigError(
                f"{without_login(root)}: no segment files; use a partition directory (topic-0 with .log "
                "files), or a data directory with such directories"
            )
        for files in partitions:
            if (other := found.setdefault(files.tp, files)) is not files:
                raise ConfigError(
                    f"{files.tp} is in {other.directory} and in {files.directory}: audit one replica at a "
                    "time"
                )
    return [found[tp] for tp in sorted(found)]


def _partitions_in(root: str) -> Iterator[PartitionFiles]:
    system, path = file_system(root)
    inside = _listed(system, path)
    if _segments_of(inside):
        directories = {path: inside}
    else:
        named = [
            info.path
            for info in inside
            if info.type is fs.FileType.Directory
            and (match := _PARTITION_NAME.fullmatch(info.base_name))
            and int(match[2]) <= _MAX_PARTITION
            and not info.base_name.startswith(_INTERNAL)
        ]
        directories = {name: _listed(system, name) for name in named}
    for directory, infos in sorted(directories.items()):
        _check_no_swap(directory, infos)
        if segments := _segments_of(infos):
            yield _partition_of(root, system, directory, segments)


def _partition_of(
    root: str, system: fs.FileSystem, directory: str, segments: list[Segment]
) -> PartitionFiles:
    parent, _, name = directory.rpartition("/")
    if (match := _PARTITION_NAME.fullmatch(name)) is None:
        raise ConfigError(f"{directory}: the directory's name must end with the partition, as in topic-0")
    tp = TopicPartition(match[1], int(match[2]))
    cleaned = _offsets(system, parent, CLEANED_OFFSETS) or {}
    is_compacted = tp in cleaned or tp.topic in _compacted_topics(system, parent)
    flushed = _offsets(system, parent, RECOVERY_POINTS)
    # Use the transaction index only up to the recovery point: after a kill, its newest entries may be missing
    # until a broker starts and restores them. See test_a_planted_fault_is_found_and_nothing_else.
    indexed_to = segments[-1].base_offset if flushed is None else flushed.get(tp, 0)
    recovery_point = None if flushed is None else flushed.get(tp, 0)
    starts = _offsets(system, parent, LOG_STARTS) or {}
    log_start_offset = max(segments[0].base_offset, starts.get(tp, 0))
    return PartitionFiles(
        tp, root, directory, segments, is_compacted, indexed_to, recovery_point, log_start_offset
    )


def _listed(system: fs.FileSystem, path: str) -> list[fs.FileInfo]:
    """Return the entries of a directory. Leave out names that are not UTF-8, because no broker creates
    them.
    """
    try:
        infos: list[fs.FileInfo] = system.get_file_info(fs.FileSelector(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot list the directory: {error}") from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path}: the path is not UTF-8, so its files cannot be audited") from error
    return [info for info in infos if _is_text(info)]


def _is_text(info: fs.FileInfo) -> bool:
    try:
        return bool(info.base_name)
    except UnicodeDecodeError:
        return False


def _segments_of(infos: Sequence[fs.FileInfo]) -> list[Segment]:
    # Oncelog's broker creates a transaction index with every segment. An empty index is treated as missing,
    # because `_aborted` opens the indexes of all later segments for every segment that it checks.
    indexes = {info.base_name for info in infos if info.base_name.endswith(TXN_SUFFIX) and info.size != 0}
    return sorted(
        Segment(int(match[1]), info.size, match[1] + TXN_SUFFIX in indexes)
        for info in infos
        if info.type is fs.FileType.File
        and (match := _SEGMENT_NAME.fullmatch(info.base_name))
        and int(match[1]) <= _MAX_OFFSET
    )


def _check_no_swap(directory: str, infos: Sequence[fs.FileInfo]) -> None:
    """Raise ConfigError if a compaction was interrupted while a new segment replaced older ones.

    A part of the log is then only in files that end in `.swap`, which a broker renames when it starts.
    Without them the records of that part would count as lost, or their absence would not be noticed. See
    test_an_interrupted_compaction_is_refused.
    """
    names = {info.base_name for info in infos}
    # Ignore the `.swap` files of a segment that still has a `.cleaned` file: the segment is not complete, and
    # a broker discards them.
    if swaps := [
        name
        for name in names
        if (match := _SWAP_NAME.fullmatch(name)) and f"{match[1]}{LOG_SUFFIX}{CLEANED}" not in names
    ]:
        raise ConfigError(
            f"{directory}/{min(swaps)}: a compaction was interrupted here, or is running. Start a broker on "
            "this directory or on a copy, which completes the compaction, and stop it before the audit"
        )


def _offsets(system: fs.FileSystem, directory: str, name: str) -> Mapping[TopicPartition, int] | None:
    """Return the contents of a checkpoint file, or None if there is no such file.

    The file is missing beside a copy of a single partition directory. Raises ConfigError if the file cannot
    be decoded. If it were treated as empty instead, the gaps in compacted topics would be reported.
    """
    path = f"{directory}/{name}"
    try:
        with system.open_input_stream(path) as stream:
            data = stream.read()
            # An empty file is not an error, because Apache Kafka creates the file empty.
            return decode_offsets(data) if data else {}
    except OSError:
        return None
    except StorageError as error:
        raise ConfigError(
            f"{path}: {error}. To audit without this file, move the file away; then name "
            "compacted topics (--compacted), and records below a log start count as present"
        ) from error


def _compacted_topics(system: fs.FileSystem, directory: str) -> set[str]:
    """Return the topics that Oncelog's topic file marks as compacted.

    Without that file, return an empty set.
    """
    try:
        with system.open_input_stream(f"{directory}/{_TOPICS_FILE}") as stream:
            topics = json.loads(stream.read())["topics"]
        return {topic["name"] for topic in topics if "compact" in topic["settings"].get("cleanup.policy", "")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


# Reading


class _ArrowFile:
    """A pyarrow file with the interface that log.scan expects."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file = file

    def pread(self, size: int, position: int) -> bytes:
        data: bytes = self._file.read_at(size, position)
        return data


@contextmanager
def open_segment(system: fs.FileSystem, path: str) -> Iterator[tuple[_ArrowFile, int]]:
    """Open a segment for log.scan. Yield the file and its size in bytes."""
    with system.open_input_file(path) as opened:
        yield _ArrowFile(opened), opened.size()


class Damage(NamedTuple):
    """Bytes in a segment file that are not a batch.

    They begin at `position` in the file, where the batch with `offset` should begin. They end at
    `next_position`, where the next batch begins, whose base offset is `next_offset`. Both are None if the
    damage reaches the end of the file.
    """

    position: int
    offset: int
    reason: str
    next_position: int | None
    next_offset: int | None


def walk_segment(file: _ArrowFile, size_bytes: int, base_offset: int) -> Iterator[ScannedBatch | Damage]:
    """Yield every valid batch of a segment file, and every damaged range, in file order."""
    position: int | None = 0
    due = base_offset
    while position is not None:
        bad: BadBatch | None = None
        for found in scan(file, position, size_bytes):
            if isinstance(found, BadBatch):
                bad = found
                break
            due = found.header.last_offset + 1
            yield found
        if bad is None:
            return
        behind = _find_behind(file, bad.position, size_bytes, due)
        position = next_offset = None
        if behind is not None and behind < size_bytes:
            position = behind
            next_offset = BASE_AND_LENGTH.unpack(file.pread(BASE_AND_LENGTH.size, behind))[0]
        yield Damage(bad.position, due, bad.reason, position, next_offset)


def _find_behind(file: _ArrowFile, position: int, end: int, due: int) -> int | None:
    """Return the position of the next batch after the damage, or None. Skip batches inside a record's value.

    `end` is the size of the file, and `due` the expected offset. A batch inside a record's value can be
    mistaken for the next batch only if the damaged batch's length is wrong. The damaged batch's header then
    still shows the next base offset, unless the log was compacted. A batch with another base offset is
    accepted if only sound batches follow it, up to the end of the log or to a torn batch.
    """
    behind = find_behind(file, position, end, due)
    header = _header_at(file, position)
    if header is None or header.base_offset < due or position + header.size_bytes <= end:
        return behind
    while behind is not None and behind < end:
        if BASE_AND_LENGTH.unpack(file.pread(BASE_AND_LENGTH.size, behind))[0] == header.last_offset + 1:
            return behind
        stop, last_offset = None, due
        for found in scan(file, behind, end):
            if isinstance(found, BadBatch):
                stop = found.position
            else:
                last_offset = found.header.last_offset
        if stop is None:
            return behind
        torn = _header_at(file, stop)
        if torn is not None and torn.base_offset > last_offset:
            return behind
        behind = find_batch(file, stop, end, due + 1)
    return behind


def _header_at(file: _ArrowFile, position: int) -> BatchHeader | None:
    try:
        return read_header(file.pread(HEADER_BYTES, position))
    except (CorruptMessage, InvalidRecord):
        return None


def read_segment(
    files: PartitionFiles, index: int, *, check_records: bool = False
) -> Iterator[tuple[int, StoredBatch]]:
    """Yield (position in the file, batch) for each batch and each damaged range.

    Damage of the transaction index comes first, at position -1.
    """
    segment = files.segments[index]
    system, _ = file_system(files.root)
    aborted, problem = _aborted(system, files, index)
    judge = None if aborted is None else VisibilityFilter(Isolation.READ_COMMITTED, aborted)
    if problem is not None:
        damaged = no_batch(segment.base_offset, segment.base_offset, problem)._replace(is_index=True)
        yield -1, damaged
    following = files.segments[index + 1].base_offset if index + 1 < len(files.segments) else None
    with open_segment(system, files.path(segment)) as (file, size_bytes):
        for found in walk_segment(file, size_bytes, segment.base_offset):
            if isinstance(found, Damage):
                batch = _no_batch(files, files.path(segment), found, following, file, size_bytes)
            else:
                batch = _judged(found, judge, check_records=check_records)
            yield found.position, batch


def _no_batch(
    files: PartitionFiles,
    path: str,
    damage: Damage,
    following: int | None,
    file: _ArrowFile,
    size_bytes: int,
) -> StoredBatch:
    """Return the StoredBatch that reports a damaged range.

    The range is a torn tail if no valid batch follows, if a crash can leave such bytes, and if the range is
    not below the recovery point. A broker has synced everything below the recovery point.
    """
    torn = None
    if following is None and damage.next_position is None:
        torn = _why_torn(file, damage, size_bytes)
    problem = f"{path} at position {damage.position}: {torn or damage.reason}"
    if torn is not None and files.recovery_point is not None and damage.offset < files.recovery_point:
        torn = None
        problem += (
            f"; a broker had synced the log up to offset {files.recovery_point}, so a crash "
            "did not cut off these bytes"
        )
    next_offset = following if damage.next_offset is None else damage.next_offset
    # If no batch follows, the end of the damage is not known. Report its first offset, or the log start if
    # that is higher.
    due = files.log_start_offset + 1 if next_offset is None else next_offset
    last_offset = max(damage.offset, due - 1)
    return no_batch(damage.offset, last_offset, problem, is_torn=torn is not None)


def _judged(found: ScannedBatch, judge: VisibilityFilter | None, *, check_records: bool) -> StoredBatch:
    batch = stored_batch(found.data, found.data_position, found.header, None, check_records=check_records)
    if judge is None:
        return batch
    verdict = judge.decide(found.header, is_abort_marker=batch.is_commit is False)
    return batch._replace(is_visible=verdict is Verdict.DELIVER)


def _aborted(
    system: fs.FileSystem, files: PartitionFiles, index: int
) -> tuple[list[tuple[int, int]] | None, str | None]:
    """Return the aborted transactions that may have data in a segment: (producer id, first offset).

    The entry of a transaction is in the index of the segment with its marker. The marker is in the segment of
    the data or in a later one, so the indexes of all these segments are read. If one of them is damaged, the
    first value is None. The second value describes damage of the segment's own index, or is None. Such damage
    loses no data, because a broker rebuilds the index from the log when it starts.
    """
    later = files.segments[index:]
    aborted: list[tuple[int, int]] = []
    for segment in later:
        if not segment.has_index:
            continue
        path = files.path(segment, TXN_SUFFIX)
        try:
            with system.open_input_stream(path) as stream:
                entries = decode_aborted(stream.read(), segment.base_offset, path)
        except StorageError as error:
            return None, str(error) if segment is later[0] else None
        end = later[1].base_offset if len(later) > 1 else None
        aborted += [(e.producer_id, e.first_offset) for e in entries if end is None or e.first_offset < end]
    return aborted, None


def _why_torn(file: _ArrowFile, bad: Damage, end: int) -> str | None:
    """Return how a crash tore the end of the log, or None if a crash did not cause the damage.

    A crash ends the log inside a batch or leaves only zeros.
    """
    try:
        read_header(file.pread(HEADER_BYTES, bad.position))
    except (CorruptMessage, InvalidRecord):
        if end - bad.position < HEADER_BYTES:
            return bad.reason
        pieces = (file.pread(_ZEROS_AT_ONCE, at) for at in range(bad.position, end, _ZEROS_AT_ONCE))
        return None if any(any(piece) for piece in pieces) else "only zeros follow"
    return bad.reason
