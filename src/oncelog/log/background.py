"""Background tasks: long work in bounded steps, between which the broker serves requests.

Large requests, snapshots, deletions and periodic work run as background tasks. A task is a generator. It does
a bounded piece of work, called a step, and then yields None or a blocking call (a sync, a deletion). A
blocking call may run in another thread, and the next step runs after it. A runner, such as the server's event
loop, calls `BackgroundQueue.step`. Without a runner, as in tests and tools, `add` runs the task to its end
before it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import IntEnum

from oncelog.log.disk import PartitionClosed

BlockingCall = Callable[[], None]
BackgroundTask = Generator[BlockingCall | None, None, None]


class Kind(IntEnum):
    """The kind of a background task. A blocking call delays only other tasks of the same kind."""

    LOG = 0
    """A task that the log or a timer started. Between its blocking call and its next step, requests are
    handled, but no other LOG task runs. So the task must expect every change that a request can make, but no
    change by another LOG task.
    """
    REQUEST = 1
    """A client's request that has made no blocking call yet."""
    REQUEST_WITH_CALLS = 2
    """A client's request, from its first blocking call on. Only one of these calls runs at a time. This
    limits the memory, because a compressed batch of 10 KB may become 256 MB.
    """
    CHANGE = 3
    """A client's change of topics, settings, ACLs, quotas or users, from its first blocking call on. Only one
    of these calls runs at a time. It does not wait for the look-ups of other clients, which the change may be
    meant to stop. See test_a_change_does_not_wait_for_the_blocking_calls_of_look_ups.
    """
    ASSIGNMENT = 4
    """The target of a large consumer group. It does not wait for look-ups either: without it, the members of
    the group read nothing. See test_a_target_does_not_wait_for_the_blocking_calls_of_look_ups.
    """


class BackgroundQueue:
    """The queue of unfinished background tasks. The kinds of tasks take turns, and so do the tasks of one
    kind.

    A runner sets `on_added`, then calls `step` until no task is left, and runs the blocking calls.
    """

    def __init__(self) -> None:
        self._queues = [_KindQueue() for _ in Kind]
        self._turn = 0
        self.on_added: Callable[[], None] | None = None

    def __len__(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues)

    @property
    def is_ready(self) -> bool:
        """True if a task waits and no blocking call of its kind is running, so that `step` can run now."""
        return any(queue.is_ready for queue in self._queues)

    def add(self, task: BackgroundTask, kind: Kind = Kind.LOG) -> None:
        """Add a task to the queue. Without a runner, run the task to its end immediately, and raise its
        error.
        """
        if self.on_added is None:
            run(task)
            return
        self._queues[kind].waiting.append(task)
        self.on_added()

    def discard(self, task: BackgroundTask) -> None:
        """Cancel a task by closing its generator. If a blocking call of the task is running, its result will
        be ignored.
        """
        task.close()
        for queue in self._queues:
            queue.waiting = deque(None if waiting is task else waiting for waiting in queue.waiting)

    def step(self) -> RunningCall | None:
        """Run one step of the next task. Return a blocking call if the caller must run one, else None.

        An error of the step ends the task and is raised. PartitionClosed ends the task without an error.
        """
        for _ in self._queues:
            queue = self._queues[self._turn]
            self._turn = (self._turn + 1) % len(self._queues)
            if queue.is_ready:
                return queue.step()
        return None

    def finish(self) -> None:
        """Run all tasks to their ends, for closing. No blocking call may be running.

        After the last task has ended, raises the first error of any task.
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
                with suppress(Exception):  # the task gets the error in its next step
                    call()
        if errors:
            raise errors[0]


class _KindQueue:
    """The tasks of one kind.

    - `waiting`: the tasks in order. A discarded task is replaced by None and not removed, because its
      blocking call may be running.
    - `call`: the running blocking call of the first task; None if no call is running.
    - `error`: the error of the last blocking call; it is raised in the next step of the call's task.
    """

    def __init__(self) -> None:
        self.waiting: deque[BackgroundTask | None] = deque()
        self.call: RunningCall | None = None
        self.error: Exception | None = None

    @property
    def is_ready(self) -> bool:
        return self.call is None and bool(self.waiting)

    def step(self) -> RunningCall | None:
        task, error = self.waiting.popleft(), self.error
        self.error = None
        if task is None:
            return None
        try:
            call = next(task) if error is None else task.throw(error)
        except (StopIteration, PartitionClosed):
            return None
        if call is None:
            self.waiting.append(task)
            return None
        # The task returns to the front, because no other task of this kind may run between the call and the
        # next step.
        self.waiting.appendleft(task)
        self.call = RunningCall(self, call)
        return self.call


class RunningCall:
    """A blocking call to run once, in any thread. If the call raises an error, the error is also raised
    inside the task, in its next step.
    """

    __slots__ = ("_queue", "_unclaimed", "call")

    def __init__(self, queue: _KindQueue, call: BlockingCall) -> None:
        self._queue, self.call = queue, call
        self._unclaimed: list[None] = [None]
        """Empty once the call has begun or was ended. `pop` is atomic, so only one thread empties it."""

    def __call__(self) -> None:
        if not self.is_running or not self._claim():
            # `end` was called before, because no thread could be started for this call. The thread pool has
            # queued the call nevertheless, and runs it once it has a thread. See
            # test_a_call_that_was_ended_does_nothing.
            return
        try:
            self.call()
        except Exception as error:
            self._finish(error)
            raise
        self._finish(None)

    @property
    def is_running(self) -> bool:
        """True until the call has returned or was ended, so that its task can continue."""
        return self._queue.call is self

    def end(self, error: Exception) -> None:
        """Let the task continue with `error`, and never begin the call. Do nothing if the call has begun.

        A thread pool that cannot start a thread may run the call in another thread that has just become free.
        The task must not undo the call's work meanwhile. See
        test_a_call_that_has_begun_is_not_ended_by_a_lack_of_threads.
        """
        if self._claim():
            self._finish(error)

    def _claim(self) -> bool:
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        return True

    def _finish(self, error: Exception | None) -> None:
        if self.is_running:
            self._queue.error = error
            # Clear `call` last: as soon as it is None, another thread may run the next step, which reads
            # `error`.
            self._queue.call = None


def run(task: BackgroundTask) -> None:
    """Run a task to its end without a runner. Raises the error of the task.

    An error of a blocking call is raised inside the task, which may handle it.
    """
    queue = BackgroundQueue()
    queue._queues[Kind.LOG].waiting.append(task)
    try:
        queue.finish()
    finally:
        task.close()
