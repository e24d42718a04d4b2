"""Loads files into a topic, in transactions that store records and file checkpoints together."""

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
    LoadRefused,
    MessageTooLarge,
    MisuseError,
    OncelogError,
)
from oncelog.load.checkpoints import (
    checkpoint_partition,
    encode_checkpoint,
    read_checkpoints,
    topic_id_lookup,
)
from oncelog.load.decisions import (
    DELIMITED_BY,
    Complete,
    FileCheckpoint,
    Format,
    Layout,
    Refused,
    Resume,
    content_mismatch,
    decide_start,
    is_load_id,
    layout_of,
    topic_mismatch,
    transactions,
)
from oncelog.load.files import Chunk, check_given_once, delimiter_of, open_reader, source_of
from oncelog.load.parsing import Options
from oncelog.rules.transactions.client_session import FENCED_ERRORS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """A load to run. All runs with the same `load_id` are one load. `format` None means that the file names
    decide.

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
    """The result of a run.

    `records` and `transactions` count this run. `records_before` counts the records of earlier runs.
    `done_bytes` of `total_bytes` on disk have been read, by this run or earlier ones. `was_complete`: True if
    nothing was left to do.
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
    """A chunk of file number `index`, and the checkpoint to store with the chunk."""

    index: int
    chunk: Chunk
    checkpoint: FileCheckpoint

    @property
    def records(self) -> int:
        return self.chunk.records

    @property
    def size_bytes(self) -> int:
        return self.chunk.size_bytes


def run_load(
    load: Load, config: Mapping[str, Any], on_progress: Callable[[Report], object] = lambda report: None
) -> Report:
    """Load everything that earlier runs with the same id have not committed.

    Older loaders with this id are fenced first. The topic must exist. `on_progress` is called with the report
    after each transaction.

    Raises LoadRefused if files, topic, format or key differ from the first run. Raises MisuseError,
    StorageError (for a file), BrokerError and TimedOut. To resume after an error or a kill, run the same load
    again.
    """
    layouts = check_load(load, config)
    sources = [source_of(path) for path in load.files]
    report = Report(sum(source.size_bytes for source in sources))
    started = time.monotonic()
    with fenced_producer(load, config) as producer:
        checkpoints, topic_id = read_checkpoints(config, load.load_id, load.topic)
        report.records_before = sum(checkpoint.records for checkpoint in checkpoints)
        check_given_once(load.files, len(checkpoints))
        hows = [how_of(load, index, layout) for index, layout in enumerate(layouts)]
        match decide_start(checkpoints, sources, topic=load.topic, topic_id=topic_id, hows=hows):
            case Refused(reason):
                raise LoadRefused(reason)
            case Complete(recheck):
                _recheck(load, layouts, checkpoints, recheck)
                report.was_complete, report.done_bytes = True, report.total_bytes
            case Resume(file, checkpoint, recheck):
                _recheck(load, layouts, checkpoints, recheck)
                sizes = [source.size_bytes for source in sources]
                steps = _steps(load, layouts, hows, topic_id, file, checkpoint)
                for group in commit_steps(load, config, producer, steps):
                    report.records += sum(step.records for step in group)
                    report.transactions += 1
                    last = group[-1]
                    report.done_bytes = sum(sizes[: last.index]) + last.chunk.consumed_bytes
                    on_progress(report)
            case verdict:
                assert_never(verdict)
    report.seconds = time.monotonic() - started
    return report


def check_load(load: Load, config: Mapping[str, Any]) -> list[Layout]:
    """Check the arguments of a load, and return the layout of each file.

    Raises MisuseError for an invalid load id, a `transactional.id` in the config, or an unknown file format.
    """
    if not is_load_id(load.load_id):
        raise MisuseError(f"load id {load.load_id!r}: expected letters, digits, dot, _ and -, at most 200")
    if "transactional.id" in config:
        raise MisuseError("transactional.id is derived from the load id; leave it out")
    layouts = []
    for path in load.files:
        layout = layout_of(path.name, load.format)
        if layout is None:
            raise MisuseError(f"{path}: the file name does not show the format; set the format")
        layouts.append(layout)
    return layouts


def how_of(load: Load, index: int, layout: Layout, *, more: str = "") -> str:
    """Return the parsing options that must not change between runs, as text for a checkpoint.

    `more` is inserted after format and key.
    """
    options = load.options
    how = layout.format if options.key is None else f"{layout.format} with key {options.key}"
    if layout.format != "csv":
        return how + more
    # --null and --text are not included. If a value in the middle of a file is refused, the error tells the
    # user to set one of them, and the load must then resume.
    return f"{how}{more}{DELIMITED_BY}{delimiter_of(load.files[index], options)!r}"


@contextmanager
def fenced_producer(load: Load, config: Mapping[str, Any], index: int | None = None) -> Iterator[Producer]:
    """Yield a producer that has fenced all older loaders of this load, or of its file number `index`.

    Raises OncelogError if a newer loader fences this loader, or if a transaction times out.
    """
    # A load id has no slash. Therefore a file's transactional id is never the id of another load.
    name = f"oncelog-load-{load.load_id}" + ("" if index is None else f"/{index}")
    try:
        with Producer({**config, "transactional.id": name}) as producer:
            producer.init_transactions()
            yield producer
    except FENCED_ERRORS as error:
        raise OncelogError(
            f"load {load.load_id!r}: another loader with this id has taken over, or a transaction lasted "
            f"longer than transaction.timeout.ms ({error})"
        ) from error


def _recheck(
    load: Load, layouts: Sequence[Layout], checkpoints: Sequence[FileCheckpoint], indexes: Iterable[int]
) -> None:
    for index in indexes:
        recheck_file(load, index, layouts[index], checkpoints[index])


def recheck_file(load: Load, index: int, layout: Layout, checkpoint: FileCheckpoint) -> None:
    """Raise LoadRefused if the part of the file up to its checkpoint has changed."""
    with closing(open_reader(load.files[index], layout, load.options)) as reader:
        _check_digest(load.files[index], reader, checkpoint)


def _check_digest(path: Path, reader: Any, checkpoint: FileCheckpoint) -> None:
    digest = reader.digest_at(checkpoint.position)
    if checkpoint.is_done and digest is not None and not reader.is_at_end():
        # A finished file must end at its checkpoint. A compressed file that replaced it may have the same
        # size and the same beginning, and contain more.
        digest = None
    reason = content_mismatch(checkpoint, source_of(path), digest)
    if reason is not None:
        raise LoadRefused(reason)


def _steps(
    load: Load,
    layouts: Sequence[Layout],
    hows: Sequence[str],
    topic_id: str | None,
    first: int,
    checkpoint: FileCheckpoint | None,
) -> Iterator[Step]:
    """Yield the remaining chunks of the files from number `first` on.

    File `first` was read up to `checkpoint`.
    """
    for index in range(first, len(load.files)):
        begun = checkpoint if index == first else None
        yield from file_steps(load, index, layouts[index], hows[index], topic_id, begun)


def file_steps(
    load: Load, index: int, layout: Layout, how: str, topic_id: str | None, checkpoint: FileCheckpoint | None
) -> Iterator[Step]:
    """Check the part of a file before `checkpoint`, then yield the remaining chunks.

    Raises LoadRefused if this part has changed.
    """
    records = 0 if checkpoint is None else checkpoint.records
    with closing(open_reader(load.files[index], layout, load.options)) as reader:
        if checkpoint is not None:
            _check_digest(load.files[index], reader, checkpoint)
        for chunk in reader.chunks(max_records=load.max_records, max_bytes=load.max_bytes):
            records += chunk.records
            checkpoint = FileCheckpoint(
                load.topic,
                topic_id,
                how,
                *chunk.source,
                position=chunk.position,
                records=records,
                digest=chunk.digest,
                is_done=chunk.is_last,
            )
            yield Step(index, chunk, checkpoint)


def commit_steps(
    load: Load, config: Mapping[str, Any], producer: Producer, steps: Iterable[Step]
) -> Iterator[list[Step]]:
    """Store the steps in transactions. After each commit, yield the steps of this transaction.

    Raises LoadRefused if the topic was deleted and created again since the checkpoints were read.
    """
    groups = transactions(prefetched(steps), max_records=load.max_records, max_bytes=load.max_bytes)
    with topic_id_lookup(config) as topic_id_of:
        for group in groups:
            with producer.transaction():
                for step in group:
                    if step.records:
                        _send(producer, load.topic, step)
                send_checkpoints(load, producer, {step.index: step.checkpoint for step in group})
                # Topic ids are never reused. If the id is the same after the flush, no record of this
                # transaction is in a later topic with the same name. Guard:
                # test_a_topic_recreated_during_the_load_ends_it.
                producer.flush()
                reason = topic_mismatch(group[-1].checkpoint, load.topic, topic_id_of(load.topic))
                if reason is not None:
                    raise LoadRefused(reason)
            yield group


def _send(producer: Producer, topic: str, step: Step) -> None:
    """Send the records of a step.

    If a record is too large, raises MessageTooLarge with the file and the number of the largest record.
    """
    try:
        producer.send_table(topic, step.chunk.table)
    except MessageTooLarge as error:
        sizes = pc.binary_length(step.chunk.table["value"].cast(pa.binary()))
        number = step.checkpoint.records - step.records + pc.index(sizes, pc.max(sizes)).as_py() + 1
        raise MessageTooLarge(
            f"{step.chunk.source.name}, record {number}: {error.detail}. Raise -X "
            "max.request.size=BYTES and the topic's max.message.bytes"
        ) from error


def send_checkpoints(load: Load, producer: Producer, checkpoints: Mapping[int, FileCheckpoint]) -> None:
    """Send the checkpoints, by file number, to the checkpoint topic in the open transaction."""
    tp = checkpoint_partition(load.load_id)
    for index, checkpoint in checkpoints.items():
        key, value = encode_checkpoint(load.load_id, index, checkpoint)
        producer.send(tp.topic, value, key, partition=tp.partition)


_END = object()


def prefetched(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items. While the caller processes an item, a thread produces the next one."""
    iterator = iter(items)
    with ThreadPoolExecutor(1, "oncelog-load") as pool:
        following: Any = pool.submit(next, iterator, _END)
        while (item := following.result()) is not _END:
            following = pool.submit(next, iterator, _END)
            yield item
