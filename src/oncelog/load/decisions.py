"""The decisions of a load: which files are left, where to resume, and when to refuse.

Each transaction of a load stores records, and a checkpoint for each file that they came from. The checkpoints
therefore show what was committed, even if the loader was killed. A load has an ordered list of files. Later
runs may append files to this list. If files are read in parallel (on Spark), every file gets a checkpoint
before any file is read. These checkpoints fix the list. This is behaviour P4 (docs/behaviours.md).
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
"""The text between format and key, and the delimiter, in `FileCheckpoint.how` of a CSV file."""


class Layout(NamedTuple):
    """A file's format, and its compression codec, None if it is not compressed."""

    format: Format
    codec: Codec | None


def layout_of(name: str, requested: Format | None) -> Layout | None:
    """Return the format and codec that a file name's extensions indicate. `requested` overrides the format.

    Return None if the format is unknown, or for a compressed Parquet file.
    """
    extension, codec = _extensions_of(name)
    format = requested or _FORMAT_OF.get(extension)
    if format is None or (format == "parquet" and codec is not None):
        return None
    return Layout(format, codec)


def default_delimiter(name: str) -> str:
    """Return the column delimiter that a CSV file's name indicates: a tab for .tsv, otherwise a comma.

    Extensions are compared in lower case, as in `layout_of`. If the format was set, a .tsv before an unknown
    extension also counts. See test_a_tab_separates_the_columns_of_tsv_files_only.
    """
    extension, _ = _extensions_of(name)
    return "\t" if extension != "csv" and "tsv" in name.lower().split(".")[1:] else ","


def _extensions_of(name: str) -> tuple[str, Codec | None]:
    """Return a file name's extension in lower case, and None. For a compressed file, return the extension
    before .gz or .zst, and the codec.
    """
    before, last = ["", "", *name.lower().split(".")[1:]][-2:]
    codec = _CODEC_OF.get(last)
    return (before if codec else last), codec


class Source(NamedTuple):
    """A file in its current state. `name`: absolute path. `modified_ns`: time in ns since the epoch."""

    name: str
    size_bytes: int
    modified_ns: int


class FileCheckpoint(NamedTuple):
    """The stored state of one file.

    topic       name of the load's topic
    topic_id    id of this topic when the checkpoint was stored; None on a cluster without topic ids
    how         format, key and delimiter, as text
    name        path of the file when it was read; versions before 0.5.0 could store a relative path
    position    start of the next record: in bytes after decompression, or in rows of a Parquet file
    records     number of stored records
    digest      SHA-256 of everything before `position`, or of a whole Parquet file; "" before the first read
    is_done     True if the file was read to its end

    `size_bytes` and `modified_ns` are copies of the Source's fields when the checkpoint was stored.
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
    """The decision to resume at `checkpoint` of file number `file`; None means the beginning of the file.

    Then the later files are read.

    `recheck`: numbers of finished files whose path or modification time has changed. Their digests must match
    their checkpoints.
    """

    file: int
    checkpoint: FileCheckpoint | None
    recheck: tuple[int, ...] = ()


class Complete(NamedTuple):
    """The decision that nothing is left to read. `recheck` is the same as in Resume."""

    recheck: tuple[int, ...] = ()


class Assignment(NamedTuple):
    """The decision to store checkpoints for the files `new`, and then to read `files`, which include `new`.

    The checkpoints are stored in one transaction.

    All fields contain numbers of files. `recheck` is the same as in Resume, but includes partly read files.
    Check the files in `recheck` before anything is stored. If one of them is a different file now, files may
    have changed places, and a new file may be one that was already read.
    """

    new: tuple[int, ...]
    files: tuple[int, ...]
    recheck: tuple[int, ...] = ()


class Refused(NamedTuple):
    """The decision that the load must not continue. `reason` says what differs and what to do."""

    reason: str


def decide_start(
    checkpoints: Sequence[FileCheckpoint],
    sources: Sequence[Source],
    *,
    topic: str,
    topic_id: str | None,
    hows: Sequence[str],
) -> Resume | Complete | Refused:
    """Decide what is left to load. `checkpoints`: the checkpoints of the load's first files, in order.

    `hows`: format, key and delimiter of each file now, as text. The key must not change, because it
    determined the partitions of the stored records.
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
    """Decide what is left to load if the files are read in parallel.

    The arguments have the same meanings as in `decide_start`.
    """
    refused = _find_refusal(checkpoints, sources, topic, topic_id, hows)
    if refused is not None:
        return refused
    unfinished = [index for index, checkpoint in enumerate(checkpoints) if not checkpoint.is_done]
    new = tuple(range(len(checkpoints), len(sources)))
    return Assignment(new, (*unfinished, *new), _possibly_changed(checkpoints, sources, in_part=True))


def initial_checkpoint(source: Source, how: str, *, topic: str, topic_id: str | None) -> FileCheckpoint:
    """Return the first checkpoint of a file, before any of its records are read."""
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
            f"the load began with {len(checkpoints)} files, but {len(sources)} were given; "
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
    """Return the numbers of finished files that may have changed, or may be other files than before.

    `in_part`: include partly read files. Two files with different names may have the same size and
    modification time: archives, copies that keep times, and fixed-width exports produce such files. Therefore
    only the same name and time prove that a file is unchanged. Guard:
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
            checkpoint, source, f"its size was {checkpoint.size_bytes} bytes and is now {source.size_bytes}"
        )
    return None


def _parsing_mismatch(checkpoint: FileCheckpoint, source: Source, how: str) -> str | None:
    """Return the reason why the load cannot continue with the file's present parsing options, or None.

    A changed delimiter matters only in a partly read file, because it can move the boundaries of records.
    Versions before 0.5.1 stored no delimiter.
    """
    before, now = checkpoint.how.partition(DELIMITED_BY), how.partition(DELIMITED_BY)
    if before[0] != now[0]:
        return f"{source.name} was begun as {before[0]}; now it is {now[0]}"
    if checkpoint.position == 0 or checkpoint.is_done or before[2] in ("", now[2]):
        return None
    return f"{source.name} was begun with the delimiter {before[2]}; now it is {now[2]}"


def topic_mismatch(checkpoint: FileCheckpoint, topic: str, topic_id: str | None) -> str | None:
    """Return the reason why `topic` is not the checkpoint's topic; None if it is the same.

    The reason is another name, or that the topic was deleted and created again.
    """
    if checkpoint.topic != topic:
        return f"the load writes to topic {checkpoint.topic!r}, not {topic!r}"
    if None not in (checkpoint.topic_id, topic_id) and checkpoint.topic_id != topic_id:
        return f"topic {topic!r} was deleted and created again since then; use another load id"
    return None


def content_mismatch(checkpoint: FileCheckpoint, source: Source, digest: str | None) -> str | None:
    """Return as text what has changed in the part of the file that was already read; None if nothing has
    changed.

    `digest` is None if the file now ends before `checkpoint.position`, or if a finished file now continues
    after that position.
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
    return _changed_text(checkpoint, source, f"the data up to position {checkpoint.position} has changed")


def _changed_text(checkpoint: FileCheckpoint, source: Source, change: str) -> str:
    if checkpoint.name != source.name:
        return (
            f"{source.name} is in the place of {checkpoint.name}, but is not the file that "
            f"was read: {change}. Give the files in their earlier order with new files at the "
            "end, or use another load id"
        )
    return (
        f"{source.name} changed since it was read: {change}. Restore the old file, or use "
        "another load id for the new one"
    )


class Sized(Protocol):
    """An object with a number of records and a size in bytes. Both are limited per transaction."""

    @property
    def records(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


def transactions(chunks: Iterable[S], *, max_records: int, max_bytes: int) -> Iterator[list[S]]:
    """Yield lists of consecutive chunks, one list for each transaction. A list stays within both limits,
    unless it is a single chunk.
    """
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
    """Return True if `text` is 1 to 200 letters, digits, dots, underscores and hyphens."""
    return _ID.fullmatch(text) is not None
