"""Loading files into a topic once: where a load goes on, and when it must not.

Every transaction of a load stores, along with its records, a mark for each file it read from. What was
committed is therefore what the marks say, whenever the loader was killed. One load is one list of files; more
may be put at its end later. Where files are read side by side (on Spark), all are marked as begun before the
first one is read, so that the list is known from then on.
Source: row P4.
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
"""In the text of how a CSV file is read: the delimiter is behind it."""


class Layout(NamedTuple):
    """How a file is read. `codec` None: as it stands."""

    format: Format
    codec: Codec | None


def layout_of(name: str, asked: Format | None) -> Layout | None:
    """By the file's endings, or the format asked for; None: the endings do not tell."""
    before, last = ["", "", *name.lower().split(".")[1:]][-2:]
    codec = _CODEC_OF.get(last)
    found = asked or _FORMAT_OF.get(before if codec else last)
    if found is None or (found == "parquet" and codec is not None):
        return None
    return Layout(found, codec)


class Source(NamedTuple):
    """A file as it is now. `name`: its whole path. `modified_ns`: nanoseconds since the epoch."""

    name: str
    size_bytes: int
    modified_ns: int


class Mark(NamedTuple):
    """What is stored of one file.

    `topic_id`: of the topic then; None where the cluster has no such ids. `how`: format, key and
    delimiter, as text.
    `name`: of the file then; versions before 0.5.0 stored it as it was given, relative paths too.
    `position`: where the next record begins, in bytes after decompression, in rows of a Parquet file.
    `records`: how many are stored. `digest`: SHA-256 of what is before `position`, of a Parquet file whole.
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


class GoOn(NamedTuple):
    """Read from this `file` (a number) on, from its `mark` (None: from its beginning).

    `recheck`: files that are done, but have another name or time of change; their digests must be what the
    marks say.
    """

    file: int
    mark: Mark | None
    recheck: tuple[int, ...] = ()


class Complete(NamedTuple):
    """Nothing is left to do; `recheck` as in GoOn."""

    recheck: tuple[int, ...] = ()


class Spread(NamedTuple):
    """Mark the `fresh` files (numbers) as begun, all at once; then read `files`, which they are among.

    `recheck` as in GoOn, and files that were read in part. Check them before anything else: where one of them
    is another file, the others may have changed places, and a fresh one may be the one that was read.
    """

    fresh: tuple[int, ...]
    files: tuple[int, ...]
    recheck: tuple[int, ...] = ()


class Refused(NamedTuple):
    """The load must not go on; `why` says what differs and what to do."""

    why: str


def decide_start(
    marks: Sequence[Mark],
    sources: Sequence[Source],
    *,
    topic: str,
    topic_id: str | None,
    hows: Sequence[str],
) -> GoOn | Complete | Refused:
    """What is left of a load. `marks` are those of the first files, in order; none for a new load.

    `hows`: format and key of each file now; the key chose the partitions of what is stored.
    """
    refused = _refused(marks, sources, topic, topic_id, hows)
    if refused is not None:
        return refused
    last = len(marks) - 1
    recheck = _touched(marks, sources)
    if marks and not marks[last].is_done:
        return GoOn(last, marks[last], recheck)
    if len(marks) == len(sources):
        return Complete(recheck)
    return GoOn(len(marks), None, recheck)


def decide_spread(
    marks: Sequence[Mark],
    sources: Sequence[Source],
    *,
    topic: str,
    topic_id: str | None,
    hows: Sequence[str],
) -> Spread | Refused:
    """What is left of a load whose files are read side by side; arguments as in `decide_start`."""
    refused = _refused(marks, sources, topic, topic_id, hows)
    if refused is not None:
        return refused
    unfinished = [index for index, mark in enumerate(marks) if not mark.is_done]
    fresh = tuple(range(len(marks), len(sources)))
    return Spread(fresh, (*unfinished, *fresh), _touched(marks, sources, in_part=True))


def first_mark(source: Source, how: str, *, topic: str, topic_id: str | None) -> Mark:
    """Of a file of which nothing was read yet."""
    return Mark(topic, topic_id, how, *source, position=0, records=0, digest="", is_done=False)


def _refused(
    marks: Sequence[Mark], sources: Sequence[Source], topic: str, topic_id: str | None, hows: Sequence[str]
) -> Refused | None:
    for mark, source, how in zip(marks, sources, hows, strict=False):
        why = why_another_topic(mark, topic, topic_id) or _differs(mark, source, how)
        if why:
            return Refused(why)
    if len(sources) < len(marks):
        return Refused(
            f"the load began with {len(marks)} files, of which {len(sources)} are given; "
            f"{marks[len(sources)].name} is missing"
        )
    names = {source.name for source in sources[: len(marks)]}
    for source in sources[len(marks) :]:
        if source.name in names:
            return Refused(f"{source.name} is given twice; all its records would be stored twice")
        names.add(source.name)
    return None


def _touched(marks: Sequence[Mark], sources: Sequence[Source], *, in_part: bool = False) -> tuple[int, ...]:
    """Return the files that are done (or read in part), but may have changed or be other files now.

    Equal sizes and times of change say nothing about files with different names: archives, copies with their
    times and exports of fixed width make such files. Guard: test_a_file_that_comes_late_and_sorts_first.
    """
    return tuple(
        index
        for index, (mark, source) in enumerate(zip(marks, sources, strict=False))
        if (mark.is_done or (in_part and mark.position))
        and (mark.name, mark.modified_ns) != (source.name, source.modified_ns)
    )


def _differs(mark: Mark, source: Source, how: str) -> str | None:
    if (why := _reads_otherwise(mark, source, how)) is not None:
        return why
    if mark.size_bytes != source.size_bytes:
        return _changed(mark, source, f"it had {mark.size_bytes} bytes and has {source.size_bytes}")
    return None


def _reads_otherwise(mark: Mark, source: Source, how: str) -> str | None:
    """Return why what is left of a file is not read as what was read of it. Its delimiter counts only there.

    With another one, 60 rows of a CSV file became 70. Versions before 0.5.1 stored none.
    """
    before, now = mark.how.partition(DELIMITED_BY), how.partition(DELIMITED_BY)
    if before[0] != now[0]:
        return f"{source.name} was begun as {before[0]}; now it is {now[0]}"
    if mark.position == 0 or mark.is_done or before[2] in ("", now[2]):
        return None
    return f"{source.name} was begun with the delimiter {before[2]}; now it is {now[2]}"


def why_another_topic(mark: Mark, topic: str, topic_id: str | None) -> str | None:
    """None if the load of `mark` goes into this topic: the one of that name, and not deleted since."""
    if mark.topic != topic:
        return f"the load goes into topic {mark.topic!r}, not {topic!r}"
    if None not in (mark.topic_id, topic_id) and mark.topic_id != topic_id:
        return f"topic {topic!r} was deleted and made anew since; load into it under another id"
    return None


def why_changed(mark: Mark, source: Source, digest: str | None) -> str | None:
    """None if the part that was read is the same. `digest` None: the file ends before `mark.position`, or
    goes on behind it though it was read to its end.
    """
    if digest == mark.digest:
        return None
    if digest is None:
        if mark.is_done:
            return _changed(mark, source, f"it does not end at position {mark.position} any more")
        return _changed(mark, source, f"it ends before position {mark.position}, up to which it was read")
    return _changed(mark, source, f"what was read up to position {mark.position} is not the same any more")


def _changed(mark: Mark, source: Source, what: str) -> str:
    if mark.name != source.name:
        return (
            f"{source.name} stands in the place of {mark.name} and is not the file that was read: {what}. "
            "Give the files in the order they had, new ones at the end, or load under another id"
        )
    return (
        f"{source.name} changed since it was read: {what}. "
        "Bring the old file back, or load the new one under another id"
    )


class Sized(Protocol):
    """A piece of a file, as far as transactions are measured by it."""

    @property
    def records(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


P = TypeVar("P", bound=Sized)


def transactions(pieces: Iterable[P], *, max_records: int, max_bytes: int) -> Iterator[list[P]]:
    """Consecutive pieces in lists of at most so many records and bytes, but of at least one piece."""
    held: list[P] = []
    records = size_bytes = 0
    for piece in pieces:
        if held and (records + piece.records > max_records or size_bytes + piece.size_bytes > max_bytes):
            yield held
            held, records, size_bytes = [], 0, 0
        held.append(piece)
        records += piece.records
        size_bytes += piece.size_bytes
        if records >= max_records or size_bytes >= max_bytes:
            yield held
            held, records, size_bytes = [], 0, 0
    if held:
        yield held


_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


def is_load_id(text: str) -> bool:
    """Letters, digits, dot, underscore and hyphen, at most 200."""
    return _ID.fullmatch(text) is not None
