"""Sends a consumer's commits over asyncio: one task sends the commits that `CommitQueue` returns.

One commit is in flight at a time. Three kinds of commits are urgent: commits of the application, automatic
commits before a revocation, and automatic commits at a close. An urgent commit does not wait for the response
to an earlier automatic commit. Instead, the sending task is cancelled and a new task sends the urgent commit.
The coordinator handles the requests of a connection in order, so the older commit cannot overtake the urgent
commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.group.commit_queue import Commit, CommitQueue, Offsets
from oncelog.client.group.coordinator_client import no_answer
from oncelog.errors import MisuseError, OncelogError
from oncelog.rules.groups.error_policy import GroupRequest
from oncelog.settings import Settings
from oncelog.types import OffsetAndMetadata, TopicPartition


class GroupCommits:
    """All commits of one consumer, with a member id or without.

    `send` makes one attempt and raises the coordinator's error. `is_kept` returns True if a member keeps
    these partitions through a rebalance. `on_failure` gets the error of an automatic commit that will not be
    repeated.
    """

    def __init__(
        self,
        core: ConsumerCore,
        settings: Settings,
        cluster: ClusterConnection,
        send: Callable[[Offsets], Awaitable[None]],
        is_kept: Callable[[Offsets], bool],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._core, self._cluster, self._send = core, cluster, send
        self._is_kept, self._on_failure = is_kept, on_failure
        self.is_automatic: bool = settings["enable.auto.commit"]
        self._group_id: str = settings["group.id"]
        self._limit_ms: float = settings["request.timeout.ms"]
        self._interval_ms: float = settings["auto.commit.interval.ms"]
        self._interval_began_ms = cluster.now_ms()
        self._queue = CommitQueue()
        self._task: asyncio.Task[None] | None = None
        # The commit that the task sends, or repeats after a pause.
        self._current: Commit | None = None
        # Commit of the application -> the future of its result, until the call of `commit` ends.
        self._results: dict[Commit, asyncio.Future[None]] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def automatic(self) -> Offsets:
        """The positions whose automatic commit has not ended."""
        return self._queue.automatic

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the positions after all delivered records. Partitions without a position are left out."""
        positions = {}
        for tp in self._core.assignment():
            with suppress(MisuseError):  # raised without a position if auto.offset.reset=none
                if (offset := self._core.position(tp)) is not None:
                    positions[tp] = OffsetAndMetadata(offset)
        return positions

    def restart_interval(self) -> None:
        """Restart the interval of automatic commits (auto.commit.interval.ms)."""
        self._interval_began_ms = self._cluster.now_ms()

    def commit_if_due(self) -> None:
        """Start an automatic commit of the current positions if auto.commit.interval.ms has passed."""
        now_ms = self._cluster.now_ms()
        if self.is_automatic and now_ms - self._interval_began_ms >= self._interval_ms:
            self._interval_began_ms = now_ms
            self.add_automatic(self.positions(), is_by_time=True)

    async def commit(self, offsets: Offsets) -> None:
        """Commit these offsets and wait for the result.

        After a cancellation of the call, the commit is not sent again. Raises the coordinator's error, and
        TimedOut after request.timeout.ms.
        """
        commit = self._queue.add_requested(offsets)
        result = self._results[commit] = asyncio.get_running_loop().create_future()
        self._start(is_urgent=True)
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
                self._restart()

    def add_automatic(self, positions: Offsets, *, is_by_time: bool = False, is_urgent: bool = False) -> None:
        """Start an automatic commit.

        Its errors are not raised: records without a commit are read again later.
        """
        if positions:
            self._queue.add_automatic(
                positions, self._cluster.now_ms() + self._limit_ms, is_by_time=is_by_time
            )
            self._start(is_urgent=is_urgent)

    async def until_idle(self, deadline_ms: float) -> bool:
        """Wait for the end of all commits; return False if the deadline passes first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(deadline_ms - self._cluster.now_ms(), 0) / 1000):
                await self._is_idle.wait()
        return self._is_idle.is_set()

    def release(self, partitions: Collection[TopicPartition], error: OncelogError) -> None:
        """Drop all commits of these partitions, because other members may own them now."""
        if partitions:
            self._queue.release(partitions, error)
            self._cancel_automatic()

    def lose(self, error: OncelogError) -> None:
        """Drop all commits, because other members may own the partitions now."""
        self._queue.lose(error)
        self._cancel_automatic()

    def stop(self) -> None:
        """End all commits. Calls of `commit` that wait raise MisuseError."""
        error = MisuseError("this consumer was closed, or unsubscribed, while it committed")
        self._queue.lose(error)
        for commit in self._results:
            self._queue.withdraw(commit)
            self._finish(commit, error)
        if self._task is not None:
            self._task.cancel()
        self._become_idle()

    # Sending

    def _start(self, *, is_urgent: bool) -> None:
        if is_urgent:
            self._cancel_automatic()
        if self._task is None:
            self._is_idle.clear()
            self._task = asyncio.create_task(self._run())

    def _cancel_automatic(self) -> None:
        """Stop waiting for the response to an automatic commit.

        Positions that are still in the queue are sent again with the next automatic commit.
        """
        # The response to a commit may end the membership. The sending task then calls this method, and must
        # not cancel itself.
        is_own = self._task is not None and asyncio.current_task() is self._task
        if self._current is not None and not self._current.is_requested and not is_own:
            self._restart()

    def _restart(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        # With asyncio.eager_task_factory (Python 3.12), a task runs up to here before `_task` refers to it.
        # Guard: test_commits_are_sent_by_eager_tasks.
        await asyncio.sleep(0)
        attempt, task = 0, asyncio.current_task()
        while self._task is task:
            commit = self._current = self._queue.next()
            if commit is None:
                self._become_idle()
                break
            error = await self._try(commit)
            is_kept = error is not None and self._is_kept(commit.offsets)
            if self._queue.on_result(commit, error, self._cluster.now_ms(), is_kept=is_kept):
                self._finish(commit, error)
                attempt = 0
            else:
                await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
                attempt += 1

    def _become_idle(self) -> None:
        self._current = self._task = None
        self._is_idle.set()

    async def _try(self, commit: Commit) -> Exception | None:
        if commit.refusal is not None:
            return commit.refusal
        try:
            await self._send(commit.offsets)
        except Exception as error:
            # Catch every Exception, not only OncelogError: the caller of `commit` must get any error.
            return error
        return None

    def _finish(self, commit: Commit, error: Exception | None) -> None:
        result = self._results.get(commit)
        if result is None:
            if error is not None:
                self._on_failure(error)
        elif not result.done():
            if error is None:
                result.set_result(None)
            else:
                result.set_exception(error)
