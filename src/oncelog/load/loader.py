"""Loads files into a topic: piece after piece, each transaction with the marks of what it read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, assert_never

import pyarrow as pa
import pyarrow.compute as pc

from oncelog.client.producer.blocking import Producer
from oncelog.errors import (
    InvalidProducerEpoch,
    InvalidTxnState,
    LoadRefused,
    MessageTooLarge,
    MisuseError,
    OncelogError,
    ProducerFenced,
)
from oncelog.load.checkpoints import encode_mark, marks_partition, read_marks, topic_ids
from oncelog.load.decisions import (
    DELIMITED_BY,
    Complete,
    Format,
    GoOn,
    Layout,
    Mark,
    Refused,
    decide_start,
    is_load_id,
    layout_of,
    transactions,
    why_another_topic,
    why_changed,
)
from oncelog.load.files import Piece, check_given_once, delimiter_of, open_reader, source_of
from oncelog.load.parsing import Options

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for. `load_id` names the load over all its runs. `format` None: by the files' names.

    A transaction has at most `max_records` records and about `max_bytes` bytes.
    """

    files: Sequence[Path]
    topic: str
    load_id: str
    options: Options = field(default_factory=Options)
    format: Format | None = None
    max_records: int = 100_000
    max_bytes: int = 8 << 20


@dataclass(slots=True)
class Report:
    """What was done. `records`, `transactions`: by this run; `records_before`: by earlier ones.

    `done_bytes` of `total_bytes` on the disk are read, by this run or before. `was_complete`: there was
    nothing to do.
    """

    total_bytes: int
    records: int = 0
    records_before: int = 0
    transactions: int = 0
    done_bytes: int = 0
    seconds: float = 0.0
    was_complete: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of file number `index`, and the mark behind it."""

    index: int
    piece: Piece
    mark: Mark

    @property
    def records(self) -> int:
        return self.piece.records

    @property
    def size_bytes(self) -> int:
        return self.piece.size_bytes


def run_load(
    load: Load, config: Mapping[str, Any], on_progress: Callable[[Report], object] = lambda report: None
) -> Report:
    """Load what is left of a load. Older loaders with its id are fenced before anything else.

    The topic must exist. Raises LoadRefused (files, topic, format or key are not those it began with),
    MisuseError, StorageError (a file), BrokerError, TimedOut. After any of them, and after any kill, the
    same load goes on where it was.
    """
    layouts = check_load(load, config)
    sources = [source_of(path) for path in load.files]
    report = Report(sum(source.size_bytes for source in sources))
    began = time.monotonic()
    with taking_over(load, config) as producer:
        marks, topic_id = read_marks(config, load.load_id, load.topic)
        report.records_before = sum(mark.records for mark in marks)
        check_given_once(load.files, len(marks))
        hows = [how_of(load, index, layout) for index, layout in enumerate(layouts)]
        match decide_start(marks, sources, topic=load.topic, topic_id=topic_id, hows=hows):
            case Refused(why):
                raise LoadRefused(why)
            case Complete(recheck):
                _recheck(load, layouts, marks, recheck)
                report.was_complete, report.done_bytes = True, report.total_bytes
            case GoOn(file, mark, recheck):
                _recheck(load, layouts, marks, recheck)
                sizes = [source.size_bytes for source in sources]
                steps = _steps(load, layouts, hows, topic_id, file, mark)
                for group in commit_steps(load, config, producer, steps):
                    report.records += sum(step.records for step in group)
                    report.transactions += 1
                    last = group[-1]
                    report.done_bytes = sum(sizes[: last.index]) + last.piece.consumed_bytes
                    on_progress(report)
            case verdict:
                assert_never(verdict)
    report.seconds = time.monotonic() - began
    return report


def check_load(load: Load, config: Mapping[str, Any]) -> list[Layout]:
    """How each file is to be read. Raises MisuseError."""
    if not is_load_id(load.load_id):
        raise MisuseError(f"{load.load_id!r}: an id is of letters, digits, dot, _ and -, at most 200")
    if "transactional.id" in config:
        raise MisuseError("transactional.id is made of the load's id; leave it out")
    layouts = []
    for path in load.files:
        layout = layout_of(path.name, load.format)
        if layout is None:
            raise MisuseError(f"{path}: its name does not tell how it is to be read; give the format")
        layouts.append(layout)
    return layouts


def how_of(load: Load, index: int, layout: Layout, *, more: str = "") -> str:
    """What must stay the same from run to run, as a mark has it. `more` is put behind format and key."""
    options = load.options
    how = layout.format if options.key is None else f"{layout.format} with key {options.key}"
    if layout.format != "csv":
        return how + more
    # Not --null and --text: they are what an error in the middle of a file tells to set.
    return f"{how}{more}{DELIMITED_BY}{delimiter_of(load.files[index], options)!r}"


@contextmanager
def taking_over(load: Load, config: Mapping[str, Any], index: int | None = None) -> Iterator[Producer]:
    """The producer of a load, or of its file number `index`; from here on no older one can write.

    Raises OncelogError when a newer one has taken over meanwhile.
    """
    # No id of a load has a slash, so a file's is never another load's.
    name = f"oncelog-load-{load.load_id}" + ("" if index is None else f"/{index}")
    try:
        with Producer({**config, "transactional.id": name}) as producer:
            producer.init_transactions()
            yield producer
    except (ProducerFenced, InvalidProducerEpoch, InvalidTxnState) as error:
        # INVALID_TXN_STATE: Apache Kafka 4 takes a fenced producer's commit for a repeated abort.
        raise OncelogError(
            f"load {load.load_id!r}: another loader with this id has taken over, or a transaction lasted "
            f"longer than transaction.timeout.ms ({error})"
        ) from error


def _recheck(load: Load, layouts: Sequence[Layout], marks: Sequence[Mark], indexes: Iterable[int]) -> None:
    for index in indexes:
        recheck_file(load, index, layouts[index], marks[index])


def recheck_file(load: Load, index: int, layout: Layout, mark: Mark) -> None:
    """Raises LoadRefused when the part that was read is not the same any more."""
    with closing(open_reader(load.files[index], layout, load.options)) as reader:
        _check_digest(load.files[index], reader, mark)


def _check_digest(path: Path, reader: Any, mark: Mark) -> None:
    digest = reader.digest_at(mark.position)
    if mark.is_done and digest is not None and not reader.is_at_end():
        digest = None  # compressed files of one size may be of different lengths
    why = why_changed(mark, source_of(path), digest)
    if why is not None:
        raise LoadRefused(why)


def _steps(
    load: Load,
    layouts: Sequence[Layout],
    hows: Sequence[str],
    topic_id: str | None,
    first: int,
    mark: Mark | None,
) -> Iterator[Step]:
    """Every piece that is left, from file number `first` on, of which `mark` tells what was read."""
    for index in range(first, len(load.files)):
        begun = mark if index == first else None
        yield from file_steps(load, index, layouts[index], hows[index], topic_id, begun)


def file_steps(
    load: Load, index: int, layout: Layout, how: str, topic_id: str | None, mark: Mark | None
) -> Iterator[Step]:
    """What is left of one file. The part of it that was read before is checked first."""
    records = 0 if mark is None else mark.records
    with closing(open_reader(load.files[index], layout, load.options)) as reader:
        if mark is not None:
            _check_digest(load.files[index], reader, mark)
        for piece in reader.pieces(max_records=load.max_records, max_bytes=load.max_bytes):
            records += piece.records
            mark = Mark(
                load.topic,
                topic_id,
                how,
                *piece.source,
                position=piece.position,
                records=records,
                digest=piece.digest,
                is_done=piece.is_last,
            )
            yield Step(index, piece, mark)


def commit_steps(
    load: Load, config: Mapping[str, Any], producer: Producer, steps: Iterable[Step]
) -> Iterator[list[Step]]:
    """Transaction after transaction; each one's steps are handed out once it is committed.

    Raises LoadRefused when the topic was deleted and created again since the marks were read.
    """
    groups = transactions(ahead(steps), max_records=load.max_records, max_bytes=load.max_bytes)
    with topic_ids(config) as topic_id_of:
        for group in groups:
            with producer.transaction():
                for step in group:
                    if step.records:
                        _send(producer, load.topic, step)
                send_marks(load, producer, {step.index: step.mark for step in group})
                # Ids do not come back: the same id after the flush shows that no record went into a later
                # topic of this name. Guard: test_a_topic_made_again_during_the_load.
                producer.flush()
                why = why_another_topic(group[-1].mark, load.topic, topic_id_of(load.topic))
                if why is not None:
                    raise LoadRefused(why)
            yield group


def _send(producer: Producer, topic: str, step: Step) -> None:
    """Hand a piece to the producer. Raises MessageTooLarge naming the file and its largest record there."""
    try:
        producer.send_table(topic, step.piece.table)
    except MessageTooLarge as error:
        sizes = pc.binary_length(step.piece.table["value"].cast(pa.binary()))
        number = step.mark.records - step.records + pc.index(sizes, pc.max(sizes)).as_py() + 1
        raise MessageTooLarge(
            f"{step.piece.source.name}, record {number}: {error.detail}. Give -X max.request.size=BYTES, and "
            "the topic a larger max.message.bytes"
        ) from error


def send_marks(load: Load, producer: Producer, marks: Mapping[int, Mark]) -> None:
    """Store the marks of files, by their numbers, with the transaction that is open."""
    at = marks_partition(load.load_id)
    for index, mark in marks.items():
        key, value = encode_mark(load.load_id, index, mark)
        producer.send(at.topic, value, key, partition=at.partition)


_END = object()


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items; the next one is made while one is worked on."""
    iterator = iter(items)
    with ThreadPoolExecutor(1, "oncelog-load") as pool:
        following: Any = pool.submit(next, iterator, _END)
        while (item := following.result()) is not _END:
            following = pool.submit(next, iterator, _END)
            yield item
