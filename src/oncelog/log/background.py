"""Background work in bounded steps, between which the broker serves requests.

Large requests, snapshots, deletions and the periodic rounds are background tasks. A task is a generator, and
each step is a bounded piece of work. A step yields None, or a blocking call (a sync, a deletion) that is safe
in another thread; the next step runs after that call. Without a runner, `add` runs a task to its end, as
tests and tools do.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import IntEnum

from oncelog.log.disk import PartitionClosed

BlockingCall = Callable[[], None]
BackgroundTask = Generator[BlockingCall | None, None, None]


class Kind(IntEnum):
    """The kind of a background task. A blocking call delays only the tasks of its own kind."""

    LOG = 0
    """A task that the log or a timer started. Between a blocking call and the step after it, only requests
    and their steps run. So such a task must expect any change that a request can make, and no other."""
    REQUEST = 1
    """A request that a client waits for, and that needs no blocking call."""
    REQUEST_WITH_CALLS = 2
    """A request that a client waits for, from its first blocking call on. One call at a time bounds their
    memory: a compressed batch of 10 KB may become 256 MB."""


class BackgroundQueue:
    """The background tasks under way. The kinds take turns, and so do the tasks of one kind.

    A runner sets `on_added`. It then calls `step` until nothing is left, and runs the blocking calls.
    """

    def __init__(self) -> None:
        self._queues = [_KindQueue() for _ in Kind]
        self._turn = 0
        self.on_added: Callable[[], None] | None = None

    def __len__(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues)

    @property
    def is_ready(self) -> bool:
        """True if `step` can run something now, even while blocking calls are running."""
        return any(queue.is_ready for queue in self._queues)

    def add(self, task: BackgroundTask, kind: Kind = Kind.LOG) -> None:
        """Start a task. Without a runner, run it to its end and raise what it raises."""
        if self.on_added is None:
            run(task)
            return
        self._queues[kind].waiting.append(task)
        self.on_added()

    def step(self) -> RunningCall | None:
        """Run one step of the next task, and return the blocking call that the caller must run, if any.

        Raises what the task raised, which ends it. A task of a closed partition ends silently.
        """
        for _ in self._queues:
            queue = self._queues[self._turn]
            self._turn = (self._turn + 1) % len(self._queues)
            if queue.is_ready:
                return queue.step()
        return None

    def finish(self) -> None:
        """Run all tasks to their ends, as on closing; no blocking call may be running.

        Raises the first error after the other tasks have ended.
        """
        errors: list[Exception] = []
        for queue in self._queues:
            queue.call = None
        while self:
            try:
                call = self.step()
            except Exception as error:
                errors.append(error)
                continue
            if call is not None:
                with suppress(Exception):  # the next step of its task gets the error
                    call()
        if errors:
            raise errors[0]


class _KindQueue:
    """The tasks of one kind. `call` is the running call of the first one; `error` is what it raised."""

    def __init__(self) -> None:
        self.waiting: deque[BackgroundTask] = deque()
        self.call: RunningCall | None = None
        self.error: Exception | None = None

    @property
    def is_ready(self) -> bool:
        return self.call is None and bool(self.waiting)

    def step(self) -> RunningCall | None:
        task, error = self.waiting.popleft(), self.error
        self.error = None
        if inspect.getgeneratorstate(task) == inspect.GEN_CLOSED:
            return None  # abandoned during its call, which may have met closed files
        try:
            call = next(task) if error is None else task.throw(error)
        except (StopIteration, PartitionClosed):
            return None
        if call is None:
            self.waiting.append(task)
            return None
        # First in the queue: no task of this kind runs between a call and the step after it.
        self.waiting.appendleft(task)
        self.call = RunningCall(self, call)
        return self.call


class RunningCall:
    """A blocking call, to be made once and in any thread. Its task's next step gets what it raises."""

    __slots__ = ("_queue", "call")

    def __init__(self, queue: _KindQueue, call: BlockingCall) -> None:
        self._queue, self.call = queue, call

    def __call__(self) -> None:
        try:
            self.call()
        except Exception as error:
            self.end(error)
            raise
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """Let the task continue, with `error` if the call failed. A second call of `end` has no effect."""
        if self._queue.call is self:
            self._queue.error = error
            self._queue.call = None  # last: the thread of the steps may continue from here


def run(task: BackgroundTask) -> None:
    """Run a task to its end. Raises what the task raises; a task may handle the errors of its calls."""
    queue = BackgroundQueue()
    queue._queues[Kind.LOG].waiting.append(task)
    try:
        queue.finish()
    finally:
        task.close()
