"""Background jobs that take time: the loop runs other events between the disk operations of a job.

A job is the work of one `run_in_executor` call. It runs in a real thread that takes turns with the loop.
Before a disk operation a job may be suspended for a drawn time. In that time the loop may rename, delete or
re-create the files that the job uses. A suspended job may also run just before a disk operation of the loop.
Only one thread runs at a time, so the seed still determines the run.
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
    """Probabilities and delays of the jobs of one seed.

    `share` is the share of jobs that are divided. `pause_s` is the longest suspension in seconds; a sync may
    last longer (`SimLoop.pause_limit_s`). `stop_chance` is the probability that a job is suspended at a disk
    operation other than a sync; at a sync it always is. `preempt_chance` is the probability that a suspended
    job runs before a disk operation of the loop.
    """

    share: float
    pause_s: float
    stop_chance: float
    preempt_chance: float


UNDIVIDED = JobSettings(0.0, 0.0, 0.0, 0.0)
"""Settings without division: every job runs from beginning to end at one moment of virtual time."""


def draw_jobs(rng: Random) -> JobSettings:
    """Draw the settings of a seed. Most seeds do not divide jobs, because that makes the simulator slower."""
    if rng.random() >= SPLIT_CHANCE:
        return UNDIVIDED
    return JobSettings(
        rng.choice((0.1, 0.5, 1.0)),
        rng.choice((0.0005, 0.005, 0.05)),
        rng.choice((0.05, 0.3, 1.0)),
        rng.choice((0.0, 0.02, 0.2)),
    )


class _Worker:
    """A thread that runs jobs one after the other."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Run the thread until its job is suspended or done."""
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
    """A job that has begun. A turn of a job is its run up to the next suspension or its end.

    `turn_count` grows with each turn, so that a timer set for an earlier turn does nothing.
    """

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
        """Run the work. Called in the job's thread."""
        try:
            self.result = self.context.run(self.work)
        except BaseException as error:
            self.failure = error
        self.is_over = True

    def suspend(self) -> None:
        """Suspend the job until its next turn. Called in the job's thread.

        Raises SimulatedCrash if the job's process was killed.
        """
        assert self.worker is not None
        if not self.is_abandoned:
            self.worker.back.release()
            self.worker.go.acquire()
        if self.is_abandoned:
            raise SimulatedCrash


class Jobs:
    """The jobs of one loop."""

    def __init__(self, loop: Any, rng: Random) -> None:
        self.settings = UNDIVIDED
        self._loop, self._chance = loop, rng
        self._idle: list[_Worker] = []
        self._waiting: dict[Job, None] = {}
        self._current: Job | None = None

    def is_split(self) -> bool:
        """Draw whether the next job is divided."""
        return self.settings.share > 0 and self._chance.random() < self.settings.share

    def begin(self, work: Callable[[], Any], done: Done) -> None:
        """Run a job until it is first suspended. `done` is called with the result or the error at the end."""
        self._turn(Job(work, done), 0)

    def on_disk(self, is_sync: bool) -> None:
        """Draw whether the current job is suspended. The disk calls this before each disk operation.

        If the operation belongs to the loop, draw instead whether a suspended job runs first.
        """
        job, rng = self._current, self._chance
        if job is not None:
            if job.is_abandoned or is_sync or rng.random() < self.settings.stop_chance:
                job.is_syncing = is_sync
                job.suspend()
        elif self._waiting and rng.random() < self.settings.preempt_chance:
            waiting = [job for job in self._waiting if self._loop.may_run(job.context)]
            if waiting:
                preempting = rng.choice(waiting)
                self._turn(preempting, preempting.turn_count)

    def abandon(self) -> None:
        """End all suspended jobs, and the threads, after the simulation."""
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
