"""DescribeLogDirs (key 35), versions 1-5: the data directory and the size of each partition.

Null topics mean all topics. As in Kafka, unknown partitions are left out. A partition's size is the sum of
its segment files in bytes. Version 4 and later add the volume's size and free space. Source: KIP-113,
KIP-827.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import ClusterAuthorizationFailed
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import DescribeLogDirsRequest, DescribeLogDirsResponse

KEY = 35


def handle(state: BrokerState, request: Request, now_ms: int) -> DescribeLogDirsResponse:
    message: DescribeLogDirsRequest = request.message
    if not request.is_authorized(ResourceType.CLUSTER):
        return DescribeLogDirsResponse(error_code=ClusterAuthorizationFailed.code, results=[])
    requested = None if message.topics is None else _requested(message.topics)
    total_bytes, usable_bytes = state.log_manager.disk.volume()
    return DescribeLogDirsResponse(
        results=[
            DescribeLogDirsResponse.DescribeLogDirsResult(
                log_dir=state.log_manager.directory,
                topics=list(_topics(state, requested)),
                total_bytes=total_bytes,
                usable_bytes=usable_bytes,
            )
        ]
    )


def _requested(topics: Iterable[DescribeLogDirsRequest.DescribableLogDirTopic]) -> dict[str, set[int]]:
    """Return the requested partition indexes by topic, merged if the request names a topic several times."""
    requested: dict[str, set[int]] = {}
    for topic in topics:
        requested.setdefault(topic.topic, set()).update(topic.partitions)
    return requested


def _topics(
    state: BrokerState, requested: dict[str, set[int]] | None
) -> Iterator[DescribeLogDirsResponse.DescribeLogDirsTopic]:
    for topic in state.topics.all():
        indexes = None if requested is None else requested.get(topic.name, set())
        partitions = [
            DescribeLogDirsResponse.DescribeLogDirsPartition(
                partition_index=index, partition_size=partition.size_bytes
            )
            for index, partition in enumerate(topic.partitions)
            if indexes is None or index in indexes
        ]
        if partitions:
            yield DescribeLogDirsResponse.DescribeLogDirsTopic(name=topic.name, partitions=partitions)
