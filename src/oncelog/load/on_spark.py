"""A load on Spark: files are read in parallel, each by a task that works like the plain loader.

The driver takes over the load's transactional id. It checks the files that earlier runs have read, and then
stores a first checkpoint for each new file in one transaction. Only then do tasks read the files. See
test_a_file_in_the_place_of_another_stops_the_load_before_anything_is_stored.

Each task takes over the transactional id of its own file. This fences every earlier attempt at the file, in
this run or an older one, and ends the attempt's transaction. Only then does the task use the file's
checkpoint. See test_a_task_that_lives_on_is_fenced_and_a_bad_file_keeps_none_back.

A task uses the checkpoint that the driver read if the task's transactional id is new (epoch 0) and nothing of
the file was read. No other attempt can have run since then. Any other task reads the checkpoints again. A
task that Spark retries always reads them again, because the epoch of a transactional id restarts at 0 after
the last epoch. If every task read all checkpoints, the total time would grow with the square of the number of
files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from oncelog.errors import LoadRefused, OncelogError
from oncelog.load.checkpoints import read_checkpoints, topic_id_lookup
from oncelog.load.decisions import (
    Assignment,
    Complete,
    FileCheckpoint,
    Layout,
    Refused,
    Resume,
    decide_assignment,
    decide_start,
    initial_checkpoint,
)
from oncelog.load.files import check_given_once, open_reader, source_of
from oncelog.load.loader import (
    Load,
    Report,
    check_load,
    commit_steps,
    fenced_producer,
    file_steps,
    how_of,
    recheck_file,
    send_checkpoints,
)
from oncelog.spark.connect import check_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WATCH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of file number `index`. `error`: the reason if the file was not loaded to its end."""

    index: int
    transactions: int = 0
    error: OncelogError | None = None


def run_load_on_spark(
    spark: SparkSession,
    load: Load,
    config: Mapping[str, Any],
    on_progress: Callable[[Report], object] | None = None,
) -> Report:
    """Run a load as `run_load` does, but with one Spark task per file.

    Every executor must find the files at the same paths. Records of one file keep their order; records of
    different files have no order. If a file cannot be loaded, the other files are still loaded, and the error
    is raised at the end. Raises ConfigError with Spark Connect.
    """
    check_classic(spark, "a load on Spark")
    load = replace(load, files=[path.absolute() for path in load.files])
    layouts = check_load(load, config)
    report = Report(sum(source_of(path).size_bytes for path in load.files))
    started = time.monotonic()
    assignment, checkpoints = _begin(spark, load, layouts, config, report)
    report.was_complete = not assignment.files
    outcomes: list[Outcome] = []
    if assignment.files:
        # Start the largest files first. Otherwise one large file could run alone at the end.
        largest = sorted(assignment.files, key=lambda index: -source_of(load.files[index]).size_bytes)
        with nullcontext() if on_progress is None else _reporting_progress(load, config, report, on_progress):
            pairs = [(index, checkpoints[index]) for index in largest]
            tasks = spark.sparkContext.parallelize(pairs, len(pairs))
            outcomes = tasks.map(partial(_load_file, load=load, config=dict(config))).collect()
    _raise_first(load, sorted(outcomes, key=lambda outcome: outcome.index))
    _count(report, read_checkpoints(config, load.load_id, load.topic)[0])
    report.transactions = sum(outcome.transactions for outcome in outcomes)
    report.seconds = time.monotonic() - started
    return report


def _how(load: Load, index: int, layout: Layout) -> str:
    """Return the parsing options as text, with a mark that the plain loader's text lacks.

    Because of the mark, each of the two loaders refuses a load that the other one began. The loaders use
    different transactional ids, so they could not fence each other's transactions.
    """
    return how_of(load, index, layout, more=", with --spark")


def _begin(
    spark: SparkSession, load: Load, layouts: Sequence[Layout], config: Mapping[str, Any], report: Report
) -> tuple[Assignment, dict[int, FileCheckpoint]]:
    """Decide what is left to load, check the files that were read before, and store first checkpoints.

    Each new file gets a first checkpoint.

    Return the decision, and each file's checkpoint by file number.
    """
    with fenced_producer(load, config) as producer:
        checkpoints, topic_id = read_checkpoints(config, load.load_id, load.topic)
        report.records_before = sum(checkpoint.records for checkpoint in checkpoints)
        check_given_once(load.files, len(checkpoints))
        sources = [source_of(path) for path in load.files]
        hows = [_how(load, index, layout) for index, layout in enumerate(layouts)]
        assignment = decide_assignment(checkpoints, sources, topic=load.topic, topic_id=topic_id, hows=hows)
        if isinstance(assignment, Refused):
            raise LoadRefused(assignment.reason)
        if assignment.recheck:
            pairs = [(index, checkpoints[index]) for index in assignment.recheck]
            checks = spark.sparkContext.parallelize(pairs, len(pairs)).map(partial(_recheck, load=load))
            _raise_first(load, sorted(checks.collect(), key=lambda outcome: outcome.index))
        # Open each new file before checkpoints are stored. If a file cannot be opened, no new file gets a
        # checkpoint.
        for index in assignment.new:
            with closing(open_reader(load.files[index], layouts[index], load.options)):
                pass
        firsts = {
            index: initial_checkpoint(sources[index], hows[index], topic=load.topic, topic_id=topic_id)
            for index in assignment.new
        }
        if firsts:
            with producer.transaction():
                send_checkpoints(load, producer, firsts)
    return assignment, {**dict(enumerate(checkpoints)), **firsts}


def _recheck(pair: tuple[int, FileCheckpoint], *, load: Load) -> Outcome:
    """Check one file that was read before. As in `_load_file`, errors are returned, not raised."""
    index, checkpoint = pair
    try:
        recheck_file(load, index, check_load(load, {})[index], checkpoint)
    except OncelogError as error:
        return Outcome(index, error=error)
    return Outcome(index)


def _load_file(pair: tuple[int, FileCheckpoint], *, load: Load, config: Mapping[str, Any]) -> Outcome:
    """Load one file in a task.

    Errors of Oncelog are returned, not raised. Spark would retry a task that raises, but a retry does not
    help against these errors.
    """
    index, checkpoint = pair
    try:
        return Outcome(index, _load(index, checkpoint, load, config))
    except OncelogError as error:
        return Outcome(index, error=error)


def _load(index: int, checkpoint: FileCheckpoint, load: Load, config: Mapping[str, Any]) -> int:
    """Load one file from its checkpoint on, and return the number of transactions.

    `checkpoint`: the file's checkpoint as the driver read it.
    """
    layout = check_load(load, config)[index]
    with fenced_producer(load, config, index) as producer:
        is_new = producer.idempotence().producer_epoch == 0 and not checkpoint.position
        if is_new and _is_first_attempt():
            with topic_id_lookup(config) as topic_id_of:
                topic_id = topic_id_of(load.topic)
        else:
            checkpoints, topic_id = read_checkpoints(config, load.load_id, load.topic)
            checkpoint = checkpoints[index]
        source, how = source_of(load.files[index]), _how(load, index, layout)
        match decide_start([checkpoint], [source], topic=load.topic, topic_id=topic_id, hows=[how]):
            case Refused(reason):
                raise LoadRefused(reason)
            # An earlier attempt has loaded the file, but Spark lost the attempt's result.
            case Complete():
                return 0
            case Resume():
                begun = checkpoint if checkpoint.position else None
                steps = file_steps(load, index, layout, how, topic_id, begun)
                return sum(1 for _ in commit_steps(load, config, producer, steps))
            case verdict:
                assert_never(verdict)


def _is_first_attempt() -> bool:
    """Return True if this is Spark's first attempt at the running task, or if no task is running.

    The epoch of the transactional id alone does not show this. It restarts at 0 after the last epoch, and
    after the transactional id has expired.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is None or context.attemptNumber() == 0


def _raise_first(load: Load, outcomes: Sequence[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return
    error = failed[0].error
    assert error is not None
    if len(failed) == 1:
        raise error
    others = ", ".join(str(load.files[outcome.index]) for outcome in failed[1:])
    raise type(error)(f"{getattr(error, 'detail', error)}. Not loaded either: {others}")


@contextmanager
def _reporting_progress(
    load: Load, config: Mapping[str, Any], report: Report, on_progress: Callable[[Report], object]
) -> Iterator[None]:
    """Call `on_progress` at intervals while the body runs.

    The report is computed from the checkpoints, which show what all tasks together have committed.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_WATCH_SECONDS):
            # Ignore errors here: the errors of the tasks are more useful.
            with suppress(OncelogError):
                _count(report, read_checkpoints(config, load.load_id, load.topic)[0])
                on_progress(report)

    watcher = threading.Thread(target=watch, name="oncelog-load-progress")
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _count(report: Report, checkpoints: Sequence[FileCheckpoint]) -> None:
    """Update the report from the checkpoints.

    The bytes of unfinished files are an estimate, because positions are in decompressed bytes or in rows.
    """
    report.records = sum(checkpoint.records for checkpoint in checkpoints) - report.records_before
    report.done_bytes = sum(
        checkpoint.size_bytes if checkpoint.is_done else min(checkpoint.position, checkpoint.size_bytes)
        for checkpoint in checkpoints
    )
