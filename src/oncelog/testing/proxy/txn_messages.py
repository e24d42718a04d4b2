"""Extracts the fields of transactional messages for the proxy's events, and formats them for tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from oncelog.testing.proxy.apis import error_name
from oncelog.wire.messages import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    InitProducerIdRequest,
    Message,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)

_TRANSACTION = 1


@dataclass(frozen=True, slots=True)
class TxnRequest:
    """The fields of one transactional request, as events show them. Other APIs' fields are None or empty."""

    transactional_id: str | None = None
    producer_id: int | None = None
    """The producer of EndTxn, with `producer_epoch`."""
    producer_epoch: int | None = None
    is_commit: bool | None = None
    """EndTxn: True to commit, False to abort."""
    group_id: str | None = None
    """The group of AddOffsetsToTxn and TxnOffsetCommit."""
    partitions: tuple[tuple[str, int], ...] = ()
    """AddPartitionsToTxn: (topic, partition) of each partition."""
    offsets: tuple[tuple[str, int, int], ...] = ()
    """TxnOffsetCommit: (topic, partition, committed offset) of each partition."""
    coordinator_keys: tuple[str, ...] = ()
    """FindCoordinator: group ids or transactional ids."""
    is_transaction_coordinator: bool | None = None
    """FindCoordinator: True for transactional ids, False for groups."""


def txn_request(message: Message) -> TxnRequest | None:
    """Return the fields of a transactional request; None for any other request."""
    read = _READERS.get(type(message))
    return read(message) if read else None


def first_error_code(message: Message) -> int:
    """Return the first error code in the response to a transactional request; 0 if there is no error."""
    codes = (code for code in (getattr(message, "error_code", 0), *_inner_codes(message)) if code)
    return next(codes, 0)


def _inner_codes(message: Any) -> Iterator[int]:
    if isinstance(message, FindCoordinatorResponse):
        yield from (coordinator.error_code for coordinator in message.coordinators)
    elif isinstance(message, TxnOffsetCommitResponse):
        yield from (partition.error_code for topic in message.topics for partition in topic.partitions)
    elif isinstance(message, AddPartitionsToTxnResponse):
        topics = [
            *message.results_by_topic_v3_and_below,
            *(topic for result in message.results_by_transaction for topic in result.topic_results),
        ]
        yield from (
            partition.partition_error_code for topic in topics for partition in topic.results_by_partition
        )


def _find_coordinator(message: FindCoordinatorRequest) -> TxnRequest:
    keys = tuple(message.coordinator_keys or [message.key])
    return TxnRequest(coordinator_keys=keys, is_transaction_coordinator=message.key_type == _TRANSACTION)


def _init_producer_id(message: InitProducerIdRequest) -> TxnRequest:
    return TxnRequest(transactional_id=message.transactional_id)


def _add_partitions(message: AddPartitionsToTxnRequest) -> TxnRequest:
    topics = [
        *message.v3_and_below_topics,
        *(topic for transaction in message.transactions for topic in transaction.topics),
    ]
    return TxnRequest(partitions=tuple((topic.name, index) for topic in topics for index in topic.partitions))


def _add_offsets(message: AddOffsetsToTxnRequest) -> TxnRequest:
    return TxnRequest(transactional_id=message.transactional_id, group_id=message.group_id)


def _commit_offsets(message: TxnOffsetCommitRequest) -> TxnRequest:
    return TxnRequest(
        transactional_id=message.transactional_id,
        group_id=message.group_id,
        offsets=tuple(
            (topic.name, partition.partition_index, partition.committed_offset)
            for topic in message.topics
            for partition in topic.partitions
        ),
    )


def _end(message: EndTxnRequest) -> TxnRequest:
    return TxnRequest(
        transactional_id=message.transactional_id,
        producer_id=message.producer_id,
        producer_epoch=message.producer_epoch,
        is_commit=message.committed,
    )


_READERS: dict[type[Message], Callable[[Any], TxnRequest]] = {
    FindCoordinatorRequest: _find_coordinator,
    InitProducerIdRequest: _init_producer_id,
    AddPartitionsToTxnRequest: _add_partitions,
    AddOffsetsToTxnRequest: _add_offsets,
    TxnOffsetCommitRequest: _commit_offsets,
    EndTxnRequest: _end,
}


def describe_request(api: str, request: TxnRequest) -> str:
    """Return the text of a request for tables and diagrams; "" if the API's name is enough."""
    match api:
        case "FindCoordinator":
            kind = "transactional id" if request.is_transaction_coordinator else "group"
            return f"of {kind} {', '.join(request.coordinator_keys)}"
        case "InitProducerId":
            return "" if request.transactional_id is None else f"for {request.transactional_id}"
        case "AddPartitionsToTxn":
            return ", ".join(f"{topic}-{partition}" for topic, partition in request.partitions)
        case "AddOffsetsToTxn":
            return f"group {request.group_id}"
        case "TxnOffsetCommit":
            offsets = ", ".join(
                f"offset {offset} of {topic}-{index}" for topic, index, offset in request.offsets
            )
            return f"{offsets} for group {request.group_id}"
        case "EndTxn":
            result = "COMMIT" if request.is_commit else "ABORT"
            return f"{result}  pid {request.producer_id} epoch {request.producer_epoch}"
    return ""


def describe_response(error_code: int) -> str:
    """Return the text of a response: the name of its first error, or `ok`."""
    return error_name(error_code) or "ok"
