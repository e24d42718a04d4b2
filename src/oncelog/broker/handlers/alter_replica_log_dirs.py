"""AlterReplicaLogDirs (key 34), versions 1-2: the broker has one data directory, so no partition moves.

If a request names a partition for two directories, the response has one result for the partition: the result
for the last directory.

Errors: LOG_DIR_NOT_FOUND for another directory, UNKNOWN_TOPIC_OR_PARTITION for an unknown partition.
Source: KIP-113; Kafka's KafkaApis.handleAlterReplicaLogDirsRequest.
"""

from __future__ import annotations

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import ClusterAuthorizationFailed, LogDirNotFound, UnknownTopicOrPartition
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse

KEY = 34

_Topic = AlterReplicaLogDirsResponse.AlterReplicaLogDirTopicResult
_Partition = AlterReplicaLogDirsResponse.AlterReplicaLogDirPartitionResult


def handle(state: BrokerState, request: Request, now_ms: int) -> AlterReplicaLogDirsResponse:
    message: AlterReplicaLogDirsRequest = request.message
    is_authorized = request.is_authorized(ResourceType.CLUSTER)
    results: dict[str, dict[int, int]] = {}
    for directory in message.dirs:
        for topic in directory.topics:
            codes = results.setdefault(topic.name, {})
            for index in topic.partitions:
                codes[index] = (
                    _code(state, directory.path, topic.name, index)
                    if is_authorized
                    else ClusterAuthorizationFailed.code
                )
    return AlterReplicaLogDirsResponse(
        results=[
            _Topic(
                topic_name=name,
                partitions=[
                    _Partition(partition_index=index, error_code=code) for index, code in codes.items()
                ],
            )
            for name, codes in results.items()
        ]
    )


def _code(state: BrokerState, path: str, topic_name: str, index: int) -> int:
    if path != state.log_manager.directory:
        return LogDirNotFound.code
    topic = state.topics.get(topic_name)
    if topic is None or not 0 <= index < len(topic.partitions):
        return UnknownTopicOrPartition.code
    return 0
