"""Drives a log's chores on the event loop: a little work, then a rest in which requests are served.

What a chore wants done elsewhere (syncs, deletions) runs in a thread, for each kind of chore one at a time.
Chores of other kinds go on meanwhile: a large request does not wait for a sync of the log on a slow disk.
See test_large_requests_are_answered_while_a_job_of_the_log_is_running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from oncelog.log.background import Chores, RunningJob
from oncelog.runtime import system
from oncelog.runtime.event_log import log_event

WORK_SECONDS = 0.002
"""No longer than this, or one step if that takes longer, are requests held up at a time: by chores of all
kinds together."""
REST_SECONDS = 0.004


class ChoreDriver:
    """From `start` to `stop` chores are done between requests; before and after, at once.

    `after_work` is called after each piece of work, which may have asked for syncs and woken fetches.
    """

    def __init__(self, chores: Chores, after_work: Callable[[], None]) -> None:
        self._chores, self._after_work = chores, after_work
        self._work_seconds = system.current().work_seconds
        self._wake = asyncio.Event()
        """Set when a chore was added or a job has ended."""
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._chores.on_added = self._wake.set
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """The step and the jobs under way end; what is left stays for whoever closes the log."""
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            await self._task
        if self._jobs:
            await asyncio.wait(self._jobs)
        self._chores.on_added = None

    async def _run(self) -> None:
        while not self._is_stopping:
            await self._wake.wait()
            self._wake.clear()
            while self._chores.is_ready and not self._is_stopping:
                has_begun_job = self._work()
                try:
                    self._after_work()
                except Exception as error:
                    _report(error)
                if has_begun_job and not self._chores.is_ready:
                    break  # deletions have a job in every step: no rest but while it is running
                await asyncio.sleep(REST_SECONDS)

    def _work(self) -> bool:
        """Steps until the time is up, or until there are only jobs to wait for; true if a job has begun."""
        until, has_begun_job = self._work_seconds() + WORK_SECONDS, False
        while self._chores.is_ready and self._work_seconds() < until:
            try:
                job = self._chores.step()
            except Exception as error:
                # A full disk, say: what periodic work could not do it tries again when it is next due.
                _report(error)
            else:
                if job is not None:
                    has_begun_job = True
                    self._begin(job)
        return has_begun_job

    def _begin(self, job: RunningJob) -> None:
        task = asyncio.get_running_loop().create_task(self._elsewhere(job))
        self._jobs.add(task)
        task.add_done_callback(self._ended)

    async def _elsewhere(self, job: RunningJob) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, job)
        except Exception as error:
            job.end(error)  # if no thread could be started; else its chore was told

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        self._wake.set()


def _report(error: Exception) -> None:
    log_event("error", "background work failed", error=repr(error), exc_info=error)
