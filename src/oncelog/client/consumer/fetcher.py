"""The background work of a consumer: fetches, leader lookups and position lookups, each in a task.

`ConsumerCore` decides which requests are due, and `Fetcher.start_due` starts them. Each task ends with a call
of `start_due`, and wakes a waiting poll. The application's next poll raises the errors that are not retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore, FetchCall, ResetCall
from oncelog.client.consumer.fetch_messages import MAX_FETCH_VERSION
from oncelog.client.consumer.list_offsets import OffsetAt, OffsetSpec
from oncelog.client.consumer.offset_lookup import list_offsets
from oncelog.errors import (
    DisconnectedError,
    MisuseError,
    OncelogError,
    TimedOut,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
)
from oncelog.settings import Settings
from oncelog.types import OffsetAndMetadata, TopicPartition

_COLLECT_LEADERS_S = 0.01

Committed = Callable[[Collection[TopicPartition]], Awaitable[Mapping[TopicPartition, OffsetAndMetadata]]]


async def _refuse_look_ups(
    partitions: Collection[TopicPartition],
) -> Mapping[TopicPartition, OffsetAndMetadata]:
    raise MisuseError("this consumer is closed; make a new one")


class Fetcher:
    """Sends the requests that `core` returns. `committed` looks up the group's committed offsets."""

    def __init__(
        self, core: ConsumerCore, settings: Settings, cluster: ClusterConnection, committed: Committed
    ) -> None:
        self._core, self._cluster, self._committed = core, cluster, committed
        self._request_timeout_ms: int = settings["request.timeout.ms"]
        self._tasks: dict[asyncio.Task[None], None] = {}
        # Partitions whose leader is being looked up.
        self._leader_lookups: set[TopicPartition] = set()
        self._failure_count = 0
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Let `wait` return."""
        self._wake.set()

    async def wait(self, deadline_ms: float) -> bool:
        """Wait for a call of `wake`; return False at the deadline."""
        remaining_ms = deadline_ms - self._cluster.now_ms()
        if remaining_ms <= 0 and not self._wake.is_set():
            return False
        try:
            async with asyncio.timeout(max(remaining_ms, 0) / 1000):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks, and return them. Later lookups of committed offsets raise MisuseError."""
        # `_committed` refers to the consumer, which refers to this object. Breaking this cycle frees a closed
        # consumer immediately. Guard: test_a_closed_client_is_freed_without_the_garbage_collector.
        self._committed = _refuse_look_ups
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def start_due(self) -> None:
        """Start all requests that are due.

        While an error waits for a poll, start no request, because a success would drop that error.
        """
        core = self._core
        if core.has_error:
            return
        resets = core.resets()
        if committed := [call for call in resets if call.to == "committed"]:
            self._spawn(self._reset_to_committed(committed))
        if resets := [call for call in resets if call.to != "committed"]:
            self._spawn(self._reset(resets))
        calls, leaderless = core.plan(self._cluster.metadata.leader_of)
        for call in calls:
            self._spawn(self._fetch(call))
        if new := [tp for tp in leaderless if tp not in self._leader_lookups]:
            self._leader_lookups.update(new)
            self._spawn(self._find_leaders(new))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _fetch(self, call: FetchCall) -> None:
        core, cluster = self._core, self._cluster
        sent_ms = cluster.now_ms()
        stale: Sequence[TopicPartition] = ()
        try:
            response = await cluster.request(
                call.node_id,
                call.request,
                timeout_ms=self._request_timeout_ms + call.request.max_wait_ms,
                max_version=MAX_FETCH_VERSION,
                channel=f"fetch-{call.connection}",
            )
            now_ms = cluster.now_ms()
            stale = core.on_response(call, response, now_ms - sent_ms, now_ms)
        except OncelogError as error:
            if not isinstance(error, (DisconnectedError, TimedOut)):
                core.note_error(error)
            stale = core.on_failure(call)
        except Exception as error:
            core.note_error(error)  # this is a bug in this client: the next poll raises the error
        finally:
            core.end_fetch(call)
        self._failure_count = self._failure_count + 1 if stale else 0
        cluster.metadata.mark_stale(stale)
        self.start_due()
        self.wake()

    # Leaders

    async def _find_leaders(self, partitions: Sequence[TopicPartition]) -> None:
        """Look up the leaders of these partitions at the same time, and start to read each partition whose
        leader was found.

        A partition is in `_leader_lookups` until its lookup has ended.
        """
        cluster = self._cluster
        lookups: dict[asyncio.Future[None], TopicPartition] = {}
        remaining: Iterable[TopicPartition] = partitions
        try:
            if self._failure_count:
                await asyncio.sleep(cluster.retry_pause_ms(self._failure_count - 1) / 1000)
            if len(topics := {tp.topic for tp in partitions}) > 1:
                # A single request finds nearly all leaders. `_find_leader` looks up the remaining ones.
                with suppress(OncelogError):
                    await cluster.refresh_metadata(sorted(topics), allow_auto_topic_creation=False)
            lookups |= {asyncio.ensure_future(self._find_leader(tp)): tp for tp in partitions}
            # From here on, use only `lookups` and not `partitions`: `start_due` may already look up again the
            # partitions that `_take_found` has removed. Guard:
            # test_a_topic_that_may_be_created_soon_is_requested_once_at_a_time.
            remaining = lookups.values()
            self._take_found(lookups)
            # A missing or leaderless partition must not delay reads of the other partitions. Guard:
            # test_a_partition_without_a_leader_does_not_delay_the_others.
            while lookups:
                done, _ = await asyncio.wait(lookups, return_when=asyncio.FIRST_COMPLETED)
                if len(done) < len(lookups):
                    # Wait for more results, because each `start_due` visits all partitions, and thousands of
                    # leaders may be found one by one.
                    await asyncio.sleep(_COLLECT_LEADERS_S)
                self._take_found(lookups)
        finally:
            for lookup in lookups:
                lookup.cancel()
            self._leader_lookups.difference_update(remaining)

    def _take_found(self, lookups: dict[asyncio.Future[None], TopicPartition]) -> None:
        """Start to read partitions whose leader was found.

        If a lookup failed, end all lookups of its topic.
        """
        missing = [task for task, tp in lookups.items() if self._cluster.metadata.leader_of(tp) is None]
        failed = [task for task in missing if task.done()]
        errors = {str(error): error for task in failed if (error := task.exception()) is not None}
        ended_topics = {lookups[task].topic for task in failed}
        remaining = {task for task in missing if lookups[task].topic not in ended_topics}
        self._leader_lookups.difference_update([tp for task, tp in lookups.items() if task not in remaining])
        for task in [task for task in lookups if task not in remaining]:
            task.cancel()
            del lookups[task]
        for error in errors.values():  # report one error per topic, not one per partition
            self._core.note_error(error if isinstance(error, Exception) else OncelogError(repr(error)))
        self.start_due()
        self.wake()

    async def _find_leader(self, tp: TopicPartition) -> None:
        """Look up one leader.

        If the topic is unknown but may be new, the next `start_due` repeats the lookup.
        """
        patience_ms = 0 if self._may_be_about_to_exist(tp) else None
        try:
            await self._cluster.leader(
                tp, allow_auto_topic_creation=False, unknown_topic_patience_ms=patience_ms
            )
        except UnknownTopicOrPartition:
            if not self._may_be_about_to_exist(tp):
                raise
            self._failure_count += 1  # so that the next lookup begins with a pause

    def _may_be_about_to_exist(self, tp: TopicPartition) -> bool:
        """Return True if the topic may be new: it has been unknown for less than request.timeout.ms."""
        since_ms = self._cluster.metadata.unknown_since_ms(tp.topic)
        return since_ms is not None and self._cluster.now_ms() - since_ms < self._request_timeout_ms

    # Positions

    async def _reset_to_committed(self, calls: list[ResetCall]) -> None:
        core = self._core
        try:
            offsets = await self._committed([call.tp for call in calls])
            for call in calls:
                offset = offsets.get(call.tp)
                core.on_committed(call, offset.offset if offset is not None else None)
        except Exception as error:
            # An open transaction may still commit offsets, so wait for its end, as Java does. Guard:
            # test_assigned_partitions_wait_for_an_open_transaction.
            is_held_back = isinstance(error, TimedOut) and isinstance(error.__cause__, UnstableOffsetCommit)
            if not is_held_back and any(core.is_awaited(call) for call in calls):
                core.note_error(error)  # report one error for all partitions together
        finally:
            core.end_resets(calls)
        self.start_due()
        self.wake()

    async def _reset(self, calls: list[ResetCall]) -> None:
        """Look up positions.

        If leaders are unknown, first refresh the metadata once. Another task then looks up the positions of
        partitions that still have no leader.
        """
        # Missing partitions must not delay reads of the other partitions. Guard:
        # test_a_missing_topic_does_not_keep_others_from_being_read.
        if leaderless := self._without_leader(calls):
            with suppress(OncelogError):
                topics = sorted({call.tp.topic for call in leaderless})
                await self._cluster.refresh_metadata(topics, allow_auto_topic_creation=False)
            leaderless = self._without_leader(calls)
        if leaderless and len(leaderless) < len(calls):
            self._spawn(self._reset_together(leaderless))
            separate = frozenset(leaderless)
            calls = [call for call in calls if call not in separate]
        await self._reset_together(calls)

    def _without_leader(self, calls: list[ResetCall]) -> list[ResetCall]:
        return [call for call in calls if self._cluster.metadata.leader_of(call.tp) is None]

    async def _reset_together(self, calls: list[ResetCall]) -> None:
        core = self._core
        try:
            specs: dict[TopicPartition, OffsetSpec] = {
                call.tp: call.to for call in calls if call.to != "committed"
            }
            outcomes = await list_offsets(self._cluster, specs, core.options.isolation)
            for call in calls:
                outcome = outcomes[call.tp]
                if isinstance(outcome, OffsetAt):
                    core.on_reset(call, outcome)
                elif isinstance(outcome, UnknownTopicOrPartition) and self._may_be_about_to_exist(call.tp):
                    core.on_reset_failed(call)
                else:
                    core.on_reset_failed(call, outcome)
        except Exception as error:
            core.note_error(error)  # this is a bug in this client: the next poll raises the error
        finally:
            core.end_resets(calls)
        self.start_due()
        self.wake()
