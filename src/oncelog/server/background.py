"""Run a log's background tasks on the event loop: a little work, then a pause in which requests are served.

Blocking calls (syncs, deletions) run in threads, one at a time for each kind of task. Tasks of other kinds
continue meanwhile, so a large request does not wait for a sync of the log on a slow disk. See
test_large_requests_are_answered_while_a_job_of_the_log_is_running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from oncelog.log.background import BackgroundQueue, RunningCall
from oncelog.runtime import system
from oncelog.runtime.event_log import log_event

WORK_SECONDS = 0.002
"""The longest time for which background work delays requests, unless a single step takes longer."""
PAUSE_SECONDS = 0.004
"""The pause after each piece of background work."""


class BackgroundRunner:
    """Runs background tasks between requests from `start` to `stop`; before and after, they run at once.

    `after_work` is called after each piece of work, which may have asked for syncs and completed fetches.
    """

    def __init__(self, background: BackgroundQueue, after_work: Callable[[], None]) -> None:
        self._background, self._after_work = background, after_work
        self._work_seconds = system.current().work_seconds
        self._wake = asyncio.Event()
        """Set when a task was added or a blocking call has ended."""
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._background.on_added = self._wake.set
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Wait for the current step and the running calls. The tasks that remain are for closing the log."""
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            await self._task
        if self._calls:
            await asyncio.wait(self._calls)
        self._background.on_added = None

    async def _run(self) -> None:
        while not self._is_stopping:
            await self._wake.wait()
            self._wake.clear()
            while self._background.is_ready and not self._is_stopping:
                has_begun_call = self._work()
                try:
                    self._after_work()
                except Exception as error:
                    _report(error)
                if has_begun_call and not self._background.is_ready:
                    break  # a deletion has a call in every step: the call itself is the pause
                await asyncio.sleep(PAUSE_SECONDS)

    def _work(self) -> bool:
        """Run steps until the time is up or only calls remain; return True if a call has begun."""
        until, has_begun_call = self._work_seconds() + WORK_SECONDS, False
        while self._background.is_ready and self._work_seconds() < until:
            try:
                call = self._background.step()
            except Exception as error:
                # A full disk, for example. Periodic work tries again when it is next due.
                _report(error)
            else:
                if call is not None:
                    has_begun_call = True
                    self._begin_call(call)
        return has_begun_call

    def _begin_call(self, call: RunningCall) -> None:
        task = asyncio.get_running_loop().create_task(self._run_in_thread(call))
        self._calls.add(task)
        task.add_done_callback(self._on_call_done)

    async def _run_in_thread(self, call: RunningCall) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, call)
        except Exception as error:
            call.end(error)  # if no thread could be started; otherwise the call has ended already

    def _on_call_done(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._wake.set()


def _report(error: Exception) -> None:
    log_event("error", "background work failed", error=repr(error), exc_info=error)
