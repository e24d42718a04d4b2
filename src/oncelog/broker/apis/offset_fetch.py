"""OffsetFetch (key 9), versions 1-9: what groups have committed.

Null topics (version 2 on) mean all of them. A partition without a commit is -1 without an error. With
require_stable (version 7 on) a partition that an open transaction may commit is 88, to be asked again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from oncelog.errors import BrokerError, UnstableOffsetCommit
from oncelog.rules.offsets import NO_OFFSET
from oncelog.types import TopicPartition
from oncelog.wire.messages import OffsetFetchRequest, OffsetFetchResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 9
FIRST_BATCHED_VERSION = 8


def handle(node: Node, request: Request, now_ms: int) -> OffsetFetchResponse:
    message: OffsetFetchRequest = request.message
    is_stable = message.require_stable
    if request.header.api_version < FIRST_BATCHED_VERSION:
        return OffsetFetchResponse(
            topics=[
                OffsetFetchResponse.OffsetFetchResponseTopic(
                    name=topic,
                    partitions=[OffsetFetchResponse.OffsetFetchResponsePartition(**each) for each in told],
                )
                for topic, told in _told(node, message.group_id, message.topics, is_stable)
            ]
        )
    return OffsetFetchResponse(groups=[_group(node, asked, is_stable) for asked in message.groups])


def _group(
    node: Node, asked: OffsetFetchRequest.OffsetFetchRequestGroup, is_stable: bool
) -> OffsetFetchResponse.OffsetFetchResponseGroup:
    consumers = node.groups.consumers.get(asked.group_id)
    try:
        if consumers is not None:
            consumers.check_fetch(asked.member_id, asked.member_epoch)
    except BrokerError as error:
        return OffsetFetchResponse.OffsetFetchResponseGroup(group_id=asked.group_id, error_code=error.code)
    return OffsetFetchResponse.OffsetFetchResponseGroup(
        group_id=asked.group_id,
        topics=[
            OffsetFetchResponse.OffsetFetchResponseTopics(
                name=topic,
                partitions=[OffsetFetchResponse.OffsetFetchResponsePartitions(**each) for each in told],
            )
            for topic, told in _told(node, asked.group_id, asked.topics, is_stable)
        ],
    )


_Topics = (
    Iterable[OffsetFetchRequest.OffsetFetchRequestTopic]
    | Iterable[OffsetFetchRequest.OffsetFetchRequestTopics]
)


def _told(
    node: Node, group_id: str, topics: _Topics | None, is_stable: bool
) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """(topic, fields of its partitions) as asked; of everything when `topics` is None."""
    committed = node.groups.offsets.of(group_id)
    pending = node.groups.offsets.pending_of(group_id) if is_stable else ()
    if topics is None:
        everything = sorted({*committed, *pending})
        asked = [
            (topic, [at.partition for at in each]) for topic, each in groupby(everything, lambda at: at.topic)
        ]
    else:
        asked = [(topic.name, topic.partition_indexes) for topic in topics]

    def one(at: TopicPartition) -> dict[str, Any]:
        fields = {"partition_index": at.partition, "committed_offset": NO_OFFSET, "metadata": ""}
        if at in pending:
            return {**fields, "error_code": UnstableOffsetCommit.code}
        if at not in committed:
            return fields
        offset, leader_epoch, metadata, *_ = committed[at]
        return {
            **fields,
            "committed_offset": offset,
            "committed_leader_epoch": leader_epoch,
            "metadata": metadata,
        }

    for topic, partitions in asked:
        yield topic, [one(TopicPartition(topic, index)) for index in partitions]
