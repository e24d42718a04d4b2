"""May the transactional batches of a Produce request be stored? Asked of the transaction coordinator.

A partition where this epoch of the producer has a transaction open already needs no question. Else, from
version 12 on the request itself makes its partitions part of the transaction (KIP-890); before, they must
be part of it (transaction.partition.verification.enable). What the coordinator refuses is translated:

    PRODUCER_FENCED                              INVALID_PRODUCER_EPOCH
    TRANSACTION_ABORTABLE                        INVALID_TXN_STATE below version 11
    CONCURRENT_TRANSACTIONS                      NOT_ENOUGH_REPLICAS below version 12, which is retried
    COORDINATOR_*, NOT_COORDINATOR               NOT_ENOUGH_REPLICAS, which is retried
Source: row T5; Kafka's AddPartitionsToTxnManager, ReplicaManager.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oncelog.broker.state_topic import Written
from oncelog.errors import (
    BrokerError,
    ConcurrentTransactions,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InvalidProducerEpoch,
    InvalidTxnState,
    NotCoordinator,
    NotEnoughReplicas,
    ProducerFenced,
    TransactionAbortable,
)
from oncelog.rules.sending import Identity
from oncelog.types import TopicPartition
from oncelog.wire.batch import read_header
from oncelog.wire.messages import ProduceRequest

if TYPE_CHECKING:
    from oncelog.broker.node import Node

FIRST_ABORTABLE_VERSION, FIRST_ADDING_VERSION = 11, 12


class Admission:
    """One request's batches. `written`: what its answer waits for."""

    def __init__(self, node: Node, message: ProduceRequest, version: int, now_ms: int) -> None:
        self._node, self._version, self._now_ms = node, version, now_ms
        self._transactional_id = message.transactional_id or ""
        self._unknown = dict(_outside(node, message))
        self._refusals: dict[Identity, BrokerError] = {}
        self.written: list[Written] = []
        if version >= FIRST_ADDING_VERSION:
            self._add()

    def check(self, at: TopicPartition) -> None:
        """Raises what the client is to be told when its batch for this partition may not be stored."""
        who = self._unknown.get(at)
        if who is None:
            return
        if who in self._refusals:
            raise self._refusals[who]
        if (
            self._version < FIRST_ADDING_VERSION
            and self._node.settings["transaction.partition.verification.enable"]
        ):
            try:
                self._node.transactions.verify(self._transactional_id, who, at)
            except BrokerError as error:
                raise self._translated(error) from None

    def _add(self) -> None:
        for who in set(self._unknown.values()):
            partitions = [at for at, owner in self._unknown.items() if owner == who]
            try:
                done = self._node.transactions.add_partitions(
                    self._transactional_id, who, partitions, self._now_ms
                )
            except BrokerError as error:
                self._refusals[who] = self._translated(error)
            else:
                self.written += done.written

    def _translated(self, error: BrokerError) -> BrokerError:
        text = str(error)
        if isinstance(error, ProducerFenced):
            return InvalidProducerEpoch(text)
        if isinstance(error, TransactionAbortable) and self._version < FIRST_ABORTABLE_VERSION:
            return InvalidTxnState(text)
        is_early = isinstance(error, ConcurrentTransactions) and self._version < FIRST_ADDING_VERSION
        if is_early or isinstance(
            error, (CoordinatorNotAvailable, CoordinatorLoadInProgress, NotCoordinator)
        ):
            return NotEnoughReplicas(text)
        return error


def _outside(node: Node, message: ProduceRequest) -> Iterator[tuple[TopicPartition, Identity]]:
    """Partitions that the producer of their batch has no transaction open in, with who that is."""
    for topic in message.topic_data:
        known = node.topics.get(topic.name)
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
            if not known.partitions[part.index].has_open_transaction(*who):
                yield TopicPartition(topic.name, part.index), who
