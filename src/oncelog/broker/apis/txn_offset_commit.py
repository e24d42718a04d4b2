"""TxnOffsetCommit (key 28), versions 0-5: a group's positions, which hold when a transaction commits.

Per partition: UNKNOWN_TOPIC_OR_PARTITION, OFFSET_METADATA_TOO_LARGE. For the whole group, in this order:
INVALID_GROUP_ID (empty), what the transaction coordinator refuses with (the group's partition of
`__consumer_offsets` must be part of the transaction, or becomes it by version 5), what
`GroupCoordinator.check_commit` refuses with (row T7). Without a known topic nobody is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oncelog.broker.admission import Admission, Dialect, knows_newer_epoch
from oncelog.broker.apis.offset_commit import check_offset, codes_of_refusal, is_for_group
from oncelog.broker.authorizer import refusal_of
from oncelog.broker.state_topic import answer_when_durable
from oncelog.errors import (
    BrokerError,
    CoordinatorNotAvailable,
    InvalidCommitOffsetSize,
    InvalidGroupId,
    InvalidProducerEpoch,
    MessageTooLarge,
    NotEnoughReplicas,
)
from oncelog.rules.authorization import ResourceType
from oncelog.rules.offsets import CommittedOffset
from oncelog.rules.sending import Identity
from oncelog.types import TopicPartition
from oncelog.wire.messages import TxnOffsetCommitRequest, TxnOffsetCommitResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Answer, Node, Request

KEY = 28
FIRST_ABORTABLE_VERSION, FIRST_ADDING_VERSION = 4, 5

_Asked = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition
_Partition = TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition


def handle(node: Node, request: Request, now_ms: int) -> Answer:
    message: TxnOffsetCommitRequest = request.message
    who = Identity(message.producer_id, message.producer_epoch)
    codes = {at: check_offset(node, request, at, asked.committed_metadata) for at, asked in _asked(message)}
    offsets = {
        at: CommittedOffset(
            asked.committed_offset,
            asked.committed_leader_epoch,
            asked.committed_metadata or "",
            now_ms,
            -1,
            -1,
        )
        for at, asked in _asked(message)
        if not codes[at]
    }

    def refusal(error: BrokerError) -> TxnOffsetCommitResponse:
        return _answer(message, codes_of_refusal(codes, error))

    for resource_type, name in (
        (ResourceType.TRANSACTIONAL_ID, message.transactional_id),
        (ResourceType.GROUP, message.group_id),
    ):
        if not request.may(resource_type, name):
            return _answer(message, dict.fromkeys(codes, refusal_of(resource_type).code))
    if not any(is_for_group(code) for code in codes.values()):
        return _answer(message, codes)
    try:
        if not message.group_id:
            raise InvalidGroupId("a group id may not be empty")
        admission = _admit(node, message, who, request.header.api_version, now_ms)
        if admission.is_early:
            return admission.later(
                lambda: handle(node, request, now_ms),
                lambda error: refusal(CoordinatorNotAvailable(str(error))),
            )
        node.groups.check_commit(
            message.group_id,
            message.generation_id,
            message.member_id,
            message.group_instance_id,
            is_transactional=True,
        )
        written = []
        if offsets:
            written.append(node.groups.offsets.commit_pending(message.group_id, who, offsets, now_ms))
    except NotEnoughReplicas as error:
        return refusal(CoordinatorNotAvailable(str(error)))
    except MessageTooLarge as error:
        return refusal(InvalidCommitOffsetSize(str(error)))
    except BrokerError as error:
        return refusal(error)
    return answer_when_durable(node, written, _answer(message, codes), refusal)


def _admit(
    node: Node, message: TxnOffsetCommitRequest, who: Identity, version: int, now_ms: int
) -> Admission:
    at = node.groups.offsets_partition(message.group_id, now_ms)
    _, partition = node.topics.partition(at)
    if knows_newer_epoch(partition, who):
        raise InvalidProducerEpoch(
            f"a newer epoch of producer id {who.producer_id} than {who.producer_epoch} is known"
        )
    outside = {} if partition.has_open_transaction(*who) else {at: who}
    dialect = Dialect(
        adds=version >= FIRST_ADDING_VERSION, knows_abortable=version >= FIRST_ABORTABLE_VERSION
    )
    admission = Admission(node, message.transactional_id, outside, dialect, now_ms)
    admission.check(at)
    return admission


def _asked(message: TxnOffsetCommitRequest) -> Iterator[tuple[TopicPartition, _Asked]]:
    for topic in message.topics:
        for partition in topic.partitions:
            yield TopicPartition(topic.name, partition.partition_index), partition


def _answer(message: TxnOffsetCommitRequest, codes: dict[TopicPartition, int]) -> TxnOffsetCommitResponse:
    return TxnOffsetCommitResponse(
        topics=[
            TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic(
                name=topic.name,
                partitions=[
                    _Partition(partition_index=index, error_code=codes[TopicPartition(topic.name, index)])
                    for index in (partition.partition_index for partition in topic.partitions)
                ],
            )
            for topic in message.topics
        ]
    )
