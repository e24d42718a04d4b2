"""The broker's periodic tasks, such as retention, compaction, expiry, checkpoints and flushes by time.

Most tasks run at an interval from a setting. A long task only starts a background task, so that requests are
handled between its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

from oncelog.broker.coordinators.groups import GroupCoordinator
from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.broker.fetch_sessions import FetchSessions
from oncelog.broker.group_commit import FlushQueue, FlushWaiter
from oncelog.broker.metrics import Metrics
from oncelog.broker.topics.topics import Topics
from oncelog.config import INT64_MAX
from oncelog.log.background import BackgroundTask
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.settings import Settings

FLUSH_CHECK_MS = 500
"""The interval in ms at which the topics' flush.ms is checked. A flush may be late by up to this interval."""

_Task = Callable[[int], None]
"""A task's function; its argument is `now_ms`."""


class PeriodicTasks:
    """The periodic tasks of one broker, and the times at which they are due.

    `now_ms` never decreases. `wall_ms` converts it to the wall clock's time, which may have been set back
    since the start.
    """

    def __init__(
        self,
        settings: Settings,
        now_ms: int,
        *,
        log_manager: LogManager,
        topics: Topics,
        transactions: TransactionCoordinator,
        groups: GroupCoordinator,
        sessions: FetchSessions,
        flush_queue: FlushQueue,
        metrics: Metrics,
        wall_ms: Callable[[int], int],
    ) -> None:
        self._settings, self._log_manager, self._topics = settings, log_manager, topics
        self._transactions, self._groups, self._sessions = transactions, groups, sessions
        self._flush_queue, self._metrics, self._wall_ms = flush_queue, metrics, wall_ms
        self._flushed_ms: WeakKeyDictionary[Partition, int] = WeakKeyDictionary()
        """The time (`now_ms`) of each partition's last flush that flush.ms caused."""
        self._tasks = [(now_ms + every_ms, every_ms, task) for every_ms, task in self._intervals()]
        """(due_ms, every_ms, task) of each task."""
        self.next_ms = min(due_ms for due_ms, _, _ in self._tasks)

    def _intervals(self) -> list[tuple[int, _Task]]:
        """Return (every_ms, task) of each task. Tasks that are due at the same time run in this order."""
        by_setting: list[tuple[str, _Task]] = [
            ("log.retention.check.interval.ms", self._enforce_retention),
            ("log.cleaner.backoff.ms", self._compact),
            ("producer.id.expiration.check.interval.ms", self._expire_producers),
            ("log.flush.offset.checkpoint.interval.ms", self._write_checkpoints),
            ("log.flush.offset.checkpoint.interval.ms", self._resume_deletions),
            ("transaction.abort.timed.out.transaction.cleanup.interval.ms", self._abort_timed_out),
            (
                "transaction.remove.expired.transaction.cleanup.interval.ms",
                self._expire_transactional_ids,
            ),
            ("offsets.retention.check.interval.ms", self._expire_groups),
        ]
        intervals: list[tuple[int, _Task]] = [(max(self._settings[key], 1), task) for key, task in by_setting]
        session_check_ms = max(self._log_manager.limits.session_expiry_ms // 4, 1)
        return [*intervals, (FLUSH_CHECK_MS, self._flush_by_time), (session_check_ms, self._sessions.expire)]

    def run_due(self, now_ms: int) -> None:
        """Run the tasks that are due. If a task raises an error, the tasks after it run at the next call."""
        for index, (due_ms, every_ms, task) in enumerate(self._tasks):
            if due_ms <= now_ms:
                self._tasks[index] = (now_ms + every_ms, every_ms, task)
                self.next_ms = min(due_ms for due_ms, _, _ in self._tasks)
                task(now_ms)

    def _enforce_retention(self, now_ms: int) -> None:
        # Retention uses the wall clock, not `now_ms`. After a wall clock that was ahead is set back, `now_ms`
        # stays too high, so retention by `now_ms` would delete records too early. See
        # test_a_clock_that_was_ahead_deletes_nothing_once_it_is_right.
        wall_ms = self._wall_ms(now_ms)

        def enforce(partition: Partition) -> Iterator[None]:
            yield from partition.confirm_times(wall_ms)
            if not partition.is_closed:
                partition.enforce_retention(wall_ms)

        self._log_manager.for_each_partition(enforce)

    def _compact(self, now_ms: int) -> None:
        if not self._settings["log.cleaner.enable"]:
            return
        self._transactions.hold_young_decisions(now_ms)
        for coordinator in (self._transactions, self._groups):
            coordinator.topic.roll_for_compaction(now_ms)
        # Compaction compares this time with the timestamps of records, so it uses the wall clock, as
        # retention does.
        wall_ms = self._wall_ms(now_ms)
        # Only synced segments are compacted. So compaction begins after these flushes. Otherwise, segments
        # that were just closed would wait for the next run. See test_one_round_compacts_what_was_just_closed.
        self._flush_closed(is_compacted=True, then=lambda: self._log_manager.compact(wall_ms))

    # The expiry tasks use the wall clock for the same reason as retention. The times that they compare with
    # it may have been stored before the wall clock went ahead. See
    # test_a_clock_that_was_ahead_makes_nothing_expire_once_it_is_right.

    def _expire_producers(self, now_ms: int) -> None:
        wall_ms = self._wall_ms(now_ms)

        def expire(partition: Partition) -> Iterator[None]:
            for expired_count in partition.expire_producers(wall_ms):
                self._metrics.producers_expired += expired_count
                yield

        self._log_manager.for_each_partition(expire)

    def _expire_transactional_ids(self, now_ms: int) -> None:
        self._transactions.expire(self._wall_ms(now_ms))

    def _expire_groups(self, now_ms: int) -> None:
        self._groups.expire(self._wall_ms(now_ms))

    def _abort_timed_out(self, now_ms: int) -> None:
        self._transactions.retry_markers(now_ms)
        self._transactions.abort_timed_out(now_ms)

    def _flush_by_time(self, now_ms: int) -> None:
        """Flush every partition whose last flush by time is at least flush.ms ago.

        Also flush partitions with records that flush.messages hides, because the last flush may have failed
        and no append may follow.
        """
        for topic in self._topics.all():
            if topic.flush_messages < INT64_MAX:
                for partition in topic.partitions:
                    if partition.high_watermark < partition.log_end_offset and not partition.is_offline:
                        self._flush_queue.add_hidden(partition, 1)
            if topic.flush_ms < INT64_MAX:
                for partition in topic.partitions:
                    due_ms = self._flushed_ms.setdefault(partition, now_ms) + topic.flush_ms
                    if partition.unflushed_record_count and now_ms >= due_ms:
                        self._flushed_ms[partition] = now_ms
                        self._flush_queue.add(
                            partition, FlushWaiter(partition.log_end_offset - 1, lambda error: None)
                        )

    def _write_checkpoints(self, now_ms: int) -> None:
        self._flush_closed(is_compacted=False, then=lambda: None)
        self._log_manager.write_checkpoints()

    def _resume_deletions(self, now_ms: int) -> None:
        """Retry deletions of topics and directories that failed because of a disk error."""
        self._log_manager.background.add(self._finish_deletions(now_ms))
        self._log_manager.remove_deleted()

    def _finish_deletions(self, now_ms: int) -> BackgroundTask:
        # Both steps are in one background task. Between two tasks, a request could recreate the topic before
        # its old offsets are deleted.
        marked = yield from self._topics.resume_deletions()
        yield from self._groups.delete_topic_offsets(marked, now_ms)

    def _flush_closed(self, *, is_compacted: bool, then: Callable[[], None]) -> None:
        """Flush closed segments, so that recovery after a kill reads only the active segments.

        With `is_compacted`, only compacted topics are flushed. `then` is called when every flush has ended or
        failed.
        """
        due = [
            partition
            for _, partition in self._topics.all_partitions()
            if partition.is_flush_due and (partition.config.is_compacted or not is_compacted)
        ]
        unfinished = len(due)

        def on_flushed(error: Exception | None) -> None:
            nonlocal unfinished
            unfinished -= 1
            if not unfinished:
                then()

        for partition in due:
            self._flush_queue.add(partition, FlushWaiter(partition.log_end_offset - 1, on_flushed))
        if not due:
            then()
