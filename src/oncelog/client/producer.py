"""The producer without I/O: what waits, what may be sent now, and what an answer means.

`append` puts a record into its partition's open batch; `drain` numbers, encodes and groups what is ready into
requests; `on_response` and `on_failure` bring outcomes. Which batch may go and with which sequence is decided
by `rules.sending`, what an error means by `rules.reactions`. Times are milliseconds of a monotonic clock,
record timestamps milliseconds since the epoch. Not thread safe: the edge holds a lock around it.

Source: rows I9-I12, I21; Kafka's RecordAccumulator, Sender and TransactionManager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from oncelog.client.cluster import ClusterMetadata
from oncelog.client.producer_batch import Callback, Outcome, ProducerBatch, Row, cut, unknown_outcome
from oncelog.client.producer_metrics import ProducerMetrics
from oncelog.client.producer_options import ProducerOptions
from oncelog.client.producer_partition import PartitionQueue
from oncelog.client.producer_request import (
    MAX_PRODUCE_VERSION,
    REQUEST_OVERHEAD_BYTES,
    ProduceCall,
    answers_by_partition,
    produce_request,
)
from oncelog.errors import (
    BrokerError,
    DeliveryUnknown,
    MessageTooLarge,
    NotConnectedError,
    OncelogError,
    OutcomeUnknown,
    TimedOut,
    error_for_code,
)
from oncelog.rules.reactions import Action, Mark, reaction_to
from oncelog.rules.sending import Identity, OutOfOrder, next_epoch
from oncelog.types import TopicPartition
from oncelog.wire.primitives import WritableBuffer


class ProducerCore:
    """One producer session. `settled` collects outcomes to `notify` once the edge has let go of its lock."""

    def __init__(
        self, options: ProducerOptions, metadata: ClusterMetadata, jitter: Callable[[], float]
    ) -> None:
        self.options = options
        self.metadata = metadata
        self.metrics = ProducerMetrics()
        self.identity: Identity | None = None
        self.is_identity_needed = options.is_idempotent
        self.max_produce_version = MAX_PRODUCE_VERSION
        self.fatal: OncelogError | None = None
        self.settled: list[Outcome] = []
        self.buffered_bytes = 0
        self.stale: set[TopicPartition] = set()
        self._jitter = jitter
        self._partitions: dict[TopicPartition, PartitionQueue] = {}
        self._in_flight_requests: dict[int, int] = {}
        self._serial = 0
        self._flush_below = 0

    # Appending

    def append(
        self, tp: TopicPartition, row: Row, size: int, now_ms: float, callback: Callback | None = None
    ) -> tuple[Outcome, int, bool]:
        """Take a record of `row_size_bytes`; (outcome, index in it, whether a drain is worth while).

        Raises MessageTooLarge when the record alone exceeds max.request.size, and the fatal error.
        """
        if self.fatal is not None:
            raise self.fatal
        if size > self.options.max_request_bytes:
            raise MessageTooLarge(
                f"a record of {size} bytes is above max.request.size={self.options.max_request_bytes}"
            )
        part = self.partition(tp)
        batch = part.open
        wake = False
        if batch is None or batch.size_bytes + size > self.options.batch_bytes:
            wake = True
            batch = self._open(part, now_ms)
        index = len(batch.rows)
        batch.rows.append(row)
        batch.size_bytes += size
        self.buffered_bytes += size
        if callback is not None:
            batch.outcome.callbacks.append((index, callback))
        return batch.outcome, index, wake

    def append_sealed(
        self, tp: TopicPartition, data: WritableBuffer, count: int, times: Any, now_ms: float
    ) -> Outcome:
        """Take a batch encoded elsewhere (Arrow), not numbered yet. `times`: the records' timestamps."""
        if self.fatal is not None:
            raise self.fatal
        most = self.options.max_request_bytes
        if len(data) > most:
            raise MessageTooLarge(f"a batch of {len(data)} bytes is above max.request.size={most}")
        part = self.partition(tp)
        part.close_open()
        batch = self._new_batch(tp, now_ms)
        batch.data, batch.record_count = data, count
        batch.outcome.times = times
        batch.charged_bytes = len(data)
        self.buffered_bytes += len(data)
        part.waiting.append(batch)
        return batch.outcome

    def partition(self, tp: TopicPartition) -> PartitionQueue:
        """Where the batches of a partition wait; made when first asked for."""
        part = self._partitions.get(tp)
        if part is None:
            part = self._partitions[tp] = PartitionQueue(tp, self.options)
        return part

    def _open(self, part: PartitionQueue, now_ms: float) -> ProducerBatch:
        part.close_open()
        part.open = self._new_batch(part.tp, now_ms)
        part.waiting.append(part.open)
        return part.open

    def _new_batch(self, tp: TopicPartition, now_ms: float) -> ProducerBatch:
        self._serial += 1
        return ProducerBatch(tp, now_ms, self._serial)

    def has_room(self, size_bytes: int) -> bool:
        """Whether buffer.memory takes that many bytes more; one record always fits an empty buffer."""
        return not self.buffered_bytes or self.buffered_bytes + size_bytes <= self.options.buffer_bytes

    def has_open_batch(self, tp: TopicPartition, size_bytes: int) -> bool:
        """Whether a record of that size would join a batch that was begun already."""
        part = self._partitions.get(tp)
        batch = part.open if part else None
        return batch is not None and batch.size_bytes + size_bytes <= self.options.batch_bytes

    def die(self, error: OncelogError) -> None:
        """The producer cannot go on: everything without an outcome fails."""
        self.fatal = error
        for part in self._partitions.values():
            for batch in part.created_before(float("inf")):
                self._fail(batch, error)

    def flush(self) -> None:
        """Send what was appended so far without lingering."""
        self._flush_below = self._serial + 1

    @property
    def is_idle(self) -> bool:
        """Whether every record taken has its outcome."""
        return all(part.is_idle for part in self._partitions.values())

    # Sending

    def give_identity(self, producer_id: int, producer_epoch: int) -> None:
        """The broker's answer to InitProducerId."""
        self.identity = Identity(producer_id, producer_epoch)
        self.is_identity_needed = False

    def drain(self, now_ms: float) -> list[ProduceCall]:
        """Everything that may be sent now; each call must end in on_response, on_sent or on_failure."""
        self._expire(now_ms)
        if self.options.is_idempotent and not self._renew_identities():
            return []
        calls = []
        for node_id, parts in self._ready_by_node(now_ms).items():
            while parts and self._in_flight_requests.get(node_id, 0) < self.options.max_in_flight:
                batches = self._pick(parts, now_ms)
                if not batches:
                    break
                calls.append(self._call(node_id, batches, now_ms))
                parts = [part for part in parts if self._is_ready(part, now_ms)]
        return calls

    def _renew_identities(self) -> bool:
        """Restart numbering where it is due; False while a producer id must be asked for."""
        if self.identity is None:
            self.is_identity_needed = any(not part.is_idle for part in self._partitions.values())
            return False
        for part in self._partitions.values():
            if not part.sequences.is_restart_due:
                continue
            if part.sequences.identity == self.identity:
                following = next_epoch(self.identity)
                if following is None:
                    self.identity, self.is_identity_needed = None, True
                    return False
                self.identity = following
                self.metrics.epoch_bumps += 1
            part.sequences.restart(self.identity)
        return True

    def _ready_by_node(self, now_ms: float) -> dict[int, list[PartitionQueue]]:
        by_node: dict[int, list[PartitionQueue]] = {}
        for tp, part in self._partitions.items():
            if not self._is_ready(part, now_ms):
                continue
            node_id = self.metadata.leader_of(tp)
            if node_id is None:
                self.stale.add(tp)
            else:
                by_node.setdefault(node_id, []).append(part)
        return by_node

    def _is_ready(self, part: PartitionQueue, now_ms: float) -> bool:
        return self._candidate(part, now_ms) is not None

    def _candidate(self, part: PartitionQueue, now_ms: float) -> ProducerBatch | None:
        nearly_full = self.buffered_bytes * 4 > self.options.buffer_bytes * 3
        return part.candidate(now_ms, self.identity, self._flush_below, nearly_full)

    def _pick(self, parts: Iterable[PartitionQueue], now_ms: float) -> list[ProducerBatch]:
        """One batch per partition, together at most max.request.size (but at least one)."""
        picked: list[ProducerBatch] = []
        size = REQUEST_OVERHEAD_BYTES
        for part in parts:
            batch = self._candidate(part, now_ms)
            if batch is None:
                continue
            batch_bytes = len(batch.data) if batch.data is not None else batch.size_bytes
            if picked and size + batch_bytes > self.options.max_request_bytes:
                break
            size += batch_bytes
            part.take(batch, self.identity)
            picked.append(batch)
        return picked

    def _call(self, node_id: int, batches: list[ProducerBatch], now_ms: float) -> ProduceCall:
        transactional_id = self.options.transactional_id
        is_transactional = transactional_id is not None
        for batch in batches:
            data = batch.encode(self.options.compression, self.options.level, is_transactional)
            batch.sent_ms = now_ms
            batch.attempt_count += 1
            self.metrics.on_sent(batch, len(data), now_ms)
        self.metrics.requests.add(1, now_ms)
        self._in_flight_requests[node_id] = self._in_flight_requests.get(node_id, 0) + 1
        acks, timeout_ms = self.options.acks, self.options.request_timeout_ms
        message = produce_request(batches, acks, timeout_ms, transactional_id)
        return ProduceCall(node_id, message, batches, acks != 0)

    def next_wakeup_ms(self, now_ms: float) -> float | None:
        """When `drain` may have something to do without an outside event; None: never."""
        times = (part.next_due_ms(now_ms) for part in self._partitions.values() if not part.is_idle)
        return min((time for time in times if time is not None), default=None)

    # Outcomes

    def on_sent(self, call: ProduceCall, now_ms: float) -> None:
        """acks=0: the request is out, and that is all that will be known."""
        self._in_flight_requests[call.node_id] -= 1
        for batch in call.batches:
            self._deliver(batch, None, None)

    def on_response(self, call: ProduceCall, response: Any, now_ms: float) -> None:
        """The broker's answer, one code per batch."""
        self._in_flight_requests[call.node_id] -= 1
        answers = answers_by_partition(response)
        for batch in call.batches:
            if batch.sent_ms is not None:
                self.metrics.latency.add(now_ms - batch.sent_ms, now_ms)
            row = answers.get(batch.tp)
            if row is None:
                self._no_outcome(batch, OncelogError("the answer names no such partition"), True, now_ms)
            elif row.error_code == 0:
                base = row.base_offset if row.base_offset >= 0 else None
                self._deliver(batch, base, row.log_append_time_ms if row.log_append_time_ms >= 0 else None)
            else:
                error = error_for_code(row.error_code, row.error_message or "")
                self._on_error(batch, error, now_ms)

    def on_failure(self, call: ProduceCall, error: OncelogError, now_ms: float) -> None:
        """No answer: the connection ended, could not be made, or the time-out passed."""
        self._in_flight_requests[call.node_id] -= 1
        may_be_stored = not isinstance(error, NotConnectedError)
        for batch in call.batches:
            self.stale.add(batch.tp)
            self._no_outcome(batch, error, may_be_stored, now_ms)

    def on_refused(self, call: ProduceCall, error: OncelogError, now_ms: float) -> None:
        """The request could not be made for this broker (version, misuse): surely not sent."""
        self._in_flight_requests[call.node_id] -= 1
        for batch in call.batches:
            self._fail(batch, error)

    def _on_error(self, batch: ProducerBatch, error: BrokerError, now_ms: float) -> None:
        self.metrics.on_error(error)
        if batch.is_settled:
            return
        batch.is_on_wire = False  # answered: a refusal is no attempt that may yet be stored
        reaction = reaction_to(error.code, self.options.mode)
        error.reaction = reaction.mark.value
        part = self._partitions[batch.tp]
        if reaction.is_metadata_stale:
            self.metadata.mark_stale([batch.tp])
            self.stale.add(batch.tp)
        match reaction.action:
            case Action.DELIVER:
                self._deliver(batch, None, None)
            case Action.RETRY:
                self._no_outcome(batch, error, reaction.may_be_stored, now_ms)
            case Action.REORDER:
                self._on_out_of_order(batch, part.sequences.on_out_of_order(batch), error, now_ms)
            case Action.RENUMBER:
                self._on_out_of_order(batch, part.sequences.on_unknown_producer(batch), error, now_ms)
            case Action.SPLIT if batch.record_count > 1 and not batch.may_be_stored:
                self._split(part, batch)
            case Action.DIE:
                self.die(error)
            case _:
                batch.may_be_stored = batch.may_be_stored or reaction.may_be_stored
                self._fail(batch, error)

    def _on_out_of_order(
        self, batch: ProducerBatch, verdict: OutOfOrder, error: BrokerError, now_ms: float
    ) -> None:
        if verdict is OutOfOrder.GIVE_UP:
            self._settle(batch, None, None, unknown_outcome(batch, error))
            return
        self.metrics.retries += 1
        batch.retry_at_ms = now_ms

    def _split(self, part: PartitionQueue, batch: ProducerBatch) -> None:
        pieces = cut(
            batch, max(self.options.batch_bytes, 1) if batch.size_bytes > self.options.batch_bytes else 0
        )
        for piece in pieces:
            piece.charged_bytes = batch.charged_bytes // len(pieces)
        self.buffered_bytes -= batch.charged_bytes - sum(piece.charged_bytes for piece in pieces)
        batch.is_settled = True
        part.replace(batch, pieces)

    def _no_outcome(
        self, batch: ProducerBatch, error: OncelogError, may_be_stored: bool, now_ms: float
    ) -> None:
        if batch.is_settled:
            return
        batch.last_error = error
        self._partitions[batch.tp].came_back(batch, may_be_stored)
        if batch.attempt_count > self.options.retries:
            self._fail(batch, error)
            return
        self.metrics.retries += batch.record_count
        batch.retry_at_ms = now_ms + self._backoff_ms(batch.attempt_count)

    def _backoff_ms(self, attempt_count: int) -> float:
        """retry.backoff.ms doubled per attempt up to the maximum, give or take 20 %."""
        base, top = self.options.retry_backoff_ms, self.options.retry_backoff_max_ms
        return min(base * 2.0 ** min(attempt_count - 1, 20), max(top, base)) * (0.8 + 0.4 * self._jitter())

    def _expire(self, now_ms: float) -> None:
        limit_ms = self.options.delivery_timeout_ms
        for part in self._partitions.values():
            for batch in part.created_before(now_ms - limit_ms):
                heard = f" (last heard: {batch.last_error})" if batch.last_error else ""
                text = f"no acknowledgement for {batch.tp} within delivery.timeout.ms={limit_ms}{heard}"
                error: OncelogError = TimedOut(f"{text}; the records were not stored")
                if batch.is_on_wire or batch.may_be_stored:
                    batch.may_be_stored = True
                    text += "; whether the records are stored is not known"
                    error = DeliveryUnknown(text, batch.last_error)
                    error.reaction = Mark.ABORTABLE.value
                self._fail(batch, error)

    def _fail(self, batch: ProducerBatch, error: OncelogError) -> None:
        if batch.is_settled:
            return
        batch.seal()
        self._partitions[batch.tp].give_up(batch)
        if batch.may_be_stored and not isinstance(error, OutcomeUnknown):
            error = unknown_outcome(batch, error)
        self._settle(batch, None, None, error)

    def _deliver(self, batch: ProducerBatch, base_offset: int | None, log_time_ms: int | None) -> None:
        if batch.is_settled:
            return
        self._partitions[batch.tp].delivered(batch)
        self._settle(batch, base_offset, log_time_ms, None)

    def _settle(
        self, batch: ProducerBatch, base_offset: int | None, log_time_ms: int | None, error: Exception | None
    ) -> None:
        batch.is_settled = True
        self.buffered_bytes -= batch.charged_bytes
        if error is not None:
            self.metrics.errors += batch.record_count
        else:
            self.metrics.delivered += batch.record_count
        batch.outcome.settle(base_offset, log_time_ms, error)
        self.settled.append(batch.outcome)
        parent = batch.parent
        if parent is not None:
            parent.unsettled_pieces -= 1
            if not parent.unsettled_pieces:
                parent.outcome.is_done = True
                self.settled.append(parent.outcome)
