"""Builds requests about transactions and reads their responses.

Source: behaviour T14 (docs/behaviours.md); KIP-664.
"""

from __future__ import annotations

from dataclasses import dataclass

from oncelog.errors import named_text, raise_for_code
from oncelog.rules.transactions.hanging import KnownTransaction, OpenTransaction
from oncelog.types import TopicPartition
from oncelog.wire.messages import (
    DescribeTransactionsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

HANGING_AGE_MS = 1_200_000
"""Minimum age of a hanging transaction: Kafka's default transaction.max.timeout.ms plus five minutes.

The coordinator of a younger transaction may still end it.
"""


@dataclass(frozen=True, slots=True)
class TransactionListing:
    """A transactional id, Kafka's name of its state, and the node id of its coordinator."""

    transactional_id: str
    producer_id: int
    state: str
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """The coordinator's entry of a transactional id.

    `start_ms` is the start of the last transaction in milliseconds since the epoch. It is None if no
    transaction has begun since InitProducerId.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int | None
    partitions: tuple[TopicPartition, ...]

    def known(self) -> KnownTransaction:
        """Return the entry in the form that `rules.transactions.hanging` takes."""
        return KnownTransaction(
            self.transactional_id,
            self.producer_id,
            self.producer_epoch,
            self.state,
            frozenset(self.partitions),
        )


def list_transactions_request(states: list[str], producer_ids: list[int]) -> ListTransactionsRequest:
    """Return a request for the transactional ids with these states and producer ids.

    An empty list matches all.
    """
    return ListTransactionsRequest(state_filters=states, producer_id_filters=producer_ids, duration_filter=-1)


def listed_transactions(node_id: int, response: ListTransactionsResponse) -> list[TransactionListing]:
    """Return the transactional ids that broker `node_id` coordinates. Raises BrokerError."""
    raise_for_code(response.error_code, f"listing transactions of broker {node_id}")
    return [
        TransactionListing(state.transactional_id, state.producer_id, state.transaction_state, node_id)
        for state in response.transaction_states
    ]


def described_transaction(
    transactional_id: str, response: DescribeTransactionsResponse
) -> TransactionDescription:
    """Return the entry of the requested transactional id.

    Raises BrokerError, such as TransactionalIdNotFound.
    """
    (state,) = response.transaction_states
    name = f"transactional id {transactional_id!r}"
    raise_for_code(state.error_code, named_text(state.error_code, name))
    return TransactionDescription(
        state.transactional_id,
        state.producer_id,
        state.producer_epoch,
        state.transaction_state,
        state.transaction_timeout_ms,
        state.transaction_start_time_ms if state.transaction_start_time_ms >= 0 else None,
        tuple(TopicPartition(topic.topic, index) for topic in state.topics for index in topic.partitions),
    )


def abort_marker_request(opened: OpenTransaction) -> WriteTxnMarkersRequest:
    """Return a request to write an ABORT marker into one partition (`kafka-transactions.sh abort`)."""
    topic = WriteTxnMarkersRequest.WritableTxnMarkerTopic(
        name=opened.tp.topic, partition_indexes=[opened.tp.partition]
    )
    marker = WriteTxnMarkersRequest.WritableTxnMarker(
        producer_id=opened.producer_id,
        producer_epoch=opened.producer_epoch,
        transaction_result=False,
        topics=[topic],
        coordinator_epoch=0 if opened.coordinator_epoch is None else opened.coordinator_epoch,
    )
    return WriteTxnMarkersRequest(markers=[marker])


def check_aborted(response: WriteTxnMarkersResponse, opened: OpenTransaction) -> None:
    """Raise the partition's error; return if the marker was written."""
    raise_for_code(
        response.markers[0].topics[0].partitions[0].error_code, f"aborting the transaction in {opened.tp}"
    )
