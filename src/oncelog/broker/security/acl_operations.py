"""The ACL operation that each API requires, for each type of resource that its requests name.

If a client lacks the operation on a resource that its request names, the resource gets its
..._AUTHORIZATION_FAILED error. If a request asks for all resources, those without permission are left out of
the response. Rules that do not fit the table, such as a choice of two operations, are in the handler of the
API. As in Kafka, every client may learn the brokers' addresses (Metadata, DescribeCluster).
Source: kafka KafkaApis and ControllerApis.
"""

from __future__ import annotations

from oncelog.rules.security.authorization import Operation, ResourceType

_O = Operation
_TOPIC, _GROUP, _CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
_TRANSACTION = ResourceType.TRANSACTIONAL_ID

REQUIRED_OPERATIONS: dict[str, dict[ResourceType, Operation]] = {
    "Produce": {_TOPIC: _O.WRITE, _TRANSACTION: _O.WRITE},
    "Fetch": {_TOPIC: _O.READ},
    "ListOffsets": {_TOPIC: _O.DESCRIBE},
    "Metadata": {_TOPIC: _O.DESCRIBE, _CLUSTER: _O.DESCRIBE},
    "OffsetForLeaderEpoch": {_TOPIC: _O.DESCRIBE},
    "DescribeCluster": {_CLUSTER: _O.DESCRIBE},
    "FindCoordinator": {_GROUP: _O.DESCRIBE, _TRANSACTION: _O.DESCRIBE},
    # transactions
    "InitProducerId": {_TRANSACTION: _O.WRITE, _CLUSTER: _O.IDEMPOTENT_WRITE},
    "AddPartitionsToTxn": {_TRANSACTION: _O.WRITE, _TOPIC: _O.WRITE, _CLUSTER: _O.CLUSTER_ACTION},
    "AddOffsetsToTxn": {_TRANSACTION: _O.WRITE, _GROUP: _O.READ},
    "EndTxn": {_TRANSACTION: _O.WRITE},
    "WriteTxnMarkers": {_CLUSTER: _O.CLUSTER_ACTION},
    "TxnOffsetCommit": {_TRANSACTION: _O.WRITE, _GROUP: _O.READ, _TOPIC: _O.READ},
    "DescribeTransactions": {_TRANSACTION: _O.DESCRIBE, _TOPIC: _O.DESCRIBE},
    "ListTransactions": {_TRANSACTION: _O.DESCRIBE},
    "DescribeProducers": {_TOPIC: _O.READ},
    # groups
    "OffsetCommit": {_GROUP: _O.READ, _TOPIC: _O.READ},
    "OffsetFetch": {_GROUP: _O.DESCRIBE, _TOPIC: _O.DESCRIBE},
    "OffsetDelete": {_GROUP: _O.DELETE, _TOPIC: _O.READ},
    "JoinGroup": {_GROUP: _O.READ},
    "SyncGroup": {_GROUP: _O.READ},
    "Heartbeat": {_GROUP: _O.READ},
    "LeaveGroup": {_GROUP: _O.READ},
    "ConsumerGroupHeartbeat": {_GROUP: _O.READ, _TOPIC: _O.DESCRIBE},
    "DescribeGroups": {_GROUP: _O.DESCRIBE},
    "ConsumerGroupDescribe": {_GROUP: _O.DESCRIBE, _TOPIC: _O.DESCRIBE},
    "ListGroups": {_GROUP: _O.DESCRIBE, _CLUSTER: _O.DESCRIBE},
    "DeleteGroups": {_GROUP: _O.DELETE},
    # topics and settings
    "CreateTopics": {_TOPIC: _O.CREATE, _CLUSTER: _O.CREATE},
    "DeleteTopics": {_TOPIC: _O.DELETE, _CLUSTER: _O.DELETE},
    "CreatePartitions": {_TOPIC: _O.ALTER},
    "DeleteRecords": {_TOPIC: _O.DELETE},
    "DescribeConfigs": dict.fromkeys((_TOPIC, _CLUSTER, _GROUP), _O.DESCRIBE_CONFIGS),
    "AlterConfigs": dict.fromkeys((_TOPIC, _CLUSTER, _GROUP), _O.ALTER_CONFIGS),
    "IncrementalAlterConfigs": dict.fromkeys((_TOPIC, _CLUSTER, _GROUP), _O.ALTER_CONFIGS),
    "DescribeLogDirs": {_CLUSTER: _O.DESCRIBE},
    "AlterReplicaLogDirs": {_CLUSTER: _O.ALTER},
    "ListConfigResources": {_CLUSTER: _O.DESCRIBE_CONFIGS},
    "DescribeTopicPartitions": {_TOPIC: _O.DESCRIBE},
    "ElectLeaders": {_CLUSTER: _O.ALTER},
    "AlterPartitionReassignments": {_CLUSTER: _O.ALTER},
    "ListPartitionReassignments": {_CLUSTER: _O.DESCRIBE},
    "DescribeQuorum": {_CLUSTER: _O.DESCRIBE},
    "UpdateFeatures": {_CLUSTER: _O.ALTER},
    # ACLs and users
    "DescribeAcls": {_CLUSTER: _O.DESCRIBE},
    "CreateAcls": {_CLUSTER: _O.ALTER},
    "DeleteAcls": {_CLUSTER: _O.ALTER},
    "DescribeUserScramCredentials": {_CLUSTER: _O.DESCRIBE},
    "AlterUserScramCredentials": {_CLUSTER: _O.ALTER},
    # quotas
    "DescribeClientQuotas": {_CLUSTER: _O.DESCRIBE_CONFIGS},
    "AlterClientQuotas": {_CLUSTER: _O.ALTER_CONFIGS},
}

APIS_WITHOUT_ACL = frozenset({"ApiVersions", "SaslHandshake", "SaslAuthenticate"})
"""APIs that require no permission. All of them may precede authentication."""
