"""What the messages of a transaction say, in words for tables and diagrams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from oncelog.testing.proxy.events import error_name
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


def words_of_request(message: Message) -> str:
    """Empty for what has none."""
    tell = _REQUESTS.get(type(message))
    return tell(message) if tell else ""


def words_of_answer(message: Message | None) -> str:
    """`ok`, or the first error in it; empty for messages that `words_of_request` has no words for."""
    if message is None or type(message).__name__.replace("Response", "Request") not in _NAMES:
        return ""
    codes = [code for code in (getattr(message, "error_code", 0), *_inner_codes(message)) if code]
    return error_name(codes[0]) if codes else "ok"


def _inner_codes(message: Any) -> Iterator[int]:
    if isinstance(message, FindCoordinatorResponse):
        yield from (each.error_code for each in message.coordinators)
    elif isinstance(message, TxnOffsetCommitResponse):
        yield from (part.error_code for topic in message.topics for part in topic.partitions)
    elif isinstance(message, AddPartitionsToTxnResponse):
        topics = [
            *message.results_by_topic_v3_and_below,
            *(topic for each in message.results_by_transaction for topic in each.topic_results),
        ]
        yield from (part.partition_error_code for topic in topics for part in topic.results_by_partition)


def _find_coordinator(message: FindCoordinatorRequest) -> str:
    names = message.coordinator_keys or [message.key]
    what = "transactional id" if message.key_type == _TRANSACTION else "group"
    return f"of {what} {', '.join(names)}"


def _init_producer_id(message: InitProducerIdRequest) -> str:
    if message.transactional_id is None:
        return ""
    return f"for {message.transactional_id}"


def _add_partitions(message: AddPartitionsToTxnRequest) -> str:
    topics = [
        *message.v3_and_below_topics,
        *(topic for each in message.transactions for topic in each.topics),
    ]
    return ", ".join(f"{topic.name}-{index}" for topic in topics for index in topic.partitions)


def _offsets(message: TxnOffsetCommitRequest) -> str:
    places = ", ".join(
        f"offset {part.committed_offset} of {topic.name}-{part.partition_index}"
        for topic in message.topics
        for part in topic.partitions
    )
    return f"{places} for group {message.group_id}"


def _end(message: EndTxnRequest) -> str:
    outcome = "COMMIT" if message.committed else "ABORT"
    return f"{outcome}  pid {message.producer_id} epoch {message.producer_epoch}"


def _add_offsets(message: AddOffsetsToTxnRequest) -> str:
    return f"group {message.group_id}"


_REQUESTS: dict[type[Message], Callable[[Any], str]] = {
    FindCoordinatorRequest: _find_coordinator,
    InitProducerIdRequest: _init_producer_id,
    AddPartitionsToTxnRequest: _add_partitions,
    AddOffsetsToTxnRequest: _add_offsets,
    TxnOffsetCommitRequest: _offsets,
    EndTxnRequest: _end,
}
_NAMES = {kind.__name__ for kind in _REQUESTS}
