"""Produce (key 0), versions 3-13: append record batches to partitions.

ApiVersions also offers version 0, because librdkafka before 2.11.1 otherwise does not compress (KAFKA-18659).
Version 13 identifies topics by id. Checks, in this order:

    TRANSACTIONAL_ID_AUTHORIZATION_FAILED  transactional batches without a transactional id, or with one
                                           that the client may not use; all partitions get this error
    UNKNOWN_TOPIC_ID                       version 13: an unknown topic id
    TOPIC_AUTHORIZATION_FAILED             the client may not write to the topic
    UNKNOWN_TOPIC_OR_PARTITION             an unknown topic or partition
    INVALID_RECORD                         not exactly one batch of magic 2
    CORRUPT_MESSAGE                        magic above 2, or a batch length below the minimum
    UNSUPPORTED_COMPRESSION_TYPE           zstd before version 7
    INVALID_REQUIRED_ACKS                  acks is not -1, 0 or 1
    INVALID_TOPIC_EXCEPTION                an internal topic
    NOT_ENOUGH_REPLICAS                    acks is -1, and min.insync.replicas is above one
    errors of transaction_verification     a transactional batch outside a transaction

The log makes all other checks. A request with acks=0 gets no response, and an error closes its connection.
With flush.messages=1 the response waits for a flush. The first batch of a transaction in a partition is
stored only after the coordinator's record that adds the partition is durable. Source: KIP-98, KIP-890;
Kafka's KafkaApis.handleProduceRequest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from oncelog.broker.append_events import AppendEvent, Verdict
from oncelog.broker.coordinators.transaction_verification import (
    FIRST_ID_VERSION,
    TransactionVerification,
    check_still_open,
    verify_produce,
)
from oncelog.broker.group_commit import FlushWaiter
from oncelog.broker.purgatory import Disconnect, PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import ELEMENT_RECORDS, Work, respond_in_steps
from oncelog.errors import (
    BrokerError,
    CorruptMessage,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRecord,
    InvalidRequiredAcks,
    InvalidTopicException,
    KafkaStorageError,
    MessageTooLarge,
    NotEnoughReplicas,
    OutOfOrderSequenceNumber,
    RecordListTooLarge,
    TransactionalIdAuthorizationFailed,
    UnknownTopicId,
    UnsupportedCompressionType,
)
from oncelog.log.partition import Appended, Partition
from oncelog.rules.security.authorization import ResourceType
from oncelog.types import Compression, Origin, TopicPartition
from oncelog.wire.batch import read_header
from oncelog.wire.messages import ProduceRequest, ProduceResponse
from oncelog.wire.primitives import Buffer

KEY = 0
FIRST_ZSTD_VERSION = 7
STEP_COST = 50_000
"""A step ends once its decompression and parsing have cost this much. The unit is the cost of a record; bytes
are converted to it.

A request of 10 KB may have 60 batches that expand to 150,000 records each, so its batches are appended in
several steps. They are not refused, because a producer with acks=0 or without retries would lose their
records. See test_a_request_of_many_batches_that_are_opened_is_carried_out_in_steps.
"""
PARTITION_COST = STEP_COST // 1_000
"""Cost of each partition: 1,000 small batches take 15 ms. See
test_a_request_of_many_partitions_is_carried_out_in_steps.
"""
PARTITION_BYTES = 350
"""Memory of a partition's request and result while later steps are carried out, in bytes: 340 were measured.
"""
TOPIC_BYTES = 180
"""Memory of a topic in such a request, in bytes: 170 were measured."""
SEGMENT_COST = STEP_COST // 4
"""Cost of a new segment, which creates files and may sync a directory.

The partitions of a topic begin new segments at the same time (segment.ms). See
test_a_request_that_begins_many_segments_is_carried_out_in_steps.
"""

_SIZE = struct.Struct(">i")
_LENGTH_POSITION, _MAGIC_POSITION, _ATTRIBUTES_POSITION = 8, 16, 22
_SIZE_OVERHEAD, _MIN_BATCH_BYTES = 12, 61
_TRANSACTIONAL_BIT, _CODEC_BITS = 0x10, 0x07

_WITHOUT_LOG_START = (CorruptMessage, MessageTooLarge, RecordListTooLarge, KafkaStorageError)
"""Errors of the log. A result with one of them has -1 instead of the log start offset."""

_PartitionData = ProduceRequest.PartitionProduceData
_PartitionResult = ProduceResponse.PartitionProduceResponse


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    work = _Produce(state, request, request.message, now_ms)
    answer: Answer = respond_in_steps(state.slots, work.run(), keep_request=work.keep_request)
    return answer


def _name_topic(state: BrokerState, requested: ProduceRequest.TopicProduceData) -> None:
    """Set the name of a topic from its id; an unknown id gets an empty name."""
    topic = state.topics.by_id(requested.topic_id)
    requested.name = "" if topic is None else topic.name


def records_bytes(message: ProduceRequest) -> int:
    """Return the size of all records of the request in bytes."""
    return sum(len(data.records or b"") for topic in message.topic_data for data in topic.partition_data)


def _keep_records(message: ProduceRequest) -> int:
    """Copy the records of the request, because the server reuses the receive buffer. Return the memory in
    bytes that the request needs until its response is ready.
    """
    size_bytes = 0
    for topic in message.topic_data:
        # A request may have 100,000 partitions without records, or topics without partitions. See
        # test_the_partitions_of_waiting_requests_count_as_memory.
        size_bytes += TOPIC_BYTES + PARTITION_BYTES * len(topic.partition_data)
        for data in topic.partition_data:
            if data.records is not None:
                data.records = bytearray(data.records)
                size_bytes += len(data.records)
    return size_bytes


class _Produce:
    """The state of a Produce request while its batches are appended."""

    __slots__ = (
        "first_error",
        "is_continued",
        "message",
        "now_ms",
        "pending",
        "request",
        "response",
        "state",
        "step_cost",
        "verification",
        "waiting"
    )  # fmt: skip

    def __init__(self, state: BrokerState, request: Request, message: ProduceRequest, now_ms: int) -> None:
        self.state, self.request, self.message, self.now_ms = state, request, message, now_ms
        self.waiting = self.step_cost = 0
        self.is_continued = False
        """True from the second step on. Other requests may have run since the checks of the first step."""
        self.verification: TransactionVerification | None = None
        self.first_error: str | None = None
        """The text of the first error. The error itself has a traceback that refers to this object: see
        test_a_refused_request_leaves_no_reference_cycle.
        """
        self.pending: PendingResponse | None = None
        self.response: ProduceResponse | None = None

    def run(self) -> Work[Answer]:
        """Verify the request, append its batches, and return the response, or a PendingResponse."""
        state, message = self.state, self.message
        if self.request.header.api_version >= FIRST_ID_VERSION:
            for topic in message.topic_data:
                _name_topic(state, topic)
        is_transactional = any(
            _is_transactional(data.records) for topic in message.topic_data for data in topic.partition_data
        )
        lacks_id = is_transactional and message.transactional_id is None
        if message.transactional_id is not None:
            if is_transactional and not self.request.is_authorized(
                ResourceType.TRANSACTIONAL_ID, message.transactional_id
            ):
                return (yield from self._refuse_all(TransactionalIdAuthorizationFailed()))
            try:
                verification = self.verification = yield from verify_produce(state, self.request, self.now_ms)
            except InvalidProducerIdMapping as error:
                return (yield from self._refuse_all(error))
            self.is_continued = verification.took_steps
            if verification.awaits_durability:
                later = verification.resume_when_durable(
                    lambda: handle(state, self.request, self.now_ms), self.refuse
                )
                later.request_bytes = _keep_records(message)
                return later
        return (yield from self._answer_all(lambda topic, data: self.partition(topic, data, lacks_id)))

    def partition(self, topic: str, data: _PartitionData, lacks_id: bool) -> _PartitionResult:
        result = _PartitionResult(index=data.index, base_offset=-1)
        tp = TopicPartition(topic, data.index)
        try:
            if lacks_id:
                raise TransactionalIdAuthorizationFailed("transactional batches need a transactional id")
            self._append(tp, data.records, result)
        except BrokerError as error:
            self._refuse(tp, data.records, result, error)
        return result

    def _append(self, tp: TopicPartition, records: Buffer | None, result: _PartitionResult) -> None:
        if not tp.topic and self.request.header.api_version >= FIRST_ID_VERSION:
            raise UnknownTopicId()
        self.request.authorize(ResourceType.TOPIC, tp.topic)
        topic, partition = self.state.topics.partition(tp)
        batch = only_batch(records, self.request.header.api_version)
        if self.message.acks not in (-1, 0, 1):
            raise InvalidRequiredAcks(f"acks={self.message.acks}")
        if topic.is_internal:
            raise InvalidTopicException(f"{tp.topic} is an internal topic; clients cannot write to it")
        if self.message.acks == -1 and topic.min_insync_replicas > 1:
            raise NotEnoughReplicas(
                f"min.insync.replicas of {tp.topic} is {topic.min_insync_replicas}, but a "
                "single broker has 1 replica; set it to 1"
            )
        begins_epoch = False
        if self.verification is not None and _is_transactional(batch):
            self.verification.check(tp, is_continued=self.is_continued)
            if self.is_continued and self.verification.was_open(tp):
                check_still_open(partition, batch)
            begins_epoch = self.verification.begins_epoch(tp)
        # Set the log start offset before the append, because the result of a refused batch also contains it.
        result.log_start_offset = partition.log_start_offset
        opened_before, segment = partition.opened_cost, partition.log.segments.active
        try:
            appended = partition.append(
                batch,
                origin=Origin.CLIENT,
                now_ms=self.now_ms,
                begins_epoch=begins_epoch,
                lead_ms=self.state.clock_lead_ms,
            )
        finally:
            cost = partition.opened_cost - opened_before
            if partition.log.segments.active is not segment:
                cost += SEGMENT_COST
            self.step_cost += cost
            self.state.round_meter.add(cost)
        put_append(result, appended)
        self._count(partition, batch, appended)
        self._wait_for_disk(partition, topic.flush_messages, appended, result)

    def _count(self, partition: Partition, batch: memoryview, appended: Appended) -> None:
        count_append(self.state, appended)
        if not appended.is_duplicate:
            self.state.note_stored(partition, len(batch))
        if self.state.on_append is not None:
            verdict: Verdict = "duplicate" if appended.is_duplicate else "stored"
            self._report(partition.topic_partition, batch, verdict, appended.base_offset, None)

    def _wait_for_disk(
        self, partition: Partition, flush_messages: int, appended: Appended, result: _PartitionResult
    ) -> None:
        if partition.unflushed_record_count < flush_messages:
            return
        # Only a duplicate can be below the recovery point. A duplicate of a batch that is not synced yet
        # waits for the flush, like the batch itself.
        if appended.last_offset < partition.recovery_point:
            return
        self.waiting += 1

        def on_flushed(error: Exception | None) -> None:
            if error is not None:
                result.error_code, result.base_offset = KafkaStorageError.code, -1
                result.error_message = f"the batch could not be flushed: {error}"
            self._on_waiter_done()

        self.state.flush_queue.add(partition, FlushWaiter(appended.last_offset, on_flushed))

    def _on_waiter_done(self) -> None:
        self.waiting -= 1
        if not self.waiting and self.pending is not None:
            self.pending.resolve(self.response)

    def _refuse(
        self,
        tp: TopicPartition,
        records: Buffer | None,
        result: _PartitionResult,
        error: BrokerError,
    ) -> None:
        put_refusal(self.state, result, error)
        if self.first_error is None:
            self.first_error = str(error)
        if self.state.on_append is not None:
            self._report(tp, records, "refused", None, error)

    def _report(
        self,
        tp: TopicPartition,
        records: Buffer | None,
        verdict: Verdict,
        base_offset: int | None,
        error: BrokerError | None,
    ) -> None:
        assert self.state.on_append is not None
        try:
            header = read_header(records) if records else None
        except Exception:
            # A refused batch may have an unreadable header. Its event then has no producer fields.
            header = None
        self.state.on_append(
            AppendEvent(
                time_ms=self.now_ms,
                connection_id=self.request.connection_id,
                client_id=self.request.header.client_id,
                topic=tp.topic,
                partition=tp.partition,
                verdict=verdict,
                producer_id=header.producer_id if header else None,
                producer_epoch=header.producer_epoch if header else None,
                base_sequence=header.base_sequence if header else None,
                last_sequence=header.last_sequence if header else None,
                record_count=header.records_count if header else 0,
                base_offset=base_offset,
                error_code=error.code if error else 0,
                reason=str(error) if error else "",
            )
        )

    def refuse(self, error: BrokerError) -> Answer:
        """Refuse every batch of the request."""
        answer: Answer = respond_in_steps(
            self.state.slots, self._refuse_all(error), keep_request=self.keep_request
        )
        return answer

    def _refuse_all(self, error: BrokerError) -> Work[Answer]:
        def refused(topic: str, data: _PartitionData) -> _PartitionResult:
            result = _PartitionResult(index=data.index, base_offset=-1)
            self._refuse(TopicPartition(topic, data.index), data.records, result, error)
            return result

        return self._answer_all(refused)

    def keep_request(self, pending: PendingResponse) -> None:
        """Copy the records for the later steps."""
        pending.request_bytes = _keep_records(self.message)
        # A producer with acks=0 may close its connection right after its last request. Store the batches
        # anyway.
        pending.outlives_client = self.message.acks == 0

    def _answer_all(self, result_of: Callable[[str, _PartitionData], _PartitionResult]) -> Work[Answer]:
        response = ProduceResponse(responses=[])
        has_ids = self.request.header.api_version >= FIRST_ID_VERSION
        for topic in self.message.topic_data:
            results: list[_PartitionResult] = []
            for data in topic.partition_data:
                if self.step_cost >= STEP_COST:
                    self.step_cost = 0
                    yield None
                    self.is_continued = True
                if self.is_continued and has_ids:
                    # Look the name up again: the topic may have been deleted since the first step, and a new
                    # topic may have its name.
                    _name_topic(self.state, topic)
                self.step_cost += PARTITION_COST
                # Without this count, a round could have 64 requests that each almost fill a step. See
                # test_a_produce_request_for_many_partitions_ends_its_round.
                self.state.round_meter.add(ELEMENT_RECORDS)
                results.append(result_of(topic.name, data))
                data.records = None
            if results:
                response.responses.append(
                    ProduceResponse.TopicProduceResponse(
                        name=topic.name, topic_id=topic.topic_id, partition_responses=results
                    )
                )
        if self.message.acks == 0:
            if self.first_error is not None:
                return Disconnect(f"a Produce with acks=0 failed: {self.first_error}")
            return None
        if not self.waiting:
            return response
        self.response = response
        self.pending = PendingResponse(blocks_pipeline=False)
        return self.pending


def count_append(state: BrokerState, appended: Appended) -> None:
    """Count an append in the metrics."""
    metrics = state.metrics
    if appended.is_duplicate:
        metrics.duplicates_acknowledged += 1
    else:
        metrics.batches_stored += 1
        metrics.records_stored += appended.last_offset - appended.base_offset + 1


def put_append(result: _PartitionResult, appended: Appended) -> None:
    """Set the result of a batch that was stored or is a duplicate."""
    result.base_offset, result.log_start_offset = appended.base_offset, appended.log_start_offset
    if appended.log_append_time_ms is not None:
        result.log_append_time_ms = appended.log_append_time_ms


def put_refusal(state: BrokerState, result: _PartitionResult, error: BrokerError) -> None:
    """Set the result of a refused batch, and count it in the metrics."""
    result.error_code, result.error_message = error.code, error.message
    if isinstance(error, _WITHOUT_LOG_START):
        result.log_start_offset = -1
    result.record_errors = [
        ProduceResponse.BatchIndexAndErrorMessage(batch_index=index, batch_index_error_message=text)
        for index, text in getattr(error, "record_errors", ())
    ]
    metrics = state.metrics
    metrics.append_errors[error.kafka_name] += 1
    if isinstance(error, OutOfOrderSequenceNumber):
        metrics.out_of_order_refused += 1
    elif isinstance(error, InvalidProducerEpoch):
        metrics.fenced_refused += 1


def only_batch(records: Buffer | None, version: int) -> memoryview:
    """Return the only batch of a partition's records, without trailing garbage.

    Raises InvalidRecord (no batch, several batches, truncated batch, old format), CorruptMessage (unknown
    magic, length below the minimum) and UnsupportedCompressionType (zstd before version 7).
    """
    if not records or len(records) < _SIZE_OVERHEAD:
        raise InvalidRecord("a Produce request needs one record batch for each of its partitions")
    size_bytes = _size_at(records, 0)
    if size_bytes > len(records) or len(records) <= _ATTRIBUTES_POSITION:
        # As in Kafka, a truncated batch gets INVALID_RECORD. With CORRUPT_MESSAGE the client would retry it.
        raise InvalidRecord(
            f"the batch length field says {size_bytes} bytes, but the request contains {len(records)}"
        )
    if records[_MAGIC_POSITION] > 2:
        raise CorruptMessage(f"magic {records[_MAGIC_POSITION]} is not a record format; use magic 2")
    if records[_MAGIC_POSITION] != 2:
        raise InvalidRecord(f"record format {records[_MAGIC_POSITION]} is not supported; use magic 2")
    if size_bytes < _MIN_BATCH_BYTES:
        raise CorruptMessage(
            f"a record batch needs at least {_MIN_BATCH_BYTES} bytes, but this one has {size_bytes}"
        )
    rest = len(records) - size_bytes
    if rest >= _SIZE_OVERHEAD and _size_at(records, size_bytes) <= rest:
        raise InvalidRecord("a Produce request must hold exactly one record batch for each partition")
    if version < FIRST_ZSTD_VERSION and records[_ATTRIBUTES_POSITION] & _CODEC_BITS == Compression.ZSTD:
        raise UnsupportedCompressionType(f"zstd needs Produce version {FIRST_ZSTD_VERSION} or later")
    return memoryview(records)[:size_bytes]


def _size_at(records: Buffer, position: int) -> int:
    size_bytes = int(_SIZE.unpack_from(records, position + _LENGTH_POSITION)[0]) + _SIZE_OVERHEAD
    if size_bytes < _SIZE_OVERHEAD + 14:
        raise CorruptMessage(f"a batch length of {size_bytes - _SIZE_OVERHEAD} is below the minimum")
    return size_bytes


def _is_transactional(records: Buffer | None) -> bool:
    return (
        records is not None
        and len(records) > _ATTRIBUTES_POSITION
        and records[_MAGIC_POSITION] == 2
        and bool(records[_ATTRIBUTES_POSITION] & _TRANSACTIONAL_BIT)
    )
