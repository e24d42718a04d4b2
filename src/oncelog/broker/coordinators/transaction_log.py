"""Encoding of transactional ids' entries as records of `__transaction_state`, in Kafka's format."""

from __future__ import annotations

from itertools import groupby

from oncelog.rules.transactions.entry import TransactionEntry, TransactionState
from oncelog.types import TopicPartition
from oncelog.wire.stored import TransactionLogKey, TransactionLogValue

KEY_VERSION = 0


def encode_key(transactional_id: str) -> bytes:
    """Return the record key of a transactional id."""
    return TransactionLogKey(transactional_id=transactional_id).to_bytes(KEY_VERSION)


def decode_key(data: bytes) -> str:
    """Return the transactional id of a record key. Raises PeerError."""
    return TransactionLogKey.from_bytes(data).transactional_id


def encode_value(entry: TransactionEntry, version: int) -> bytes:
    """Return the record value of an entry. Version 1 adds the fields of KIP-890 to version 0."""
    by_topic = groupby(sorted(entry.partitions), key=lambda tp: tp.topic)
    partitions = [
        TransactionLogValue.PartitionsSchema(topic=topic, partition_ids=[tp.partition for tp in group])
        for topic, group in by_topic
    ]
    return TransactionLogValue(
        producer_id=entry.producer_id,
        previous_producer_id=entry.previous_producer_id,
        next_producer_id=entry.next_producer_id,
        producer_epoch=entry.producer_epoch,
        transaction_timeout_ms=entry.timeout_ms,
        transaction_status=entry.state.value,
        transaction_partitions=None if entry.state is TransactionState.EMPTY else partitions,
        transaction_last_update_timestamp_ms=entry.last_update_ms,
        transaction_start_timestamp_ms=entry.start_ms,
        client_transaction_version=entry.client_version,
    ).to_bytes(version)


def decode_value(transactional_id: str, data: bytes) -> TransactionEntry:
    """Return the entry of a record value. Raises PeerError, or ValueError for an unknown state."""
    value = TransactionLogValue.from_bytes(data)
    return TransactionEntry(
        transactional_id=transactional_id,
        producer_id=value.producer_id,
        producer_epoch=value.producer_epoch,
        timeout_ms=value.transaction_timeout_ms,
        state=TransactionState(value.transaction_status),
        partitions=frozenset(
            TopicPartition(topic.topic, partition)
            for topic in value.transaction_partitions or ()
            for partition in topic.partition_ids
        ),
        start_ms=value.transaction_start_timestamp_ms,
        last_update_ms=value.transaction_last_update_timestamp_ms,
        previous_producer_id=value.previous_producer_id,
        next_producer_id=value.next_producer_id,
        client_version=value.client_transaction_version,
    )
