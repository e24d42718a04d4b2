"""Runs the log's background tasks on the event loop: WORK_SECONDS of work, then PAUSE_SECONDS for requests.

Blocking calls (syncs, deletions) run in threads. Each kind of task has at most one running call, and the
other kinds continue. A large request therefore does not wait for a sync of the log on a slow disk. See
test_large_requests_are_answered_while_a_job_of_the_log_is_running.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

from oncelog.log.background import BackgroundQueue, RunningCall
from oncelog.runtime import system
from oncelog.runtime.event_log import log_event

WORK_SECONDS = 0.002
"""Length of one piece of background work, in seconds.

A single step that takes longer makes the piece longer.
"""
PAUSE_SECONDS = 0.004
"""Pause after each piece of background work, in seconds. The event loop handles requests in the pause."""


class BackgroundRunner:
    """Runs the tasks of a BackgroundQueue on the event loop between `start` and `stop`.

    Outside that time, the queue runs each task immediately when it is added. `after_work` is called after
    each piece of work, because the work may have appended records: waiting fetches may then be complete, and
    syncs may be due.
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
        """Wait for the current step and the running calls.

        Queued tasks stay in the queue until the log is closed.
        """
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
                    # Do not pause: no task can continue before a blocking call has ended, so requests are
                    # handled anyway. A deletion, for example, begins a blocking call in every step.
                    break
                await asyncio.sleep(PAUSE_SECONDS)

    def _work(self) -> bool:
        """Run steps for WORK_SECONDS, or until no step is ready. Return True if a blocking call has begun."""
        until, has_begun_call = self._work_seconds() + WORK_SECONDS, False
        while self._background.is_ready and self._work_seconds() < until:
            try:
                call = self._background.step()
            except Exception as error:
                # The step has failed, for example because the disk is full. Periodic work is retried when it
                # is next due.
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
            # If no thread could be started, `call` has not run, so end it here. An OSError tells its task
            # that a later attempt may succeed. If `call` itself failed, it has ended already, and this does
            # nothing. See test_compaction_continues_once_there_are_threads_again.
            call.end(OSError(errno.EAGAIN, str(error)))
            # Another thread may have begun the call meanwhile, and then ends it.
            while call.is_running:
                await asyncio.sleep(PAUSE_SECONDS)

    def _on_call_done(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._wake.set()


def _report(error: Exception) -> None:
    log_event("error", "background work failed", error=repr(error), exc_info=error)
