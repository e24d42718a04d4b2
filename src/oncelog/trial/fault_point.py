"""The faults inside the pipeline's processes: a task fails, or a micro-batch is held at its end.

A step behind each source, before each writer, and before each Python function that gets the rows of a task
runs in Spark's Python workers, and makes a task fail. The last two make the tasks fail that write: if the
plan shuffles or caches rows, these do not read the source. Wrappers of these functions, and of those of
groups, make a task fail after the function: it may have written all rows at its end, or those of a group. A
wrapper of the functions of foreachBatch runs in the driver, and holds a micro-batch at its end and at each
line (held_lines.py). A task is "struck" if it was chosen to fail. The trial and these processes communicate
by files in a control directory:

    armed           by the trial: strike a task of each stage that reads rows, or hold the next micro-batch
    struck-STAGE    by a task: it is struck, and no other task of its stage will be. For a failure after a
                    function, STAGE ends in `-end`, so that a stage can have one of each
    written-STAGE   by the trial: a write has reached the target since the strike, so the task may fail
    raised-STAGE    by a task: it fails now; the file names the attempt and its partition
    repeated        by a task: Spark repeats the task after this failure, so the failure had an effect
    kill-PID        by a task: the trial must kill this Spark worker, and start it again

One task of each stage fails, because a pipeline may read a micro-batch before it writes it, for example with
`isEmpty()` or `count()`. A failure in such a job proves nothing about the sink. Spark even ignores the
failure of a task whose rows `isEmpty()` no longer needs.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oncelog.trial.held_lines import FUNCTION, LineAnnouncer
from oncelog.trial.plan import Strike

if TYPE_CHECKING:
    import pyarrow as pa

ARMED, STRUCK, WRITTEN, RAISED, REPEATED = "armed", "struck", "written", "raised", "repeated"
KILL = "kill"
_END = "-end"
_AT_END = frozenset({Strike.RAISE, Strike.KILL_WORKER})
"""The strikes that also happen after a function. A second executor or Spark worker is not killed."""
SPARK_WORKER = "org.apache.spark.deploy.worker.Worker"
"""The main class of a worker of a standalone cluster."""
_BATCHES_BEFORE = 2
"""The number of Arrow batches that a task passes on before the fault."""
_ITEMS_BEFORE = 40
"""The number of an RDD's items that a task passes on before the fault."""
_WAIT_TIMEOUT_S = 10.0
"""Longest wait for a write in seconds. Some sinks write nothing before their task has all rows."""
_EXECUTOR_TIMEOUT_S = 60.0
"""Longest wait in seconds for the end of an executor whose Spark worker was killed."""
_POLL_S = 0.02
_EXECUTOR = "CoarseGrainedExecutorBackend"
"""Part of the name of the main class of an executor's JVM, with any cluster manager."""


class TaskFault(RuntimeError):
    """The error of a task that the trial makes fail."""


def instrument(control: Path, strike: Strike) -> None:
    """Add the fault to every query that this process starts from now on."""
    if not strike.is_in_tasks:
        _hold_batches(control, waits_at_end=strike is Strike.HOLD)
        return
    options = {"control": str(control), "strike": strike.value, "driver": secrets.token_hex(4)}
    add_step = partial(with_step, **options)
    _follow_sources(add_step)
    _precede_writers(add_step)
    _precede_functions_of_rdds(partial(pass_items, **options))
    _follow_functions(options)


def _hold_batches(control: Path, *, waits_at_end: bool) -> None:
    """Make functions of foreachBatch wait at each line, and at their end while the file `armed` exists."""
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    foreach_batch = DataStreamWriter.foreachBatch

    def held(writer: Any, function: Callable[[Any, int], None]) -> Any:
        announcer = LineAnnouncer(control)
        (control / FUNCTION).touch()

        def write_and_wait(frame: Any, batch_id: int) -> None:
            announcer.call(function, frame, batch_id)
            if waits_at_end:
                _wait_while(lambda: (control / ARMED).exists())

        return foreach_batch(writer, write_and_wait)

    DataStreamWriter.foreachBatch = held


def with_step(frame: Any, *, control: str, strike: str, driver: str) -> Any:
    """Return the rows of a frame behind the step with the fault. The step cannot pass on two columns of the
    same name, so such a frame stays as it is.
    """
    from pyspark.sql.pandas.map_ops import PandasMapOpsMixin

    if len(set(frame.columns)) < len(frame.columns):
        return frame
    step = partial(pass_rows, control=control, strike=strike, driver=driver)
    # Do not call `frame.mapInArrow`, which adds the step itself (`_precede_writers`).
    return PandasMapOpsMixin.mapInArrow(frame, step, frame.schema)


def _follow_sources(add_step: Callable[[Any], Any]) -> None:
    """Insert the step after every source that `spark.readStream` loads."""
    from pyspark.sql.streaming.readwriter import DataStreamReader

    load = DataStreamReader.load
    DataStreamReader.load = lambda *arguments, **options: add_step(load(*arguments, **options))


def _precede_writers(add_step: Callable[[Any], Any]) -> None:
    """Insert the step before every writer of a streaming query, and before the writers and functions that a
    function of foreachBatch uses. A function of mapInArrow or mapInPandas may write the rows of its task.
    """
    from pyspark.sql.classic.dataframe import DataFrame

    def with_step_before(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda frame, *arguments, **options: method(add_step(frame), *arguments, **options)

    for name in ("writeStream", "write"):
        setattr(DataFrame, name, property(with_step_before(getattr(DataFrame, name).fget)))
    for name in ("writeTo", "mapInArrow", "mapInPandas"):
        setattr(DataFrame, name, with_step_before(getattr(DataFrame, name)))


def _precede_functions_of_rdds(step: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
    """Insert the step before every function of an RDD: those of foreach and foreachPartition, also of a
    DataFrame, write rows. Guard: test_a_task_fails_that_writes_rows_in_a_function.
    """
    from pyspark.core.rdd import RDD

    map_partitions = RDD.mapPartitionsWithIndex

    def mapped(rdd: Any, f: Callable[[int, Iterable[Any]], Any], *arguments: Any, **options: Any) -> Any:
        return map_partitions(rdd, lambda index, items: f(index, step(items)), *arguments, **options)

    RDD.mapPartitionsWithIndex = mapped


def _follow_functions(options: Mapping[str, str]) -> None:
    """Wrap the Python functions that get the rows of a task or a group, so that a task fails after them.
    Guard: test_a_task_fails_after_a_function_that_writes_at_its_end.
    """
    from pyspark.core.rdd import RDD
    from pyspark.sql.classic.dataframe import DataFrame
    from pyspark.sql.pandas.group_ops import PandasCogroupedOps, PandasGroupedOpsMixin
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    def wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
        method = getattr(owner, name)

        def wrapped(self: Any, func: Any, *arguments: Any, **named: Any) -> Any:
            return method(self, wrapper(func), *arguments, **named)

        setattr(owner, name, wrapped)

    for name in ("mapInArrow", "mapInPandas"):
        wrap(DataFrame, name, lambda func: partial(run_to_end, func, len, options))
    wrap(RDD, "mapPartitionsWithIndex", lambda f: _of_partition(f, options))
    for owner in (PandasGroupedOpsMixin, PandasCogroupedOps):
        for name in ("applyInPandas", "applyInArrow"):
            wrap(owner, name, lambda func: fail_after_group(func, options))
    construct = DataStreamWriter._construct_foreach_function
    DataStreamWriter._construct_foreach_function = staticmethod(
        lambda f: _of_partition(construct(f), options)
    )


def _of_partition(
    function: Callable[[int, Any], Any], options: Mapping[str, str]
) -> Callable[[int, Any], Any]:
    """Return a function of a partition's number and items, behind which the task fails."""
    return lambda index, items: run_to_end(partial(function, index), _one, options, items)


def _one(_item: Any) -> int:
    return 1


class Attempt(NamedTuple):
    """An attempt of Spark at a task. `stage` and `partition` are the same in all attempts at this task."""

    stage: int = 0
    partition: int = 0
    number: int = 0


def pass_rows(
    batches: Iterable[pa.RecordBatch], *, control: str, strike: str, driver: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task. If the fault is armed, the first task of each stage fails after some rows.

    A task with at most _BATCHES_BEFORE Arrow batches fails after its last row.

    `driver` distinguishes the stages of this driver process from those of earlier ones.
    """
    sized = ((batch, batch.num_rows) for batch in batches)
    return _pass_on(sized, _BATCHES_BEFORE, control=control, strike=strike, driver=driver)


def pass_items(items: Iterable[Any], *, control: str, strike: str, driver: str) -> Iterator[Any]:
    """Yield the items of an RDD that a task has, and fail as `pass_rows` does, after _ITEMS_BEFORE items."""
    sized = ((item, 1) for item in items)
    return _pass_on(sized, _ITEMS_BEFORE, control=control, strike=strike, driver=driver)


def _pass_on(
    sized: Iterable[tuple[Any, int]], limit: int, *, control: str, strike: str, driver: str
) -> Iterator[Any]:
    """Yield the parts of a task's input, which come with their numbers of rows. The fault follows `limit`
    parts with rows, or the last row if there are fewer.
    """
    directory, attempt = Path(control), _attempt()
    stage_name = f"{driver}.{attempt.stage}"
    _note_repetition(directory, stage_name, attempt)
    passed = 0
    for part, rows in sized:
        if passed == limit:
            _strike_if_armed(directory, strike, stage_name, attempt)
        yield part
        passed += rows > 0
    if 0 < passed <= limit:
        _strike_if_armed(directory, strike, stage_name, attempt)


def run_to_end(
    function: Callable[[Any], Iterable[Any]],
    size: Callable[[Any], int],
    options: Mapping[str, str],
    parts: Iterable[Any],
) -> Iterator[Any]:
    """Yield what a function returns for the input of a task. If the fault is armed, the first task of each
    stage whose input has rows fails after that. `size` returns the number of rows of a part of the input.
    """
    has_rows = False

    def noted() -> Iterator[Any]:
        nonlocal has_rows
        for part in parts:
            has_rows = has_rows or size(part) > 0
            yield part

    yield from function(noted())
    if has_rows:
        _fail_at_end(options)


def fail_after_group(function: Callable[..., Any], options: Mapping[str, str]) -> Callable[..., Any]:
    """Return a function of a group that makes the first task of each stage fail after a group."""

    def run(*arguments: Any) -> Any:
        result = function(*arguments)
        if inspect.isgenerator(result):
            return _to_end(result)
        _fail_at_end(options)
        return result

    def _to_end(parts: Iterator[Any]) -> Iterator[Any]:
        yield from parts
        _fail_at_end(options)

    # Spark counts the function's parameters, and reads its type hints.
    functools.update_wrapper(run, function)
    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run


def _fail_at_end(options: Mapping[str, str]) -> None:
    if options["strike"] not in _AT_END:
        return
    control, attempt = Path(options["control"]), _attempt()
    stage_name = f"{options['driver']}.{attempt.stage}"
    _note_repetition(control, stage_name, attempt)
    _strike_if_armed(control, options["strike"], f"{stage_name}{_END}", attempt)


def _note_repetition(control: Path, stage_name: str, attempt: Attempt) -> None:
    for name in (stage_name, f"{stage_name}{_END}"):
        if is_repeated(control / f"{RAISED}-{name}", attempt):
            (control / REPEATED).touch()


def _attempt() -> Attempt:
    """Return the attempt that this process runs."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return Attempt() if task is None else Attempt(task.stageId(), task.partitionId(), task.taskAttemptId())


def is_repeated(raised: Path, attempt: Attempt) -> bool:
    """Return True if the file `raised` names another attempt at the same task.

    The attempt's number within its task would not do, because it is 0 again if Spark repeats the whole stage.
    """
    try:
        failed = Attempt(*map(int, raised.read_text().split()))
    except FileNotFoundError:
        return False
    return failed.partition == attempt.partition and failed.number != attempt.number


def _strike_if_armed(control: Path, strike: str, stage_name: str, attempt: Attempt) -> None:
    if not (control / ARMED).exists():
        return
    try:
        (control / f"{STRUCK}-{stage_name}").touch(exist_ok=False)
    except FileExistsError:
        return
    if not stage_name.endswith(_END):
        _wait_while(lambda: not (control / f"{WRITTEN}-{stage_name}").exists())
    victims = _victims(strike)
    raised = control / f"{RAISED}-{stage_name}"
    raised.with_name(f".{raised.name}").write_text(" ".join(map(str, attempt)))
    raised.with_name(f".{raised.name}").rename(raised)
    if strike == Strike.KILL_SPARK_WORKER:
        _die_with_spark_worker(control, victims[0])
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    raise TaskFault("oncelog trial: this task fails once")


def _die_with_spark_worker(control: Path, pid: int) -> None:
    """Let the trial kill the Spark worker, and wait until the executor ends, which ends this process too.

    Raises TaskFault if this takes too long.
    """
    executor = executor_above(os.getpid(), _parent_and_command)
    (control / f"{KILL}-{pid}").touch()
    _wait_while(lambda: Path("/proc", str(executor)).exists(), _EXECUTOR_TIMEOUT_S)
    raise TaskFault("oncelog trial: the executor of a Spark worker that was killed is still running")


def _victims(strike: str) -> list[int]:
    """Return the ids of the processes to kill, with this process last."""
    match Strike(strike):
        case Strike.KILL_WORKER:
            return [os.getpid()]
        case Strike.KILL_EXECUTOR:
            return [executor_above(os.getpid(), _parent_and_command), os.getpid()]
        case Strike.KILL_SPARK_WORKER:
            return [process_above(os.getpid(), SPARK_WORKER, _parent_and_command)]
        case _:
            return []


def executor_above(pid: int, look_up: Callable[[int], tuple[int, str]]) -> int:
    """Return the process id of the executor that started a Python worker, perhaps through Spark's daemon.

    `look_up` returns the parent and the command line of a process. Raises RuntimeError if no process above
    `pid` is an executor.
    """
    return process_above(pid, _EXECUTOR, look_up)


def process_above(pid: int, main_class: str, look_up: Callable[[int], tuple[int, str]]) -> int:
    """Return the id of the nearest process, from `pid` upwards, whose command line names this class."""
    while pid > 1:
        parent, command = look_up(pid)
        if main_class in command:
            return pid
        pid = parent
    raise RuntimeError(f"oncelog trial: no process above this Python worker is a {main_class}")


def _parent_and_command(pid: int) -> tuple[int, str]:
    """Return the parent and the command line of a process. Only Linux has these files."""
    directory = Path("/proc", str(pid))
    # The name of the program, in parentheses, may contain spaces.
    _state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
    return int(parent), (directory / "cmdline").read_bytes().decode(errors="replace")


class Strikes:
    """The trial's view of the tasks that fail, from the files in the control directory."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self._writes_before: dict[str, int] = {}
        """Name of a stage -> the number of writes when its task was struck."""
        self._writes = 0
        self._has_failed_query = False

    def arm(self) -> None:
        """Arm the fault: let tasks fail, or hold micro-batches. Forget earlier failures of tasks, because
        they had no effect.
        """
        for file in (*self._control.glob(f"{STRUCK}-*"), *self._control.glob(f"{RAISED}-*")):
            file.unlink()
        self._writes_before.clear()
        (self._control / ARMED).touch()

    def disarm(self) -> None:
        (self._control / ARMED).unlink(missing_ok=True)

    def look(self, writes: int) -> None:
        """Let each struck task fail as soon as a write has reached the target since it was struck.

        `writes` counts the writes since the fault was prepared. The first struck task may fail if there was
        any write since then.
        """
        for file in self._control.glob(f"{STRUCK}-*"):
            stage_name = file.name.removeprefix(f"{STRUCK}-")
            before = self._writes if self._writes_before else 0
            if writes > self._writes_before.setdefault(stage_name, before):
                (self._control / f"{WRITTEN}-{stage_name}").touch()
        self._writes = writes

    def take_kills(self) -> list[int]:
        """Return the ids of the Spark workers that tasks have asked the trial to kill, each once."""
        files = list(self._control.glob(f"{KILL}-*"))
        for file in files:
            file.unlink()
        return [int(file.name.removeprefix(f"{KILL}-")) for file in files]

    def query_failed(self) -> None:
        """Handle a failure of the query. If a task was made to fail before, the failure counts as its effect,
        and the fault is disarmed.
        """
        if any(self._control.glob(f"{RAISED}-*")):
            self._has_failed_query = True
            self.disarm()

    @property
    def has_begun(self) -> bool:
        return bool(self._writes_before)

    @property
    def has_counted(self) -> bool:
        """True if the failure of a task had an effect: Spark repeated the task, or the query failed."""
        return self._has_failed_query or (self._control / REPEATED).exists()


def _wait_while(condition: Callable[[], bool], timeout_s: float = _WAIT_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
