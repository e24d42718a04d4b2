"""The faults inside of the pipeline's processes.

A step between the source and the user's plan runs in Spark's Python workers. The functions of foreachBatch
run in the driver. The trial and these processes speak through files in a control directory:

    armed     the trial: the next task that reads rows strikes, or the next micro-batch is held
    struck    a task: it strikes now, and no other will
    written   the trial: a write has reached the target, so the fault comes after it
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncelog.trial.plan import Strike

if TYPE_CHECKING:
    import pyarrow as pa

ARMED, STRUCK, WRITTEN = "armed", "struck", "written"
_BATCHES_BEFORE = 2
"""Arrow batches of a task that pass before the fault."""
_WAIT_TIMEOUT_S = 10.0
"""Longest wait in seconds. Some sinks write only when their task has all rows, so no write would come."""
_POLL_S = 0.02


class TaskFault(RuntimeError):
    """The error of a task that the trial makes fail."""


def instrument(control: Path, strike: Strike) -> None:
    """Put the fault into every query that this process starts from now on."""
    if strike is Strike.HOLD:
        _hold_batches(control)
    else:
        _follow_sources(control, strike)


def _hold_batches(control: Path) -> None:
    """Make functions of foreachBatch wait behind their last write, as long as that is armed."""
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    foreach_batch = DataStreamWriter.foreachBatch

    def held(writer: Any, function: Callable[[Any, int], None]) -> Any:
        def write_and_wait(frame: Any, batch_id: int) -> None:
            function(frame, batch_id)
            _wait_while(lambda: (control / ARMED).exists())

        return foreach_batch(writer, write_and_wait)

    DataStreamWriter.foreachBatch = held


def _follow_sources(control: Path, strike: Strike) -> None:
    """Put the step with the fault behind every source that `spark.readStream` loads."""
    from pyspark.sql.streaming.readwriter import DataStreamReader

    load = DataStreamReader.load

    def load_with_fault(reader: Any, *arguments: Any, **options: Any) -> Any:
        frame = load(reader, *arguments, **options)
        fault_point = partial(pass_rows, control=str(control), strike=strike.value)
        return frame.mapInArrow(fault_point, frame.schema)

    DataStreamReader.load = load_with_fault


def pass_rows(batches: Iterable[pa.RecordBatch], *, control: str, strike: str) -> Iterator[pa.RecordBatch]:
    """Pass the rows of a task on, and strike once if that is armed: after some of them, or after all."""
    passed = 0
    for batch in batches:
        if passed == _BATCHES_BEFORE:
            _strike_if_armed(Path(control), strike)
        yield batch
        passed += batch.num_rows > 0
    if 0 < passed <= _BATCHES_BEFORE:
        _strike_if_armed(Path(control), strike)


def _strike_if_armed(control: Path, strike: str) -> None:
    if not (control / ARMED).exists():
        return
    try:
        (control / STRUCK).touch(exist_ok=False)
    except FileExistsError:
        return
    _wait_while(lambda: not (control / WRITTEN).exists())
    if strike == Strike.KILL_WORKER:
        os.kill(os.getpid(), signal.SIGKILL)
    raise TaskFault("oncelog trial: this task fails once")


def _wait_while(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_TIMEOUT_S
    while condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
