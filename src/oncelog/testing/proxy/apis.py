"""The names of Kafka's API keys and error codes.

The API keys include those whose messages this project does not decode. Source: the request schemas of Apache
Kafka 4.x (clients/src/main/resources/common/message).
"""

from __future__ import annotations

from oncelog.errors import ERROR_BY_CODE

_TABLE = """
0 Produce; 1 Fetch; 2 ListOffsets; 3 Metadata; 8 OffsetCommit; 9 OffsetFetch; 10 FindCoordinator;
11 JoinGroup; 12 Heartbeat; 13 LeaveGroup; 14 SyncGroup; 15 DescribeGroups; 16 ListGroups;
17 SaslHandshake; 18 ApiVersions; 19 CreateTopics; 20 DeleteTopics; 21 DeleteRecords;
22 InitProducerId; 23 OffsetForLeaderEpoch; 24 AddPartitionsToTxn; 25 AddOffsetsToTxn; 26 EndTxn;
27 WriteTxnMarkers; 28 TxnOffsetCommit; 29 DescribeAcls; 30 CreateAcls; 31 DeleteAcls;
32 DescribeConfigs; 33 AlterConfigs; 34 AlterReplicaLogDirs; 35 DescribeLogDirs; 36 SaslAuthenticate;
37 CreatePartitions; 42 DeleteGroups; 43 ElectLeaders; 44 IncrementalAlterConfigs;
45 AlterPartitionReassignments; 46 ListPartitionReassignments; 47 OffsetDelete;
48 DescribeClientQuotas; 49 AlterClientQuotas; 50 DescribeUserScramCredentials;
51 AlterUserScramCredentials; 55 DescribeQuorum; 57 UpdateFeatures; 60 DescribeCluster;
61 DescribeProducers; 65 DescribeTransactions; 66 ListTransactions; 68 ConsumerGroupHeartbeat;
69 ConsumerGroupDescribe; 71 GetTelemetrySubscriptions; 72 PushTelemetry; 74 ListConfigResources;
75 DescribeTopicPartitions; 76 ShareGroupHeartbeat; 77 ShareGroupDescribe; 78 ShareFetch;
79 ShareAcknowledge
"""

NAME_BY_KEY: dict[int, str] = {
    int(key): name for key, name in (row.split() for row in _TABLE.replace("\n", " ").split(";"))
}
API_NAMES = frozenset(NAME_BY_KEY.values())


def api_name(key: int) -> str:
    """Return Kafka's name of an API key; `Api<key>` if this table does not have the key."""
    return NAME_BY_KEY.get(key, f"Api{key}")


def error_name(code: int) -> str:
    """Return Kafka's name of an error code; "" for 0, `error <code>` if the code is unknown."""
    if code == 0:
        return ""
    error = ERROR_BY_CODE.get(code)
    return error.kafka_name if error else f"error {code}"
