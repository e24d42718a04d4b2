"""The producer without I/O: which records wait, which may be sent now, and what a response means for them.

`append` adds a record to its partition's open batch. `drain` gives ready batches their sequences, encodes
them and groups them into requests. `on_response` and `on_failure` complete batches or schedule retries.
`rules.idempotence.sequencer` decides which batch may be sent and with which sequence.
`rules.idempotence.error_policy` decides what an error means.

Times are milliseconds of a monotonic clock. Record timestamps are milliseconds since the epoch. The core is
not thread safe: every caller must hold the lock of ProducerDriver.

Source: behaviours I9 to I12 and I21 (docs/behaviours.md); Kafka's RecordAccumulator, Sender and
TransactionManager.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, SupportsIndex

from oncelog.client.connection.metadata import ClusterMetadata
from oncelog.client.producer.appender import Appender
from oncelog.client.producer.batch import BatchResult, Callback, ProducerBatch, indeterminate_error, split
from oncelog.client.producer.options import ProducerOptions
from oncelog.client.producer.partitioner import Partitioner
from oncelog.client.producer.produce_messages import (
    MAX_PRODUCE_VERSION,
    REQUEST_OVERHEAD_BYTES,
    ProduceCall,
    produce_request,
    responses_by_partition,
)
from oncelog.client.producer.producer_metrics import ProducerMetrics
from oncelog.client.producer.queues import PartitionQueue, TopicQueues
from oncelog.client.producer.rows import Row
from oncelog.client.producer.schedule import SendSchedule
from oncelog.client.producer.transaction import ProducerTransaction
from oncelog.errors import (
    BrokerError,
    DeliveryUnknown,
    MessageTooLarge,
    MisuseError,
    NotConnectedError,
    OncelogError,
    OutcomeUnknown,
    TimedOut,
    TransactionAborted,
    copy_to_raise,
    error_for_code,
)
from oncelog.rules.idempotence.error_policy import Action, ErrorClass, error_policy_for
from oncelog.rules.idempotence.sequencer import OutOfOrder, ProducerIdAndEpoch, next_epoch
from oncelog.rules.transactions.client_session import Operation, State
from oncelog.types import TopicPartition
from oncelog.wire.primitives import WritableBuffer

MAX_KEPT_SEQUENCES = 50_000
"""The maximum number of partitions of forgotten topics whose sequences are kept (12 MB).

Above this number the producer raises its epoch, so that all sequences restart at 0.
"""


class RandomSource(Protocol):
    """The part of `random.Random` that the producer uses."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


class ProducerCore:
    """The state of one producer session."""

    def __init__(self, options: ProducerOptions, metadata: ClusterMetadata, rng: RandomSource) -> None:
        self.options = options
        self.metadata = metadata
        self.metrics = ProducerMetrics()
        self.transaction = ProducerTransaction() if options.transactional_id is not None else None
        """The transaction of this producer; None without a transactional.id."""
        self.identity: ProducerIdAndEpoch | None = None
        self.is_identity_needed = options.is_idempotent and self.transaction is None
        """True if the driver must send InitProducerId. Always False for a transactional producer."""
        self.fatal: OncelogError | None = None
        """The error that every further `append` raises; None while the producer accepts records."""
        self.completed: list[BatchResult] = []
        """Results whose callbacks the driver calls once it has released the lock."""
        self.completed_count = 0
        """Number of results that were ever put into `completed`."""
        self.room_waiter_count = 0
        """Number of calls that wait for room in buffer.memory. While there are any, no batch lingers."""
        self.is_append_unfinished = False
        """True while an `append` changes the queues. If it is True between calls, `repair` is needed."""
        self.stale_leaders: set[TopicPartition] = set()
        """Partitions whose leader must be looked up."""
        self.forgotten_topics: list[str] = []
        """Topics that were not used for metadata.max.idle.ms. The driver must forget them as well."""
        self._rng = rng
        self.topics: OrderedDict[str, TopicQueues] = OrderedDict()
        """Topic name -> its queues, in ascending order of `used_ms`. `_forget_idle` relies on this order."""
        self._partitions: dict[TopicPartition, PartitionQueue] = {}
        self._incomplete: OrderedDict[ProducerBatch, None] = OrderedDict()
        """Batches that are not complete, oldest first.

        A split batch stays here instead of its child batches, until the last of them is complete.
        """
        self._schedule = SendSchedule()
        self._restarting: dict[PartitionQueue, None] = {}
        """Partitions whose sequences cannot continue and must restart at 0."""
        self._kept_sequences: dict[TopicPartition, tuple[int, int | None]] = {}
        """Forgotten partition -> (next sequence, acknowledged producer id). Valid only as long as the
        producer has the id and epoch `_kept_identity`.

        If the partition is used again, its sequences continue with these values.
        """
        self._kept_identity: ProducerIdAndEpoch | None = None
        self._metadata_version = metadata.version
        self._in_flight_requests: dict[int, int] = {}
        self._serial = 0
        self._flush_below = 0
        self.appender = Appender(options.buffer_bytes)
        """Appends records to the open batches. Its attribute `topics` has the same topics as `self.topics`.
        """
        self._hashes_in_python = options.partitioner == "consistent_random"

    @property
    def buffered_bytes(self) -> int:
        """Return the number of bytes of buffer.memory that are in use."""
        return self.appender.buffered_bytes

    @buffered_bytes.setter
    def buffered_bytes(self, value: int) -> None:
        self.appender.buffered_bytes = value

    # Topics

    def topic(self, name: str) -> TopicQueues | None:
        """Return a topic's queues, or None if its number of partitions must be looked up first."""
        return self.topics.get(name)

    def may_have_more_partitions(self, name: str, partition: object) -> bool:
        """Return True if the number `partition` is too high for the known partitions of a topic.

        The partition may have been added since the last metadata response.
        """
        # `isinstance` with a protocol takes 18 µs, too much for every new batch.
        if partition is None or (type(partition) is not int and not isinstance(partition, SupportsIndex)):
            return False
        return operator.index(partition) >= self.current_topic(name).count

    def set_partition_count(self, name: str, count: int, now_ms: float) -> TopicQueues:
        """Set a topic's number of partitions, and add queues for new partitions."""
        topic = self.topics.get(name)
        if topic is None:
            partitioner = Partitioner(self.options.partitioner, self._rng.randrange)
            max_bytes = min(self.options.batch_bytes, self.options.max_request_bytes)
            topic = self.topics[name] = TopicQueues(name, partitioner, now_ms, max_bytes)
        for partition in range(len(topic.queues), count):
            topic.open_batches.buffers.append(None)
            topic.queues.append(self._make_queue(TopicPartition(name, partition), topic))
        topic.set_count(count)
        self.appender.topics[name] = topic.open_batches
        return topic

    def _make_queue(self, tp: TopicPartition, topic: TopicQueues) -> PartitionQueue:
        queue = self._partitions[tp] = PartitionQueue(tp, self.options, topic.open_batches)
        kept = self._kept_sequences.pop(tp, None)
        if kept is not None and self._kept_identity == self.identity is not None:
            queue.sequences.resume(self.identity, *kept)
        return queue

    def _forget_idle(self, now_ms: float) -> None:
        while self.topics:
            topic = next(iter(self.topics.values()))
            if topic.used_ms + self.options.metadata_max_idle_ms > now_ms:
                return
            self.topics.move_to_end(topic.name)
            if any(not queue.is_idle or queue in self._restarting for queue in topic.queues):
                topic.used_ms = now_ms
                continue
            del self.topics[topic.name]
            self.appender.topics.pop(topic.name, None)
            self.forgotten_topics.append(topic.name)
            for queue in topic.queues:
                self._keep_sequences(queue)
                del self._partitions[queue.tp]

    def _keep_sequences(self, queue: PartitionQueue) -> None:
        """Keep the next sequence of a forgotten partition.

        A broker that remembers the partition's last sequence would refuse a batch that starts at 0.
        """
        sequences = queue.sequences
        if self._kept_identity != self.identity:
            self._kept_identity = self.identity
            self._kept_sequences.clear()
        if sequences.identity is not None and sequences.identity == self.identity:
            self._kept_sequences[queue.tp] = (sequences.next_sequence, sequences.acked_producer_id)

    # Appending

    def append_to_open_batch(
        self, topic: Any, partition: object, row: Row, size_bytes: int, callback: Callback | None
    ) -> tuple[BatchResult, int] | None:
        """Append a record to a batch that is open and has room: the fast path of nearly every `send`.

        `topic` and `partition` are the application's arguments, still unchecked.

        Return the batch's result and the record's index in it, or None if the record needs `append`. The
        caller holds the lock. Raises MisuseError in a signal handler that interrupted another call.
        """
        if self.appender.is_changing:
            raise interrupted_call()
        if self._hashes_in_python and partition is None and row[1] and (queues := self.topics.get(topic)):
            partition = queues.partitioner.for_key(row[1], queues.count)
        return self.appender.append(topic, partition, row, size_bytes, callback)

    def append(
        self,
        topic: str,
        partition: object,
        row: Row,
        size_bytes: int,
        now_ms: float,
        callback: Callback | None = None,
    ) -> tuple[BatchResult, int, bool]:
        """Append a record. Return the batch's result, the record's index in it, and True if a drain is due.

        `size_bytes` is the record's `row_size_bytes`. If `partition` is None, the partitioner chooses it. The
        topic must be known. Raises MessageTooLarge if the record alone exceeds max.request.size, MisuseError
        if the topic does not have `partition`, and the fatal error if the producer has failed.
        """
        self._check_append(size_bytes)
        queues = self.current_topic(topic)
        queue = queues.queue(partition, row[1], size_bytes)
        self.is_append_unfinished = True
        batch = queue.open
        needs_drain = False
        if batch is None or batch.size_bytes + size_bytes > queues.max_batch_bytes:
            # If a sealed batch still waits, it is sent first, and the new batch changes nothing in the
            # schedule.
            is_behind = len(queue.waiting) > 1
            batch = self._begin_batch(queue, now_ms)
            queue.open = batch
            if not is_behind:
                self._place(queue, now_ms)
            needs_drain = not is_behind or self._is_urgent
        self.buffered_bytes += size_bytes
        index = batch.buffer.append(row, size_bytes, callback)
        self.is_append_unfinished = False
        return batch.result, index, needs_drain

    def append_sealed(
        self, topic: str, partition: int, data: WritableBuffer, count: int, times: Any, now_ms: float
    ) -> BatchResult:
        """Append a batch that is already encoded (from Arrow) and has no sequence yet.

        `times` has the timestamp of each record in ms, or is a single int for all records. Raises the same
        errors as `append`.
        """
        self._check_append(len(data))
        queue = self.current_topic(topic).queue(partition, None, 0)
        self.is_append_unfinished = True
        batch = self._begin_batch(queue, now_ms)
        batch.data, batch.record_count = data, count
        batch.result.times = times
        batch.charged_bytes = len(data)
        self.buffered_bytes += len(data)
        self._place(queue, now_ms)
        self.is_append_unfinished = False
        return batch.result

    def _check_append(self, size_bytes: int) -> None:
        if self.transaction is not None:
            self.transaction.check(Operation.SEND)
        if self.fatal is not None:
            raise copy_to_raise(self.fatal)
        self.check_size(size_bytes)

    def check_size(self, size_bytes: int) -> None:
        """Raise MessageTooLarge for a record that is larger than max.request.size."""
        max_bytes = self.options.max_request_bytes
        if size_bytes > max_bytes:
            raise MessageTooLarge(
                f"a record of {size_bytes} bytes is larger than max.request.size={max_bytes}"
            )

    def current_topic(self, name: str) -> TopicQueues:
        """Return a known topic's queues, after adding queues for partitions that newer metadata has."""
        topic = self.topics[name]
        count = self.metadata.partition_count(name)
        if count and count != topic.count:
            self.set_partition_count(name, count, topic.used_ms)
        return topic

    def topic_to_append(self, name: str) -> TopicQueues:
        """Return the queues of a topic to which records are about to be appended.

        The topic must be known, unless the producer has failed. Raises the same errors as `append`.
        """
        # Raise the fatal error first: a producer that has failed does not look up an unknown topic. Guard:
        # test_a_failed_producer_raises_its_error_for_a_table_of_a_new_topic.
        self._check_append(0)
        return self.current_topic(name)

    def _begin_batch(self, queue: PartitionQueue, now_ms: float) -> ProducerBatch:
        queue.close_open()
        self._serial += 1
        batch = ProducerBatch(queue.tp, now_ms, self._serial)
        self._incomplete[batch] = None
        queue.waiting.append(batch)
        topic = self.topics[queue.tp.topic]
        topic.used_ms = now_ms
        self.topics.move_to_end(topic.name)
        return batch

    def has_room(self, size_bytes: int) -> bool:
        """Return True if buffer.memory has room for these bytes. An empty buffer takes any record."""
        return not self.buffered_bytes or self.buffered_bytes + size_bytes <= self.options.buffer_bytes

    def can_append(self, size_bytes: int) -> bool:
        """Return True if no wait for room is needed: `append` would take the record, or raise the fatal
        error.
        """
        return self.fatal is not None or self.has_room(size_bytes)

    def refuse_appends(self, error: OncelogError) -> None:
        """Let every further `append` raise `error`. Records that were appended earlier are still sent."""
        if self.fatal is None:
            self.fatal = error
        self.close_open_batches()

    def close_open_batches(self) -> None:
        """Seal every open batch, so that the next record goes through `append` and its checks."""
        for batch in self._incomplete:
            queue = self._partitions[batch.tp]
            if queue.open is not None:
                queue.close_open()
                self._place(queue)

    def detach(self, error: OncelogError) -> None:
        """Complete every batch with `error` and without callbacks, in a forked child that cannot send
        records.

        Otherwise a caller in the child that waits for a record from before the fork would wait without end.
        """
        self.fatal = error
        self.appender.is_changing = False
        self.topics.clear()
        self.appender.topics.clear()
        for batch in self._incomplete:
            batch.result.complete(None, None, error)
        for queue in self._partitions.values():  # these have the children of batches that were split
            for batch in queue.batches():
                batch.result.complete(None, None, error)

    def fail_all(self, error: OncelogError) -> None:
        """Fail every batch that is not complete, and refuse further records, because the producer cannot
        continue.
        """
        if self.transaction is not None:
            self.transaction.session.set_fatal_error(error)
        self.fatal = error
        self._fail_batches(lambda batch: True, error)

    def _fail_batches(self, condition: Callable[[ProducerBatch], bool], error: OncelogError) -> None:
        for queue in dict.fromkeys(self._partitions[batch.tp] for batch in self._incomplete):
            for batch in queue.batches():
                if condition(batch):
                    self._fail(batch, error)

    def flush(self) -> int:
        """Let no existing batch linger. Return the serial to pass to `is_completed_to`."""
        self._flush_below = self._serial + 1
        for queue in self._schedule.take_lingering():
            self._place(queue)
        return self._serial

    def is_completed_to(self, serial: int) -> bool:
        """Return True once every record from before the `flush` that returned this serial is complete."""
        return not self._incomplete or next(iter(self._incomplete)).serial > serial

    @property
    def is_idle(self) -> bool:
        """Return True if every appended record is complete. Callers need no lock."""
        return not self._incomplete

    # Sending

    def set_identity(self, producer_id: int, producer_epoch: int) -> None:
        """Set the producer id and epoch of an InitProducerId response."""
        self.identity = ProducerIdAndEpoch(producer_id, producer_epoch)
        self.is_identity_needed = False

    def drain(self, now_ms: float) -> list[ProduceCall]:
        """Return the requests that may be sent now.

        The driver must end each of them with `on_response`, `on_sent`, `on_refused` or `on_failure`.
        """
        if self.is_append_unfinished:
            self.repair()
        self._expire(now_ms)
        self._forget_idle(now_ms)
        for queue in self._schedule.take_due(now_ms):
            self._place(queue, now_ms)
        if self._is_urgent:
            for queue in self._schedule.take_lingering():
                self._place(queue, now_ms)
        if self._metadata_version != self.metadata.version:
            self._metadata_version = self.metadata.version
            for queue in self._schedule.take_all_ready():
                self._place(queue, now_ms)
        if self.options.is_idempotent and not self._prepare_identity(now_ms):
            return []
        calls = []
        for node_id in self._schedule.ready_nodes():
            while self._in_flight_requests.get(node_id, 0) < self.options.max_in_flight:
                batches = self._pick(node_id, now_ms)
                if not batches:
                    break
                calls.append(self._make_call(node_id, batches, now_ms))
        return calls

    def repair(self) -> None:
        """Rebuild all derived state from the queues, after an exception has interrupted an `append`.

        Guard: test_an_interrupt_at_any_call_of_send_leaves_a_sound_producer.
        """
        self._schedule = SendSchedule()
        incomplete: dict[ProducerBatch, None] = {}
        self.buffered_bytes = 0
        for queue in self._partitions.values():
            queue.drop_empty()
            for batch in queue.batches():
                incomplete[batch] = None
                self.buffered_bytes += batch.charged_bytes
            self._place(queue)
        for batch in [*self._incomplete]:
            if batch not in incomplete and not batch.incomplete_children:
                del self._incomplete[batch]
        for batch in incomplete:
            if batch.parent is None:
                self._incomplete.setdefault(batch)
        # Clear the flag last: if a second signal interrupts this repair, the next drain repairs again.
        self.is_append_unfinished = False

    def _place(self, queue: PartitionQueue, now_ms: float = 0.0) -> None:
        """Move a queue to its current group of the schedule (ready, timed or without leader). Remove it if it
        has no batch to send. See `SendSchedule`.
        """
        if queue.sequences.is_restart_needed:
            self._restarting[queue] = None
        candidate = queue.next_to_send(self.identity, self._flush_below, self._is_urgent)
        if candidate is None:
            self._schedule.remove(queue)
            return
        batch, due_ms = candidate
        if due_ms > now_ms:
            self._schedule.put_timed(queue, due_ms, is_lingering=batch is queue.open)
            return
        node_id = self.metadata.leader_of(queue.tp)
        if node_id is None:
            self.stale_leaders.add(queue.tp)
        self._schedule.put_ready(queue, node_id)

    @property
    def _is_urgent(self) -> bool:
        return self.room_waiter_count > 0 or self.buffered_bytes * 4 > self.options.buffer_bytes * 3

    def _prepare_identity(self, now_ms: float) -> bool:
        """Restart the sequences that are due to restart. Return False if no batch may be sent.

        No batch may be sent without a producer id or, by a transactional producer, outside a transaction.
        """
        if self.transaction is not None:
            if self.transaction.session.state is State.ABORTABLE_ERROR:
                # Nothing more is sent. Let flush() and close() not wait for delivery.timeout.ms. Guard:
                # test_no_call_waits_for_records_of_a_transaction_that_can_only_be_aborted.
                self.drop_unsent()
            # The coordinator assigns the epochs of transactions, so sequences are not restarted here.
            return self.identity is not None and self.transaction.is_sending
        if self.identity is None:
            self.is_identity_needed = bool(self._incomplete)
            return False
        # A new epoch restarts the sequences of all partitions at 0, so no sequences need to be kept.
        if len(self._kept_sequences) > MAX_KEPT_SEQUENCES and not self._raise_epoch():
            return False
        for queue in list(self._restarting):
            if not queue.sequences.is_restart_needed:
                del self._restarting[queue]
            elif queue.sequences.is_restart_due:
                if queue.sequences.identity == self.identity and not self._raise_epoch():
                    return False
                self._restart(queue, now_ms)
        return True

    def _raise_epoch(self) -> bool:
        """Change to the next epoch. Return False if no epoch is left, so that a new producer id is needed."""
        assert self.identity is not None
        self.identity = next_epoch(self.identity)
        self._kept_sequences.clear()
        if self.identity is None:
            self.is_identity_needed = True
            return False
        self.metrics.epoch_bumps += 1
        return True

    def _restart(self, queue: PartitionQueue, now_ms: float = 0.0) -> None:
        assert self.identity is not None
        queue.sequences.restart(self.identity)
        del self._restarting[queue]
        self._place(queue, now_ms)

    def _pick(self, node_id: int, now_ms: float) -> list[ProducerBatch]:
        """Take the batches of one request: one per partition, together at most max.request.size.

        A single batch may be larger.
        """
        picked: list[ProducerBatch] = []
        queues: list[PartitionQueue] = []
        size = REQUEST_OVERHEAD_BYTES
        while (queue := self._schedule.take_ready(node_id)) is not None:
            candidate = queue.next_to_send(self.identity, self._flush_below, self._is_urgent)
            if candidate is None or candidate[1] > now_ms or self.metadata.leader_of(queue.tp) != node_id:
                self._place(queue, now_ms)  # the queue has changed since it was placed in the schedule
                continue
            if self.transaction is not None and not self.transaction.admits(queue.tp):
                continue  # `on_partitions_added` places the queue again
            batch = candidate[0]
            batch_bytes = len(batch.data) if batch.data is not None else batch.size_bytes
            if picked and size + batch_bytes > self.options.max_request_bytes:
                self._schedule.put_first(queue, node_id)
                break
            size += batch_bytes
            queue.take(batch, self.identity)
            picked.append(batch)
            queues.append(queue)
        for queue in queues:
            self._place(queue, now_ms)
        return picked

    def _make_call(self, node_id: int, batches: list[ProducerBatch], now_ms: float) -> ProduceCall:
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

    def next_wakeup_ms(self) -> float | None:
        """Return the time at which `drain` must run next if nothing else happens; None for never.

        A batch that is due, but waits for a leader or a response, does not count. Otherwise the loop would
        drain without pause. Guard: test_a_batch_that_waits_for_a_leader_is_not_due_by_itself.
        """
        times = [self._schedule.next_due_ms()]
        if self._incomplete:
            times.append(next(iter(self._incomplete)).created_ms + self.options.delivery_timeout_ms)
        return min((time for time in times if time is not None), default=None)

    @property
    def max_produce_version(self) -> int:
        """Return the highest Produce version that may be sent now."""
        return MAX_PRODUCE_VERSION if self.transaction is None else self.transaction.max_produce_version

    # The transaction of a producer with a transactional.id

    @property
    def _transaction(self) -> ProducerTransaction:
        assert self.transaction is not None
        return self.transaction

    def on_partitions_added(self, partitions: set[TopicPartition]) -> None:
        """Schedule the batches that waited for these partitions to become part of the transaction."""
        self._transaction.on_added(partitions)
        for tp in sorted(partitions):  # sorted, so that a seed of the simulator always gives the same run
            queue = self._partitions.get(tp)
            if queue is not None:
                self._place(queue)

    def require_abort(self, error: OncelogError) -> None:
        """Record that a part of the transaction failed, so that only an abort can follow."""
        was_sending = self._transaction.is_sending
        self._transaction.require_abort(error)
        if was_sending:
            self.close_open_batches()  # the next `send` then finds no open batch, and checks the session

    def drop_unsent(self) -> None:
        """Fail every record that is not on the wire: the transaction is being aborted."""
        self._transaction.pending.clear()
        error = TransactionAborted("the transaction was aborted before this record was stored")
        self._fail_batches(lambda batch: not batch.is_on_wire, error)

    def change_transactional_id(self, transactional_id: str) -> None:
        """Return to the state of a producer that was never initialized, with another transactional id.

        Raises MisuseError within a transaction, and the fatal error of a producer that has failed. Sequences
        restart with the epoch that the coordinator assigns to the next transactional id.
        """
        self._transaction.session.check_unused()
        if self.fatal is not None:
            raise copy_to_raise(self.fatal)
        if not self.is_idle or self._restarting:
            raise MisuseError("some records have no result; make a new producer")
        self.options = replace(self.options, transactional_id=transactional_id)
        self.identity = None
        self._transaction.reset()

    def forget_topics(self) -> list[str]:
        """Forget the partitions of all topics, and return the topics' names. No record may be incomplete.

        The next record of a topic looks its partitions up again.
        """
        assert self.is_idle and not self._restarting
        names = list(self.topics)
        for topic in self.topics.values():
            self.appender.topics.pop(topic.name, None)
            for queue in topic.queues:
                del self._partitions[queue.tp]
        self.topics.clear()
        self._kept_sequences.clear()
        return names

    def on_transaction_ended(self, identity: ProducerIdAndEpoch | None) -> None:
        """Return to the state before `begin`.

        The next transaction uses `identity`, or with None the current identity.
        """
        self._transaction.forget_parts()
        if identity is not None:
            self._restart_under(identity)
        self._transaction.session.enter(State.READY)

    def _restart_under(self, identity: ProducerIdAndEpoch) -> None:
        """Change to another epoch or producer id, and restart all sequences. Nothing may be in flight."""
        self.identity = identity
        self._transaction.on_new_epoch()
        for queue in list(self._restarting):  # other partitions restart at 0 with their next batch
            self._restart(queue)

    # Results of requests

    def on_queued(self, call: ProduceCall) -> None:
        """Mark the batches of a request that waits for a connection. `on_written` removes the mark."""
        for batch in call.batches:
            batch.is_queued = True

    def on_written(self, call: ProduceCall) -> None:
        """Record that the first byte is about to be written: from now on, the broker may receive the
        request.
        """
        for batch in call.batches:
            batch.is_queued = False

    def on_sent(self, call: ProduceCall, now_ms: float) -> None:
        """Complete the batches of a request with acks=0, which gets no response."""
        self._in_flight_requests[call.node_id] -= 1
        for batch in call.batches:
            self._deliver(batch, None, None)
            self._place_again(batch, now_ms)

    def _place_again(self, batch: ProducerBatch, now_ms: float) -> None:
        queue = self._partitions.get(batch.tp)  # None if the batch expired and its topic was forgotten
        if queue is not None:
            self._place(queue, now_ms)

    def on_response(self, call: ProduceCall, response: Any, now_ms: float) -> None:
        """Handle a Produce response, which has one error code per batch."""
        self._in_flight_requests[call.node_id] -= 1
        responses = responses_by_partition(response)
        for batch in call.batches:
            if batch.sent_ms is not None:
                self.metrics.latency.add(now_ms - batch.sent_ms, now_ms)
            row = responses.get(batch.tp)
            if row is None:
                self._no_outcome(
                    batch, OncelogError("the response has no entry for this partition"), True, now_ms
                )
            elif row.error_code == 0:
                base = row.base_offset if row.base_offset >= 0 else None
                self._deliver(batch, base, row.log_append_time_ms if row.log_append_time_ms >= 0 else None)
            else:
                error = error_for_code(row.error_code, row.error_message or "")
                self._on_error(batch, error, now_ms)
            self._place_again(batch, now_ms)

    def on_failure(
        self, call: ProduceCall, error: OncelogError, now_ms: float, *, was_sent: bool = True
    ) -> None:
        """Handle a request without a response: no connection, a lost connection, or a timeout.

        `was_sent` is False if the request was certainly not sent.
        """
        self._in_flight_requests[call.node_id] -= 1
        was_sent = was_sent and not isinstance(error, NotConnectedError)
        for batch in call.batches:
            self.stale_leaders.add(batch.tp)
            self._no_outcome(batch, error, was_sent and not batch.is_queued, now_ms)
            self._place_again(batch, now_ms)

    def on_refused(self, call: ProduceCall, error: OncelogError, now_ms: float) -> None:
        """Handle a request that could not be encoded for this broker. The request was certainly not sent."""
        self._in_flight_requests[call.node_id] -= 1
        for batch in call.batches:
            batch.is_on_wire = batch.is_on_wire and not batch.is_queued
            self._fail(batch, error)
            self._place_again(batch, now_ms)

    def _on_error(self, batch: ProducerBatch, error: BrokerError, now_ms: float) -> None:
        self.metrics.on_error(error)
        if batch.is_completed:
            return
        batch.is_on_wire = False  # the broker has responded, so it can no longer store the attempt
        policy = error_policy_for(error.code, self.options.mode)
        error.reaction = policy.error_class.value
        queue = self._partitions[batch.tp]
        if policy.is_metadata_stale:
            self.metadata.mark_stale([batch.tp])
            self.stale_leaders.add(batch.tp)
        match policy.action:
            case Action.DELIVER:
                self._deliver(batch, None, None)
            case Action.RETRY:
                self._no_outcome(batch, error, policy.may_be_stored, now_ms)
            case Action.REORDER:
                self._on_out_of_order(batch, queue.sequences.on_out_of_order(batch), error, now_ms)
            case Action.RENUMBER:
                self._on_out_of_order(batch, queue.sequences.on_unknown_producer(batch), error, now_ms)
            case Action.SPLIT if batch.record_count > 1:
                self._split(queue, batch)
            case Action.FAIL_PRODUCER:
                self.fail_all(error)
            case _:
                batch.may_be_stored = batch.may_be_stored or policy.may_be_stored
                self._fail(batch, error)

    def _on_out_of_order(
        self, batch: ProducerBatch, verdict: OutOfOrder, error: BrokerError, now_ms: float
    ) -> None:
        if self.transaction is not None:
            if verdict is OutOfOrder.RENUMBER:
                self._fail(batch, error)
                return
            if verdict is OutOfOrder.GIVE_UP:
                self.require_abort(error)
        if verdict is OutOfOrder.GIVE_UP:
            self._complete(batch, None, None, indeterminate_error(batch, error))
            return
        self.metrics.retries += batch.record_count
        batch.retry_at_ms = now_ms

    def _split(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        topic = self.topics.get(queue.tp.topic)
        if topic is not None:
            topic.on_too_large(max(batch.size_bytes, len(batch.data or b"")))
        children = split(batch)
        self.buffered_bytes += sum(child.charged_bytes for child in children) - batch.charged_bytes
        batch.is_completed = True
        queue.replace(batch, children)

    def _no_outcome(
        self, batch: ProducerBatch, error: OncelogError, may_be_stored: bool, now_ms: float
    ) -> None:
        if batch.is_completed:
            return
        batch.last_error = error
        self._partitions[batch.tp].on_no_outcome(batch, may_be_stored)
        if batch.attempt_count > self.options.retries:
            self._fail(batch, error)
            return
        self.metrics.retries += batch.record_count
        batch.retry_at_ms = now_ms + self._backoff_ms(batch.attempt_count)

    def _backoff_ms(self, attempt_count: int) -> float:
        """Return retry.backoff.ms, doubled per attempt up to retry.backoff.max.ms, with a jitter of 20 %."""
        base_ms, max_ms = self.options.retry_backoff_ms, self.options.retry_backoff_max_ms
        return min(base_ms * 2.0 ** min(attempt_count - 1, 20), max(max_ms, base_ms)) * (
            0.8 + 0.4 * self._rng.random()
        )

    def _expire(self, now_ms: float) -> None:
        limit_ms = self.options.delivery_timeout_ms
        while self._incomplete:
            oldest = next(iter(self._incomplete))
            if oldest.created_ms + limit_ms > now_ms:
                return
            queue = self._partitions[oldest.tp]
            for batch in queue.batches():
                if batch.created_ms + limit_ms <= now_ms:
                    if batch.is_queued:  # the driver cancels the request before the request is written
                        queue.on_no_outcome(batch, may_be_stored=False)
                    self._fail(batch, self._timed_out(batch))
            self._place(queue, now_ms)

    def _timed_out(self, batch: ProducerBatch) -> OncelogError:
        limit_ms = self.options.delivery_timeout_ms
        last = f" (last error: {batch.last_error})" if batch.last_error else ""
        text = f"no acknowledgement for {batch.tp} within delivery.timeout.ms={limit_ms}{last}"
        # "Not stored" is certain only if each attempt that was sent got a response that refuses it. Guard:
        # test_after_the_delivery_timeout_nothing_is_missing_or_doubled.
        if not batch.is_on_wire and not batch.may_be_stored:
            return TimedOut(f"{text}; the records were not stored")
        batch.may_be_stored = True
        error = DeliveryUnknown(f"{text}; the broker may have stored the records", batch.last_error)
        error.reaction = ErrorClass.ABORTABLE.value
        return error

    def _fail(self, batch: ProducerBatch, error: OncelogError) -> None:
        if self.transaction is not None:
            if not batch.is_completed and not isinstance(error, TransactionAborted):
                self.require_abort(error)
            if batch.identity is not None:
                self.transaction.is_epoch_spent = True
        if batch.is_completed:
            return
        batch.seal()
        queue = self._partitions[batch.tp]
        queue.on_given_up(batch)
        if queue.sequences.is_restart_needed:
            self._restarting[queue] = None
        if batch.may_be_stored and not isinstance(error, OutcomeUnknown):
            error = indeterminate_error(batch, error)
        self._complete(batch, None, None, error)

    def _deliver(self, batch: ProducerBatch, base_offset: int | None, log_time_ms: int | None) -> None:
        if batch.is_completed:
            return
        queue = self._partitions[batch.tp]
        queue.on_delivered(batch)
        if batch.parent is not None and batch.parent.may_be_stored:
            self._note_not_stored(queue, batch.parent)
        self._complete(batch, base_offset, log_time_ms, None)

    def _note_not_stored(self, queue: PartitionQueue, parent: ProducerBatch | None) -> None:
        """Record that a split batch, and its children that were not sent yet, are not stored.

        Called when one of its children is stored: the broker stores either the batch itself or its children.
        A child inherits `may_be_stored` from the batch. It is sent only after the child before it was
        acknowledged. So a remaining child that is not on the wire was never sent.
        """
        while parent is not None and parent.may_be_stored:
            parent.may_be_stored = False
            for batch in queue.batches():
                if batch.parent is parent and not batch.is_on_wire:
                    batch.may_be_stored = False
            parent = parent.parent

    def _complete(
        self, batch: ProducerBatch, base_offset: int | None, log_time_ms: int | None, error: Exception | None
    ) -> None:
        batch.is_completed = True
        self.buffered_bytes -= batch.charged_bytes
        if error is not None:
            self.metrics.errors += batch.record_count
        else:
            self.metrics.delivered += batch.record_count
        batch.result.complete(base_offset, log_time_ms, error)
        self._finish(batch)

    def _finish(self, batch: ProducerBatch) -> None:
        """Put a complete batch's result into `completed`. After the last child of a split, do so for the
        parent too.
        """
        self._incomplete.pop(batch, None)  # a child of a split batch has no entry
        self.completed.append(batch.result)
        self.completed_count += 1
        parent = batch.parent
        if parent is not None:
            parent.incomplete_children -= 1
            if not parent.incomplete_children:
                parent.result.is_done = True
                self._finish(parent)


def interrupted_call() -> MisuseError:
    """Return the error of a call in a signal handler that interrupted another call of the same producer."""
    return MisuseError(
        "a signal handler cannot use this producer here, because it interrupted a call of "
        "the same producer. Let the handler set a flag or raise, and use the producer "
        "outside the handler"
    )
