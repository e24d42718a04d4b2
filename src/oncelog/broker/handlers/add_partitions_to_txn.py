"""AddPartitionsToTxn (key 24), versions 0-5: add partitions to a transaction.

Clients use versions up to 3, with one transaction per request. Brokers use version 4 and later (KIP-890),
with several transactions per request. With verify_only, the coordinator only checks that the partitions are
in the transaction. If a partition does not exist or the client may not write to it, none is added: that
partition gets the error, and the others get OPERATION_NOT_ATTEMPTED. Versions 0 and 1 get
INVALID_PRODUCER_EPOCH instead of PRODUCER_FENCED. Source: Kafka's KafkaApis.handleAddPartitionsToTxnRequest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from oncelog.broker.coordinators.internal_topic import AppendHandle, respond_when_durable
from oncelog.broker.handlers.transactional import code_for
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, name_cost, respond_in_steps
from oncelog.errors import (
    BrokerError,
    ClusterAuthorizationFailed,
    InvalidRequest,
    OperationNotAttempted,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
    UnknownTopicOrPartition,
)
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.security.authorization import ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import AddPartitionsToTxnRequest, AddPartitionsToTxnResponse

KEY = 24
FIRST_FENCED_VERSION, FIRST_BATCHED_VERSION = 2, 4

_Topics = Iterable[AddPartitionsToTxnRequest.AddPartitionsToTxnTopic]
_Result = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
_Partition = AddPartitionsToTxnResponse.AddPartitionsToTxnPartitionResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _add_all(state, request, now_ms))
    return answer


def _add_all(state: BrokerState, request: Request, now_ms: int) -> Work[Answer]:
    message: AddPartitionsToTxnRequest = request.message
    version = request.header.api_version
    work = _PartitionAdder(state, request, now_ms)
    if version >= FIRST_BATCHED_VERSION and not request.is_authorized(ResourceType.CLUSTER):
        return AddPartitionsToTxnResponse(error_code=ClusterAuthorizationFailed.code)
    if version >= FIRST_BATCHED_VERSION:
        answer = AddPartitionsToTxnResponse(results_by_transaction=[])
        for transaction in message.transactions:
            results = yield from work.results(
                transaction.transactional_id,
                ProducerIdAndEpoch(transaction.producer_id, transaction.producer_epoch),
                transaction.topics,
                verify_only=transaction.verify_only,
            )
            answer.results_by_transaction.append(
                AddPartitionsToTxnResponse.AddPartitionsToTxnResult(
                    transactional_id=transaction.transactional_id, topic_results=results
                )
            )
    else:
        producer = ProducerIdAndEpoch(message.v3_and_below_producer_id, message.v3_and_below_producer_epoch)
        results = yield from work.results(
            message.v3_and_below_transactional_id, producer, message.v3_and_below_topics
        )
        answer = AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results)
    return respond_when_durable(
        state.flush_queue, work.written, answer, lambda error: _refuse_all(answer, error)
    )


class _PartitionAdder:
    """The work of one request: it adds or verifies partitions, and collects the log appends in `written`."""

    def __init__(self, state: BrokerState, request: Request, now_ms: int) -> None:
        version = request.header.api_version
        self.state, self.now_ms, self.request = state, now_ms, request
        self.knows_fenced = version >= FIRST_FENCED_VERSION
        self.is_by_client = version < FIRST_BATCHED_VERSION
        self.written: list[AppendHandle] = []
        self.budget = state.step_budget()

    def results(
        self,
        transactional_id: str,
        producer: ProducerIdAndEpoch,
        topics: _Topics,
        *,
        verify_only: bool = False,
    ) -> Work[list[_Result]]:
        """Add or verify the partitions of one transaction, and return a result for each. Either all of them
        are added or none. With `verify_only`, each partition is verified separately.
        """
        results, bad = [], 0
        partitions: dict[TopicPartition, list[_Partition]] = {}
        for topic in topics:
            rows = [_Partition(partition_index=index) for index in topic.partitions]
            results.append(_Result(name=topic.name, results_by_partition=rows))
            for row in rows:
                tp = TopicPartition(topic.name, row.partition_index)
                row.partition_error_code = self._refusal(tp)
                bad += row.partition_error_code != 0
                partitions.setdefault(tp, []).append(row)
                if self.budget.spend():
                    yield None
        if self.budget.spend(name_cost(transactional_id)):
            yield None
        rows = [row for named in partitions.values() for row in named]
        if self.is_by_client and not self.request.is_authorized(
            ResourceType.TRANSACTIONAL_ID, transactional_id
        ):
            _set_all(rows, TransactionalIdAuthorizationFailed.code)
        elif bad:
            _set_all(
                [row for row in rows if not row.partition_error_code],
                OperationNotAttempted.code,
            )
        elif not transactional_id:
            _set_all(rows, InvalidRequest.code)
        elif verify_only:
            for tp, named in partitions.items():
                _set_all(named, self._verify(transactional_id, producer, tp))
                if self.budget.spend(name_cost(transactional_id)):
                    yield None
        else:
            code, cost = self._add(transactional_id, producer, partitions.keys())
            _set_all(rows, code)
            if not self.is_by_client and self.budget.spend(cost):
                yield None
        return results

    def _refusal(self, tp: TopicPartition) -> int:
        """Return the error code of a partition that cannot be added; 0 if it can be added."""
        if self.is_by_client and not self.request.is_authorized(ResourceType.TOPIC, tp.topic):
            return TopicAuthorizationFailed.code
        topic = self.state.topics.get(tp.topic)
        is_there = topic is not None and 0 <= tp.partition < len(topic.partitions)
        return 0 if is_there else UnknownTopicOrPartition.code

    def _add(
        self, transactional_id: str, producer: ProducerIdAndEpoch, partitions: Collection[TopicPartition]
    ) -> tuple[int, int]:
        """Return the error code and the cost in elements: the number of partitions in the record."""
        try:
            done = self.state.transactions.add_partitions(transactional_id, producer, partitions, self.now_ms)
        except BrokerError as error:
            return code_for(error, knows_fenced=self.knows_fenced), 0
        self.written += done.written
        return 0, len(done.entry.partitions)

    def _verify(self, transactional_id: str, producer: ProducerIdAndEpoch, tp: TopicPartition) -> int:
        try:
            self.state.transactions.verify(transactional_id, producer, tp)
        except BrokerError as error:
            return error.code
        return 0


def _set_all(rows: Iterable[_Partition], code: int) -> None:
    for row in rows:
        row.partition_error_code = code


def _refuse_all(answer: AddPartitionsToTxnResponse, error: BrokerError) -> AddPartitionsToTxnResponse:
    """Set `error` in all partitions without an error, because the record that adds them could not be made
    durable.
    """
    topics = [*answer.results_by_topic_v3_and_below]
    topics += [topic for result in answer.results_by_transaction for topic in result.topic_results]
    for topic in topics:
        for partition in topic.results_by_partition:
            partition.partition_error_code = partition.partition_error_code or error.code
    return answer
