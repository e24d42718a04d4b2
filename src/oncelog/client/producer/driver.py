"""The loop that carries a ProducerCore: sends what it drains, brings it answers, ids, metadata and time."""

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
    ConfigError,
    DisconnectedError,
    MisuseError,
    NotConnectedError,
    OncelogError,
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


def parse_settings(
    config: Mapping[str, object] | None, keywords: Mapping[str, object]
) -> tuple[Settings, ProducerOptions]:
    """Return the settings, checked against each other (behaviour I3, docs/behaviours.md). Raises ConfigError.

    Warns if another setting switches off idempotence that was only on by default. Call it from a constructor:
    the warning names the constructor's caller.
    """
    settings = PRODUCER.parse({**(config or {}), **keywords})
    options = resolve(settings)
    parse_bootstrap(settings["bootstrap.servers"])
    if settings["enable.idempotence"] and not options.is_idempotent:
        warnings.warn(f"idempotence is {options.reason}; records may be doubled", UserWarning, stacklevel=3)
    return settings, options


def no_room_error(options: ProducerOptions) -> TimedOut:
    """Return the error of a `send` that found no room in buffer.memory within max.block.ms."""
    return TimedOut(
        f"no room in buffer.memory={options.buffer_bytes} within max.block.ms={options.max_block_ms}: "
        "records come in faster than the broker acknowledges them"
    )


def _do_nothing() -> None:
    pass


class ProducerDriver:
    """Not thread safe except for `state`: use it on its loop."""

    def __init__(self, settings: Settings, options: ProducerOptions) -> None:
        self.settings = settings
        self.options = options
        self.runtime = system.current()
        self.cluster = ClusterConnection(settings)
        self.core = ProducerCore(options, self.cluster.metadata, self.runtime.rng)
        """Without the lock, only for reading a single field that is replaced as a whole."""
        self.lock = threading.RLock()
        """Held by every call that touches the core, on any thread. Taken by `with driver.lock` only."""
        self.notified_count = 0
        """Batches whose callbacks have returned; see ProducerCore.settled_count."""
        self.room_waiters: list[queue.SimpleQueue[None]] = []
        """One queue per thread that waits for room in buffer.memory; it gets an item when a batch
        completes.
        """
        self.start_error: OncelogError | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._main: asyncio.Task[None] | None = None
        self._in_flight: dict[asyncio.Future[Any], ProduceCall] = {}
        self._is_asking_id = False
        self._is_refreshing = False
        self._waiters: list[asyncio.Future[None]] = []
        self._learners: Counter[str] = Counter()
        """Calls of `learn` under way, by topic."""
        self._is_closing = False
        self._closing: asyncio.Task[None] | None = None
        self._thread_id: int | None = None
        self.on_turn: Callable[[], object] = _do_nothing
        """Called after every drain: what a transaction must do before more can be sent."""
        _drivers.add(self)

    def now_ms(self) -> float:
        """Milliseconds of the monotonic clock."""
        return self.runtime.monotonic_ns() / 1e6

    def is_own_thread(self) -> bool:
        """Whether the caller runs on the thread that carries the records, as callbacks do."""
        return threading.get_ident() == self._thread_id

    def check_lock_not_held(self) -> None:
        """Raise MisuseError in a signal handler that has interrupted a call which holds the lock.

        Guard: test_a_signal_handler_that_calls_the_producer_never_waits_for_what_it_interrupted.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise interrupted_call()

    @property
    def is_flushed(self) -> bool:
        """Return True once every record has its outcome and its callback has returned; under the lock."""
        return self.core.is_idle and self.notified_count >= self.core.settled_count

    def _wake_room_waiters(self) -> None:
        for waiter in list(self.room_waiters):
            waiter.put(None)

    def reset_after_fork(self) -> None:
        """Give the child a free lock: no thread sends there, and one that is not there may have held it."""
        self.lock = threading.RLock()
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
        """Begin; on the loop that shall run it."""
        self.loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._main = self.loop.create_task(self._run())

    def wake(self) -> None:
        """Something was appended, or time moved: drain soon. From the loop's thread."""
        self._event.set()

    async def refuse_appends(self, error: OncelogError) -> None:
        """Take no more records; those that were taken go their way."""
        with self.lock:
            self.core.refuse_appends(error)

    async def close(self) -> None:
        """Stop sending; what has no outcome yet fails. A cancellation ends only the wait for this.

        Else it would leave connections, or records without an outcome. See
        test_a_close_that_is_cancelled_twice_leaves_nothing_behind.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        if not self._closing.done():
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._is_closing = True  # wait_for of Python 3.11 swallows a cancellation when its event is set, too
        for task in [*self._tasks, *([self._main] if self._main else [])]:
            task.cancel()
        await asyncio.gather(*self._tasks, *([self._main] if self._main else []), return_exceptions=True)
        # Both hold this object again; without them it is freed at once.
        self._main, self.on_turn = None, _do_nothing
        await self.cluster.close()
        with self.lock:
            self.core.die(MisuseError("the producer was closed before this record was acknowledged"))
        self.notify()

    async def _run(self) -> None:
        while not self._is_closing:
            # A timer and not wait_for, which in Python 3.11 can swallow a cancellation.
            timer = asyncio.get_running_loop().call_later(self._guarded_turn(), self._event.set)
            try:
                await self._event.wait()
            finally:
                timer.cancel()
            self._event.clear()

    def _guarded_turn(self) -> float:
        """A turn; what goes wrong in it ends the producer with an error, for nobody may wait for ever."""
        try:
            return self._turn()
        except Exception as error:
            _LOG.exception("the producer cannot go on")
            with self.lock:
                self.core.die(OncelogError(f"the producer cannot go on: {error!r}"))
            self.notify()
            return _IDLE_SECONDS

    def _turn(self) -> float:
        """One drain; seconds until the next is due."""
        now_ms = self.now_ms()
        with self.lock:
            calls = self.core.drain(now_ms)
            due_ms = self.core.next_wakeup_ms()
            needs_id, stale = self.core.is_identity_needed, bool(self.core.stale)
            forgotten, self.core.forgotten = self.core.forgotten, []
        self.cluster.forget_topics(forgotten)
        self._withdraw_settled()
        for call in calls:
            self._send(call)
        self.notify()
        self.on_turn()
        if needs_id and not self._is_asking_id:
            self._is_asking_id = True
            self.spawn(self._ask_identity())
        if stale and not self._is_refreshing:
            self._is_refreshing = True
            self.spawn(self._refresh())
        return _IDLE_SECONDS if due_ms is None else max(0.0, due_ms - now_ms) / 1000

    def spawn(self, coroutine: Any) -> None:
        """Run a coroutine until it ends or the producer is closed."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def notify(self) -> None:
        """Call the callbacks of what was settled, then wake those who wait; never while holding the lock."""
        with self.lock:
            outcomes, self.core.settled = self.core.settled, []
        if not outcomes:
            return
        self._wake_room_waiters()  # they need not wait for callbacks
        interrupt: BaseException | None = None
        for outcome in outcomes:
            for error in outcome.notify():
                _LOG.error("a delivery callback raised", exc_info=error)
                if isinstance(error, KeyboardInterrupt):
                    interrupt = error
        with self.lock:
            self.notified_count += len(outcomes)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if interrupt is not None and threading.current_thread() is threading.main_thread():
            raise interrupt  # of a signal, which is meant for the program; only the main thread gets one

    async def flush(self) -> None:
        """Send what was taken so far and wait until its callbacks have returned."""
        with self.lock:
            mark = FlushMark(self)
        self.wake()
        while not self._is_reached(mark):
            await self.next_settled()

    def _is_reached(self, mark: FlushMark) -> bool:
        with self.lock:
            return mark.is_reached()

    async def next_settled(self) -> None:
        """Wait until something got its outcome."""
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

    def _withdraw_settled(self) -> None:
        """What was given up while it waited for a connection must not be sent once there is one.

        Its application may have been told that it is not stored. Others of its request are sent again.
        """
        for future, call in list(self._in_flight.items()):
            settled = [batch for batch in call.batches if batch.is_settled]
            if len(settled) == len(call.batches) or any(batch.is_queued for batch in settled):
                future.cancel()

    def _on_done(self, done: asyncio.Future[Any]) -> None:
        now_ms = self.now_ms()
        call = self._in_flight.pop(done)
        error = self._why_cancelled(call) if done.cancelled() else done.exception()
        with self.lock:
            if error is None and not call.is_answered:
                self.core.on_sent(call, now_ms)
            elif error is None:
                self.core.on_response(call, done.result(), now_ms)
            elif isinstance(error, (UnsupportedVersion, MisuseError, ConfigError)):
                self.core.on_refused(call, error, now_ms)
            else:
                failure = error if isinstance(error, OncelogError) else OncelogError(repr(error))
                self.core.on_failure(call, failure, now_ms)
        self.notify()
        self._event.set()

    def _why_cancelled(self, call: ProduceCall) -> OncelogError:
        if self._is_closing:
            return DisconnectedError("the producer was closed")
        return NotConnectedError(f"there was no connection to broker {call.node_id} in time")

    async def _ask_identity(self) -> None:
        """InitProducerId, again and again while the error is one that passes."""
        attempt = 0
        try:
            while True:
                try:
                    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=2**31 - 1)
                    answer = await self.cluster.request(None, request)
                    raise_for_code(answer.error_code)
                except (DisconnectedError, TimedOut, BrokerError) as error:
                    if isinstance(error, BrokerError) and not error.retriable:
                        with self.lock:
                            error.reaction = "fatal"
                            self.core.die(error)
                        self.notify()
                        return
                else:
                    with self.lock:
                        self.core.give_identity(answer.producer_id, answer.producer_epoch)
                    return
                await asyncio.sleep(self.cluster.retry_pause_ms(attempt) / 1000)
                attempt += 1
        finally:
            self._is_asking_id = False
            self._event.set()

    async def _refresh(self) -> None:
        """Metadata of the topics whose leader is unknown or wrong, then a pause."""
        try:
            with self.lock:
                topics = sorted({tp.topic for tp in self.core.stale})
                stale = set(self.core.stale)
                self.core.stale.clear()
            try:
                await self.cluster.refresh_metadata(topics)
            except OncelogError as error:
                _LOG.debug("metadata refresh failed: %s", error)
                with self.lock:
                    self.core.stale |= stale
            await asyncio.sleep(self.settings["retry.backoff.ms"] / 1000)
        finally:
            self._is_refreshing = False
            self._event.set()

    async def learn(self, topic: str) -> None:
        """Look a topic up, created if the broker does so, for the core to know. Raises after max.block.ms."""
        self._learners[topic] += 1
        try:
            count = await self._partition_count(topic)
            with self.lock:
                self.core.set_partition_count(topic, count, self.now_ms())
        finally:
            # A call that is cancelled must not take from another one what that has found:
            # test_a_first_send_that_is_cancelled_does_not_end_another_one.
            self._learners[topic] -= 1
            if not self._learners[topic]:
                del self._learners[topic]
                if self.core.topic(topic) is None:
                    self.cluster.forget_topics([topic])

    async def look_up_again(self, topic: str) -> None:
        """Ask once how many partitions a known topic has now. Raises after max.block.ms."""
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
            if isinstance(error, UnknownTopicOrPartition):  # says more than that the time is over
                raise error from None
            raise self._no_metadata(topic) from None

    def _no_metadata(self, topic: str) -> TimedOut:
        return TimedOut(f"no metadata of topic {topic!r} within max.block.ms={self.options.max_block_ms}")

    async def _find_topic(self, topic: str) -> int:
        # max.block.ms bounds this from outside: a topic made a moment ago may be unknown for as long.
        await self.cluster.topic(topic, unknown_topic_patience_ms=self.options.max_block_ms)
        await self._start_cluster()  # from here on metadata is asked for again by its age
        count = self.cluster.metadata.partition_count(topic)
        if count is None:
            raise TimedOut(f"topic {topic!r} went away while it was looked up")
        return count

    async def _start_cluster(self) -> None:
        """Start the cluster's connection, again and again while no broker can be reached.

        Only max.block.ms bounds a first send. See
        test_a_first_send_outlives_a_broker_that_goes_away_after_it_told_of_the_topic.
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
    """The point that a flush waits for: all records taken before it are complete, and their callbacks
    called.
    """

    def __init__(self, driver: ProducerDriver) -> None:
        """Begin a flush. The caller holds the lock."""
        self._driver = driver
        self._serial = driver.core.flush()
        self._completed_count: int | None = None

    def is_reached(self) -> bool:
        """Return True once the flush is over. The caller holds the lock."""
        core = self._driver.core
        if self._completed_count is None and core.is_settled_to(self._serial):
            self._completed_count = core.settled_count
        return self._completed_count is not None and self._driver.notified_count >= self._completed_count


_drivers: weakref.WeakSet[ProducerDriver] = weakref.WeakSet()


def _after_fork() -> None:
    for driver in _drivers:
        driver.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
