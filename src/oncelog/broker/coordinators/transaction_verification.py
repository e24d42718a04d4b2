"""Verification that a transactional batch belongs to an open transaction before it is stored (KIP-890).

A partition needs no verification if the producer, with this epoch, already has an open transaction there.
Otherwise the request's version matters. Newer versions (Produce 12, TxnOffsetCommit 5) add their partitions
to the transaction. With older versions, the partition must be in the transaction already, if
transaction.partition.verification.enable is set. The coordinator's errors are translated, here with the
versions of Produce:

    PRODUCER_FENCED                              INVALID_PRODUCER_EPOCH
    TRANSACTION_ABORTABLE                        INVALID_TXN_STATE, before Produce 11
    CONCURRENT_TRANSACTIONS                      NOT_ENOUGH_REPLICAS, before Produce 12
    COORDINATOR_*, NOT_COORDINATOR               NOT_ENOUGH_REPLICAS, which clients retry

Source: behaviour T5 (docs/behaviours.md); kafka AddPartitionsToTxnManager, ReplicaManager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from oncelog.broker.coordinators.internal_topic import AppendHandle, is_pending_flush, when_durable
from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.broker.group_commit import FlushQueue
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work
from oncelog.broker.topics.topics import Topic, Topics
from oncelog.errors import (
    BrokerError,
    ConcurrentTransactions,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    NotCoordinator,
    NotEnoughReplicas,
    ProducerFenced,
    TransactionAbortable,
    copy_to_raise,
    without_traceback,
)
from oncelog.log.partition import Partition
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.security.authorization import ResourceType
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.batch import read_header
from oncelog.wire.messages import ProduceRequest

FIRST_ID_VERSION = 13
"""First version of Produce that names topics by id."""


class ClientCapabilities(NamedTuple):
    """The transactional features that depend on a request's version.

    If `adds_partitions`, the request adds its partitions to the transaction. If `supports_abortable_error`,
    the client knows TRANSACTION_ABORTABLE.
    """

    adds_partitions: bool
    supports_abortable_error: bool


class TransactionVerification:
    """The verification of one request's transactional batches.

    The keys of `unverified` are the partitions in which the producer has no open transaction yet; the values
    are their producers. A partition that the client may not write to must not be in `unverified`, because the
    partition would join the transaction before its batch is rejected.

    The coordinator's record adds partitions to the transaction. While `awaits_durability`, that record is not
    durable, so no batch may be stored. Otherwise a power loss could lose the record and keep a batch. Then
    the transaction would never end in the batch's partition, or the outcome of the next transaction would
    apply to the batch. A model found this (docs/model, STORE_EARLY). See
    test_nothing_is_stored_before_it_is_durable_where_it_belongs.
    """

    def __init__(
        self,
        transactional_id: str,
        unverified: Mapping[TopicPartition, ProducerIdAndEpoch],
        capabilities: ClientCapabilities,
        now_ms: int,
        *,
        took_steps: bool = False,
        transactions: TransactionCoordinator,
        flush_queue: FlushQueue,
        settings: Settings,
    ) -> None:
        self.took_steps = took_steps
        """True if other requests may have run since the first batch was read."""
        self._transactional_id, self._now_ms = transactional_id, now_ms
        self._transactions, self._flush_queue, self._settings = transactions, flush_queue, settings
        self._unverified, self._capabilities = unverified, capabilities
        self._refusals: dict[ProducerIdAndEpoch, BrokerError] = {}
        self._written: list[AppendHandle] = []
        if capabilities.adds_partitions:
            self._add()
        elif unverified and settings["transaction.partition.verification.enable"]:
            # Wait for the record of the client's AddPartitionsToTxn: it may not be durable yet, because the
            # client may not have waited for the response. See
            # test_a_partition_that_joined_a_transaction_takes_nothing_before_that_is_durable.
            self._written += transactions.last_append(transactional_id)

    @property
    def awaits_durability(self) -> bool:
        """True while a record of the coordinator for this request is not durable."""
        return is_pending_flush(self._written)

    def resume_when_durable(
        self, again: Callable[[], Answer], refuse: Callable[[BrokerError], Answer]
    ) -> PendingResponse:
        """Return a pending response, which is completed once the records are durable.

        Then `again` handles the request and returns the response. If a flush fails, `refuse` returns the
        response for the error.
        """
        pending = PendingResponse(blocks_pipeline=True)

        def on_durable(error: BrokerError | None) -> None:
            pending.resolve_with(again() if error is None else refuse(self._translated(error)))

        when_durable(self._flush_queue, self._written, on_durable)
        return pending

    def check(self, tp: TopicPartition, *, is_continued: bool = False) -> None:
        """Raise an error if the client's batch for this partition must not be stored.

        `is_continued` is true if other requests may have run since this one began. One of them may have ended
        the transaction. The epoch would not show this, because without KIP-890 the end of a transaction does
        not raise it. See
        test_a_transaction_that_is_committed_between_the_steps_that_began_it_takes_no_more_batches.
        """
        producer = self._unverified.get(tp)
        if producer is None:
            return
        if producer in self._refusals:
            raise copy_to_raise(self._refusals[producer])
        is_verified = self._settings["transaction.partition.verification.enable"]
        if is_continued if self._capabilities.adds_partitions else is_verified:
            try:
                self._transactions.verify(self._transactional_id, producer, tp)
                self._transactions.end_leftovers(producer, (tp,), self._now_ms)
            except BrokerError as error:
                raise self._translated(error) from None

    def was_open(self, tp: TopicPartition) -> bool:
        """Return True if the partition needed no verification when the request began.

        A partition needs no verification if the transaction is open there, or if the partition knows a newer
        epoch.
        """
        return tp not in self._unverified

    def begins_epoch(self, tp: TopicPartition) -> bool:
        """Return True if the batch begins a transaction in the partition, and the producer uses a new epoch
        for each transaction (KIP-890).
        """
        return self._capabilities.adds_partitions and tp in self._unverified

    def _add(self) -> None:
        for producer in set(self._unverified.values()):
            partitions = [tp for tp, owner in self._unverified.items() if owner == producer]
            try:
                transactions = self._transactions
                done = transactions.add_partitions(self._transactional_id, producer, partitions, self._now_ms)
                transactions.end_leftovers(producer, partitions, self._now_ms)
            except BrokerError as error:
                self._refusals[producer] = without_traceback(self._translated(error))
            else:
                self._written += done.written

    def _translated(self, error: BrokerError) -> BrokerError:
        text = str(error)
        if isinstance(error, ProducerFenced):
            return InvalidProducerEpoch(text)
        if isinstance(error, TransactionAbortable) and not self._capabilities.supports_abortable_error:
            return InvalidTxnState(text)
        is_retried_by_older_clients = (
            isinstance(error, ConcurrentTransactions) and not self._capabilities.adds_partitions
        )
        if is_retried_by_older_clients or isinstance(
            error, (CoordinatorNotAvailable, CoordinatorLoadInProgress, NotCoordinator)
        ):
            return NotEnoughReplicas(text)
        return error


def verify_produce(state: BrokerState, request: Request, now_ms: int) -> Work[TransactionVerification]:
    """Return the verification of a Produce request's transactional batches, which are read in steps.

    Raises InvalidProducerIdMapping if the batches are from several producers; none of them may be stored
    then. See test_the_batches_of_a_transaction_are_verified_in_steps.
    """
    version = request.header.api_version
    capabilities = ClientCapabilities(adds_partitions=version >= 12, supports_abortable_error=version >= 11)
    batches: list[_Batch] = []
    budget, took_steps = state.step_budget(), False
    for batch in _transactional_batches(state.topics, request):
        if batch is not None:
            batches.append(batch)
        if budget.spend():
            yield None
            took_steps = True
    if len({producer for _, producer, *_ in batches}) > 1:
        raise InvalidProducerIdMapping(
            "all transactional batches of a request must have the same producer id"
        )
    unverified: dict[TopicPartition, _Batch] = {}
    for batch in batches:
        tp, producer, partition, sequence = batch
        if _needs_verification(partition, producer):
            unverified[tp] = batch
            if sequence is not None:
                partition.begin_verification(*producer, sequence, raises_epoch=capabilities.adds_partitions)
        if budget.spend():
            yield None
            took_steps = True
    if took_steps:
        # A topic that was deleted between two steps must not join the transaction, nor a new topic of its
        # name. See test_a_topic_that_is_made_again_while_its_batches_are_verified_joins_no_transaction.
        unverified = {tp: batch for tp, batch in unverified.items() if _is_live(state.topics, batch)}
    return TransactionVerification(
        request.message.transactional_id or "",
        {tp: producer for tp, (_, producer, _, _) in unverified.items()},
        capabilities,
        now_ms,
        took_steps=took_steps,
        transactions=state.transactions,
        flush_queue=state.flush_queue,
        settings=state.settings,
    )


def _is_live(topics: Topics, batch: _Batch) -> bool:
    tp, _, partition, _ = batch
    topic = topics.get(tp.topic)
    # A new topic with this name may have fewer partitions.
    return topic is not None and partition in topic.partitions[tp.partition : tp.partition + 1]


def _needs_verification(partition: Partition, producer: ProducerIdAndEpoch) -> bool:
    """Return True if the coordinator must first add the partition to the producer's transaction, or confirm
    that it was added.

    Return False if the partition's log already has an open transaction of this producer and epoch, or if the
    log knows a newer epoch. In the second case the append rejects the batch. As in Kafka, a rejected batch
    must not add its partition to the transaction.
    """
    return not partition.has_open_transaction(*producer) and not knows_newer_epoch(partition, producer)


def check_still_open(partition: Partition, batch: memoryview) -> None:
    """Raise InvalidTxnState if the transaction of an already verified batch has ended.

    If the batch were stored after the marker, it would begin a transaction that never ends. If the end has
    raised the epoch, this raises nothing, because the append rejects the batch.
    """
    header = read_header(batch)
    if header.producer_id is None or header.producer_epoch is None:
        return
    if _needs_verification(partition, ProducerIdAndEpoch(header.producer_id, header.producer_epoch)):
        raise InvalidTxnState(
            f"the transaction has ended in {partition.topic_partition} since the batch was verified"
        )


def knows_newer_epoch(partition: Partition, producer: ProducerIdAndEpoch) -> bool:
    """Return True if the partition has seen a newer epoch of this producer."""
    state = partition.producer(producer.producer_id)
    return (
        state is not None
        and state.producer_epoch is not None
        and state.producer_epoch > producer.producer_epoch
    )


_Batch = tuple[TopicPartition, ProducerIdAndEpoch, Partition, int | None]
"""(partition's name, producer, partition, base sequence)"""


def _transactional_batches(topics: Topics, request: Request) -> Iterator[_Batch | None]:
    """Yield the transactional batch of each partition, or None for a topic, and for a partition without one.

    Topics that the client may not write to are left out. The request is refused for these topics, so their
    partitions must not join the transaction. See
    test_a_producer_that_may_not_add_a_partition_may_not_write_either.
    """
    message: ProduceRequest = request.message
    has_ids = request.header.api_version >= FIRST_ID_VERSION
    for topic in message.topic_data:
        yield None
        may_write = request.is_authorized(ResourceType.TOPIC, topic.name)
        existing = topics.get(topic.name) if may_write else None
        if existing is not None and has_ids and existing.topic_id != topic.topic_id:
            existing = None  # a new topic has the name since an earlier step
        for part in topic.partition_data:
            yield None if existing is None else _transactional_batch(existing, part)


def _transactional_batch(topic: Topic, part: ProduceRequest.PartitionProduceData) -> _Batch | None:
    if not 0 <= part.index < len(topic.partitions) or not part.records:
        return None
    try:
        header = read_header(part.records)
    except BrokerError:
        # The header cannot be read, so the append rejects this batch. It needs no verification.
        return None
    if not header.is_transactional or header.producer_id is None or header.producer_epoch is None:
        return None
    producer = ProducerIdAndEpoch(header.producer_id, header.producer_epoch)
    partition = topic.partitions[part.index]
    return TopicPartition(topic.name, part.index), producer, partition, header.base_sequence
