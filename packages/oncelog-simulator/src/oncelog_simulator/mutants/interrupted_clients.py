"""Mutants of the clients, which seeds with threads, signals and cancellations catch."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from oncelog.client.consumer import aio as consumer_aio
from oncelog.client.consumer import blocking as consumer_blocking
from oncelog.client.consumer.delivery_buffer import DeliveryBuffer
from oncelog.client.group import aio as edge_group
from oncelog.client.group import classic_member, commit_queue
from oncelog.client.group.core import next_after
from oncelog.client.producer import aio as producer_aio
from oncelog.client.producer import batch as producer_batch
from oncelog.client.producer import core as client_producer
from oncelog.client.producer import delivery, driver, transaction_manager
from oncelog.errors import FencedInstanceId
from oncelog.rules.groups.error_policy import GroupAction
from oncelog.rules.transactions import client_session
from oncelog.runtime import loop_thread
from oncelog.types import ConsumerGroupMetadata
from oncelog_simulator import txn_clients
from oncelog_simulator.mutants.mutant import ClientMutant, nothing


class _NoLock:
    """A lock that never blocks."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return blocking

    def release(self) -> None:
        """Do nothing."""

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


_ORIGINAL_ASK = transaction_manager.TransactionManager._send_until_done
_ORIGINAL_ADVANCE = edge_group.GroupSession.advance
_ORIGINAL_DRIVER = driver.ProducerDriver.__init__
_ORIGINAL_STEP = consumer_aio.AsyncConsumer.poll_step
_ORIGINAL_ACTION = next_after
_ORIGINAL_COPIER = txn_clients.ConsumeTransformProduce.__init__


def _driver_without_lock(self: Any, *how: Any) -> None:
    _ORIGINAL_DRIVER(self, *how)
    self.lock = _NoLock()


def _take_on_the_loop(self: Any, timeout: float = 1.0, *, max_records: int | None = None) -> Any:
    limit = self._async.poll_limit(max_records)
    if not self._wait_for_records(timeout, lambda now_ms: self._core.prepare_records(limit, now_ms)):
        return []

    async def take() -> Any:
        rows = self._core.delivery.take(limit)
        await asyncio.sleep(0.001)
        return rows

    return self._run(take())


def _iterate_polls(self: Any) -> Any:
    while rows := self.poll(self._async.iteration_timeout):
        yield from rows


async def _iterate_async_polls(self: Any) -> Any:
    while rows := await self.poll(self.iteration_timeout):
        for row in rows:
            yield row


def _join_again(error: Any, request: Any) -> Any:
    if isinstance(error, FencedInstanceId):
        return GroupAction.RESET
    return _ORIGINAL_ACTION(error, request)


async def _tell_once(self: Any, deadline_ms: float, prepare: Any, next_row: Any = None) -> Any:
    step = await _ORIGINAL_STEP(self, deadline_ms, prepare, next_row)
    self.finish_rebalance()
    return step


def _completed_before_callbacks(self: Any) -> Any:
    return self._driver.core.is_completed_to(self._serial)


def _completed_to_the_last(self: Any, mark: int) -> bool:
    return not self._incomplete


async def _leave_open(self: Any, timeout_s: float | None = None) -> None:
    """Do nothing, so that a close leaves the open transaction to its time-out."""


def _make_twice(self: Any, name: str) -> Any:
    if name not in delivery._STATE:
        raise AttributeError(name)
    Future.__init__(self)
    self._batch_result.add_listener(self._complete)
    return self.__dict__[name]


def _commit_automatically(self: Any, *how: Any) -> None:
    _ORIGINAL_COPIER(self, *how)
    self.reading |= {"enable.auto.commit": True, "auto.commit.interval.ms": 100}


def _metadata_unguarded(self: Any) -> Any:
    return self._group.metadata if self._group else ConsumerGroupMetadata(self._settings["group.id"])


async def _flush_at_once(self: Any) -> None:
    await self._started().flush()


async def _prepare_to_leave(self: Any) -> Any:
    """Let polls continue while the partitions are given up."""
    return await self._group.prepare_to_leave() if self._group is not None else None


def _leave_silently(self: Any) -> None:
    self._thread.run(self._async.end_polling(), 30)
    self._thread.run(self._async.prepare_to_leave(), 30)


def _notify_of_exceptions(self: Any) -> Any:
    """Run the callbacks, but catch only Exception: a callback's KeyboardInterrupt skips the other
    callbacks.
    """
    callbacks, self.callbacks = self.callbacks, {}
    for index, callback in callbacks.items():
        try:
            error = self.error if self.children is None else self.error_of(index)
            callback(None if error else self.metadata(index), error)
        except Exception as raised:
            yield raised
    yield from self._call_listeners()


async def _look_up_alone(self: Any, topic: str) -> None:
    """Look a topic up, and forget it after a failure even if other callers are looking it up."""
    try:
        count = await self._partition_count(topic)
        with self.lock:
            self.core.set_partition_count(topic, count, self.now_ms())
    finally:
        if self.core.topic(topic) is None:
            self.cluster.forget_topics([topic])


def _result_as_it_is(self: Any, call: Any) -> Any:
    return call.result()


async def _advance_behind_commits(self: Any, deadline_ms: float) -> Any:
    """Wait for a running automatic commit within the poll, even beyond the poll's deadline."""
    following = await _ORIGINAL_ADVANCE(self, deadline_ms)
    if self._commits._task is not None:
        await asyncio.wait([self._commits._task])
    return following


def _keep_older(self: Any, positions: Any, until_ms: float, **_: bool) -> None:
    """Keep the older position if a partition has one, so that newer positions are not committed."""
    self._automatic_until_ms = until_ms
    self._automatic = {**positions, **self._automatic}


def _make_condition_first(self: Any) -> None:
    mine = self.__dict__
    for name, part in mine.setdefault("_made", vars(Future())).items():
        mine.setdefault(name, part)


async def _forget_on_cancellation(self: Any, *how: Any) -> Any:
    """Send a request. If the call is cancelled, treat the request as if it was never sent."""
    before = self._may_be_committed
    try:
        return await _ORIGINAL_ASK(self, *how)
    except asyncio.CancelledError:
        self._may_be_committed = before
        raise


async def _start_once(self: Any) -> None:
    await self.cluster.start()


async def _poll_on(self: Any) -> None:
    """Do nothing, so that a poll of another thread keeps waiting."""


CLIENT_MUTANTS = [
    ClientMutant(
        "the producer's state has no lock",
        "blocking",
        ("producer",),
        ((driver.ProducerDriver, "__init__", _driver_without_lock),),
        findings=("L1", "L2"),
    ),
    ClientMutant(
        "an interrupted poll loses its records",
        "blocking",
        ("consumer",),
        ((consumer_blocking.Consumer, "poll", _take_on_the_loop),),
        findings=("L3",),
    ),
    ClientMutant(
        "a loop that ends early drops its fetched records",
        "blocking",
        ("consumer",),
        ((consumer_blocking.Consumer, "__iter__", _iterate_polls),),
        findings=("L4",),
    ),
    ClientMutant(
        "an asyncio loop that ends early drops its fetched records",
        "asyncio",
        ("consumer",),
        ((consumer_aio.AsyncConsumer, "_iterate", _iterate_async_polls),),
        findings=("L4",),
    ),
    ClientMutant(
        "a fenced instance joins again",
        "asyncio",
        ("twins",),
        ((classic_member, "next_after", _join_again),),
        findings=("L5",),
    ),
    ClientMutant(
        "flush returns before the callbacks",
        "blocking",
        ("producer",),
        ((driver.FlushMark, "is_reached", _completed_before_callbacks),),
        findings=("L6",),
    ),
    ClientMutant(
        "a cancelled poll forgets listener calls",
        "asyncio",
        ("consumer",),
        ((consumer_aio.AsyncConsumer, "poll_step", _tell_once),),
        findings=("L7",),
    ),
    ClientMutant(
        "flush waits for what is sent after it",
        "blocking",
        ("producer",),
        ((client_producer.ProducerCore, "is_completed_to", _completed_to_the_last),),
        findings=("L11",),
    ),
    ClientMutant(
        "a transaction commits without its offsets",
        "asyncio",
        ("copier",),
        ((client_session.Session, "begin_offsets", nothing),),
        findings=("L13",),
    ),
    ClientMutant(
        "close leaves the transaction open",
        "asyncio",
        ("copier",),
        ((transaction_manager.TransactionManager, "end_open", _leave_open),),
        findings=("L14",),
    ),
    ClientMutant(
        "two threads make one future's lock",
        "blocking",
        ("producer",),
        ((delivery.RecordFuture, "__getattr__", _make_twice),),
        findings=("L23",),
    ),
    ClientMutant(
        "a copier commits automatically",
        "asyncio",
        ("copier",),
        (
            (txn_clients.ConsumeTransformProduce, "__init__", _commit_automatically),
            (consumer_aio.AsyncConsumer, "group_metadata", _metadata_unguarded),
        ),
        findings=("L26",),
    ),
    ClientMutant(
        "an asyncio flush returns before its futures are done",
        "asyncio",
        ("producer",),
        ((producer_aio.AsyncProducer, "flush", _flush_at_once),),
        findings=("R190",),
    ),
    ClientMutant(
        "leaving a group does not notify the listener",
        "blocking",
        ("consumer",),
        ((consumer_blocking.Consumer, "_notify_of_leaving", _leave_silently),),
        findings=("R57",),
    ),
    ClientMutant(
        "the record at which a loop ended is committed",
        "blocking",
        ("consumer",),
        ((DeliveryBuffer, "return_unfinished", nothing),),
        findings=("R56",),
    ),
    ClientMutant(
        "a callback that raises SystemExit ends the producer",
        "blocking",
        ("producer",),
        ((producer_batch.BatchResult, "notify", _notify_of_exceptions),),
        findings=("R46",),
    ),
    ClientMutant(
        "a poll ignores that another thread closes",
        "blocking",
        ("consumer",),
        (
            (consumer_aio.AsyncConsumer, "end_polling", _poll_on),
            (consumer_aio.AsyncConsumer, "prepare_to_leave", _prepare_to_leave),
            (loop_thread.LoopThread, "_result_of", _result_as_it_is),
        ),
        findings=("R180",),
    ),
    ClientMutant(
        "a cancelled topic look-up fails for other callers",
        "asyncio",
        ("producer",),
        ((driver.ProducerDriver, "look_up_topic", _look_up_alone),),
        findings=("R265",),
    ),
    ClientMutant(
        "a first send starts the cluster's connection once",
        "blocking",
        ("producer",),
        ((driver.ProducerDriver, "_start_cluster", _start_once),),
        findings=("R331",),
        guards=(
            "client/test_client_producer_unreachable.py::"
            "test_a_first_send_survives_an_outage_after_its_topic_was_found",
        ),
        needs_faults=True,
    ),
    ClientMutant(
        "a poll waits for automatic commits",
        "asyncio",
        ("consumer",),
        ((edge_group.GroupSession, "advance", _advance_behind_commits),),
        findings=("L10", "L10a"),
        needs_faults=True,
    ),
    ClientMutant(
        "an older commit is repeated in place of a revocation's",
        "asyncio",
        ("consumer",),
        ((commit_queue.CommitQueue, "add_automatic", _keep_older),),
        findings=("R59",),
        guards=(
            "client/test_client_leaving.py::"
            "test_an_older_commit_that_is_repeated_is_not_sent_after_the_one_of_a_revocation",
        ),
        needs_faults=True,
    ),
    ClientMutant(
        "a cancelled commit counts as not sent",
        "asyncio",
        ("copier",),
        ((transaction_manager.TransactionManager, "_send_until_done", _forget_on_cancellation),),
        findings=("L25a",),
        guards=(
            "client/test_client_transactions_close.py::"
            "test_a_cancelled_commit_counts_as_one_that_may_be_decided",
        ),
        needs_faults=True,
    ),
    ClientMutant(
        "a future's condition is there before its waiters",
        "blocking",
        ("producer",),
        ((delivery.RecordFuture, "_make_state", _make_condition_first),),
        findings=("R330",),
        guards=("client/test_client_callbacks_end.py::test_a_half_initialized_future_loses_no_waiter",),
    ),
]
NOT_CAUGHT: dict[str, str] = {
    "an older commit is repeated in place of a revocation's": (
        "needs a revocation while a commit is repeated: no seed of the first 297"
    ),
    "a cancelled commit counts as not sent": "a retry of a decided commit is answered as the first one",
    "a future's condition is there before its waiters": "a thread is put off there in two of 635 seeds",
}
"""Mutants that no seed catches, with the reason."""
