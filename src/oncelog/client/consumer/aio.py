"""The consumer for asyncio: client.consumer.ConsumerCore driven by tasks that fetch and look up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from oncelog.client.arguments import by_partition, partitions_of, topic_of
from oncelog.client.connection.cluster import ClusterConnection, parse_bootstrap
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.consumer.fetch_messages import MAX_FETCH_VERSION, FetchOptions
from oncelog.client.consumer.list_offsets import OffsetAt, OffsetSpec
from oncelog.client.consumer.offset_lookup import list_offsets
from oncelog.client.consumer.range_reader import RangeFetcher, RangePiece, check_range, range_options
from oncelog.client.consumer.state import FetchCall, ResetCall
from oncelog.client.group.aio import Rebalance
from oncelog.client.group.rebalance_callbacks import AsyncSubscribing
from oncelog.config import CONSUMER, INT32_MAX
from oncelog.errors import (
    DisconnectedError,
    MisuseError,
    OncelogError,
    TimedOut,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
)
from oncelog.runtime import system
from oncelog.runtime.loop_thread import check_running_loop
from oncelog.settings import Settings
from oncelog.types import Isolation, PartitionInfo, Record, TopicPartition

_POLL_FOREVER_SECONDS = 3600.0
_FOUND_TOGETHER_S = 0.01

SECOND_POLL = "another thread or task is polling this consumer; give each one of its own"

Prepare = Callable[[float], bool]
"""Has records ready in the core's `delivery`; false when none wait. It is given the time in milliseconds."""


class AsyncConsumer(AsyncSubscribing):
    """Reads partitions, assigned or shared out by a group, on the running asyncio loop.

    Settings: a mapping with Kafka's keys, or keywords with underscores for the dots.

    Connects at first use, or with `async with`. Not for use by several tasks at a time.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self._settings = CONSUMER.parse({**(config or {}), **settings})
        parse_bootstrap(self._settings["bootstrap.servers"])
        self._core = ConsumerCore(self._settings)
        super().__init__()
        self._cluster: ClusterConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        # Partitions whose leader is being found.
        self._sought: set[TopicPartition] = set()
        self._failure_count = 0
        self._wake: asyncio.Event | None = None
        self._connecting: asyncio.Task[None] | None = None
        # A rebalance of which the application has not been told to the end.
        self._untold: Rebalance | None = None
        # The task whose poll lasts, its callbacks included.
        self._polled_by: asyncio.Task[Any] | None = None
        # The task in which a step of a poll is under way, and whether `close` has cancelled it.
        self._stepping: asyncio.Task[Any] | None = None
        # How often that task had been cancelled before its step, and went on. See
        # test_a_task_that_outlived_a_cancellation_polls_like_any_other.
        self._earlier_cancels = 0
        self._is_step_ended = False
        self._closed = False

    @property
    def settings(self) -> Settings:
        """The settings, parsed and completed with defaults."""
        return self._settings

    @property
    def core(self) -> ConsumerCore:
        """Positions and undelivered records, for the blocking Consumer."""
        return self._core

    # Life

    async def start(self) -> None:
        """Connect; other methods do so by themselves. Raises what ClusterConnection.start raises."""
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
        """Raise MisuseError if `close` has cancelled what this task waits for, and nobody this task."""
        task = asyncio.current_task()
        if self._closed and task is not None and not task.cancelling():
            raise MisuseError("this consumer was closed during this call; make a new one") from None

    def _start_connecting(self) -> asyncio.Task[None]:
        """Return the task that connects; it outlives the calls that wait for it."""
        if self._cluster is None:
            self._wake = asyncio.Event()
            self._cluster = ClusterConnection(self._settings, topics_in_use=self._topics_in_use)
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._cluster.start())
        return self._connecting

    @property
    def _is_connected(self) -> bool:
        task = self._connecting
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    def _topics_in_use(self) -> set[str]:
        """Return the topics whose metadata are to be kept: those assigned or subscribed to, as in Java.

        The leader of a classic group also keeps what the other members subscribe to.
        """
        subscribed = self._group.topics_in_use if self._group is not None else ()
        return {tp.topic for tp in self._core.assignment()}.union(subscribed)

    async def close(self) -> None:
        """Commit what was handed out if that is automatic, leave the group, end all work and connections.

        Not committed is a record at which a loop ended, by `break` or an exception. Calls `on_revoked` (or
        `on_lost`) with the partitions that are given up. Safe to call twice.
        """
        check_running_loop(self._loop, "consumer")
        try:
            await self.end_polling()
            self._untold = None
            try:
                if not self._closed:
                    await self.tell_of_leaving()
            except Exception:
                await self._end()
                raise
            await self._end()
        except asyncio.CancelledError:
            # A second call ends the rest. The group would wait for a member that nobody polls. See
            # test_a_cancelled_close_keeps_no_member_in_the_group.
            if self._group is not None and not self._closed:
                self._group.begin_leaving()
            raise

    async def end_at_once(self) -> None:
        """End all, as `close` does, without a commit and without callbacks."""
        check_running_loop(self._loop, "consumer")
        if self._group is not None and not self._closed:
            self._group.begin_leaving()
            await self._group.until_left()
        await self._end_connections()

    async def _end(self) -> None:
        """Leave the group, end all work and connections."""
        if self._group is not None and not self._closed:
            await self._group.close()
        await self._end_connections()

    async def _end_connections(self) -> None:
        """End all work but the group's, and the connections."""
        self._closed = True
        tasks = [*self._tasks, *([self._connecting] if self._connecting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connecting = None
        if self._cluster:
            await self._cluster.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Assignment and positions

    def assign(self, partitions: Collection[TopicPartition] | TopicPartition) -> None:
        """Read these partitions and no others; those assigned before keep their positions.

        With a group.id new ones begin at the group's committed offsets, and positions are committed
        automatically with enable.auto.commit. No member of the group may hold partitions meanwhile: the
        group refuses the commits then. Else new ones begin where auto.offset.reset says.
        """
        if self._subscription:
            raise MisuseError(
                "this consumer is subscribed: unsubscribe() before assigning partitions by hand"
            )
        wanted = partitions_of(partitions)
        if self._group is not None and not self._closed and not set(self.assignment()) <= set(wanted):
            self._group.commit_before_assigning()
        self._core.assign(wanted, from_committed=self._settings["group.id"] is not None)

    def assignment(self) -> list[TopicPartition]:
        """The partitions being read."""
        return self._core.assignment()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on at `offset` (0 or above). Raises MisuseError when the partition is not assigned."""
        self._core.seek(tp, offset)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Go on at the first record; without arguments in every assigned partition."""
        self._core.seek_to(partitions_of(partitions), "earliest")

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go on behind the last record a reader of this isolation may see."""
        self._core.seek_to(partitions_of(partitions), "latest")

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these until `resume`; positions stay."""
        self._core.set_paused(partitions_of(partitions), True)

    def resume(self, *partitions: TopicPartition) -> None:
        """End a `pause`."""
        self._core.set_paused(partitions_of(partitions), False)
        if self._cluster and not self._closed:
            self._step(self._cluster)

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused."""
        return self._core.paused()

    async def position(self, tp: TopicPartition) -> int:
        """The offset of the next record `poll` would give, looked up if need be."""
        cluster = await self._connected()
        deadline_ms = cluster.now_ms() + self._settings["request.timeout.ms"]
        while (offset := self._core.position(tp)) is None:
            self._step(cluster)
            if not await self._wait(cluster, deadline_ms):
                raise TimedOut(f"the position of {tp} was not found within request.timeout.ms")
            self._core.raise_error()
        return offset

    def lag(self, tp: TopicPartition) -> int | None:
        """Records between position and end as of the last fetch; None while unknown."""
        return self._core.lag(tp)

    # Records

    async def poll(self, timeout: float = 1.0, *, max_records: int | None = None) -> list[Record]:
        """Records that wait, or come within `timeout` seconds; at most max.poll.records.

        What it returns counts as handed out: positions, and so commits, are behind it. A poll that is
        cancelled has handed out nothing, and the next one returns what it would have returned.

        Raises OffsetOutOfRange with auto.offset.reset=none, CorruptMessage, and what made partitions
        unreachable for longer than request.timeout.ms; polling may go on after any of them.
        """
        limit = self.poll_limit(max_records)
        is_ready = await self._ready(timeout, lambda now_ms: self._core.prepare_rows(limit, now_ms))
        return self._core.delivery.take(limit) if is_ready else []

    async def poll_arrow(self, timeout: float = 1.0, *, include_headers: bool = False) -> Any | None:
        """All records of one fetched piece of one partition as a pyarrow.RecordBatch; None if none came."""
        is_ready = await self._ready(
            timeout, lambda now_ms: self._core.prepare_columns(now_ms, include_headers=include_headers)
        )
        return self._core.delivery.take_columns() if is_ready else None

    def poll_limit(self, max_records: int | None = None) -> int:
        """Return the most records that one poll returns."""
        limit: int = self._settings["max.poll.records"]
        return min(max_records or INT32_MAX, limit)

    async def _ready(self, timeout: float, prepare: Prepare) -> bool:
        """Wait until records are ready in the core's `delivery`; false when the time is over."""
        await self._until_interrupted_poll_ends()
        # Between two steps a second task would call the callbacks once more. A callback may poll itself. See
        # test_a_second_task_is_refused_while_a_callback_of_the_first_runs.
        task, outer = asyncio.current_task(), self._polled_by
        if outer not in (None, task):
            raise MisuseError(SECOND_POLL)
        deadline_ms = self.begin_poll(timeout)
        self._polled_by = task
        try:
            while isinstance(step := await self.poll_step(deadline_ms, prepare), Rebalance):
                try:
                    await self.listeners.tell_async(step)
                except Exception:
                    self.note_told()  # as for Java's: it was called, and poll raises what it raised
                    raise
                self.note_told()
            return step
        finally:
            self._polled_by = outer

    async def _until_interrupted_poll_ends(self) -> None:
        """Wait for a step of a poll that was cancelled and is about to end."""
        while self._stepping is not None and self._stepping.cancelling() > self._earlier_cancels:
            await asyncio.sleep(0)

    # A poll, step by step: both consumers are made of these. No step hands records out.

    def begin_poll(self, timeout: float) -> float:
        """Return the deadline of a poll. Raises MisuseError when there is nothing to poll."""
        self._core.delivery.finish()
        if not self._subscription and not self._core.assignment() and not self._closed:
            raise MisuseError("no partitions are assigned; call assign() or subscribe() first")
        return self._now_ms() + timeout * 1000

    async def poll_step(self, deadline_ms: float, prepare: Prepare) -> Rebalance | bool:
        """Return a Rebalance to tell the application of, or whether records are ready.

        The same Rebalance is returned again until `note_told`. Raises MisuseError while another poll is under
        way, and when the consumer is closed meanwhile.
        """
        await self._until_interrupted_poll_ends()
        if self._stepping is not None:
            raise MisuseError(SECOND_POLL)
        self._stepping = task = asyncio.current_task()
        assert task is not None
        self._earlier_cancels = task.cancelling()
        try:
            return await self._poll_step(deadline_ms, prepare)
        except asyncio.CancelledError:
            if self._is_step_ended and task.uncancel() <= self._earlier_cancels:
                raise MisuseError("this consumer was closed, or unsubscribed, while it was polled") from None
            raise
        finally:
            self._stepping = None

    async def end_polling(self) -> None:
        """End a poll that another thread or task has under way; that one raises MisuseError."""
        step = self._stepping
        if step is None or step is asyncio.current_task():
            return
        self._is_step_ended = True
        step.cancel()
        try:
            while self._stepping is step:
                await asyncio.sleep(0)
        finally:
            self._is_step_ended = False

    async def _poll_step(self, deadline_ms: float, prepare: Prepare) -> Rebalance | bool:
        with self._polling():
            while self._untold is None:
                following = await self._advanced(deadline_ms)
                if following is False:
                    return False
                if following is not True:
                    self._untold = following
                    break
                cluster = await self._connected()
                self._core.raise_error()
                is_ready = prepare(cluster.now_ms())
                self._step(cluster)
                if is_ready:
                    return True
                if not await self._wait(cluster, deadline_ms):
                    return False
            return self._untold

    def note_told(self) -> None:
        """The application's callback has ended, or there is none."""
        self._untold = None

    def _now_ms(self) -> float:
        return self._runtime.monotonic_ns() / 1e6

    async def _advanced(self, deadline_ms: float) -> Rebalance | bool:
        """Return what `advance` returns; False when the deadline comes first.

        The assignment changes nowhere else, so never between two polls.
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
        return await self.advance(deadline_ms)

    async def unsubscribe(self) -> None:
        """Leave the group, committing first if that is automatic, and read nothing.

        Calls `on_revoked` (or `on_lost`) with the partitions that are given up.
        """
        await self.end_polling()
        self._untold = None
        await super().unsubscribe()

    async def _wait(self, cluster: ClusterConnection, deadline_ms: float) -> bool:
        """Until something arrived; false when the time is over."""
        assert self._wake is not None
        remaining_ms = deadline_ms - cluster.now_ms()
        if remaining_ms <= 0 and not self._wake.is_set():
            return False
        try:
            async with asyncio.timeout(max(remaining_ms, 0) / 1000):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    def __aiter__(self) -> AsyncIterator[Record]:
        """Record after record; ends after consumer.timeout.ms without one, if that is set.

        Each record counts as handed out when the loop gets it. A loop that is left, by `break` or an
        exception, skips nothing: the next loop or poll goes on behind the last record that was handed out.
        Automatic commits leave out the record at which a loop was left, until the application asks for more.
        """
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Record]:
        timeout, limit = self.iteration_timeout, self.poll_limit()

        def prepare(now_ms: float) -> bool:
            return self._core.prepare_rows(limit, now_ms)

        await self.start()  # connecting does not count as time without a record
        while True:
            row = self._core.delivery.next_row()
            if row is not None:
                yield row
            elif not await self._ready(timeout, prepare):
                return

    @property
    def iteration_timeout(self) -> float:
        """Seconds after which an iteration without a record ends."""
        limit_ms = self._settings["consumer.timeout.ms"]
        return _POLL_FOREVER_SECONDS if limit_ms is None else limit_ms / 1000

    async def fetch_range(
        self, tp: TopicPartition, start: int, end: int, *, include_headers: bool = False
    ) -> AsyncIterator[Any]:
        """What a reader of this isolation sees of offsets [start, end), as pyarrow.RecordBatches.

        Independent of assignment and positions. Ends when everything below `end` was read, also if only
        markers and aborted records are left. Raises as RangeFetcher.fetch.
        """
        options = range_options(self._settings)
        async for offset, piece in self._pieces(tp, start, end, options):
            batch = piece.arrow(offset, end, check_crcs=options.check_crcs, include_headers=include_headers)
            if batch is not None:
                yield batch

    async def fetch_batches(self, tp: TopicPartition, start: int, end: int) -> AsyncIterator[memoryview]:
        """The stored batches that hold offsets [start, end): each view is one or more whole batches."""
        options = range_options(self._settings, Isolation.READ_UNCOMMITTED)
        async for offset, piece in self._pieces(tp, start, end, options):
            if len(raw := piece.raw(offset, end)):
                yield raw

    async def _pieces(
        self, tp: TopicPartition, start: int, end: int, options: FetchOptions
    ) -> AsyncIterator[tuple[int, RangePiece]]:
        check_range(tp, start, end)
        offset, following = start, None
        try:
            while offset < end:
                piece = await (following or self.fetch_piece(tp, offset, end, options))
                following = None
                if piece.next_offset < end:
                    following = asyncio.ensure_future(self.fetch_piece(tp, piece.next_offset, end, options))
                yield offset, piece
                offset = piece.next_offset
        finally:
            if following:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def fetch_piece(
        self, tp: TopicPartition, offset: int, end: int, options: FetchOptions
    ) -> RangePiece:
        """One step of a range: see RangeFetcher.fetch."""
        return await RangeFetcher(await self._connected(), tp, options).fetch(offset, end)

    # Looking around

    async def beginning_offsets(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, int]:
        """The first offset that exists, per partition."""
        return await self._bounds(partitions, "earliest")

    async def end_offsets(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, int]:
        """The offset behind the last record this isolation may see (LSO or high watermark), per partition."""
        return await self._bounds(partitions, "latest")

    async def _bounds(
        self, partitions: Collection[TopicPartition] | TopicPartition, spec: OffsetSpec
    ) -> dict[TopicPartition, int]:
        found = await self._offsets(dict.fromkeys(partitions_of(partitions), spec))
        return {tp: at.offset for tp, at in found.items() if at.offset is not None}

    async def offsets_for_times(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAt | None]:
        """The first record at or after a time, per partition; None where there is none."""
        found = await self._offsets(by_partition(times_ms))
        return {tp: at if at.offset is not None else None for tp, at in found.items()}

    async def _offsets(self, specs: Mapping[TopicPartition, OffsetSpec]) -> dict[TopicPartition, OffsetAt]:
        outcome = await list_offsets(await self._connected(), specs, self._core.options.isolation)
        found = {}
        for tp, at in outcome.items():
            if isinstance(at, OncelogError):
                raise at
            found[tp] = at
        return found

    async def partitions_for(self, topic: str) -> tuple[PartitionInfo, ...]:
        """The topic's partitions. Raises UnknownTopicOrPartition when it does not exist."""
        cluster = await self._connected()
        await cluster.leader(TopicPartition(topic_of(topic), 0), allow_auto_topic_creation=False)
        return cluster.metadata.partitions(topic)

    def metrics(self) -> dict[str, float]:
        """Numbers under Kafka's names (records-consumed-rate, fetch-latency-avg, records-lag-max, ...)."""
        return self._core.metric_values(system.current().monotonic_ns() / 1e6)

    # Work in the background

    def _step(self, cluster: ClusterConnection) -> None:
        """Start whatever is due, unless an error waits for the application, which a repetition would hide."""
        if self._core.has_error:
            return
        resets = self._core.resets()
        if committed := [call for call in resets if call.to == "committed"]:
            self._spawn(self._reset_to_committed(cluster, committed))
        if resets := [call for call in resets if call.to != "committed"]:
            self._spawn(self._reset(cluster, resets))
        calls, homeless = self._core.plan(cluster.metadata.leader_of)
        for call in calls:
            self._spawn(self._fetch(cluster, call))
        if unsought := [tp for tp in homeless if tp not in self._sought]:
            self._sought.update(unsought)
            self._spawn(self._find_leaders(cluster, unsought))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def _wake_up(self) -> None:
        if self._wake:
            self._wake.set()

    async def _fetch(self, cluster: ClusterConnection, call: FetchCall) -> None:
        sent_ms = cluster.now_ms()
        timeout_ms = self._settings["request.timeout.ms"] + call.request.max_wait_ms
        stale: Sequence[TopicPartition] = ()
        try:
            response = await cluster.request(
                call.node_id,
                call.request,
                timeout_ms=timeout_ms,
                max_version=MAX_FETCH_VERSION,
                channel=f"fetch-{call.lane}",
            )
            now_ms = cluster.now_ms()
            stale = self._core.on_response(call, response, now_ms - sent_ms, now_ms)
        except OncelogError as error:
            if not isinstance(error, (DisconnectedError, TimedOut)):
                self._core.note_error(error)
            stale = self._core.on_failure(call)
        except Exception as error:
            self._core.note_error(error)  # a fault of ours: the next poll raises it
        finally:
            self._core.end_fetch(call)
        self._failure_count = self._failure_count + 1 if stale else 0
        cluster.metadata.mark_stale(stale)
        self._step(cluster)
        self._wake_up()

    async def _find_leaders(self, cluster: ClusterConnection, partitions: Sequence[TopicPartition]) -> None:
        """Find the leaders of these partitions, which stand in `_sought` until then."""
        tasks: dict[asyncio.Future[None], TopicPartition] = {}
        remaining: Iterable[TopicPartition] = partitions
        try:
            if self._failure_count:
                await asyncio.sleep(cluster.retry_pause_ms(self._failure_count - 1) / 1000)
            if len(topics := {tp.topic for tp in partitions}) > 1:
                with suppress(OncelogError):  # one question finds nearly all
                    await cluster.refresh_metadata(sorted(topics), allow_auto_topic_creation=False)
            tasks |= {asyncio.ensure_future(self._find_leader(cluster, tp)): tp for tp in partitions}
            # Not `partitions` from here on: a step seeks again those that `_take_found` has let go. See
            # test_a_topic_that_may_be_about_to_exist_is_looked_for_once_at_a_time.
            remaining = tasks.values()
            self._take_found(cluster, tasks)
            # One that is missing, or has no leader, must not keep others from being read meanwhile. See
            # test_a_partition_without_a_leader_keeps_no_other_from_being_followed.
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if len(done) < len(tasks):
                    # A step looks at each partition, and thousands may be found one after the other.
                    await asyncio.sleep(_FOUND_TOGETHER_S)
                self._take_found(cluster, tasks)
        finally:
            for task in tasks:
                task.cancel()
            self._sought.difference_update(remaining)

    def _take_found(
        self, cluster: ClusterConnection, tasks: dict[asyncio.Future[None], TopicPartition]
    ) -> None:
        """Read partitions whose leaders were found; end the search for those of topics where one failed."""
        missing = [task for task, tp in tasks.items() if cluster.metadata.leader_of(tp) is None]
        failed = [task for task in missing if task.done()]
        errors = {str(error): error for task in failed if (error := task.exception()) is not None}
        ended_topics = {tasks[task].topic for task in failed}
        sought = {task for task in missing if tasks[task].topic not in ended_topics}
        self._sought.difference_update([tp for task, tp in tasks.items() if task not in sought])
        for task in [task for task in tasks if task not in sought]:
            task.cancel()
            del tasks[task]
        for error in errors.values():  # one for a topic, however many of its partitions are read
            self._core.note_error(error if isinstance(error, Exception) else OncelogError(repr(error)))
        self._step(cluster)
        self._wake_up()

    async def _find_leader(self, cluster: ClusterConnection, tp: TopicPartition) -> None:
        """Find one leader. A topic that may be about to exist is looked for again by the next step."""
        is_awaited = self._is_awaited(cluster, tp)
        try:
            await cluster.leader(
                tp, allow_auto_topic_creation=False, unknown_topic_patience_ms=0 if is_awaited else None
            )
        except UnknownTopicOrPartition:
            if not self._is_awaited(cluster, tp):
                raise
            self._failure_count += 1  # the next step waits a moment first

    def _is_awaited(self, cluster: ClusterConnection, tp: TopicPartition) -> bool:
        """True while an unknown topic may still be one that was created a moment ago."""
        since_ms = cluster.metadata.unknown_since_ms(tp.topic)
        limit_ms: int = self._settings["request.timeout.ms"]
        return since_ms is not None and cluster.now_ms() - since_ms < limit_ms

    async def _reset_to_committed(self, cluster: ClusterConnection, calls: list[ResetCall]) -> None:
        try:
            found = await (await self._session()).committed([call.tp for call in calls])
            for call in calls:
                offset = found.get(call.tp)
                self._core.on_committed(call, offset.offset if offset is not None else None)
        except Exception as error:
            # An open transaction that holds the positions back is waited for, as in Java. See
            # test_assigned_partitions_wait_for_an_open_transaction.
            is_held_back = isinstance(error, TimedOut) and isinstance(error.__cause__, UnstableOffsetCommit)
            if not is_held_back and any(self._core.is_awaited(call) for call in calls):
                self._core.note_error(error)  # once, however many partitions there are
        finally:
            self._core.end_resets(calls)
        self._step(cluster)
        self._wake_up()

    async def _reset(self, cluster: ClusterConnection, calls: list[ResetCall]) -> None:
        """Look positions up, at once where the leader is known, or found with the first question."""
        # What is missing must not keep the others from being read. See
        # test_a_missing_topic_keeps_no_other_from_being_read.
        if unknown := self._without_leader(cluster, calls):
            with suppress(OncelogError):
                topics = sorted({call.tp.topic for call in unknown})
                await cluster.refresh_metadata(topics, allow_auto_topic_creation=False)
            unknown = self._without_leader(cluster, calls)
        if unknown and len(unknown) < len(calls):
            self._spawn(self._reset_together(cluster, unknown))
            missing = frozenset(unknown)
            calls = [call for call in calls if call not in missing]
        await self._reset_together(cluster, calls)

    def _without_leader(self, cluster: ClusterConnection, calls: list[ResetCall]) -> list[ResetCall]:
        return [call for call in calls if cluster.metadata.leader_of(call.tp) is None]

    async def _reset_together(self, cluster: ClusterConnection, calls: list[ResetCall]) -> None:
        try:
            specs: dict[TopicPartition, OffsetSpec] = {
                call.tp: call.to for call in calls if call.to != "committed"
            }
            outcomes = await list_offsets(cluster, specs, self._core.options.isolation)
            for call in calls:
                outcome = outcomes[call.tp]
                if isinstance(outcome, OffsetAt):
                    self._core.on_reset(call, outcome)
                elif isinstance(outcome, UnknownTopicOrPartition) and self._is_awaited(cluster, call.tp):
                    self._core.on_reset_failed(call)
                else:
                    self._core.on_reset_failed(call, outcome)
        except Exception as error:
            self._core.note_error(error)  # a fault of ours: the next poll raises it
        finally:
            self._core.end_resets(calls)
        self._step(cluster)
        self._wake_up()
