"""The commits of a consumer over asyncio: client.commit_queue.CommitQueue driven by one task.

One commit is awaited at a time. A call that somebody waits for (of the application, before a revocation, at
a close) does not wait for the answer to an automatic commit: the task is ended and begins again with what
is next. Requests to a coordinator are carried out in their order, so the older commit cannot come later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.group.commit_queue import Commit, CommitQueue, Offsets
from oncelog.client.group.coordinator_requests import no_answer
from oncelog.errors import MisuseError, OncelogError
from oncelog.rules.groups.error_policy import GroupRequest
from oncelog.settings import Settings
from oncelog.types import TopicPartition


class GroupCommits:
    """All commits of one consumer.

    `send` makes one attempt, and raises why the group does not take it. `is_kept` tells whether a member
    keeps these partitions through a rebalance. `note_failure` is told why an automatic commit is given up.
    """

    def __init__(
        self,
        settings: Settings,
        cluster: ClusterConnection,
        send: Callable[[Offsets], Awaitable[None]],
        is_kept: Callable[[Offsets], bool],
        note_failure: Callable[[Exception], None],
    ) -> None:
        self._cluster, self._send, self._note_failure = cluster, send, note_failure
        self._is_kept = is_kept
        self._group_id: str = settings["group.id"]
        self._limit_ms: float = settings["request.timeout.ms"]
        self._queue = CommitQueue()
        self._task: asyncio.Task[None] | None = None
        # What the task sends, or repeats after a pause.
        self._current: Commit | None = None
        # The results that calls of the application wait for.
        self._results: dict[Commit, asyncio.Future[None]] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def owed(self) -> Offsets:
        """The positions whose automatic commit has not ended."""
        return self._queue.owed

    async def commit(self, offsets: Offsets) -> None:
        """Commit what the application asks for. A call that is cancelled is not repeated."""
        commit = self._queue.ask(offsets)
        result = self._results[commit] = asyncio.get_running_loop().create_future()
        self._begin(is_urgent=True)
        try:
            async with asyncio.timeout(self._limit_ms / 1000) as limit:
                await result
        except TimeoutError:
            if not limit.expired():
                raise
            raise no_answer(
                self._group_id, GroupRequest.COMMIT, self._limit_ms, commit.error
            ) from commit.error
        finally:
            del self._results[commit]
            self._queue.withdraw(commit)
            if self._current is commit:
                self._begin_again()

    def owe(self, positions: Offsets, *, is_by_time: bool = False, is_urgent: bool = False) -> None:
        """Begin an automatic commit. Its errors are not raised: what was not stored is read again."""
        if positions:
            self._queue.owe(positions, self._cluster.now_ms() + self._limit_ms, is_by_time=is_by_time)
            self._begin(is_urgent=is_urgent)

    async def until_idle(self, deadline_ms: float) -> bool:
        """Wait for the end of all commits; False if the deadline comes first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(deadline_ms - self._cluster.now_ms(), 0) / 1000):
                await self._is_idle.wait()
        return self._is_idle.is_set()

    def release(self, partitions: Collection[TopicPartition], error: OncelogError) -> None:
        """Commit nothing more of these partitions: others may own them."""
        if partitions:
            self._queue.release(partitions, error)
            self._end_automatic()

    def lose(self, error: OncelogError) -> None:
        """Commit nothing more of what is owned now."""
        self._queue.lose(error)
        self._end_automatic()

    def stop(self) -> None:
        """End all commits."""
        error = MisuseError("this consumer was closed, or unsubscribed, while it committed")
        self._queue.lose(error)
        for commit in self._results:
            self._queue.withdraw(commit)
            self._tell(commit, error)
        if self._task is not None:
            self._task.cancel()
        self._note_end()

    # Sending

    def _begin(self, *, is_urgent: bool) -> None:
        if is_urgent:
            self._end_automatic()
        if self._task is None:
            self._is_idle.clear()
            self._task = asyncio.create_task(self._run())

    def _end_automatic(self) -> None:
        """Wait no longer for the answer to an automatic commit, and send none that has not been sent."""
        # The task itself may bring the loss, by what its commit was answered.
        is_own = self._task is not None and asyncio.current_task() is self._task
        if self._current is not None and not self._current.is_asked and not is_own:
            self._begin_again()

    def _begin_again(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        attempt, task = 0, asyncio.current_task()
        while self._task is task:
            commit = self._current = self._queue.next()
            if commit is None:
                self._note_end()
                break
            error = await self._try(commit)
            is_kept = error is not None and self._is_kept(commit.offsets)
            if self._queue.answered(commit, error, self._cluster.now_ms(), is_kept=is_kept):
                self._tell(commit, error)
                attempt = 0
            else:
                await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
                attempt += 1

    def _note_end(self) -> None:
        self._current = self._task = None
        self._is_idle.set()

    async def _try(self, commit: Commit) -> Exception | None:
        if commit.refusal is not None:
            return commit.refusal
        try:
            await self._send(commit.offsets)
        except Exception as error:
            # Also what is no OncelogError, as of an offset that no request can hold: the caller is told.
            return error
        return None

    def _tell(self, commit: Commit, error: Exception | None) -> None:
        result = self._results.get(commit)
        if result is None:
            if error is not None:
                self._note_failure(error)
        elif not result.done():
            if error is None:
                result.set_result(None)
            else:
                result.set_exception(error)
