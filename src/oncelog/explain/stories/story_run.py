"""One run of a story: a topic, a proxy with rules, the records that were sent, and the final log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from oncelog.client.consumer.blocking import Consumer
from oncelog.client.consumer.fetch_messages import decode_batch
from oncelog.client.producer.blocking import Producer
from oncelog.errors import OncelogError
from oncelog.rules.storage.read_committed import Verdict
from oncelog.testing.proxy.events import BatchSummary, Direction, Fate, Outcome, WireEvent
from oncelog.testing.proxy.proxy import Proxy
from oncelog.types import Isolation, RecordMetadata, TopicPartition
from oncelog.wire.batch import HEADER_BYTES
from oncelog.wire.records import record_size_upper_bound

RECORDS_PER_BATCH = 3
_VALUE_BYTES = 100
PATIENCE_SECONDS = 20.0
"""Time-out of each wait in a story, in seconds. Normally a wait ends within a tenth of it."""

_PRODUCE_FATES_AT_BROKER = {Fate.PASSED, Fate.RELEASED, Fate.COPY}


def value_of(number: int) -> bytes:
    """Return the value of record `number`. All values have the same length, so that `batch_settings` can
    limit the records of a batch.
    """
    return (b"record %d" % number).ljust(_VALUE_BYTES)


def batch_settings() -> dict[str, object]:
    """Return producer settings for batches of exactly three records and for short time-outs."""
    record_bytes = record_size_upper_bound(None, value_of(1), ())
    return {
        "batch.size": HEADER_BYTES + RECORDS_PER_BATCH * record_bytes,
        "linger.ms": 300,
        "request.timeout.ms": 1_500,
        "delivery.timeout.ms": 30_000,
        "retry.backoff.ms": 20,
        "retry.backoff.max.ms": 50,
        "reconnect.backoff.ms": 10,
        "reconnect.backoff.max.ms": 50,
    }


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of records in one run.

    sent           given to producers
    acknowledged   sent, and the future has a result
    failed         sent, and the future has an exception or is not done
    stored         in the log
    lost           sent, but not in the log
    doubled        copies in the log beyond the first
    """

    sent: int
    acknowledged: int
    failed: int
    stored: int
    lost: int
    doubled: int


@dataclass(frozen=True, slots=True)
class Check:
    """A statement about the result of a run, and whether the statement is true."""

    text: str
    is_true: bool


@dataclass(slots=True)
class StoryRun:
    """One run of a story. After the run, the proxy is closed and the topic is deleted.

    `is_drawn` is False if the run is too long for a diagram. `is_counted` is False if the story leaves no
    visible record, so that the counts mean nothing. `written`: the transaction's records in the logs, and its
    markers, as text.
    """

    heading: str
    proxy: Proxy
    upstream: str
    topic: str
    partitions: int = 1
    is_drawn: bool = True
    is_counted: bool = True
    written: list[str] = field(default_factory=list)
    events: list[WireEvent] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    counts: Counts = Counts(0, 0, 0, 0, 0, 0)
    log: list[int] = field(default_factory=list)
    """Record numbers in the order of the log, one partition after the other."""
    _sent: list[tuple[int, int, Future[RecordMetadata]]] = field(default_factory=list)

    def producer(self, settings: Mapping[str, object] | None = None) -> Producer:
        """Return a producer that connects to the proxy. `settings` override `batch_settings`."""
        return Producer(
            {**batch_settings(), "bootstrap.servers": self.proxy.bootstrap_servers, **(settings or {})}
        )

    def send(
        self, producer: Producer, numbers: Iterable[int], partition: int = 0
    ) -> list[Future[RecordMetadata]]:
        """Send records, and remember their futures for the counts."""
        futures: list[Future[RecordMetadata]] = []
        for number in numbers:
            future = producer.send(self.topic, value_of(number), partition=partition)
            self._sent.append((partition, number, future))
            futures.append(future)
        return futures

    def check(self, text: str, is_true: bool) -> None:
        """Add a check: a statement about the result of the run, and whether the statement is true."""
        self.checks.append(Check(text, bool(is_true)))

    def wait_until(self, what: str, predicate: Any) -> None:
        """Wait until `predicate` is true for the proxy's events. Raises OncelogError after PATIENCE_SECONDS;
        its text names `what`.
        """
        if not self.proxy.wait_until(predicate, PATIENCE_SECONDS):
            raise OncelogError(f"the story did not continue: waited {PATIENCE_SECONDS:g} s for {what}")

    def finish(self) -> None:
        """Read the partitions directly from the cluster, and count the records."""
        self._wait_for_records_under_way()
        self.events = self.proxy.events
        stored: Counter[tuple[int, int]] = Counter()
        with Consumer({"bootstrap.servers": self.upstream}) as consumer:
            for partition in range(self.partitions):
                numbers = _read(consumer, TopicPartition(self.topic, partition))
                self.log += numbers
                stored.update((partition, number) for number in numbers)
        self.counts = self._count(stored)

    def _count(self, stored: Counter[tuple[int, int]]) -> Counts:
        acknowledged = [_is_acknowledged(future) for _, _, future in self._sent]
        sent = Counter((partition, number) for partition, number, _ in self._sent)
        return Counts(
            sent=len(self._sent),
            acknowledged=acknowledged.count(True),
            failed=acknowledged.count(False),
            stored=sum(stored.values()),
            lost=sum(1 for record in sent if record not in stored),
            doubled=sum(count - 1 for count in stored.values()),
        )

    def _wait_for_records_under_way(self) -> None:
        """Wait until the records that were sent with acks=0 are stored, at most PATIENCE_SECONDS.

        The producer does not wait for the broker to store them, so some may be stored after the producer was
        closed.
        """
        arriving = [
            batch.records_count
            for event in self.proxy.events
            if event.acks == 0 and event.fate in _PRODUCE_FATES_AT_BROKER
            for batch in event.batches
        ]
        deadline = time.monotonic() + PATIENCE_SECONDS
        with Consumer({"bootstrap.servers": self.upstream}) as consumer:
            partitions = [TopicPartition(self.topic, index) for index in range(self.partitions)]
            while arriving and time.monotonic() < deadline:
                if sum(consumer.end_offsets(partitions).values()) >= sum(arriving):
                    return
                time.sleep(0.02)

    # --- facts for the checks of a story

    def batches_at_broker(self) -> list[BatchSummary]:
        """Return the batches in the order in which they reached the broker, including repeated ones."""
        return [
            batch
            for event in self.proxy.events
            if event.fate in _PRODUCE_FATES_AT_BROKER
            for batch in event.batches
        ]

    def sequences_at_broker(self) -> list[int | None]:
        """Return the base sequences of `batches_at_broker`."""
        return [batch.base_sequence for batch in self.batches_at_broker()]

    def outcomes(self) -> list[Outcome]:
        """Return the broker's result for each partition of each Produce request, even if the response was
        lost.
        """
        seen = set()
        outcomes: list[Outcome] = []
        for event in self.proxy.events:
            journey = (event.connection, event.correlation_id, event.fate is Fate.UNEXPECTED)
            if event.outcomes and event.fate is not Fate.FORGED and journey not in seen:
                seen.add(journey)
                outcomes += event.outcomes
        return outcomes

    def offsets(self) -> list[int | None]:
        """Return the base offset in each of `outcomes`; None for an error."""
        return [outcome.base_offset for outcome in self.outcomes()]

    def errors(self) -> list[str]:
        """Return the names of the errors in `outcomes`."""
        return [outcome.error_name for outcome in self.outcomes() if outcome.error_code]


def _is_acknowledged(future: Future[RecordMetadata]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def committed_values(consumer: Consumer, tp: TopicPartition) -> list[bytes]:
    """Return the values that read_committed consumers see in a partition. Needs no PyArrow, unlike
    `Consumer.fetch_range`.
    """
    start, end = consumer.beginning_offsets([tp])[tp], consumer.end_offsets([tp])[tp]
    return [
        record.value or b""
        for chunk in consumer.fetch_chunks(tp, start, end, Isolation.READ_COMMITTED)
        for batch in chunk.batches
        if batch.verdict is Verdict.DELIVER
        for record in decode_batch(tp, chunk.records, batch, start, check_crcs=True)
        if record.offset < end
    ]


def _read(consumer: Consumer, tp: TopicPartition) -> list[int]:
    return [int(value.split()[1]) for value in committed_values(consumer, tp)]


def has_requests_at_broker(count: int) -> Any:
    """Return a predicate for `wait_until`: at least `count` Produce requests have reached the broker."""

    def holds(events: Sequence[WireEvent]) -> bool:
        passed = (event for event in events if event.batches and event.fate in _PRODUCE_FATES_AT_BROKER)
        return sum(1 for _ in passed) >= count

    return holds


def has_fate(fate: Fate, direction: Direction, count: int = 1) -> Any:
    """Return a predicate for `wait_until`: at least `count` Produce messages of a direction had this fate."""

    def holds(events: Sequence[WireEvent]) -> bool:
        matches = (e for e in events if e.api == "Produce" and e.direction is direction and e.fate is fate)
        return sum(1 for _ in matches) >= count

    return holds
