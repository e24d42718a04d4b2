"""OffsetCommit (key 8), versions 2-10: a group's positions.

Per partition: UNKNOWN_TOPIC_OR_PARTITION, OFFSET_METADATA_TOO_LARGE, UNKNOWN_TOPIC_ID (version 10 on). For
the whole group what `GroupCoordinator.check_commit` refuses with. `retention_time_ms` (versions 2-4) takes
the place of offsets.retention.minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from oncelog.broker.state_topic import answer_when_durable
from oncelog.errors import (
    BrokerError,
    GroupAuthorizationFailed,
    InvalidCommitOffsetSize,
    MessageTooLarge,
    OffsetMetadataTooLarge,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from oncelog.rules.authorization import ResourceType
from oncelog.rules.offsets import CommittedOffset
from oncelog.types import TopicPartition
from oncelog.wire.messages import OffsetCommitRequest, OffsetCommitResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Answer, Node, Request

KEY = 8
FIRST_ID_VERSION = 10

_Asked = OffsetCommitRequest.OffsetCommitRequestPartition
_Partition = OffsetCommitResponse.OffsetCommitResponsePartition


def handle(node: Node, request: Request, now_ms: int) -> Answer:
    message: OffsetCommitRequest = request.message
    if request.header.api_version >= FIRST_ID_VERSION:
        _name_topics(node, message)
    expire_ms = now_ms + message.retention_time_ms if message.retention_time_ms >= 0 else -1
    codes = {at: check_offset(node, request, at, asked.committed_metadata) for at, asked in _asked(message)}
    if not request.may(ResourceType.GROUP, message.group_id):
        return _answer(message, dict.fromkeys(codes, GroupAuthorizationFailed.code))
    offsets = {
        at: CommittedOffset(
            asked.committed_offset,
            asked.committed_leader_epoch,
            asked.committed_metadata or "",
            now_ms,
            expire_ms,
            -1,
        )
        for at, asked in _asked(message)
        if not codes[at]
    }

    def refusal(error: BrokerError) -> OffsetCommitResponse:
        return _answer(message, codes_of_refusal(codes, error))

    try:
        node.groups.check_commit(
            message.group_id,
            message.generation_id_or_member_epoch,
            message.member_id,
            message.group_instance_id,
            version=request.header.api_version,
        )
        node.groups.note_commit(message.group_id, message.member_id, now_ms)
        written = [node.groups.offsets.commit(message.group_id, offsets, now_ms)] if offsets else []
    except MessageTooLarge as error:
        return refusal(InvalidCommitOffsetSize(str(error)))
    except BrokerError as error:
        return refusal(error)
    return answer_when_durable(node, written, _answer(message, codes), refusal)


def _name_topics(node: Node, message: OffsetCommitRequest) -> None:
    """Fill in the names of topics that the request names by id; those of unknown ids stay empty."""
    for requested in message.topics:
        topic = node.topics.by_id(requested.topic_id)
        requested.name = "" if topic is None else topic.name


def check_offset(node: Node, request: Request, at: TopicPartition, metadata: str | None) -> int:
    """The error code of one offset by itself; the topic's name is empty if its id is unknown."""
    if not at.topic and request.header.api_version >= FIRST_ID_VERSION:
        return UnknownTopicId.code
    if not request.may(ResourceType.TOPIC, at.topic):
        return TopicAuthorizationFailed.code
    topic = node.topics.get(at.topic)
    if topic is None or not 0 <= at.partition < len(topic.partitions):
        return UnknownTopicOrPartition.code
    if metadata is not None and _java_length(metadata) > node.settings["offset.metadata.max.bytes"]:
        return OffsetMetadataTooLarge.code
    return 0


def _java_length(text: str) -> int:
    """Return the length that Kafka compares with offset.metadata.max.bytes, which is in UTF-16 units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def codes_of_refusal(codes: Mapping[TopicPartition, int], error: BrokerError) -> dict[TopicPartition, int]:
    """Return each offset's error code where the group refuses: its error, except for topics not reached.

    The group is asked before metadata is measured, so its refusal wins over OFFSET_METADATA_TOO_LARGE.
    """
    return {tp: error.code if is_for_group(code) else code for tp, code in codes.items()}


def is_for_group(code: int) -> bool:
    """Return True for the code of `check_offset` of an offset that the group is asked about."""
    return code in (0, OffsetMetadataTooLarge.code)


def _asked(message: OffsetCommitRequest) -> Iterator[tuple[TopicPartition, _Asked]]:
    for topic in message.topics:
        for partition in topic.partitions:
            yield TopicPartition(topic.name, partition.partition_index), partition


def _answer(message: OffsetCommitRequest, codes: dict[TopicPartition, int]) -> OffsetCommitResponse:
    return OffsetCommitResponse(
        topics=[
            OffsetCommitResponse.OffsetCommitResponseTopic(
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=[
                    _Partition(partition_index=index, error_code=codes[TopicPartition(topic.name, index)])
                    for index in (partition.partition_index for partition in topic.partitions)
                ],
            )
            for topic in message.topics
        ]
    )
