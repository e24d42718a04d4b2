"""DescribeLogDirs (key 35), versions 1-5: the data directory and the size of each partition.

Null topics mean all topics. As in Kafka, unknown partitions are left out. A partition's size is the sum of
its segment files in bytes. Version 4 and later add the volume's size and free space. Source: KIP-113,
KIP-827.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import ClusterAuthorizationFailed
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import DescribeLogDirsRequest, DescribeLogDirsResponse

KEY = 35
SEGMENTS_PER_ELEMENT = 32
"""Number of segments whose sizes cost as much to add as one element of a step."""

_Topic = DescribeLogDirsResponse.DescribeLogDirsTopic
_Partition = DescribeLogDirsResponse.DescribeLogDirsPartition


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _describe(state, request))
    return answer


def _describe(state: BrokerState, request: Request) -> Work[DescribeLogDirsResponse]:
    message: DescribeLogDirsRequest = request.message
    if not request.is_authorized(ResourceType.CLUSTER):
        return DescribeLogDirsResponse(error_code=ClusterAuthorizationFailed.code, results=[])
    topics, budget = [], state.step_budget()
    for name, indexes in _requested(state, message.topics):
        topic, rows = state.topics.get(name), []
        partitions = [] if topic is None else topic.partitions
        for index in range(len(partitions)) if indexes is None else sorted(indexes):
            cost = 1
            if 0 <= index < len(partitions):
                partition = partitions[index]
                rows.append(_Partition(partition_index=index, partition_size=partition.size_bytes))
                cost += partition.segment_count // SEGMENTS_PER_ELEMENT
            if budget.spend(cost):
                yield None
        # The topic may have been deleted between two steps.
        if rows and state.topics.get(name) is topic:
            topics.append(_Topic(name=name, partitions=rows))
        if budget.spend():
            yield None
    total_bytes, usable_bytes = state.log_manager.disk.volume()
    return DescribeLogDirsResponse(
        results=[
            DescribeLogDirsResponse.DescribeLogDirsResult(
                log_dir=state.log_manager.directory,
                topics=topics,
                total_bytes=total_bytes,
                usable_bytes=usable_bytes,
            )
        ]
    )


def _requested(
    state: BrokerState, topics: Iterable[DescribeLogDirsRequest.DescribableLogDirTopic] | None
) -> Iterator[tuple[str, set[int] | None]]:
    """Yield (topic, indexes of its partitions). None stands for all topics, and for all their partitions.

    A topic that the request names several times is yielded once, with the partitions of all its entries.
    """
    if topics is None:
        yield from [(topic.name, None) for topic in state.topics.all()]
        return
    requested: dict[str, set[int]] = {}
    for topic in topics:
        requested.setdefault(topic.topic, set()).update(topic.partitions)
    yield from requested.items()
