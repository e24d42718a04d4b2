"""DescribeLogDirs (key 35), versions 1-5: the data directory and the size of each partition.

topics null = all. Unknown partitions are left out, as Kafka leaves them out. Sizes are bytes of
segment files; v4 tells the size and free space of the volume.
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
    wanted = None if message.topics is None else _wanted(message.topics)
    total_bytes, usable_bytes = state.log_manager.disk.volume()
    return DescribeLogDirsResponse(
        results=[
            DescribeLogDirsResponse.DescribeLogDirsResult(
                log_dir=state.log_manager.directory,
                topics=list(_topics(state, wanted)),
                total_bytes=total_bytes,
                usable_bytes=usable_bytes,
            )
        ]
    )


def _wanted(asked: Iterable[DescribeLogDirsRequest.DescribableLogDirTopic]) -> dict[str, set[int]]:
    """Partitions by topic, which may be named several times."""
    wanted: dict[str, set[int]] = {}
    for topic in asked:
        wanted.setdefault(topic.topic, set()).update(topic.partitions)
    return wanted


def _topics(
    state: BrokerState, wanted: dict[str, set[int]] | None
) -> Iterator[DescribeLogDirsResponse.DescribeLogDirsTopic]:
    for topic in state.topics.all():
        chosen = None if wanted is None else wanted.get(topic.name, set())
        partitions = [
            DescribeLogDirsResponse.DescribeLogDirsPartition(
                partition_index=index, partition_size=partition.size_bytes
            )
            for index, partition in enumerate(topic.partitions)
            if chosen is None or index in chosen
        ]
        if partitions:
            yield DescribeLogDirsResponse.DescribeLogDirsTopic(name=topic.name, partitions=partitions)
