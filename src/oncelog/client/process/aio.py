"""The consume-transform-produce loop for asyncio."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from oncelog.client.closing import close_to_the_end
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.client.process.converters import BYTES, Converters
from oncelog.client.process.core import ProcessLoop, outputs_of, seeks_to
from oncelog.client.process.loop_plan import LoopOptions, LoopPlan, Sources, plan_of
from oncelog.client.producer.aio import AsyncProducer
from oncelog.client.serialization import (
    Deserializer,
    Serializer,
    record_deserializer,
    record_serializer,
)
from oncelog.errors import OncelogError
from oncelog.rules.transactions.client_session import State
from oncelog.runtime import system
from oncelog.types import ProducerRecord, Record, RecordMetadata, TopicPartition

_LOG = logging.getLogger("oncelog.process")

AsyncTransform = Callable[[Record], Any]
"""A function, coroutine function or asynchronous generator with the same results as a `Transform`."""
AsyncRestore = Callable[[list[TopicPartition]], Awaitable[object] | object]


class AsyncProcessor:
    """A consume-transform-produce loop for asyncio. See `oncelog.Processor` for the arguments.

        processor = aio.Processor("orders", transform, group_id="g", transactional_id="g-1", config=config)
        await processor.run()

    `transform` and `restore` may be coroutine functions, and `transform` may be an asynchronous generator.
    Records are processed one after the other. A plain function runs on the event loop, so it must not block.
    """

    def __init__(
        self,
        source_topics: Sources,
        transform: AsyncTransform,
        *,
        group_id: str,
        transactional_id: str,
        config: Mapping[str, object] | None = None,
        restore: AsyncRestore | None = None,
        dead_letter_topic: str | None = None,
        max_attempts: int = 3,
        max_records: int = 1_000,
        commit_interval_ms: int = 100,
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        key_serializer: Serializer | None = None,
        value_serializer: Serializer | None = None,
        **settings: object,
    ) -> None:
        options = LoopOptions(
            source_topics,
            group_id,
            transactional_id,
            dead_letter_topic,
            max_attempts,
            max_records,
            commit_interval_ms,
            has_state=restore is not None,
        )
        plan = plan_of(options, config, settings)
        converters = Converters(
            record_deserializer(key_deserializer, value_deserializer),
            record_serializer(key_serializer, value_serializer),
        )
        self._loop = ProcessLoop(plan, AsyncLoopIO(plan, transform, restore, converters))

    async def run(self) -> dict[str, float]:
        """Process until `stop`, an error or a cancellation, and return the metrics. See `Processor.run`.

        A cancellation aborts the open transaction and closes both clients. After a second cancellation, `run`
        does not wait for them to close.
        """
        await self._loop.run()
        return self.metrics()

    def stop(self) -> None:
        """Make `run` commit the processed records, close both clients and return.

        Call it on the event loop's thread.
        """
        self._loop.stop()

    def metrics(self) -> dict[str, float]:
        """Return the counters of this loop: see docs/reference/metrics.md."""
        return self._loop.metrics.to_dict()


async def process(
    source_topics: Sources,
    transform: AsyncTransform,
    *,
    group_id: str,
    transactional_id: str,
    config: Mapping[str, object] | None = None,
    restore: AsyncRestore | None = None,
    dead_letter_topic: str | None = None,
    max_attempts: int = 3,
    max_records: int = 1_000,
    commit_interval_ms: int = 100,
    key_deserializer: Deserializer | None = None,
    value_deserializer: Deserializer | None = None,
    key_serializer: Serializer | None = None,
    value_serializer: Serializer | None = None,
    **settings: object,
) -> dict[str, float]:
    """Process the records of topics, each exactly once, until an error or a cancellation.

    See `oncelog.process` for the arguments, and `AsyncProcessor` for what asyncio changes.
    """
    return await AsyncProcessor(
        source_topics,
        transform,
        group_id=group_id,
        transactional_id=transactional_id,
        config=config,
        restore=restore,
        dead_letter_topic=dead_letter_topic,
        max_attempts=max_attempts,
        max_records=max_records,
        commit_interval_ms=commit_interval_ms,
        key_deserializer=key_deserializer,
        value_deserializer=value_deserializer,
        key_serializer=key_serializer,
        value_serializer=value_serializer,
        **settings,
    ).run()


class AsyncLoopIO:
    """The clients and functions of one loop. The protocol `LoopIO` documents the methods."""

    def __init__(
        self,
        plan: LoopPlan,
        transform: AsyncTransform,
        restore: AsyncRestore | None,
        converters: Converters = BYTES,
    ) -> None:
        self._plan, self._transform, self._restore = plan, transform, restore
        self._converters = converters
        self._runtime = system.current()
        self._consumer: AsyncConsumer | None = None
        self._producer: AsyncProducer | None = None
        # The futures of the open transaction's records. `_forget_sent` retrieves their exceptions.
        self._sent: list[asyncio.Future[RecordMetadata]] = []

    @property
    def state(self) -> State:
        manager = self._writing._transactions
        return State.UNINITIALIZED if manager is None else manager.session.state

    @property
    def _reading(self) -> AsyncConsumer:
        assert self._consumer is not None
        return self._consumer

    @property
    def _writing(self) -> AsyncProducer:
        assert self._producer is not None
        return self._producer

    def now_ms(self) -> float:
        return self._runtime.monotonic_ns() / 1e6

    async def open_producer(self) -> None:
        await self._close_producer()
        self._producer = AsyncProducer(self._plan.producer_settings)
        await self._producer.init_transactions()

    async def _close_producer(self) -> None:
        if self._producer is not None:
            self._forget_sent()
            await _close(self._producer.close)

    async def subscribe(self, sources: Sources, loop: ProcessLoop) -> None:
        self._consumer = AsyncConsumer(self._plan.consumer_settings)
        topics, pattern = ((), sources) if isinstance(sources, re.Pattern) else (sources, None)
        self._consumer.subscribe(
            topics,
            pattern=pattern,
            on_assigned=loop.assigned,
            on_revoked=loop.revoked,
            on_lost=loop.lost,
        )

    async def poll(self, timeout_s: float, max_records: int) -> list[Record]:
        return await self._reading.poll(timeout_s, max_records=max_records)

    async def begin(self) -> None:
        await self._writing.begin_transaction()

    async def transform(self, record: Record) -> list[ProducerRecord]:
        await self._converters.prepare_input(record)
        result = self._transform(self._converters.input(record))
        if inspect.isawaitable(result):
            result = await result
        if hasattr(result, "__aiter__"):
            result = [output async for output in result]
        outputs = outputs_of(result)
        await self._converters.prepare_outputs(outputs)
        return self._converters.outputs(outputs)

    async def restore(self) -> None:
        assert self._restore is not None
        result = self._restore(self._reading.assignment())
        if inspect.isawaitable(result):
            await result

    async def send(self, output: ProducerRecord) -> None:
        topic, value, key, headers, partition, timestamp_ms = output
        future = await self._writing.send(
            topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
        )
        self._sent.append(future)

    async def send_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        await self._writing.send_offsets_to_transaction(offsets, self._reading.group_metadata())

    async def commit(self) -> None:
        await self._writing.commit_transaction()
        self._forget_sent()

    async def abort(self) -> None:
        await self._writing.abort_transaction()
        self._forget_sent()

    def _forget_sent(self) -> None:
        """Retrieve the exceptions of failed records, because asyncio logs exceptions that nobody retrieves.

        The commit reports these exceptions to the loop.
        """
        for future in self._sent:
            future.add_done_callback(_retrieve)
        self._sent.clear()

    async def is_replaced(self, *, may_have_timed_out: bool) -> bool:
        manager = self._writing._transactions
        return manager is not None and await manager.is_replaced(may_have_timed_out=may_have_timed_out)

    async def go_back(self, firsts: Mapping[TopicPartition, int]) -> None:
        consumer = self._reading
        if assignment := consumer.assignment():
            committed = await consumer.committed(assignment)
            for tp, offset in seeks_to(committed, firsts).items():
                consumer.seek(tp, offset)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        # No other call closes the clients. So a second cancellation ends only this wait, and the clients
        # close in the background. Guard: test_a_second_cancellation_leaves_no_client_open.
        await close_to_the_end(self._close_clients())

    async def _close_clients(self) -> None:
        try:
            await self._close_producer()
        finally:
            if self._consumer is not None:
                await _close(self._consumer.close)


async def _close(close: Callable[[], Awaitable[None]]) -> None:
    try:
        await close()
    except OncelogError as error:
        _LOG.warning("a client of the loop did not close cleanly: %s", error)


def _retrieve(future: asyncio.Future[RecordMetadata]) -> None:
    with suppress(asyncio.CancelledError):
        future.exception()
