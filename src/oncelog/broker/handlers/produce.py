"""Produce (key 0): advertised 0-13, served 3-13.

0 is advertised because librdkafka before 2.11.1 drops compression otherwise (KAFKA-18659). Version 13
names topics by id; an unknown id is 100.

Checks in order: transactional batches without a transactional id 53 (whole request), topic 3, exactly one
batch of magic 2 87, zstd before v7 76, acks 21, the broker's own topics 17, min.insync.replicas above one 19,
transactional batches outside of a transaction (see `broker.coordinators.transaction_verification`); the log
does the rest. acks=0: no response; an error ends the connection. With flush.messages=1 the answer waits for
the disk, and before that a first batch of a transaction until it is on disk that its partition belongs to it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from oncelog.broker.append_events import AppendEvent, Verdict
from oncelog.broker.coordinators.transaction_verification import Admission, admit_produce, check_still_open
from oncelog.broker.group_commit import FlushWaiter
from oncelog.broker.purgatory import Disconnect, PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, answer_in_steps
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
FIRST_ZSTD_VERSION, FIRST_ID_VERSION = 7, 13
STEP_COST = 50_000
"""Records, and bytes at the cost of records, that are opened before others have their turn.

A request of 10 KB may hold 60 batches that become 150,000 records each. None of them is refused for that:
with acks=0, or without retries, its records would be lost.
See test_a_request_of_many_batches_that_are_opened_is_carried_out_in_steps.
"""

_SIZE = struct.Struct(">i")
_LENGTH_POSITION, _MAGIC_POSITION, _ATTRIBUTES_POSITION = 8, 16, 22
_SIZE_OVERHEAD, _LEAST_SIZE = 12, 61
_TRANSACTIONAL_BIT, _CODEC_BITS = 0x10, 0x07

_WITHOUT_LOG_START = (CorruptMessage, MessageTooLarge, RecordListTooLarge, KafkaStorageError)
"""Refusals of the log that do not tell where it starts."""

_PartitionData = ProduceRequest.PartitionProduceData
_PartitionResult = ProduceResponse.PartitionProduceResponse


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: ProduceRequest = request.message
    if request.header.api_version >= FIRST_ID_VERSION:
        _name_topics(state, message)
    work = _Produce(state, request, message, now_ms)
    is_transactional = any(
        _is_transactional(part.records) for topic in message.topic_data for part in topic.partition_data
    )
    lacks_id = is_transactional and message.transactional_id is None
    if message.transactional_id is not None:
        if is_transactional and not request.is_authorized(
            ResourceType.TRANSACTIONAL_ID, message.transactional_id
        ):
            return work.refuse(TransactionalIdAuthorizationFailed())
        try:
            admission = work.admission = admit_produce(state, request, now_ms)
        except InvalidProducerIdMapping as error:
            return work.refuse(error)
        if admission.is_early:
            later = admission.later(lambda: handle(state, request, now_ms), work.refuse)
            later.request_bytes = _keep_records(message)
            return later
    return work.answer(lambda topic, part: work.partition(topic, part, lacks_id))


def _name_topics(state: BrokerState, message: ProduceRequest) -> None:
    """Fill in the names of topics that the request names by id; those of unknown ids stay empty."""
    for requested in message.topic_data:
        topic = state.topics.by_id(requested.topic_id)
        requested.name = "" if topic is None else topic.name


def _keep_records(message: ProduceRequest) -> int:
    """Copy the records, and return their size: the buffer that they are views of is used again before."""
    size_bytes = 0
    for topic in message.topic_data:
        for part in topic.partition_data:
            if part.records is not None:
                part.records = bytearray(part.records)
                size_bytes += len(part.records)
    return size_bytes


class _Produce:
    """One request under way: what was appended, what still waits for the disk."""

    __slots__ = (
        "admission",
        "first_error",
        "is_continued",
        "message",
        "now_ms",
        "opened_cost",
        "pending",
        "request",
        "response",
        "state",
        "waiting"
    )  # fmt: skip

    def __init__(self, state: BrokerState, request: Request, message: ProduceRequest, now_ms: int) -> None:
        self.state, self.request, self.message, self.now_ms = state, request, message, now_ms
        self.waiting = self.opened_cost = 0
        self.is_continued = False
        """True from the second step on: others may have changed what was so at the first."""
        self.admission: Admission | None = None
        self.first_error: BrokerError | None = None
        self.pending: PendingResponse | None = None
        self.response: ProduceResponse | None = None

    def partition(self, topic: str, part: _PartitionData, lacks_id: bool) -> _PartitionResult:
        result = _PartitionResult(index=part.index, base_offset=-1)
        at = TopicPartition(topic, part.index)
        try:
            if lacks_id:
                raise TransactionalIdAuthorizationFailed("transactional batches need a transactional id")
            self._append(at, part.records, result)
        except BrokerError as error:
            self._refuse(at, part.records, result, error)
        return result

    def _append(self, at: TopicPartition, records: Buffer | None, result: _PartitionResult) -> None:
        if not at.topic and self.request.header.api_version >= FIRST_ID_VERSION:
            raise UnknownTopicId()
        self.request.authorize(ResourceType.TOPIC, at.topic)
        topic, partition = self.state.topics.partition(at)
        batch = only_batch(records, self.request.header.api_version)
        if self.message.acks not in (-1, 0, 1):
            raise InvalidRequiredAcks(f"acks={self.message.acks}")
        if topic.is_internal:
            raise InvalidTopicException(f"{at.topic} is the broker's own; clients may not write to it")
        if self.message.acks == -1 and topic.min_insync_replicas > 1:
            raise NotEnoughReplicas(
                f"min.insync.replicas of {at.topic} is {topic.min_insync_replicas}; a single node can give 1"
            )
        begins_epoch = False
        if self.admission is not None and _is_transactional(batch):
            self.admission.check(at, is_continued=self.is_continued)
            if self.is_continued and self.admission.was_open(at):
                check_still_open(partition, batch)
            begins_epoch = self.admission.begins_epoch(at)
        result.log_start_offset = partition.log_start_offset  # told with a refusal as well
        opened_before = partition.opened_cost
        try:
            appended = partition.append(
                batch, origin=Origin.CLIENT, now_ms=self.now_ms, begins_epoch=begins_epoch
            )
        finally:
            cost = partition.opened_cost - opened_before
            self.opened_cost += cost
            self.state.opened_cost += cost
        put_append(result, appended)
        self._count(partition, batch, appended)
        self._wait_for_disk(partition, topic.flush_messages, appended, result)

    def _count(self, partition: Partition, batch: memoryview, appended: Appended) -> None:
        count_append(self.state, appended)
        if not appended.is_duplicate:
            self.state.note_stored(partition, len(batch))
        if self.state.on_append is not None:
            verdict: Verdict = "duplicate" if appended.is_duplicate else "stored"
            self._tell(partition.topic_partition, batch, verdict, appended.base_offset, None)

    def _wait_for_disk(
        self, partition: Partition, flush_messages: int, appended: Appended, result: _PartitionResult
    ) -> None:
        if partition.unflushed_record_count < flush_messages:
            return
        # A retry of a batch that is not on disk yet waits as the batch itself does.
        if appended.last_offset < partition.recovery_point:
            return
        self.waiting += 1

        def on_flushed(error: Exception | None) -> None:
            if error is not None:
                result.error_code, result.base_offset = KafkaStorageError.code, -1
                result.error_message = f"the batch could not be flushed: {error}"
            self._waited()

        self.state.flush_queue.add(partition, FlushWaiter(appended.last_offset, on_flushed))

    def _waited(self) -> None:
        self.waiting -= 1
        if not self.waiting and self.pending is not None:
            self.pending.resolve(self.response)

    def _refuse(
        self,
        at: TopicPartition,
        records: Buffer | None,
        result: _PartitionResult,
        error: BrokerError,
    ) -> None:
        put_refusal(self.state, result, error)
        self.first_error = self.first_error or error
        if self.state.on_append is not None:
            self._tell(at, records, "refused", None, error)

    def _tell(
        self,
        at: TopicPartition,
        records: Buffer | None,
        verdict: Verdict,
        base_offset: int | None,
        error: BrokerError | None,
    ) -> None:
        assert self.state.on_append is not None
        try:
            header = read_header(records) if records else None
        except Exception:
            header = None  # a refused batch may be anything; its event then has no producer fields
        self.state.on_append(
            AppendEvent(
                time_ms=self.now_ms,
                connection_id=self.request.connection_id,
                client_id=self.request.header.client_id,
                topic=at.topic,
                partition=at.partition,
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
        """Nothing of the request is stored."""

        def refused(topic: str, part: _PartitionData) -> _PartitionResult:
            result = _PartitionResult(index=part.index, base_offset=-1)
            self._refuse(TopicPartition(topic, part.index), part.records, result, error)
            return result

        return self.answer(refused)

    def answer(self, result_of: Callable[[str, _PartitionData], _PartitionResult]) -> Answer:
        """What each partition has to say, once it may be said."""
        answer: Answer = answer_in_steps(
            self.state.slots, self._answer_all(result_of), keep_request=self._keep_request
        )
        return answer

    def _keep_request(self, pending: PendingResponse) -> None:
        pending.request_bytes = _keep_records(self.message)
        # A producer with acks=0 may close as soon as the system has taken its last request.
        pending.outlives_client = self.message.acks == 0

    def _answer_all(
        self, result_of: Callable[[str, _PartitionData], _PartitionResult]
    ) -> Work[ProduceResponse | Disconnect | PendingResponse | None]:
        response = ProduceResponse(responses=[])
        for topic in self.message.topic_data:
            results: list[_PartitionResult] = []
            for part in topic.partition_data:
                if self.opened_cost >= STEP_COST:
                    self.opened_cost = 0
                    yield None
                    self.is_continued = True
                    if self.request.header.api_version >= FIRST_ID_VERSION:
                        # A topic may have gone, and its name be that of another one.
                        _name_topics(self.state, self.message)
                results.append(result_of(topic.name, part))
                part.records = None
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
    """Where the batch stands."""
    result.base_offset, result.log_start_offset = appended.base_offset, appended.log_start_offset
    if appended.log_append_time_ms is not None:
        result.log_append_time_ms = appended.log_append_time_ms


def put_refusal(state: BrokerState, result: _PartitionResult, error: BrokerError) -> None:
    """An append was refused: the answer's fields, and the metrics."""
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
    """The one batch a partition's records must be, without trailing garbage.

    Raises InvalidRecord (none, several, old format), CorruptMessage, UnsupportedCompressionType.
    """
    if not records or len(records) < _SIZE_OVERHEAD:
        raise InvalidRecord("a Produce request needs one record batch for every partition it names")
    size_bytes = _size_at(records, 0)
    if size_bytes > len(records) or len(records) <= _ATTRIBUTES_POSITION:
        # Not CORRUPT_MESSAGE, which clients retry: Kafka sees no batch in a truncated one.
        raise InvalidRecord(f"the batch claims {size_bytes} bytes, the request holds {len(records)}")
    if records[_MAGIC_POSITION] > 2:
        raise CorruptMessage(f"magic {records[_MAGIC_POSITION]} is that of no record format")
    if records[_MAGIC_POSITION] != 2:
        raise InvalidRecord(f"record format {records[_MAGIC_POSITION]} is not served; use magic 2")
    if size_bytes < _LEAST_SIZE:
        raise CorruptMessage(f"a record batch has at least {_LEAST_SIZE} bytes, this one {size_bytes}")
    rest = len(records) - size_bytes
    if rest >= _SIZE_OVERHEAD and _size_at(records, size_bytes) <= rest:
        raise InvalidRecord("a Produce request must hold exactly one record batch for each partition")
    if version < FIRST_ZSTD_VERSION and records[_ATTRIBUTES_POSITION] & _CODEC_BITS == Compression.ZSTD:
        raise UnsupportedCompressionType(f"zstd needs Produce version {FIRST_ZSTD_VERSION} or higher")
    return memoryview(records)[:size_bytes]


def _size_at(records: Buffer, position: int) -> int:
    size_bytes = int(_SIZE.unpack_from(records, position + _LENGTH_POSITION)[0]) + _SIZE_OVERHEAD
    if size_bytes < _SIZE_OVERHEAD + 14:
        raise CorruptMessage(f"a batch length of {size_bytes - _SIZE_OVERHEAD} is below the least possible")
    return size_bytes


def _is_transactional(records: Buffer | None) -> bool:
    return (
        records is not None
        and len(records) > _ATTRIBUTES_POSITION
        and records[_MAGIC_POSITION] == 2
        and bool(records[_ATTRIBUTES_POSITION] & _TRANSACTIONAL_BIT)
    )
