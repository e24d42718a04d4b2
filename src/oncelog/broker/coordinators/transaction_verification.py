"""May transactional batches be stored in a partition? Asked of the transaction coordinator.

A partition where this epoch of the producer has a transaction open already needs no question. Else newer
requests (Produce 12, TxnOffsetCommit 5) make their partitions part of the transaction themselves (KIP-890);
with older ones they must be part of it (transaction.partition.verification.enable). What the coordinator
refuses is translated for Produce:

    PRODUCER_FENCED                              INVALID_PRODUCER_EPOCH
    TRANSACTION_ABORTABLE                        INVALID_TXN_STATE where clients do not know it
    CONCURRENT_TRANSACTIONS                      NOT_ENOUGH_REPLICAS, retried, for older requests
    COORDINATOR_*, NOT_COORDINATOR               NOT_ENOUGH_REPLICAS, retried
Source: row T5; Kafka's AddPartitionsToTxnManager, ReplicaManager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from oncelog.broker.coordinators.internal_topic import Written, must_wait, when_durable
from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.broker.group_commit import FlushQueue
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.topics.topics import Topics
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
)
from oncelog.log.partition import Partition
from oncelog.rules.idempotence.sequencer import Identity
from oncelog.rules.security.authorization import ResourceType
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.batch import read_header
from oncelog.wire.messages import ProduceRequest


class Dialect(NamedTuple):
    """What a version of a request means here. `adds`: its partitions join the transaction by it."""

    adds: bool
    knows_abortable: bool


class Admission:
    """One request's batches. `outside`: partitions where their producer has no transaction open yet.

    `is_early`: it is not durable yet that they are part of the transaction, so nothing may be stored. Stored
    before, a batch could survive a power loss that the coordinator's record does not: a transaction that
    nobody ends, or the next one ends with its own (docs/model, STORE_EARLY).
    """

    def __init__(
        self,
        transactional_id: str,
        outside: Mapping[TopicPartition, Identity],
        dialect: Dialect,
        now_ms: int,
        *,
        transactions: TransactionCoordinator,
        flush_queue: FlushQueue,
        settings: Settings,
    ) -> None:
        self._transactional_id, self._now_ms = transactional_id, now_ms
        self._transactions, self._flush_queue, self._settings = transactions, flush_queue, settings
        self._outside, self._dialect = outside, dialect
        self._refusals: dict[Identity, BrokerError] = {}
        self._written: list[Written] = []
        if dialect.adds:
            self._add()
        elif outside and settings["transaction.partition.verification.enable"]:
            # An answer of AddPartitionsToTxn was not waited for, or said that the disk failed.
            # See test_a_partition_that_joined_a_transaction_takes_nothing_before_that_is_durable.
            self._written += transactions.newest(transactional_id)

    @property
    def is_early(self) -> bool:
        return must_wait(self._written)

    def later(self, again: Callable[[], Answer], refuse: Callable[[BrokerError], Answer]) -> PendingResponse:
        """The answer to an early request, which is handled `again` when it is not early any more."""
        pending = PendingResponse(blocks_pipeline=True)

        def on_durable(error: BrokerError | None) -> None:
            pending.resolve_with(again() if error is None else refuse(self._translated(error)))

        when_durable(self._flush_queue, self._written, on_durable)
        return pending

    def check(self, at: TopicPartition, *, is_continued: bool = False) -> None:
        """Raises what the client is to be told when its batch for this partition may not be stored.

        `is_continued`: others were served since. What this request made part of the transaction may be part
        of none by now: an end of the old kind leaves the epoch as it is. See
        test_a_transaction_that_is_committed_between_the_steps_that_began_it_takes_no_more_batches.
        """
        who = self._outside.get(at)
        if who is None:
            return
        if who in self._refusals:
            raise self._refusals[who]
        is_verified = self._settings["transaction.partition.verification.enable"]
        if is_continued if self._dialect.adds else is_verified:
            try:
                self._transactions.verify(self._transactional_id, who, at)
                self._transactions.end_leftovers(who, (at,), self._now_ms)
            except BrokerError as error:
                raise self._translated(error) from None

    def was_open(self, at: TopicPartition) -> bool:
        """Return True if the coordinator was not asked about the partition's batch."""
        return at not in self._outside

    def begins_epoch(self, at: TopicPartition) -> bool:
        """True when the partition's batch begins a transaction with an epoch of its own there."""
        return self._dialect.adds and at in self._outside

    def _add(self) -> None:
        for who in set(self._outside.values()):
            partitions = [at for at, owner in self._outside.items() if owner == who]
            try:
                transactions = self._transactions
                done = transactions.add_partitions(self._transactional_id, who, partitions, self._now_ms)
                transactions.end_leftovers(who, partitions, self._now_ms)
            except BrokerError as error:
                self._refusals[who] = self._translated(error)
            else:
                self._written += done.written

    def _translated(self, error: BrokerError) -> BrokerError:
        text = str(error)
        if isinstance(error, ProducerFenced):
            return InvalidProducerEpoch(text)
        if isinstance(error, TransactionAbortable) and not self._dialect.knows_abortable:
            return InvalidTxnState(text)
        is_early = isinstance(error, ConcurrentTransactions) and not self._dialect.adds
        if is_early or isinstance(
            error, (CoordinatorNotAvailable, CoordinatorLoadInProgress, NotCoordinator)
        ):
            return NotEnoughReplicas(text)
        return error


def admit_produce(state: BrokerState, request: Request, now_ms: int) -> Admission:
    """The transactional batches of a Produce request.

    Raises InvalidProducerIdMapping when they are of several producers: nothing of the request is stored.
    """
    message, version = request.message, request.header.api_version
    dialect = Dialect(adds=version >= 12, knows_abortable=version >= 11)
    batches = list(_transactional_batches(state.topics, request))
    if len({who for _, who, *_ in batches}) > 1:
        raise InvalidProducerIdMapping("the transactional batches of a request must be of one producer")
    outside = {}
    for at, who, partition, sequence in batches:
        if _needs_question(partition, who):
            outside[at] = who
            if sequence is not None:
                partition.begin_verification(*who, sequence, raises_epoch=dialect.adds)
    return Admission(
        message.transactional_id or "",
        outside,
        dialect,
        now_ms,
        transactions=state.transactions,
        flush_queue=state.flush_queue,
        settings=state.settings,
    )


def _needs_question(partition: Partition, who: Identity) -> bool:
    """True unless the transaction is open in the partition, or the partition knows a newer epoch.

    An older epoch is refused when it comes to be appended. As in Kafka it must not become part of the
    transaction before that.
    """
    return not partition.has_open_transaction(*who) and not knows_newer_epoch(partition, who)


def check_still_open(partition: Partition, batch: memoryview) -> None:
    """Raise InvalidTxnState if the transaction has ended since a batch was found to be part of it.

    Stored behind its marker, the batch would begin a transaction that nobody ends. A newer epoch, which most
    ends bring, is left to the log.
    """
    header = read_header(batch)
    if header.producer_id is None or header.producer_epoch is None:
        return
    if _needs_question(partition, Identity(header.producer_id, header.producer_epoch)):
        raise InvalidTxnState(
            f"the transaction ended in {partition.topic_partition} while others were served"
        )


def knows_newer_epoch(partition: Partition, who: Identity) -> bool:
    """True when the partition has seen a newer epoch of this producer."""
    known = partition.producer(who.producer_id)
    return (
        known is not None and known.producer_epoch is not None and known.producer_epoch > who.producer_epoch
    )


def _transactional_batches(
    topics: Topics, request: Request
) -> Iterator[tuple[TopicPartition, Identity, Partition, int | None]]:
    """Yield the partitions whose batch is transactional, with its producer and base sequence."""
    message: ProduceRequest = request.message
    for topic in message.topic_data:
        may_write = request.is_authorized(ResourceType.TOPIC, topic.name)
        known = topics.get(topic.name) if may_write else None
        for part in topic.partition_data:
            if known is None or not 0 <= part.index < len(known.partitions) or not part.records:
                continue
            try:
                header = read_header(part.records)
            except BrokerError:
                continue  # refused when it comes to be appended
            if not header.is_transactional or header.producer_id is None or header.producer_epoch is None:
                continue
            who = Identity(header.producer_id, header.producer_epoch)
            at = TopicPartition(topic.name, part.index)
            yield at, who, known.partitions[part.index], header.base_sequence
