"""A load on Spark: its files are read side by side, a task for each, which does what the plain loader does.

The driver takes over the load's id and stores a first mark for every new file, all in one transaction. A task
takes over its file's own transactional id, which fences and ends every earlier attempt at this file, of this
run or an older one, and only then takes the file's mark: it says what all of them have committed. Where the
id is new (epoch 0, and nothing of the file was read) there were none since the driver read the marks, so its
mark of the file holds. Any other task reads the marks again: epochs begin anew when they are used up. All
tasks did once, which took time with the square of the number of files.
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
from oncelog.load.checkpoints import read_marks, topic_ids
from oncelog.load.decisions import (
    Complete,
    GoOn,
    Layout,
    Mark,
    Refused,
    Spread,
    decide_spread,
    decide_start,
    first_mark,
)
from oncelog.load.files import check_given_once, open_reader, source_of
from oncelog.load.loader import (
    Load,
    Report,
    check_load,
    commit_steps,
    file_steps,
    how_of,
    recheck_file,
    send_marks,
    taking_over,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WATCH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of file number `index`. `error`: why it is not loaded to its end."""

    index: int
    transactions: int = 0
    error: OncelogError | None = None


def run_load_on_spark(
    spark: SparkSession,
    load: Load,
    config: Mapping[str, Any],
    on_progress: Callable[[Report], object] | None = None,
) -> Report:
    """As `run_load`, with a Spark task per file; every executor must find the files at the same paths.

    Records of a file keep their order, files among each other have none. A file that cannot be loaded does
    not keep the others from it: its error is raised at the end.
    """
    load = replace(load, files=[path.absolute() for path in load.files])
    layouts = check_load(load, config)
    report = Report(sum(source_of(path).size_bytes for path in load.files))
    began = time.monotonic()
    spread, marks = _begin(spark, load, layouts, config, report)
    report.was_complete = not spread.files
    outcomes: list[Outcome] = []
    if spread.files:
        # The largest first, so that none of them is left over for the end.
        largest = sorted(spread.files, key=lambda index: -source_of(load.files[index]).size_bytes)
        with nullcontext() if on_progress is None else _watching(load, config, report, on_progress):
            pairs = [(index, marks[index]) for index in largest]
            tasks = spark.sparkContext.parallelize(pairs, len(pairs))
            outcomes = tasks.map(partial(_load_file, load=load, config=dict(config))).collect()
    _raise_first(load, sorted(outcomes, key=lambda outcome: outcome.index))
    _count(report, read_marks(config, load.load_id, load.topic)[0])
    report.transactions = sum(outcome.transactions for outcome in outcomes)
    report.seconds = time.monotonic() - began
    return report


def _how(load: Load, index: int, layout: Layout) -> str:
    """Not as the plain loader's: neither would fence what the other one has running."""
    return how_of(load, index, layout, more=", with --spark")


def _begin(
    spark: SparkSession, load: Load, layouts: Sequence[Layout], config: Mapping[str, Any], report: Report
) -> tuple[Spread, dict[int, Mark]]:
    """Decide what is left to do, check the files that were read before, and fix the list of files.

    Return the decision and the mark of every file.
    """
    with taking_over(load, config) as producer:
        marks, topic_id = read_marks(config, load.load_id, load.topic)
        report.records_before = sum(mark.records for mark in marks)
        check_given_once(load.files, len(marks))
        sources = [source_of(path) for path in load.files]
        hows = [_how(load, index, layout) for index, layout in enumerate(layouts)]
        spread = decide_spread(marks, sources, topic=load.topic, topic_id=topic_id, hows=hows)
        if isinstance(spread, Refused):
            raise LoadRefused(spread.why)
        if spread.recheck:
            pairs = [(index, marks[index]) for index in spread.recheck]
            checks = spark.sparkContext.parallelize(pairs, len(pairs)).map(partial(_recheck, load=load))
            _raise_first(load, sorted(checks.collect(), key=lambda outcome: outcome.index))
        for index in spread.fresh:  # what cannot be read at all, or not with these options, leaves no mark
            with closing(open_reader(load.files[index], layouts[index], load.options)):
                pass
        firsts = {
            index: first_mark(sources[index], hows[index], topic=load.topic, topic_id=topic_id)
            for index in spread.fresh
        }
        if firsts:
            with producer.transaction():
                send_marks(load, producer, firsts)
    return spread, {**dict(enumerate(marks)), **firsts}


def _recheck(pair: tuple[int, Mark], *, load: Load) -> Outcome:
    """Check one file that was read before. A refusal is no failure of the task, as in `_load_file`."""
    index, mark = pair
    try:
        recheck_file(load, index, check_load(load, {})[index], mark)
    except OncelogError as error:
        return Outcome(index, error=error)
    return Outcome(index)


def _load_file(pair: tuple[int, Mark], *, load: Load, config: Mapping[str, Any]) -> Outcome:
    """What a task does. What only a person can mend is no failure of the task: Spark would try it again."""
    index, mark = pair
    try:
        return Outcome(index, _load(index, mark, load, config))
    except OncelogError as error:
        return Outcome(index, error=error)


def _load(index: int, mark: Mark, load: Load, config: Mapping[str, Any]) -> int:
    """Load one file, of which the driver read `mark`; return the number of transactions it took."""
    layout = check_load(load, config)[index]
    with taking_over(load, config, index) as producer:
        is_new = producer.idempotence().producer_epoch == 0 and not mark.position
        if is_new and _is_first_attempt():
            with topic_ids(config) as topic_id_of:
                topic_id = topic_id_of(load.topic)
        else:
            marks, topic_id = read_marks(config, load.load_id, load.topic)
            mark = marks[index]
        source, how = source_of(load.files[index]), _how(load, index, layout)
        match decide_start([mark], [source], topic=load.topic, topic_id=topic_id, hows=[how]):
            case Refused(why):
                raise LoadRefused(why)
            case Complete():  # by an attempt whose outcome was lost
                return 0
            case GoOn():
                begun = mark if mark.position else None
                steps = file_steps(load, index, layout, how, topic_id, begun)
                return sum(1 for _ in commit_steps(load, config, producer, steps))
            case verdict:
                assert_never(verdict)


def _is_first_attempt() -> bool:
    """Return whether Spark runs this task for the first time.

    A transactional id begins again with epoch 0 when its epochs are used up, and long after its last use.
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
def _watching(
    load: Load, config: Mapping[str, Any], report: Report, on_progress: Callable[[Report], object]
) -> Iterator[None]:
    """Tell meanwhile how far the marks are: they are what is committed, whichever task did it."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_WATCH_SECONDS):
            with suppress(OncelogError):  # the tasks' own errors are what matters
                _count(report, read_marks(config, load.load_id, load.topic)[0])
                on_progress(report)

    watcher = threading.Thread(target=watch, name="oncelog-load-progress")
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _count(report: Report, marks: Sequence[Mark]) -> None:
    """Bytes of files that are not done are about right: positions are those after decompression, or rows."""
    report.records = sum(mark.records for mark in marks) - report.records_before
    report.done_bytes = sum(
        mark.size_bytes if mark.is_done else min(mark.position, mark.size_bytes) for mark in marks
    )
