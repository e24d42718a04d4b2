"""The consumer for asyncio: ConsumerCore decides, Fetcher and GroupSession send the requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self

from oncelog.client.arguments import by_partition, offsets_of, partitions_of, topic_of
from oncelog.client.closing import close_in_background, start_or_close
from oncelog.client.connection.cluster import ClusterConnection, parse_bootstrap
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.consumer.fetch_messages import FetchOptions
from oncelog.client.consumer.fetcher import Fetcher
from oncelog.client.consumer.list_offsets import OffsetAt, OffsetSpec
from oncelog.client.consumer.offset_lookup import list_offsets
from oncelog.client.consumer.poll_activity import PollActivity
from oncelog.client.consumer.range_reader import RangeChunk, RangeFetcher, check_range, range_options
from oncelog.client.group.aio import GroupSession
from oncelog.client.group.membership import Rebalance
from oncelog.client.group.rebalance_callbacks import (
    Offsets,
    RebalanceCallback,
    RebalanceListener,
    Subscription,
    subscription_of,
)
from oncelog.client.serialization import Deserializer, RecordDeserializer, record_deserializer
from oncelog.config import CONSUMER
from oncelog.errors import MisuseError, OncelogError, TimedOut
from oncelog.runtime import system
from oncelog.runtime.loop_thread import check_running_loop
from oncelog.settings import Settings
from oncelog.types import (
    ConsumerGroupMetadata,
    Isolation,
    OffsetAndMetadata,
    PartitionInfo,
    Record,
    TopicPartition,
)

_LONG_WAIT_SECONDS = 3600.0
_CALLBACK_MS = 5_000

_LEAVING = "this consumer was closed, or unsubscribed, while it was polled"
SECOND_POLL = "another thread or task is polling this consumer; use one consumer per thread or task"
POLL_IN_CALLBACK = (
    "a rebalance callback or a signal handler cannot poll the consumer that it interrupts: return, and the "
    "poll continues"
)

NextRow = Callable[[], Record | None]
"""A function that returns the next record of the core's `delivery`, or None, without taking it."""
Prepare = Callable[[float], bool]
"""A function that moves fetched records into the core's `delivery`. It returns True if `delivery` then has
records.

Its argument is the current monotonic time in milliseconds.
"""


class AsyncConsumer:
    """A Kafka consumer for asyncio that reads assigned partitions, or its share of a group's topics.

    Settings: a mapping with Kafka's keys, or keyword arguments with underscores instead of dots.
    `key_deserializer` and `value_deserializer` work as in `oncelog.Consumer`.

    The consumer connects at first use, or at the start of `async with`. Only one task at a time may use it.
    """

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        **settings: object,
    ) -> None:
        self.deserializer = record_deserializer(key_deserializer, value_deserializer)
        self._settings = CONSUMER.parse({**(config or {}), **settings})
        parse_bootstrap(self._settings["bootstrap.servers"])
        self._core = ConsumerCore(self._settings)
        self._runtime = system.current()
        self._activity = PollActivity(self._runtime.monotonic_ns() / 1e6)
        self._subscription = Subscription()
        self._listener = RebalanceListener()
        self._group: GroupSession | None = None
        # The memberships that an interrupted `unsubscribe` is still leaving. A close waits for them. Guard:
        # test_a_close_after_an_interrupted_unsubscribe_keeps_no_member_in_the_group.
        self._leaving: list[GroupSession] = []
        self._cluster: ClusterConnection | None = None
        self._fetcher: Fetcher | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Task[None] | None = None
        # A rebalance whose callback has not ended yet.
        self._pending_rebalance: Rebalance | None = None
        # The task that is inside a poll, including its callbacks.
        self._polling_task: asyncio.Task[Any] | None = None
        # The task that is inside `poll_step`.
        self._step_task: asyncio.Task[Any] | None = None
        # `_step_task.cancelling()` as of the start of the step. A task that has survived a cancellation
        # starts above 0. Guard: test_a_task_that_outlived_a_cancellation_polls_like_any_other.
        self._earlier_cancels = 0
        # True if `end_polling` has cancelled the step.
        self._is_step_ended = False
        # True while a close or `unsubscribe` gives up the partitions. Polls are refused then: their records
        # would come again, because the last commit excludes them. Guard:
        # test_nothing_is_delivered_once_close_has_begun.
        self._is_leaving = False
        self._closed = False

    @property
    def settings(self) -> Settings:
        """The settings, parsed and completed with defaults."""
        return self._settings

    @property
    def core(self) -> ConsumerCore:
        """Positions and undelivered records, for the blocking Consumer."""
        return self._core

    # Connecting and closing

    async def start(self) -> None:
        """Connect to the cluster. Optional: other methods connect if necessary.

        Raises AuthenticationError, DisconnectedError or PeerError, like ClusterConnection.start.
        """
        await self._connected()

    async def _connected(self) -> ClusterConnection:
        if self._closed:
            raise MisuseError("this consumer is closed; make a new one")
        self._loop = check_running_loop(self._loop, "consumer")
        if not self._is_connected:
            try:
                await asyncio.shield(self._start_connecting())
            except asyncio.CancelledError:
                self._raise_if_closed_meanwhile()
                raise
        assert self._cluster is not None
        return self._cluster

    def _raise_if_closed_meanwhile(self) -> None:
        """Raise MisuseError if the consumer was closed while the current task waited, unless the task was
        cancelled too.
        """
        task = asyncio.current_task()
        if self._closed and task is not None and not task.cancelling():
            raise MisuseError("this consumer was closed during this call; make a new one") from None

    def _start_connecting(self) -> asyncio.Task[None]:
        """Return the task that connects. The task continues if a call that waits for it is cancelled."""
        if self._cluster is None:
            self._cluster = ClusterConnection(self._settings, topics_in_use=self._topics_in_use)
            self._fetcher = Fetcher(self._core, self._settings, self._cluster, self._committed_offsets)
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._cluster.start())
        return self._connecting

    @property
    def _is_connected(self) -> bool:
        task = self._connecting
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    def _topics_in_use(self) -> set[str]:
        """Return the topics whose metadata must be kept: assigned and subscribed ones, as in Java.

        The leader of a classic group also keeps the topics of the other members.
        """
        subscribed = self._group.topics_in_use if self._group is not None else ()
        return {tp.topic for tp in self._core.assignment()}.union(subscribed)

    async def close(self) -> None:
        """Commit if enable.auto.commit is set, leave the group, and close all connections.

        The commit covers all delivered records. If a `for` loop was left by `break` or an exception, the
        commit excludes the record of that iteration. Calls `on_revoked` (or `on_lost`) with the assigned
        partitions. It is safe to call `close` twice.
        """
        check_running_loop(self._loop, "consumer")
        try:
            await self.until_callback_ends(self._is_callback_over)
            self._pending_rebalance = None
            try:
                if not self._closed:
                    await self._notify_of_leaving()
            except Exception:
                await self._end()
                raise
            await self._end()
        except asyncio.CancelledError:
            # Leave now, although only a second call completes the close. Otherwise the group would wait for a
            # member that is no longer polled. Guard: test_a_cancelled_close_keeps_no_member_in_the_group.
            if self._group is not None and not self._closed:
                self._group.begin_leaving()
            raise

    async def end_at_once(self) -> None:
        """Leave the group and close all connections, without a commit and without callbacks."""
        check_running_loop(self._loop, "consumer")
        if self._group is not None and not self._closed:
            self._group.begin_leaving()
            await self._group.until_left()
        await self._end_connections()

    async def _end(self) -> None:
        """Leave the group, cancel all tasks and close all connections."""
        if self._group is not None and not self._closed:
            await self._group.close()
        await self._end_connections()

    async def _end_connections(self) -> None:
        """Cancel all tasks except the group's, and close all connections.

        First wait for the memberships that an interrupted `unsubscribe` is leaving.
        """
        self._closed = True
        # Do not remove items from the list: a second call may wait for the same memberships. Guard:
        # test_two_closes_wait_for_the_same_interrupted_unsubscribe.
        for group in self._leaving:
            await group.until_left()
        self._leaving = []
        tasks = self._fetcher.cancel() if self._fetcher is not None else []
        if self._connecting is not None:
            self._connecting.cancel()
            tasks.append(self._connecting)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connecting = None
        if self._cluster is not None:
            await self._cluster.close()

    async def __aenter__(self) -> Self:
        await start_or_close(self.start, self.end_at_once)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except asyncio.CancelledError:
            close_in_background(self.end_at_once())  # nobody calls `close` again
            raise

    # Assignment and positions

    def assign(self, partitions: Collection[TopicPartition] | TopicPartition) -> None:
        """Read exactly these partitions. Partitions that are already assigned keep their positions.

        With a group.id, new partitions start at the group's committed offsets, and enable.auto.commit commits
        the positions of all assigned partitions. The coordinator refuses such commits while the group has
        members. Without a group.id or a committed offset, auto.offset.reset decides where a new partition
        starts.

        Raises MisuseError while the consumer is subscribed.
        """
        if self._subscription:
            raise MisuseError("this consumer is subscribed to topics: call unsubscribe() before assign()")
        requested = partitions_of(partitions)
        if self._group is not None and not self._closed and not set(self.assignment()) <= set(requested):
            self._group.commit_before_assigning()
        self._core.assign(requested, from_committed=self._settings["group.id"] is not None)

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are assigned now, by `assign` or by the group."""
        return self._core.assignment()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Read next from `offset` (0 or above). Raises MisuseError if the partition is not assigned."""
        self._core.seek(tp, offset)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Move these partitions (none given: all assigned ones) to their first available record."""
        self._core.seek_to(partitions_of(partitions), "earliest")

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Move these partitions (none given: all assigned ones) to their end offset: see `end_offsets`."""
        self._core.seek_to(partitions_of(partitions), "latest")

    def pause(self, *partitions: TopicPartition) -> None:
        """Stop returning records from these partitions until `resume`. Positions are kept."""
        self._core.set_paused(partitions_of(partitions), True)

    def resume(self, *partitions: TopicPartition) -> None:
        """Return records from these partitions again after `pause`."""
        self._core.set_paused(partitions_of(partitions), False)
        if self._fetcher and not self._closed:
            self._fetcher.start_due()

    def paused(self) -> list[TopicPartition]:
        """Return the paused partitions."""
        return self._core.paused()

    async def position(self, tp: TopicPartition) -> int:
        """Return the offset of the next record that `poll` would return. Look the position up if necessary.

        Raises TimedOut after request.timeout.ms, and MisuseError if the partition is not assigned.
        """
        cluster = await self._connected()
        assert self._fetcher is not None
        deadline_ms = cluster.now_ms() + self._settings["request.timeout.ms"]
        while (offset := self._core.position(tp)) is None:
            # While an error waits, `start_due` starts no lookup, so raise the error now. Guard:
            # test_position_raises_an_error_that_waits_instead_of_timing_out.
            if self._core.has_error:
                self._core.raise_error()
            self._fetcher.start_due()
            if not await self._fetcher.wait(deadline_ms):
                raise TimedOut(f"the position of {tp} was not found within request.timeout.ms")
        return offset

    def lag(self, tp: TopicPartition) -> int | None:
        """Return the partition's end offset (as of the last fetch) minus its position; None if unknown."""
        return self._core.lag(tp)

    # Groups

    def subscribe(
        self,
        topics: Collection[str] | str = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        on_assigned: RebalanceCallback | None = None,
        on_revoked: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Subscribe to topics: polls join the group of group.id, and read this member's share of partitions.

        With `pattern` instead of names, read every topic whose whole name matches, except Kafka's internal
        topics. The matching topics are looked up again every metadata.max.age.ms.

        The callbacks run during `poll` and get lists of partitions. They must not poll themselves.
        `on_revoked` may still commit positions. A second call replaces the subscription.

        Raises MisuseError if group.id is not set, no topic is given, or partitions are assigned manually.
        """
        if self._settings["group.id"] is None:
            raise MisuseError("group.id is not set: set it to the consumer's group before subscribe()")
        subscription = subscription_of(topics, pattern)
        # A member without topics would take no part in rebalances. It would continue to read partitions that
        # the group has given to other members. Guard: test_a_subscription_to_no_topic_is_refused.
        if not subscription:
            raise MisuseError("subscribe() got no topics: call unsubscribe() to leave the group")
        # If `subscribe` replaced a manual assignment, the last positions in that assignment would never be
        # committed. Java refuses the call as well.
        if not self._subscription and self._core.assignment():
            raise MisuseError("partitions were assigned with assign(): call unsubscribe() before subscribe()")
        self._subscription = subscription
        self._listener = RebalanceListener(on_assigned, on_revoked, on_lost)
        if self._group is not None:
            self._group.subscribe(*subscription)

    async def unsubscribe(self) -> None:
        """Commit if enable.auto.commit is set, leave the group, and unassign all partitions.

        Calls `on_revoked` (or `on_lost`) with the partitions.
        """
        try:
            await self.until_callback_ends(self._is_callback_over)
            self._pending_rebalance = None
            await self._notify_of_leaving()
            if self._group is not None:
                await self._group.close()
        finally:
            # Leave the group even if this call is cancelled. Otherwise the group would wait for a member that
            # is no longer polled. Guard: test_an_interrupt_of_a_close_keeps_no_member_in_the_group.
            if self._group is not None:
                self._group.begin_leaving()
                self._leaving = [group for group in (*self._leaving, self._group) if not group.has_left]
            self._group, self._subscription = None, Subscription()
            self._core.assign([])
            self._is_leaving = False
            self._core.delivery.set_held(False)

    async def prepare_to_leave(self) -> Rebalance | None:
        """Commit if enable.auto.commit is set, and return the Rebalance to pass to the rebalance callback.
        Return None if no callback is needed. See GroupSession.prepare_to_leave.

        From now on, polls raise MisuseError and nothing is delivered.
        """
        self._is_leaving = True
        self._core.delivery.set_held(True)
        await self.end_polling()
        return await self._group.prepare_to_leave() if self._group is not None else None

    async def _notify_of_leaving(self) -> None:
        """Commit if enable.auto.commit is set, and call the rebalance callback before the member leaves."""
        rebalance = await self.prepare_to_leave()
        if rebalance is not None:
            await self._listener.notify_async(rebalance)

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return this consumer's identity in its group, for `Producer.send_offsets_to_transaction`.

        Raises MisuseError with enable.auto.commit=true. Otherwise poll() and close() would also commit the
        positions of records whose transaction was aborted, and those records would never be processed.
        """
        if self._settings["enable.auto.commit"]:
            raise MisuseError(
                "set enable.auto.commit=false before group_metadata() for "
                "send_offsets_to_transaction(): with enable.auto.commit=true, poll() and "
                "close() would also commit the positions of aborted records, and those "
                "records would be lost"
            )
        if self._group is None:
            return ConsumerGroupMetadata(self._settings["group.id"] or "")
        return self._group.metadata

    async def commit(self, offsets: Offsets | None = None) -> None:
        """Commit positions for the group.

        `offsets` has the offset of the next record to read, for each partition. By default, the positions
        after all delivered records are committed.

        Raises IllegalGeneration, UnknownMemberId or RebalanceInProgress if the group has rebalanced without
        this member. The new owners of its partitions then read again from the last commit.
        """
        chosen = None if offsets is None else offsets_of(offsets)
        await (await self._session()).commit(chosen)
        self._finish_committed(chosen)

    def _finish_committed(self, offsets: Mapping[TopicPartition, OffsetAndMetadata] | None) -> None:
        """If the record that a `for` loop is processing was committed, count it as processed.

        Otherwise a later automatic commit would move the committed offset back to this record.
        """
        record = self._core.delivery.unfinished()
        if record is None:
            return
        if offsets is not None:
            committed = offsets.get(TopicPartition(record.topic, record.partition))
            if committed is None or committed.offset <= record.offset:
                return
        self._core.delivery.finish()

    async def committed(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the group's committed offset of each partition; None if there is none.

        Raises MisuseError if group.id is not set.
        """
        requested = partitions_of(partitions)
        offsets = await self._committed_offsets(requested)
        return {tp: offsets.get(tp) for tp in requested}

    async def _committed_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        return await (await self._session()).committed(partitions)

    async def seek_to_committed(self, *partitions: TopicPartition) -> None:
        """Move these partitions (none given: all assigned ones) to the group's committed offsets.

        Call it after an aborted transaction, to read again the records that the transaction consumed
        (KAFKA-17582). For partitions without a committed offset, auto.offset.reset decides. If
        auto.offset.reset is `none`, the call raises MisuseError for them.
        """
        session = await self._session()
        chosen = partitions_of(partitions) or self._core.assignment()
        offsets = await session.committed(chosen)
        for tp, position in offsets.items():
            self._core.seek(tp, position.offset)
        if without := [tp for tp in chosen if tp not in offsets]:
            self._core.reset(without)

    async def _session(self) -> GroupSession:
        cluster = await self._connected()
        if self._group is None:
            assert self._fetcher is not None
            self._group = GroupSession(
                self._core, self._settings, cluster, self._activity, self._fetcher.wake
            )
            if self._subscription:
                self._group.subscribe(*self._subscription)
        return self._group

    # Records

    async def poll(self, timeout: float = 1.0, *, max_records: int | None = None) -> list[Record]:
        """Return up to max.poll.records records, or up to `max_records` if that is less.

        If there are none, wait up to `timeout` seconds. Returned records count as delivered: the positions
        and automatic commits move past them. A cancelled poll delivers nothing, and the next poll returns its
        records. A deserializer that waits, for example for a schema, may prolong the poll.

        Raises OffsetOutOfRange with auto.offset.reset=none, CorruptMessage or InvalidRecord for a batch that
        cannot be decoded, DeserializationError, and any error that has kept a partition unreachable for
        longer than request.timeout.ms. You may poll again after any of these errors.
        """
        limit = self.poll_limit(max_records)
        is_ready = await self._wait_for_records(
            timeout,
            lambda now_ms: self._core.prepare_records(limit, now_ms),
            lambda: next(iter(self._core.delivery.peek(1)), None),
        )
        if not is_ready:
            return []
        if self.deserializer is not None:
            return self._take_converted(limit, self.deserializer)
        return self._core.delivery.take(limit)

    def _take_converted(self, limit: int, deserializer: RecordDeserializer) -> list[Record]:
        """Return up to `limit` converted records: those before the first one that must be prepared.

        The poll has prepared the first record. Raises DeserializationError.
        """
        delivery = self._core.delivery
        if deserializer.may_wait:
            later = enumerate(delivery.peek(limit)[1:], start=1)
            limit = next((number for number, row in later if not deserializer.is_ready(row)), limit)
        return delivery.take_converted(limit, deserializer)

    async def poll_arrow(self, timeout: float = 1.0, *, include_headers: bool = False) -> Any | None:
        """Return the records of one partition from one fetch as a pyarrow.RecordBatch.

        Returns None if no records arrive within `timeout` seconds. Raises the same errors as `poll`.
        """
        is_ready = await self._wait_for_records(
            timeout, lambda now_ms: self._core.prepare_columns(now_ms, include_headers=include_headers)
        )
        return self._core.delivery.take_columns() if is_ready else None

    def poll_limit(self, max_records: int | None = None) -> int:
        """Return the maximum number of records that one poll returns."""
        limit: int = self._settings["max.poll.records"]
        return limit if max_records is None else min(max_records, limit)

    async def _wait_for_records(
        self, timeout: float, prepare: Prepare, next_row: NextRow | None = None
    ) -> bool:
        """Wait until the core's `delivery` has records; return False after `timeout` seconds.

        Also wait for the data that the deserializers need for the record of `next_row`, such as its schema.
        """
        await self._until_interrupted_poll_ends()
        # Between two steps, a second task would call the callbacks again, so it is refused. So is a callback,
        # which would call itself again. Guards: test_a_callback_that_polls_is_refused and
        # test_a_second_task_is_refused_while_a_callback_of_the_first_runs.
        task = asyncio.current_task()
        if self._polling_task is not None:
            raise MisuseError(POLL_IN_CALLBACK if self._polling_task is task else SECOND_POLL)
        deadline_ms = self.begin_poll(timeout)
        self._polling_task = task
        try:
            while isinstance(step := await self.poll_step(deadline_ms, prepare, next_row), Rebalance):
                try:
                    await self._listener.notify_async(step)
                except Exception:
                    # As in Java, the next poll does not call the callback again. This poll raises the
                    # callback's error.
                    self.finish_rebalance()
                    raise
                self.finish_rebalance()
            return step
        finally:
            self._polling_task = None

    async def _until_interrupted_poll_ends(self) -> None:
        """Wait until a cancelled step of a poll has ended."""
        while self._step_task is not None and self._step_task.cancelling() > self._earlier_cancels:
            await asyncio.sleep(0)

    # The steps of a poll, for this class and for the blocking Consumer. Steps only prepare records for
    # delivery.

    def begin_poll(self, timeout: float) -> float:
        """Begin a poll and return its deadline in ms. The last record of a `for` loop now counts as
        processed.

        Raises MisuseError if no partition is assigned and no topic is subscribed to.
        """
        self._core.delivery.finish()
        if not self._subscription and not self._core.assignment() and not self._closed:
            raise MisuseError("no partitions are assigned; call assign() or subscribe() first")
        return self._now_ms() + timeout * 1000

    async def poll_step(
        self, deadline_ms: float, prepare: Prepare, next_row: NextRow | None = None
    ) -> Rebalance | bool:
        """Return True if records are ready, False at the deadline, or a Rebalance.

        The caller notifies the application of the Rebalance. Each call returns the same Rebalance until
        `finish_rebalance` is called. Raises MisuseError while another poll runs, and if the consumer is
        closed or unsubscribed during the step.
        """
        await self._until_interrupted_poll_ends()
        if self._step_task is not None:
            raise MisuseError(SECOND_POLL)
        if self._is_leaving and not self._closed:
            raise MisuseError(_LEAVING)
        self._step_task = task = asyncio.current_task()
        assert task is not None
        self._earlier_cancels = task.cancelling()
        # A waiting poll counts as activity of the application (max.poll.interval.ms).
        self._activity.enter()
        try:
            return await self._poll_step(deadline_ms, prepare, next_row)
        except asyncio.CancelledError:
            if self._is_step_ended and task.uncancel() <= self._earlier_cancels:
                raise MisuseError(_LEAVING) from None
            raise
        finally:
            self._activity.leave(self._now_ms())
            self._step_task = None

    async def end_polling(self) -> None:
        """Interrupt the poll of another thread or task. The interrupted poll raises MisuseError."""
        step = self._step_task
        if step is None or step is asyncio.current_task():
            return
        self._is_step_ended = True
        step.cancel()
        try:
            while self._step_task is step:
                await asyncio.sleep(0)
        finally:
            self._is_step_ended = False

    async def until_callback_ends(self, is_over: Callable[[], bool]) -> None:
        """Interrupt the poll of another thread or task, and wait until `is_over` for its rebalance callback.

        Otherwise that callback could run after the last callback of this consumer, and the application would
        count partitions as assigned to a closed consumer. Guards:
        test_close_waits_for_the_running_callback_of_another_thread and
        test_close_waits_for_the_callback_that_another_task_awaits. Simulated blocking clients found it, too.
        Do not wait long: the callback may wait for the thread or task that closes.
        """
        await self.end_polling()
        deadline_ms = self._now_ms() + _CALLBACK_MS
        while not is_over() and self._now_ms() < deadline_ms:
            await asyncio.sleep(0.001)
            await self.end_polling()

    def _is_callback_over(self) -> bool:
        """Return True unless another task is inside a poll."""
        return self._polling_task is None or self._polling_task is asyncio.current_task()

    async def _prepare_next(self, next_row: NextRow | None) -> bool:
        """Await the data that the deserializers need for the next record, such as its schema. Return False if
        there is no next record any more.

        This is part of a poll's step, so that a close interrupts it. Otherwise the poll could return records
        of partitions that the close has given to other members. Guard:
        test_a_poll_that_waits_for_a_schema_returns_nothing_after_a_close.
        """
        deserializer, prepared = self.deserializer, None
        if next_row is None or deserializer is None or not deserializer.may_wait:
            return True
        # Look again after each wait: another task may have changed the buffer meanwhile. But prepare no
        # record twice: a full cache may have dropped its schema again.
        while (row := next_row()) is not None and row is not prepared and not deserializer.is_ready(row):
            await deserializer.prepare(row)
            prepared = row
        return row is not None

    async def _poll_step(
        self, deadline_ms: float, prepare: Prepare, next_row: NextRow | None
    ) -> Rebalance | bool:
        while self._pending_rebalance is None:
            step = await self._advance(deadline_ms)
            if step is False:
                return False
            if step is not True:
                self._pending_rebalance = step
                break
            cluster, fetcher = await self._connected(), self._fetcher
            assert fetcher is not None
            self._core.raise_error()
            is_ready = prepare(cluster.now_ms())
            fetcher.start_due()
            if is_ready:
                if await self._prepare_next(next_row):
                    return True
            elif not await fetcher.wait(deadline_ms):
                return False
        return self._pending_rebalance

    def finish_rebalance(self) -> None:
        """Forget the pending rebalance, because its callback has ended or was not needed."""
        self._pending_rebalance = None

    def _now_ms(self) -> float:
        return self._runtime.monotonic_ns() / 1e6

    async def _advance(self, deadline_ms: float) -> Rebalance | bool:
        """Connect if necessary, and run the group's next step.

        Return True if partitions may be read, False at the deadline, or a Rebalance. Only this method lets a
        rebalance change the assignment, so assignments change only during a poll.
        """
        if not self._is_connected and not self._closed:
            self._loop = check_running_loop(self._loop, "consumer")
            connecting = self._start_connecting()
            done, _ = await asyncio.wait([connecting], timeout=max(deadline_ms - self._now_ms(), 0) / 1000)
            if not done:
                return False
            try:
                connecting.result()
            except asyncio.CancelledError:
                self._raise_if_closed_meanwhile()
                raise
        if self._subscription:
            return await (await self._session()).advance(deadline_ms)
        if self._settings["group.id"] is not None:
            (await self._session()).commit_if_due()
        return True

    def __aiter__(self) -> AsyncIterator[Record]:
        """Iterate over records. If consumer.timeout.ms is set, end after that time without a record.

        A record counts as delivered when the loop gets it. After a loop was left by `break` or an exception,
        the next loop or poll continues after the last delivered record. Until then, automatic commits exclude
        the last delivered record, because the application may not have processed it completely.
        """
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Record]:
        timeout, limit = self.iteration_timeout, self.poll_limit()

        def prepare(now_ms: float) -> bool:
            return self._core.prepare_records(limit, now_ms)

        # Connect first: the time that connecting takes does not count as time without a record.
        await self.start()
        delivery, deserializer = self._core.delivery, self.deserializer
        may_wait = deserializer is not None and deserializer.may_wait
        is_prepared = False
        while True:
            if may_wait and not is_prepared and (row := delivery.peek_next()) is not None:
                assert deserializer is not None
                is_prepared = deserializer.is_ready(row)
            record = delivery.next_record(deserializer) if is_prepared or not may_wait else None
            is_prepared = False
            if record is not None:
                yield record
            elif await self._wait_for_records(timeout, prepare, delivery.peek_next):
                is_prepared = True
            elif self.iteration_ends:
                return

    @property
    def iteration_ends(self) -> bool:
        """True if consumer.timeout.ms is set, so that an iteration ends after that time without a record."""
        return self._settings["consumer.timeout.ms"] is not None

    @property
    def iteration_timeout(self) -> float:
        """The time in seconds that one wait of an iteration lasts.

        It is consumer.timeout.ms. If that is unset, it is one hour, and the iteration waits again after each
        hour.
        """
        limit_ms = self._settings["consumer.timeout.ms"]
        return _LONG_WAIT_SECONDS if limit_ms is None else limit_ms / 1000

    # Ranges of offsets

    async def fetch_range(
        self, tp: TopicPartition, start: int, end: int, *, include_headers: bool = False
    ) -> AsyncIterator[Any]:
        """Yield the records with offsets in [start, end) as pyarrow.RecordBatches.

        isolation.level decides which records are visible. The assignment and positions are neither used nor
        changed. The iteration ends when all offsets below `end` were read, even if the last of these offsets
        belong only to markers and aborted records.

        Raises OffsetOutOfRange with the available offsets in its text. Raises TimedOut if no batch below
        `end` arrives within request.timeout.ms.
        """
        options = range_options(self._settings)
        async for offset, chunk in self._chunks(tp, start, end, options):
            batch = chunk.arrow(offset, end, check_crcs=options.check_crcs, include_headers=include_headers)
            if batch is not None:
                yield batch

    async def fetch_batches(self, tp: TopicPartition, start: int, end: int) -> AsyncIterator[memoryview]:
        """Yield the stored batches that contain offsets in [start, end), including markers and aborted
        batches.

        Each memoryview has one or more whole batches, byte for byte as stored. The caller must verify their
        checksums. Raises the same errors as `fetch_range`.
        """
        options = range_options(self._settings, Isolation.READ_UNCOMMITTED)
        async for offset, chunk in self._chunks(tp, start, end, options):
            if len(raw := chunk.raw(offset, end)):
                yield raw

    async def _chunks(
        self, tp: TopicPartition, start: int, end: int, options: FetchOptions
    ) -> AsyncIterator[tuple[int, RangeChunk]]:
        check_range(tp, start, end)
        offset, following = start, None
        try:
            while offset < end:
                chunk = await (following or self.fetch_chunk(tp, offset, end, options))
                following = None
                if chunk.next_offset < end:
                    following = asyncio.ensure_future(self.fetch_chunk(tp, chunk.next_offset, end, options))
                yield offset, chunk
                offset = chunk.next_offset
        finally:
            if following:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def fetch_chunk(
        self, tp: TopicPartition, offset: int, end: int, options: FetchOptions
    ) -> RangeChunk:
        """Fetch one chunk of a range: see RangeFetcher.fetch."""
        return await RangeFetcher(await self._connected(), tp, options).fetch(offset, end)

    # Information about partitions

    async def beginning_offsets(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, int]:
        """Return the first available offset of each partition."""
        return await self._bounds(partitions, "earliest")

    async def end_offsets(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, int]:
        """Return the end offset of each partition, where readers stop.

        This is the high watermark, or with isolation.level=read_committed the last stable offset.
        """
        return await self._bounds(partitions, "latest")

    async def _bounds(
        self, partitions: Collection[TopicPartition] | TopicPartition, spec: OffsetSpec
    ) -> dict[TopicPartition, int]:
        results = await self._offsets(dict.fromkeys(partitions_of(partitions), spec))
        return {tp: result.offset for tp, result in results.items() if result.offset is not None}

    async def offsets_for_times(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAt | None]:
        """Return, for each partition, the offset of the first record at or after the partition's time.

        None means that there is no such record. Times are milliseconds since the epoch.
        """
        results = await self._offsets(by_partition(times_ms))
        return {tp: result if result.offset is not None else None for tp, result in results.items()}

    async def _offsets(self, specs: Mapping[TopicPartition, OffsetSpec]) -> dict[TopicPartition, OffsetAt]:
        outcomes = await list_offsets(await self._connected(), specs, self._core.options.isolation)
        results = {}
        for tp, outcome in outcomes.items():
            if isinstance(outcome, OncelogError):
                raise outcome
            results[tp] = outcome
        return results

    async def partitions_for(self, topic: str) -> tuple[PartitionInfo, ...]:
        """Return the topic's partitions. Raises UnknownTopicOrPartition if the topic does not exist."""
        cluster = await self._connected()
        await cluster.leader(TopicPartition(topic_of(topic), 0), allow_auto_topic_creation=False)
        return cluster.metadata.partitions(topic)

    def metrics(self) -> dict[str, float]:
        """Return metrics under Kafka's names, such as records-consumed-rate and records-lag-max."""
        return self._core.metric_values(system.current().monotonic_ns() / 1e6)
