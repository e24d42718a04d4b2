"""Drives a log's chores on the event loop: a little work, then a rest in which requests are served.

What a chore wants done elsewhere (syncs, deletions) runs in a thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from oncelog.edge import machine
from oncelog.edge.event_log import log_event
from oncelog.log.chores import Chores, Job

WORK_SECONDS = 0.002
"""No longer than this, or one step if that takes longer, are requests held up at a time."""
REST_SECONDS = 0.004


class ChoreDriver:
    """From `start` to `stop` chores are done between requests; before and after, at once.

    `after_work` is called after each piece of work, which may have asked for syncs and woken fetches.
    """

    def __init__(self, chores: Chores, after_work: Callable[[], None]) -> None:
        self._chores, self._after_work = chores, after_work
        self._work_seconds = machine.current().work_seconds
        self._added = asyncio.Event()
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._chores.on_added = self._added.set
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """The step under way ends; what is left stays for whoever closes the log."""
        self._is_stopping = True
        self._added.set()
        if self._task is not None:
            await self._task
        self._chores.on_added = None

    async def _run(self) -> None:
        while not self._is_stopping:
            await self._added.wait()
            self._added.clear()
            while self._chores and not self._is_stopping:
                job = self._work()
                try:
                    self._after_work()
                except Exception as error:
                    _report(error)
                if job is None:
                    await asyncio.sleep(REST_SECONDS)
                else:
                    await self._elsewhere(job)

    def _work(self) -> Job | None:
        """Steps until the time is up or there is a job."""
        until = self._work_seconds() + WORK_SECONDS
        while self._chores and self._work_seconds() < until:
            try:
                job = self._chores.step()
            except Exception as error:
                # A full disk, say: what periodic work could not do it tries again when it is next due.
                _report(error)
            else:
                if job is not None:
                    return job
        return None

    async def _elsewhere(self, job: Job) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, job)
        except Exception as error:
            self._chores.failed(error)


def _report(error: Exception) -> None:
    log_event("error", "background work failed", error=repr(error), exc_info=error)
