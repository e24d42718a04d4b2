"""Work in bounded steps, between which requests are served: large requests, snapshots, deletions, rounds.

A chore is a generator; each step is a bounded piece of work. What it yields is done before its next step:
None is nothing, a function is a call that may take long (a sync, a deletion) and is safe in another
thread. Without a driver a chore runs to its end in `add`, as tests and the simulator want it.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import IntEnum

from oncelog.log.disk import PartitionClosed

Job = Callable[[], None]
Chore = Generator[Job | None, None, None]


class Kind(IntEnum):
    """What a chore is part of. A job holds up the chores of its own kind, and no others."""

    LOG = 0
    """What the log or the clock began. Nothing comes between a job and the step that follows it but requests
    and their steps, so such a chore must expect any change that a request can make."""
    REQUEST = 1
    """What a client waits for. It has no jobs."""
    REQUEST_WITH_JOBS = 2
    """What a client waits for, once it has had a job. One job at a time bounds their memory: a compressed
    batch of 10 KB may become 256 MB."""


class Chores:
    """Chores under way; their kinds take turns, and so do the chores of a kind.

    `on_added` is set by a driver, who then calls `step` until there is nothing left, and runs the jobs.
    """

    def __init__(self) -> None:
        self._queues = [_Queue() for _ in Kind]
        self._turn = 0
        self.on_added: Callable[[], None] | None = None

    def __len__(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues)

    @property
    def is_ready(self) -> bool:
        """True if `step` has something to do, whatever jobs are running."""
        return any(queue.is_ready for queue in self._queues)

    def add(self, chore: Chore, kind: Kind = Kind.LOG) -> None:
        """Begin a chore. Small ones are done when this returns; what they raise is raised here."""
        if self.on_added is None:
            run(chore)
            return
        self._queues[kind].waiting.append(chore)
        self.on_added()

    def step(self) -> RunningJob | None:
        """One step of the chore whose turn it is; if it returns a job, that must be run.

        Raises what the chore raised, which is over then. A chore of a partition that was closed just ends.
        """
        for _ in self._queues:
            queue = self._queues[self._turn]
            self._turn = (self._turn + 1) % len(self._queues)
            if queue.is_ready:
                return queue.step()
        return None

    def finish(self) -> None:
        """Everything now, as on closing: no job is running.

        Raises the first error, after the other chores.
        """
        errors: list[Exception] = []
        for queue in self._queues:
            queue.job = None
        while self:
            try:
                job = self.step()
            except Exception as error:
                errors.append(error)
                continue
            if job is not None:
                with suppress(Exception):  # its chore is told
                    job()
        if errors:
            raise errors[0]


class _Queue:
    """The chores of one kind. `job`: of the first one, while it is running; `error`: what it raised."""

    def __init__(self) -> None:
        self.waiting: deque[Chore] = deque()
        self.job: RunningJob | None = None
        self.error: Exception | None = None

    @property
    def is_ready(self) -> bool:
        return self.job is None and bool(self.waiting)

    def step(self) -> RunningJob | None:
        chore, error = self.waiting.popleft(), self.error
        self.error = None
        if inspect.getgeneratorstate(chore) == inspect.GEN_CLOSED:
            return None  # given up while its job ran, which may have met files that were closed
        try:
            job = next(chore) if error is None else chore.throw(error)
        except (StopIteration, PartitionClosed):
            return None
        if job is None:
            self.waiting.append(chore)
            return None
        # No chore of the kind comes between a job and the step that follows it.
        self.waiting.appendleft(chore)
        self.job = RunningJob(self, job)
        return self.job


class RunningJob:
    """A job to be called once, in any thread. The next step of its chore is told what it raises."""

    __slots__ = ("_queue", "job")

    def __init__(self, queue: _Queue, job: Job) -> None:
        self._queue, self.job = queue, job

    def __call__(self) -> None:
        try:
            self.job()
        except Exception as error:
            self.end(error)
            raise
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """Let its chore go on. Does nothing if it has ended already."""
        if self._queue.job is self:
            self._queue.error = error
            self._queue.job = None  # last: from here on the thread of the steps goes on


def run(chore: Chore) -> None:
    """Do a chore to its end. Raises what it raises; what a job raises it may handle."""
    alone = Chores()
    alone._queues[Kind.LOG].waiting.append(chore)
    try:
        alone.finish()
    finally:
        chore.close()
