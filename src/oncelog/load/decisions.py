"""The decisions of a load: which files are left, where to resume, and when to refuse.

Each transaction of a load stores records together with a checkpoint for each file that they came from. So the
checkpoints say what was committed, whenever the loader was killed. A load has one list of files, to whose end
more may be added later. If files are read in parallel (on Spark), all of them get a checkpoint
before the first is read: that fixes the list. This is behaviour P4 (docs/behaviours.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar, get_args

Format = Literal["csv", "jsonl", "parquet", "lines"]
Codec = Literal["gzip", "zstd"]

FORMATS: tuple[Format, ...] = get_args(Format)
_FORMAT_OF: dict[str, Format] = {
    "csv": "csv",
    "tsv": "csv",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
    "pq": "parquet",
    "txt": "lines",
    "log": "lines",
}
_CODEC_OF: dict[str, Codec] = {"gz": "gzip", "zst": "zstd"}


DELIMITED_BY = ", delimited by "
"""Stands in front of the delimiter in `FileCheckpoint.how` of a CSV file."""


class Layout(NamedTuple):
    """A file's format, and its compression codec if it has one."""

    format: Format
    codec: Codec | None


def layout_of(name: str, requested: Format | None) -> Layout | None:
    """Return the layout by the file's extensions, or with the requested format; None if they do not tell."""
    before, last = ["", "", *name.lower().split(".")[1:]][-2:]
    codec = _CODEC_OF.get(last)
    format = requested or _FORMAT_OF.get(before if codec else last)
    if format is None or (format == "parquet" and codec is not None):
        return None
    return Layout(format, codec)


class Source(NamedTuple):
    """A file as it is now. `name` is its absolute path, `modified_ns` its time of change since the epoch."""

    name: str
    size_bytes: int
    modified_ns: int


class FileCheckpoint(NamedTuple):
    """The stored state of one file.

    `topic_id` is the topic's id at that time; None on a cluster without topic ids. `how` has format, key and
    delimiter as text. `name` is the file's path at that time; versions before 0.5.0 stored it as given, even
    relative. `position` is where the next record begins: in bytes after decompression, or in rows of a
    Parquet file. `records` is the number of stored records. `digest` is the SHA-256 of everything before
    `position`, or of a whole Parquet file.
    """

    topic: str
    topic_id: str | None
    how: str
    name: str
    size_bytes: int
    modified_ns: int
    position: int
    records: int
    digest: str
    is_done: bool


class Resume(NamedTuple):
    """Read from file number `file` on, starting at its `checkpoint` (None: at its beginning).

    `recheck` are finished files with another path or time of change; their digests must match their
    checkpoints.
    """

    file: int
    checkpoint: FileCheckpoint | None
    recheck: tuple[int, ...] = ()


class Complete(NamedTuple):
    """Nothing is left to do; `recheck` as in Resume."""

    recheck: tuple[int, ...] = ()


class Assignment(NamedTuple):
    """Store checkpoints for the files `new` in one transaction, then read `files`, which include them.

    Both have numbers of files.

    `recheck` as in Resume, but with partly read files too. Check these first: if one of them is another file,
    the others may have changed places, and a new one may be the one that was read.
    """

    new: tuple[int, ...]
    files: tuple[int, ...]
    recheck: tuple[int, ...] = ()


class Refused(NamedTuple):
    """The load must not continue. `reason` says what differs and what to do."""

    reason: str


def decide_start(
    checkpoints: Sequence[FileCheckpoint],
    sources: Sequence[Source],
    *,
    topic: str,
    topic_id: str | None,
    hows: Sequence[str],
) -> Resume | Complete | Refused:
    """Decide what is left of a load. `checkpoints` are those of its first files, in order.

    `hows` has format and key of each file now; the key has chosen the partitions of the stored records.
    """
    refused = _find_refusal(checkpoints, sources, topic, topic_id, hows)
    if refused is not None:
        return refused
    last = len(checkpoints) - 1
    recheck = _possibly_changed(checkpoints, sources)
    if checkpoints and not checkpoints[last].is_done:
        return Resume(last, checkpoints[last], recheck)
    if len(checkpoints) == len(sources):
        return Complete(recheck)
    return Resume(len(checkpoints), None, recheck)


def decide_assignment(
    checkpoints: Sequence[FileCheckpoint],
    sources: Sequence[Source],
    *,
    topic: str,
    topic_id: str | None,
    hows: Sequence[str],
) -> Assignment | Refused:
    """Decide what is left of a load whose files are read in parallel; arguments as in `decide_start`."""
    refused = _find_refusal(checkpoints, sources, topic, topic_id, hows)
    if refused is not None:
        return refused
    unfinished = [index for index, checkpoint in enumerate(checkpoints) if not checkpoint.is_done]
    new = tuple(range(len(checkpoints), len(sources)))
    return Assignment(new, (*unfinished, *new), _possibly_changed(checkpoints, sources, in_part=True))


def initial_checkpoint(source: Source, how: str, *, topic: str, topic_id: str | None) -> FileCheckpoint:
    """Return the checkpoint of a file of which nothing was read yet."""
    return FileCheckpoint(topic, topic_id, how, *source, position=0, records=0, digest="", is_done=False)


def _find_refusal(
    checkpoints: Sequence[FileCheckpoint],
    sources: Sequence[Source],
    topic: str,
    topic_id: str | None,
    hows: Sequence[str],
) -> Refused | None:
    for checkpoint, source, how in zip(checkpoints, sources, hows, strict=False):
        reason = topic_mismatch(checkpoint, topic, topic_id) or _mismatch(checkpoint, source, how)
        if reason:
            return Refused(reason)
    if len(sources) < len(checkpoints):
        return Refused(
            f"the load began with {len(checkpoints)} files, of which {len(sources)} are given; "
            f"{checkpoints[len(sources)].name} is missing"
        )
    names = {source.name for source in sources[: len(checkpoints)]}
    for source in sources[len(checkpoints) :]:
        if source.name in names:
            return Refused(f"{source.name} is given twice; all its records would be stored twice")
        names.add(source.name)
    return None


def _possibly_changed(
    checkpoints: Sequence[FileCheckpoint], sources: Sequence[Source], *, in_part: bool = False
) -> tuple[int, ...]:
    """Return the finished (or partly read) files that may have changed, or may be other files now.

    Equal sizes and times of change prove nothing for files with different names: archives, copies that keep
    times, and fixed-width exports produce such files. Guard:
    test_a_file_that_comes_late_and_sorts_first_is_not_taken_for_the_one_that_was_read.
    """
    return tuple(
        index
        for index, (checkpoint, source) in enumerate(zip(checkpoints, sources, strict=False))
        if (checkpoint.is_done or (in_part and checkpoint.position))
        and (checkpoint.name, checkpoint.modified_ns) != (source.name, source.modified_ns)
    )


def _mismatch(checkpoint: FileCheckpoint, source: Source, how: str) -> str | None:
    if (reason := _parsing_mismatch(checkpoint, source, how)) is not None:
        return reason
    if checkpoint.size_bytes != source.size_bytes:
        return _changed_text(
            checkpoint, source, f"it had {checkpoint.size_bytes} bytes and has {source.size_bytes}"
        )
    return None


def _parsing_mismatch(checkpoint: FileCheckpoint, source: Source, how: str) -> str | None:
    """Return why the rest of a file would be parsed differently; None if it would not.

    A changed delimiter matters only within a file: with another one, 60 rows of a CSV file became 70.
    Versions before 0.5.1 stored no delimiter.
    """
    before, now = checkpoint.how.partition(DELIMITED_BY), how.partition(DELIMITED_BY)
    if before[0] != now[0]:
        return f"{source.name} was begun as {before[0]}; now it is {now[0]}"
    if checkpoint.position == 0 or checkpoint.is_done or before[2] in ("", now[2]):
        return None
    return f"{source.name} was begun with the delimiter {before[2]}; now it is {now[2]}"


def topic_mismatch(checkpoint: FileCheckpoint, topic: str, topic_id: str | None) -> str | None:
    """Return why this is not the checkpoint's topic: another name, or deleted since. None if it is."""
    if checkpoint.topic != topic:
        return f"the load goes into topic {checkpoint.topic!r}, not {topic!r}"
    if None not in (checkpoint.topic_id, topic_id) and checkpoint.topic_id != topic_id:
        return f"topic {topic!r} was deleted and created again since; load into it under another id"
    return None


def content_mismatch(checkpoint: FileCheckpoint, source: Source, digest: str | None) -> str | None:
    """Return why the part that was read is no longer the same; None if it is.

    `digest` is None if the file ends before `checkpoint.position`, or continues behind it though it was
    finished.
    """
    if digest == checkpoint.digest:
        return None
    if digest is None:
        if checkpoint.is_done:
            return _changed_text(
                checkpoint, source, f"it does not end at position {checkpoint.position} any more"
            )
        return _changed_text(
            checkpoint, source, f"it ends before position {checkpoint.position}, up to which it was read"
        )
    return _changed_text(
        checkpoint, source, f"what was read up to position {checkpoint.position} is not the same any more"
    )


def _changed_text(checkpoint: FileCheckpoint, source: Source, change: str) -> str:
    if checkpoint.name != source.name:
        return (
            f"{source.name} stands in the place of {checkpoint.name} "
            f"and is not the file that was read: {change}. "
            "Give the files in the order they had, new ones at the end, or load under another id"
        )
    return (
        f"{source.name} changed since it was read: {change}. "
        "Bring the old file back, or load the new one under another id"
    )


class Sized(Protocol):
    """Anything with a number of records and a size in bytes, both of which limit a transaction."""

    @property
    def records(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


def transactions(chunks: Iterable[S], *, max_records: int, max_bytes: int) -> Iterator[list[S]]:
    """Yield consecutive chunks in lists within both limits; each list has at least one chunk."""
    group: list[S] = []
    records = size_bytes = 0
    for chunk in chunks:
        if group and (records + chunk.records > max_records or size_bytes + chunk.size_bytes > max_bytes):
            yield group
            group, records, size_bytes = [], 0, 0
        group.append(chunk)
        records += chunk.records
        size_bytes += chunk.size_bytes
        if records >= max_records or size_bytes >= max_bytes:
            yield group
            group, records, size_bytes = [], 0, 0
    if group:
        yield group


_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


def is_load_id(text: str) -> bool:
    """Return True for 1 to 200 letters, digits, dots, underscores and hyphens."""
    return _ID.fullmatch(text) is not None
