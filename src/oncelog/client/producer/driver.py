"""Drives a ProducerCore on an event loop, and shares it with application threads.

The driver sends the requests that the core drains. It passes responses, producer ids, metadata and the time
to the core. Application threads append records, and the loop's thread drains and completes them. Both hold
`driver.lock`.

Python runs a signal handler on the main thread, after any call or at the start of a function, and the handler
may raise. Three rules follow:

- Take the lock only by `with driver.lock`. If a handler raises within another method that takes the lock, or
  within a Condition, the lock may stay held.
- Threads wait only on queues. `ProducerCore.repair` completes the work of an interrupted `append`.
- If a handler calls the producer while the interrupted call holds the lock, the handler gets MisuseError. It
  cannot wait, because the interrupted call continues only after the handler. The lock is reentrant, so that
  this case can be detected.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from oncelog.client.connection.cluster import ClusterConnection, parse_bootstrap
from oncelog.client.producer.core import ProducerCore, interrupted_call
from oncelog.client.producer.options import IdempotenceReport, ProducerOptions, resolve
from oncelog.client.producer.produce_messages import ProduceCall
from oncelog.config import PRODUCER
from oncelog.errors import (
    AuthenticationError,
    BrokerError,
    ClusterAuthorizationFailed,
    ConfigError,
    DisconnectedError,
    MisuseError,
    NotConnectedError,
    OncelogError,
    PeerError,
    TimedOut,
    UnknownTopicOrPartition,
    UnsupportedVersion,
    raise_for_code,
)
from oncelog.runtime import system
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.messages import InitProducerIdRequest

_LOG = logging.getLogger("oncelog.producer")
_IDLE_SECONDS = 60.0
CLOSED = "this producer is closed; make a new one"
_NOT_ALLOWED = (
    "an idempotent producer needs WRITE on a topic (before Kafka 2.8: IDEMPOTENT_WRITE on the cluster). "
    "Allow it with `oncelog acls add --allow-principal User:NAME --producer --topic TOPIC` (before 2.8: "
    "`oncelog acls add --allow-principal User:NAME --operation IDEMPOTENT_WRITE --cluster`)"
)
"""The text of a CLUSTER_AUTHORIZATION_FAILED for InitProducerId. Source: KIP-679."""


def parse_settings(
    config: Mapping[str, object] | None, keywords: Mapping[str, object]
) -> tuple[Settings, ProducerOptions]:
    """Return the settings, checked against each other (behaviour I3). Raises ConfigError.

    Warns if idempotence was on only by default, and another setting switches it off. Call it from a
    constructor: the warning names the constructor's caller.
    """
    settings = PRODUCER.parse({**(config or {}), **keywords})
    options = resolve(settings)
    parse_bootstrap(settings["bootstrap.servers"])
    if settings["enable.idempotence"] and not options.is_idempotent:
        warnings.warn(
            f"idempotence is {options.reason}; records may be duplicated", UserWarning, stacklevel=3
        )
    return settings, options


def no_room_error(options: ProducerOptions) -> TimedOut:
    """Return the error of a `send` that found no room in buffer.memory within max.block.ms."""
    return TimedOut(
        f"buffer.memory={options.buffer_bytes} is full, and no memory became free within "
        f"max.block.ms={options.max_block_ms}: records are sent faster than the broker "
        "acknowledges them"
    )


def _do_nothing() -> None:
    pass


class ProducerDriver:
    """The driver of one producer, on its event loop.

    Other threads may touch only `core`, `notified_count` and `room_waiters`: the first two with `lock` held.
    """

    def __init__(self, settings: Settings, options: ProducerOptions) -> None:
        self.settings = settings
        self.options = options
        self.runtime = system.current()
        self.cluster = ClusterConnection(settings)
        self.core = ProducerCore(options, self.cluster.metadata, self.runtime.rng)
        """Every use needs the lock, except reading one attribute that is only replaced and never changed in
        place.
        """
        self.lock = threading.RLock()
        """Every call that touches the core holds this lock, on any thread.

        Take it only by `with driver.lock`.
        """
        self.notified_count = 0
        """Number of batches whose callbacks have returned; compare ProducerCore.completed_count."""
        self.room_waiters: list[queue.SimpleQueue[None]] = []
        """One queue per thread that waits for room in buffer.memory.

        Each queue gets an item when a batch completes.
        """
        self.loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._main: asyncio.Task[None] | None = None
        self._in_flight: dict[asyncio.Future[Any], ProduceCall] = {}
        self._is_requesting_id = False
        self._is_refreshing = False
        self._waiters: list[asyncio.Future[None]] = []
        self._lookups: Counter[str] = Counter()
        """Number of running `look_up_topic` calls, by topic."""
        self._is_closing = False
        self._closing: asyncio.Task[None] | None = None
        self._thread_id: int | None = None
        self.on_drained: Callable[[], object] = _do_nothing
        """Called after each drain, to add partitions to a transaction before their records can be sent."""
        _drivers.add(self)

    def now_ms(self) -> float:
        """Return milliseconds of the monotonic clock."""
        return self.runtime.monotonic_ns() / 1e6

    def is_own_thread(self) -> bool:
        """Return True on the producer's own thread, where callbacks run."""
        return threading.get_ident() == self._thread_id

    def check_lock_not_held(self) -> None:
        """Raise MisuseError in a signal handler that has interrupted a call which holds the lock.

        Guard: test_a_signal_handler_that_calls_the_producer_never_waits_for_what_it_interrupted.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]  # threading.Condition calls it, too
            raise interrupted_call()

    @property
    def is_flushed(self) -> bool:
        """Return True if every record is complete and its callback has returned.

        The caller holds the lock.
        """
        return self.core.is_idle and self.notified_count >= self.core.completed_count

    def _wake_room_waiters(self) -> None:
        for waiter in list(self.room_waiters):
            waiter.put(None)

    def reset_after_fork(self) -> None:
        """In a forked child, fail all records, and replace the lock, which the parent may hold."""
        self.lock = self.core.appender.lock = threading.RLock()
        self.room_waiters = []
        self.core.detach(MisuseError("this producer was made before a fork; make one in the child process"))

    def metrics(self) -> dict[str, float]:
        """Return the metrics under Kafka's names (producer-metrics)."""
        with self.lock:
            return self.core.metrics.to_dict(
                self.now_ms(), self.core.buffered_bytes, self.options.buffer_bytes
            )

    def idempotence(self) -> IdempotenceReport:
        """Return whether idempotence is on, and the producer id if there is one."""
        return self.options.report(*(self.core.identity or (None, None)))

    def start(self) -> None:
        """Start the task that drains and sends, on the running event loop."""
        self.loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._main = self.loop.create_task(self._run())

    def wake(self) -> None:
        """Let the loop drain soon. Call it on the loop's thread."""
        self._event.set()

    async def refuse_appends(self, error: OncelogError) -> None:
        """Let every further `append` raise `error`. Records that were appended earlier are still sent."""
        with self.lock:
            self.core.refuse_appends(error)

    async def close(self) -> None:
        """Stop sending, and fail all records that are not complete. Cancelling this call ends only its wait.

        If a cancellation ended the close itself, connections would stay open, or records would get no result.
        Guard: test_a_close_that_is_cancelled_twice_leaves_nothing_behind.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        if not self._closing.done():
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # This flag ends `_run` even if a cancellation is lost.
        self._is_closing = True
        for task in [*self._tasks, *([self._main] if self._main else [])]:
            task.cancel()
        await asyncio.gather(*self._tasks, *([self._main] if self._main else []), return_exceptions=True)
        # The task and the callback refer to this object. Without these references the object is freed
        # immediately.
        self._main, self.on_drained = None, _do_nothing
        await self.cluster.close()
        with self.lock:
            self.core.fail_all(MisuseError("the producer was closed before this record was acknowledged"))
        self.notify()

    async def _run(self) -> None:
        while not self._is_closing:
            # Use a timer, because wait_for of Python 3.11 can swallow a cancellation.
            timer = asyncio.get_running_loop().call_later(self._drain_or_fail(), self._event.set)
            try:
                await self._event.wait()
            finally:
                timer.cancel()
            self._event.clear()

    def _drain_or_fail(self) -> float:
        """Drain, and return the seconds until the next drain.

        If the drain raises, fail all records, because their callers would otherwise wait without end.
        """
        try:
            return self._drain()
        except Exception as error:
            self._fail_all(error)
            return _IDLE_SECONDS

    def _fail_all(self, error: Exception) -> None:
        """Fail all records after an unexpected exception."""
        _LOG.error("the producer cannot continue", exc_info=error)
        with self.lock:
            self.core.fail_all(OncelogError(f"the producer cannot continue: {error!r}"))
        self.notify()

    def _drain(self) -> float:
        """Send the batches that are ready, and return the seconds until the next drain is due."""
        now_ms = self.now_ms()
        with self.lock:
            calls = self.core.drain(now_ms)
            due_ms = self.core.next_wakeup_ms()
            needs_id, stale = self.core.is_identity_needed, bool(self.core.stale_leaders)
            forgotten, self.core.forgotten_topics = self.core.forgotten_topics, []
        self.cluster.forget_topics(forgotten)
        self._cancel_completed()
        for call in calls:
            self._send(call)
        self.notify()
        self.on_drained()
        if needs_id and not self._is_requesting_id:
            self._is_requesting_id = True
            self.spawn(self._request_producer_id())
        if stale and not self._is_refreshing:
            self._is_refreshing = True
            self.spawn(self._refresh())
        return _IDLE_SECONDS if due_ms is None else max(0.0, due_ms - now_ms) / 1000

    def spawn(self, coroutine: Any) -> None:
        """Run a coroutine as a task that `close` cancels."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def notify(self) -> None:
        """Call the callbacks of complete batches, and wake the tasks that wait for a completion.

        The caller must not hold the lock.
        """
        with self.lock:
            results, self.core.completed = self.core.completed, []
        if not results:
            return
        self._wake_room_waiters()  # waiters for room need not wait for the callbacks
        interrupt: BaseException | None = None
        for result in results:
            for error in result.notify():
                _LOG.error("a delivery callback raised", exc_info=error)
                if isinstance(error, KeyboardInterrupt):
                    interrupt = error
        with self.lock:
            self.notified_count += len(results)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if interrupt is not None and threading.current_thread() is threading.main_thread():
            # Only the main thread gets a KeyboardInterrupt from a signal. It is meant for the program, so
            # raise it.
            raise interrupt

    async def flush(self) -> None:
        """Send all records of earlier calls, and wait until their callbacks have returned."""
        with self.lock:
            mark = FlushMark(self)
        self.wake()
        while not self._is_reached(mark):
            await self.next_completion()

    def _is_reached(self, mark: FlushMark) -> bool:
        with self.lock:
            return mark.is_reached()

    async def next_completion(self) -> None:
        """Wait until a batch is complete and its callbacks have returned."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _send(self, call: ProduceCall) -> None:
        with self.lock:
            self.core.on_queued(call)
        try:
            future = self.cluster.submit(
                call.node_id,
                call.message,
                max_version=self.core.max_produce_version,
                on_written=partial(self._on_written, call),
            )
        except OncelogError as error:
            with self.lock:
                self.core.on_failure(call, error, self.now_ms(), was_sent=False)
            self._event.set()
            return
        self._in_flight[future] = call
        future.add_done_callback(self._on_done)

    def _on_written(self, call: ProduceCall) -> None:
        with self.lock:
            self.core.on_written(call)

    def _cancel_completed(self) -> None:
        """Cancel requests that must not be sent: all batches are complete, or one expired before it was sent.

        The application may already know that an expired batch is not stored. The other batches of a cancelled
        request are sent again.
        """
        for future, call in list(self._in_flight.items()):
            completed = [batch for batch in call.batches if batch.is_completed]
            if len(completed) == len(call.batches) or any(batch.is_queued for batch in completed):
                future.cancel()

    def _on_done(self, done: asyncio.Future[Any]) -> None:
        call = self._in_flight.pop(done)
        try:
            self._end_call(call, done)
        except Exception as error:
            # Fail all records. Otherwise the request's records would have no result until
            # delivery.timeout.ms. Guard:
            # test_an_unexpected_exception_for_a_response_fails_the_records_at_once.
            self._fail_all(error)
        self.notify()
        self._event.set()

    def _end_call(self, call: ProduceCall, done: asyncio.Future[Any]) -> None:
        """Pass the result of a request to the core."""
        now_ms = self.now_ms()
        error = self._cancellation_error(call) if done.cancelled() else done.exception()
        with self.lock:
            if error is None and not call.expects_response:
                self.core.on_sent(call, now_ms)
            elif error is None:
                self.core.on_response(call, done.result(), now_ms)
            elif isinstance(error, (UnsupportedVersion, MisuseError, ConfigError)):
                self.core.on_refused(call, error, now_ms)
            else:
                failure = error if isinstance(error, OncelogError) else OncelogError(repr(error))
                self.core.on_failure(call, failure, now_ms)

    def _cancellation_error(self, call: ProduceCall) -> OncelogError:
        if self._is_closing:
            return DisconnectedError("the producer was closed")
        return NotConnectedError(f"no connection to broker {call.node_id} in time")

    async def _request_producer_id(self) -> None:
        """Send InitProducerId until it succeeds. A BrokerError that is not retriable fails the producer."""
        attempt = 0
        try:
            while True:
                try:
                    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=2**31 - 1)
                    response = await self.cluster.request(None, request)
                    raise_for_code(response.error_code)
                except (DisconnectedError, TimedOut, PeerError, BrokerError) as error:
                    if isinstance(error, BrokerError) and not error.retriable:
                        if isinstance(error, ClusterAuthorizationFailed):
                            error.detail = error.detail or _NOT_ALLOWED
                        with self.lock:
                            error.reaction = "fatal"
                            self.core.fail_all(error)
                        self.notify()
                        return
                else:
                    with self.lock:
                        self.core.set_identity(response.producer_id, response.producer_epoch)
                    return
                await asyncio.sleep(self.cluster.retry_pause_ms(attempt) / 1000)
                attempt += 1
        except Exception as error:
            # Fail all records. Otherwise the next drain would start this task again immediately. Guard:
            # test_a_producer_id_is_requested_with_pauses.
            self._fail_all(error)
        finally:
            self._is_requesting_id = False
            self._event.set()

    async def _refresh(self) -> None:
        """Refresh the metadata of topics with stale leaders, then pause for retry.backoff.ms."""
        try:
            with self.lock:
                topics = sorted({tp.topic for tp in self.core.stale_leaders})
                stale = set(self.core.stale_leaders)
                self.core.stale_leaders.clear()
            try:
                await self.cluster.refresh_metadata(topics)
            except OncelogError as error:
                _LOG.debug("metadata refresh failed: %s", error)
                with self.lock:
                    self.core.stale_leaders |= stale
            await asyncio.sleep(self.settings["retry.backoff.ms"] / 1000)
        finally:
            self._is_refreshing = False
            self._event.set()

    async def look_up_topic(self, topic: str) -> None:
        """Find a topic's number of partitions for the core; the broker may create the topic.

        Raises TimedOut or UnknownTopicOrPartition after max.block.ms.
        """
        self._lookups[topic] += 1
        try:
            count = await self._partition_count(topic)
            with self.lock:
                self.core.set_partition_count(topic, count, self.now_ms())
        finally:
            # A cancelled call must not forget a topic that another call still looks up. Guard:
            # test_a_first_send_that_is_cancelled_does_not_end_another_one.
            self._lookups[topic] -= 1
            if not self._lookups[topic]:
                del self._lookups[topic]
                if self.core.topic(topic) is None:
                    self.cluster.forget_topics([topic])

    async def refresh_topic(self, topic: str) -> None:
        """Refresh the number of partitions of a known topic, once. Raises TimedOut after max.block.ms."""
        try:
            async with asyncio.timeout(self.options.max_block_ms / 1000):
                await self.cluster.refresh_metadata([topic], allow_auto_topic_creation=False)
        except TimeoutError:
            raise self._no_metadata(topic) from None

    async def _partition_count(self, topic: str) -> int:
        timeout_s = self.options.max_block_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                return await self._find_topic(topic)
        except TimeoutError:
            error = self.cluster.why_no_leader(TopicPartition(topic, 0))
            if isinstance(error, UnknownTopicOrPartition):  # says more than TimedOut, so raise it instead
                raise error from None
            raise self._no_metadata(topic) from None

    def _no_metadata(self, topic: str) -> TimedOut:
        return TimedOut(f"no metadata of topic {topic!r} within max.block.ms={self.options.max_block_ms}")

    async def _find_topic(self, topic: str) -> int:
        # The caller limits the whole lookup to max.block.ms. During all of this time the topic may be
        # unknown, because it may have just been created.
        await self.cluster.topic(topic, unknown_topic_patience_ms=self.options.max_block_ms)
        await self._start_cluster()  # from here on, metadata is refreshed when it reaches its maximum age
        count = self.cluster.metadata.partition_count(topic)
        if count is None:
            raise TimedOut(f"topic {topic!r} was deleted while it was looked up")
        return count

    async def _start_cluster(self) -> None:
        """Start the cluster's connections. Repeat while no broker can be reached; the caller limits the time.

        Guard: test_a_first_send_survives_an_outage_after_its_topic_was_found.
        """
        attempt = 0
        while True:
            try:
                await self.cluster.start()
                return
            except AuthenticationError:
                raise
            except (DisconnectedError, TimedOut):
                await asyncio.sleep(self.cluster.retry_pause_ms(attempt) / 1000)
                attempt += 1


class FlushMark:
    """A flush. It ends when all records from before it are complete and their callbacks have returned."""

    def __init__(self, driver: ProducerDriver) -> None:
        """Begin the flush. The caller must hold the lock."""
        self._driver = driver
        self._serial = driver.core.flush()
        self._completed_count: int | None = None

    def is_reached(self) -> bool:
        """Return True once the flush is over. The caller must hold the lock."""
        core = self._driver.core
        if self._completed_count is None and core.is_completed_to(self._serial):
            self._completed_count = core.completed_count
        return self._completed_count is not None and self._driver.notified_count >= self._completed_count


_drivers: weakref.WeakSet[ProducerDriver] = weakref.WeakSet()


def _after_fork() -> None:
    for driver in _drivers:
        driver.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
