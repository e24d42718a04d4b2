"""Jobs of run_in_executor that take time: other events of the loop run between their disk operations.

A job runs in a real thread that takes turns with the loop. Before a disk operation it may be put off for a
drawn time. The loop runs meanwhile, and renames, deletes and creates again what the job uses. Likewise a job
that waits may run at a disk operation of the loop. Two threads never run at a time, so a seed stays a seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from random import Random
from typing import Any, NamedTuple

from oncelog.testing.memory_disk import SimulatedCrash

SPLIT_CHANCE = 0.25
Done = Callable[[Any, BaseException | None], object]


class JobSettings(NamedTuple):
    """How a seed's jobs are split. `share`: of the jobs, which are; `pause_s`: the longest time between two
    operations; `stop_chance`: that a job is put off at an operation; `preempt_chance`: that the loop is.
    """

    share: float
    pause_s: float
    stop_chance: float
    preempt_chance: float


WHOLE = JobSettings(0.0, 0.0, 0.0, 0.0)
"""Every job at one moment."""


def draw_jobs(chance: Random) -> JobSettings:
    """Most seeds have whole jobs: a split one costs the simulator some of its time."""
    if chance.random() >= SPLIT_CHANCE:
        return WHOLE
    return JobSettings(
        chance.choice((0.1, 0.5, 1.0)),
        chance.choice((0.0005, 0.005, 0.05)),
        chance.choice((0.05, 0.3, 1.0)),
        chance.choice((0.0, 0.02, 0.2)),
    )


class _Worker:
    """A thread that runs jobs, one after the other."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Run the thread until it is put off or done."""
        self.go.release()
        self.back.acquire()

    def end(self) -> None:
        self.job = None
        self.go.release()
        self._thread.join()

    def _main(self) -> None:
        while True:
            self.go.acquire()
            if self.job is None:
                return
            self.job.run()
            self.back.release()


class Job:
    """A job under way. `turn_count` tells a timer that was set for an earlier turn."""

    def __init__(self, work: Callable[[], Any], done: Done) -> None:
        self.work, self.done = work, done
        self.context: Context = copy_context()
        self.turn_count = 0
        self.is_over = self.is_abandoned = False
        self.result: Any = None
        self.failure: BaseException | None = None
        self.worker: _Worker | None = None
        self.is_syncing = False

    def run(self) -> None:
        """In its thread."""
        try:
            self.result = self.context.run(self.work)
        except BaseException as error:
            self.failure = error
        self.is_over = True

    def put_off(self) -> None:
        """In its thread: until its next turn. Raises SimulatedCrash when its process was killed."""
        assert self.worker is not None
        if not self.is_abandoned:
            self.worker.back.release()
            self.worker.go.acquire()
        if self.is_abandoned:
            raise SimulatedCrash


class Jobs:
    """The jobs of one loop."""

    def __init__(self, loop: Any, chance: Random) -> None:
        self.settings = WHOLE
        self._loop, self._chance = loop, chance
        self._idle: list[_Worker] = []
        self._waiting: dict[Job, None] = {}
        self._current: Job | None = None

    def is_split(self) -> bool:
        """Draw whether the next job takes turns."""
        return self.settings.share > 0 and self._chance.random() < self.settings.share

    def begin(self, work: Callable[[], Any], done: Done) -> None:
        """Run a job up to where it is put off first. `done` gets its result or error in the end."""
        self._turn(Job(work, done), 0)

    def on_disk(self, is_sync: bool) -> None:
        """A disk operation is about to be done, by the loop or by a job."""
        job, chance = self._current, self._chance
        if job is not None:
            if job.is_abandoned or is_sync or chance.random() < self.settings.stop_chance:
                job.is_syncing = is_sync
                job.put_off()
        elif self._waiting and chance.random() < self.settings.preempt_chance:
            waiting = [each for each in self._waiting if self._loop.may_run(each.context)]
            if waiting:
                preempting = chance.choice(waiting)
                self._turn(preempting, preempting.turn_count)

    def abandon(self) -> None:
        """The world is over: jobs of killed processes end."""
        for job in list(self._waiting):
            job.is_abandoned = True
            self._run(job)
        self._waiting.clear()
        for worker in self._idle:
            worker.end()
        self._idle.clear()

    def _turn(self, job: Job, turn_count: int) -> None:
        if job.turn_count != turn_count or job.is_over:
            return
        self._waiting.pop(job, None)
        self._run(job)
        if job.is_over:
            if not isinstance(job.failure, SimulatedCrash):
                job.done(job.result, job.failure)
            return
        self._waiting[job] = None
        limit_s = max(self.settings.pause_s, self._loop.pause_limit_s if job.is_syncing else 0.0)
        pause_s = self._chance.uniform(0.0, limit_s)
        self._loop.call_later(pause_s, self._turn, job, job.turn_count, context=job.context.copy())

    def _run(self, job: Job) -> None:
        if job.worker is None:
            job.worker = self._idle.pop() if self._idle else _Worker()
            job.worker.job = job
        job.turn_count += 1
        self._current, before = job, self._current
        job.worker.turn()
        self._current = before
        if job.is_over:
            self._idle.append(job.worker)
