"""The blocking consume-transform-produce loop: it runs in the caller's thread."""

from __future__ import annotations

import logging
import queue
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from oncelog.client.consumer.blocking import Consumer
from oncelog.client.process.converters import BYTES, Converters
from oncelog.client.process.core import ProcessLoop, outputs_of, run_now, seeks_to
from oncelog.client.process.loop_plan import LoopOptions, LoopPlan, Sources, plan_of
from oncelog.client.producer.blocking import Producer
from oncelog.client.serialization import (
    Deserializer,
    Serializer,
    record_deserializer,
    record_serializer,
)
from oncelog.errors import OncelogError
from oncelog.rules.transactions.client_session import State
from oncelog.runtime import system
from oncelog.types import ProducerRecord, Record, TopicPartition

_LOG = logging.getLogger("oncelog.process")

Transform = Callable[[Record], Any]
"""A function or generator: its result is None, one ProducerRecord, or several."""
Restore = Callable[[list[TopicPartition]], object]


class Processor:
    """A consume-transform-produce loop: each record of the source topics is processed exactly once.

        def transform(record):
            yield ProducerRecord("receipts", record.value, record.key)

        Processor("orders", transform, group_id="g", transactional_id="g-1", config=config).run()

    A transaction holds consumed positions and output: both become visible, or neither does. `transform` gets
    a Record and returns None, a ProducerRecord, or an iterable of them. An abort does not undo other effects
    of `transform`, for example in a database.

    source_topics       names, or a compiled regular expression that matches whole names
    group_id            loops with one group share the partitions
    transactional_id    the identity of this loop over its restarts; each running loop needs its own
    config, settings    Kafka's settings for the consumer, the producer or both, as for those classes
    restore             called with the assigned partitions before records are processed from committed
                        positions: at the start, after a rebalance and after an abort. A transform that
                        keeps state in memory reads that state here from committed data
    dead_letter_topic   gets each record that has failed `max_attempts` times, in the same transaction and
                        with headers `__oncelog.errors.*`; None: the loop raises the record's error
    max_records         maximum number of consumed records in a transaction
    commit_interval_ms  time after which an open transaction is committed
    *_deserializer      convert key and value of each record for `transform`, as in Consumer
    *_serializer        convert the output's keys and values to bytes, as in Producer. An error of a
                        serializer or deserializer counts as an error of the transform

    If its group has no committed offset, the consumer starts at the earliest offset (auto.offset.reset). It
    is a static member named `transactional_id` (group.instance.id). Raises MisuseError with
    enable.auto.commit=true.
    """

    def __init__(
        self,
        source_topics: Sources,
        transform: Transform,
        *,
        group_id: str,
        transactional_id: str,
        config: Mapping[str, object] | None = None,
        restore: Restore | None = None,
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
        self._io = BlockingLoopIO(plan, transform, restore, converters)
        self._loop = ProcessLoop(plan, self._io)

    def run(self) -> dict[str, float]:
        """Process until `stop`, an error or an interrupt, and return the metrics.

        If consumer.timeout.ms is set, `run` also ends after that time without a record. Call it once.

        Raises ProducerFenced or FencedInstanceId if another loop has started with this transactional_id, the
        error of a transform without a dead-letter topic, and errors that a retry cannot fix, such as missing
        permissions. Aborts, rebalances, commits with an unknown outcome, unreachable brokers and other fatal
        errors of the producer are handled and logged.

        If `run` raises, nothing of the open transaction is committed. The next loop with this
        transactional_id completes a commit with an unknown outcome.
        """
        run_now(self._loop.run())
        return self.metrics()

    def stop(self) -> None:
        """Make `run` commit the processed records, close both clients and return.

        Threads and signal handlers may call it.
        """
        self._loop.stop()
        self._io.wake()

    def metrics(self) -> dict[str, float]:
        """Return the counters of this loop: see docs/reference/metrics.md."""
        return self._loop.metrics.to_dict()


def process(
    source_topics: Sources,
    transform: Transform,
    *,
    group_id: str,
    transactional_id: str,
    config: Mapping[str, object] | None = None,
    restore: Restore | None = None,
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
    """Process the records of topics, each exactly once, until an error or an interrupt.

    `Processor` documents the arguments, and has `stop` and `metrics` for other threads.
    """
    return Processor(
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


class BlockingLoopIO:
    """The clients and functions of one loop. The protocol `LoopIO` documents the methods. None of them
    awaits.
    """

    def __init__(
        self,
        plan: LoopPlan,
        transform: Transform,
        restore: Restore | None,
        converters: Converters = BYTES,
    ) -> None:
        self._plan, self._transform, self._restore = plan, transform, restore
        self._converters = converters
        self._runtime = system.current()
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        # An item ends a pause. This is a SimpleQueue and not an Event, because a signal handler may interrupt
        # any call of it and add an item.
        self._stopped: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def state(self) -> State:
        manager = self._writing._transactions
        return State.UNINITIALIZED if manager is None else manager.session.state

    @property
    def _reading(self) -> Consumer:
        assert self._consumer is not None
        return self._consumer

    @property
    def _writing(self) -> Producer:
        assert self._producer is not None
        return self._producer

    def now_ms(self) -> float:
        return self._runtime.monotonic_ns() / 1e6

    async def open_producer(self) -> None:
        self._close_producer()
        self._producer = Producer(self._plan.producer_settings)
        self._producer.init_transactions()

    def _close_producer(self) -> None:
        if self._producer is not None:
            _close(self._producer.close)

    async def subscribe(self, sources: Sources, loop: ProcessLoop) -> None:
        self._consumer = Consumer(self._plan.consumer_settings)
        topics, pattern = ((), sources) if isinstance(sources, re.Pattern) else (sources, None)
        self._consumer.subscribe(
            topics,
            pattern=pattern,
            on_assigned=lambda partitions: run_now(loop.assigned(partitions)),
            on_revoked=lambda partitions: run_now(loop.revoked(partitions)),
            on_lost=lambda partitions: run_now(loop.lost(partitions)),
        )

    async def poll(self, timeout_s: float, max_records: int) -> list[Record]:
        return self._reading.poll(timeout_s, max_records=max_records)

    async def begin(self) -> None:
        self._writing.begin_transaction()

    async def transform(self, record: Record) -> list[ProducerRecord]:
        return self._converters.outputs(outputs_of(self._transform(self._converters.input(record))))

    async def restore(self) -> None:
        assert self._restore is not None
        self._restore(self._reading.assignment())

    async def send(self, output: ProducerRecord) -> None:
        topic, value, key, headers, partition, timestamp_ms = output
        self._writing.send(topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers)

    async def send_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._writing.send_offsets_to_transaction(offsets, self._reading.group_metadata())

    async def commit(self) -> None:
        self._writing.commit_transaction()

    async def abort(self) -> None:
        self._writing.abort_transaction()

    async def is_replaced(self, *, may_have_timed_out: bool) -> bool:
        manager = self._writing._transactions
        if manager is None:
            return False
        return self._writing._thread.run(manager.is_replaced(may_have_timed_out=may_have_timed_out))

    async def go_back(self, firsts: Mapping[TopicPartition, int]) -> None:
        consumer = self._reading
        if assignment := consumer.assignment():
            for tp, offset in seeks_to(consumer.committed(assignment), firsts).items():
                consumer.seek(tp, offset)

    async def pause(self, seconds: float) -> None:
        with suppress(queue.Empty):
            self._stopped.get(timeout=seconds)

    def wake(self) -> None:
        """End the current pause immediately, or the next one if no pause is running."""
        self._stopped.put(None)

    async def close(self) -> None:
        try:
            self._close_producer()
        finally:
            if self._consumer is not None:
                _close(self._consumer.close)


def _close(close: Callable[[], None]) -> None:
    try:
        close()
    except OncelogError as error:
        _LOG.warning("a client of the loop did not close cleanly: %s", error)
