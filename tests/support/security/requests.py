"""One request of every API that names a resource, to compare what different users get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oncelog.client.connection.sasl import Credentials, begin
from oncelog.rules.security.authorization import Operation, ResourceType
from oncelog.wire import messages as m
from oncelog.wire.message import Message
from support.broker import RawClient, batch

TOPIC, GROUP, TRANSACTION = "secured", "secured-group", "secured-txn"
MISSING = "secured-missing"


def log_in(client: RawClient, user: str, password: str, mechanism: str = "SCRAM-SHA-256") -> None:
    """Authenticate a raw connection with SaslHandshake and SaslAuthenticate requests."""
    exchange = begin(Credentials(mechanism, user, password, str))
    assert client.ask(m.SaslHandshakeRequest(mechanism=mechanism), 1).error_code == 0
    message: bytes | None = exchange.first()
    while message is not None:
        answer = client.ask(m.SaslAuthenticateRequest(auth_bytes=message), 2)
        assert answer.error_code == 0, answer.error_message
        message = exchange.reply(answer.auth_bytes)


def requests(with_id: bytes) -> Iterator[tuple[str, Message, int]]:
    """Return (name, request, version) of each request. No request changes the responses to later ones.

    `with_id` is the topic id for requests that name topics by id.
    """
    yield from _of_topics(with_id)
    yield from _of_groups(with_id)
    yield from _of_transactions()
    yield from _of_the_cluster()


def _of_topics(with_id: bytes) -> Iterator[tuple[str, Message, int]]:
    P, F, L = m.ProduceRequest, m.FetchRequest, m.ListOffsetsRequest
    for topic in (TOPIC, MISSING):
        data = P.PartitionProduceData(index=0, records=batch(b"v"))
        yield (
            f"Produce {topic}",
            P(acks=1, timeout_ms=5000, topic_data=[P.TopicProduceData(name=topic, partition_data=[data])]),
            9,
        )
        asked = F.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=100)
        yield (
            f"Fetch {topic}",
            F(max_bytes=100, topics=[F.FetchTopic(topic=topic, partitions=[asked])]),
            12,
        )
        one = L.ListOffsetsPartition(partition_index=0, timestamp=-1)
        yield f"ListOffsets {topic}", L(topics=[L.ListOffsetsTopic(name=topic, partitions=[one])]), 5
        named = m.MetadataRequest.MetadataRequestTopic(name=topic)
        for may_create in (False, True) if topic == TOPIC else (False,):
            yield (
                f"Metadata {topic} {may_create}",
                m.MetadataRequest(
                    topics=[named],
                    allow_auto_topic_creation=may_create,
                    include_topic_authorized_operations=True,
                    include_cluster_authorized_operations=True,
                ),
                9,
            )
        epoch = m.OffsetForLeaderEpochRequest
        at = epoch.OffsetForLeaderPartition(partition=0, leader_epoch=0)
        yield (
            f"OffsetForLeaderEpoch {topic}",
            epoch(topics=[epoch.OffsetForLeaderTopic(topic=topic, partitions=[at])]),
            4,
        )
        create = m.CreateTopicsRequest
        yield (
            f"CreateTopics {topic}",
            create(
                topics=[create.CreatableTopic(name=topic, num_partitions=1, replication_factor=1)],
                timeout_ms=5000,
                validate_only=True,
            ),
            7,
        )
        grow = m.CreatePartitionsRequest
        yield (
            f"CreatePartitions {topic}",
            grow(
                topics=[grow.CreatePartitionsTopic(name=topic, count=3, assignments=None)],
                timeout_ms=5000,
                validate_only=True,
            ),
            2,
        )
        cut = m.DeleteRecordsRequest
        yield (
            f"DeleteRecords {topic}",
            cut(
                topics=[
                    cut.DeleteRecordsTopic(
                        name=topic,
                        partitions=[cut.DeleteRecordsPartition(partition_index=0, offset=0)],
                    )
                ],
                timeout_ms=5000,
            ),
            2,
        )
        yield from _of_settings(2, topic)
        who = m.DescribeProducersRequest
        yield (
            f"DescribeProducers {topic}",
            who(topics=[who.TopicRequest(name=topic, partition_indexes=[0])]),
            0,
        )
    yield "Metadata all", m.MetadataRequest(topics=None), 9
    delete = m.DeleteTopicsRequest
    yield (
        "DeleteTopics",
        delete(topics=[delete.DeleteTopicState(name=MISSING)], timeout_ms=5000),
        6,
    )
    by_id = m.MetadataRequest.MetadataRequestTopic(name=None, topic_id=with_id)
    yield "Metadata by id", m.MetadataRequest(topics=[by_id]), 12
    asked = F.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=100)
    yield "Fetch by id", F(max_bytes=100, topics=[F.FetchTopic(topic_id=with_id, partitions=[asked])]), 13
    for name, topic_id in (("by id", with_id), ("by unknown id", b"?" * 16)):
        data = P.PartitionProduceData(index=0, records=batch(b"v"))
        produced = P.TopicProduceData(topic_id=topic_id, partition_data=[data])
        yield f"Produce {name}", P(acks=1, timeout_ms=5000, topic_data=[produced]), 13
    Q = m.DescribeTopicPartitionsRequest
    for topics in ([TOPIC], [MISSING], []):
        named_topics = [Q.TopicRequest(name=topic) for topic in topics]
        yield f"DescribeTopicPartitions {topics}", Q(topics=named_topics), 0


def _of_settings(
    kind: int, name: str, key: str = "retention.ms", value: str = "1000000"
) -> Iterator[tuple[str, Message, int]]:
    D, A, I = m.DescribeConfigsRequest, m.AlterConfigsRequest, m.IncrementalAlterConfigsRequest
    resource = D.DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=[key])
    yield f"DescribeConfigs {name}", D(resources=[resource]), 4
    if kind != 4:
        change = I.AlterableConfig(name=key, config_operation=0, value=value)
        altered = I.AlterConfigsResource(resource_type=kind, resource_name=name, configs=[change])
        yield f"IncrementalAlterConfigs {name}", I(resources=[altered], validate_only=True), 1
        old = A.AlterConfigsResource(resource_type=kind, resource_name=name, configs=[])
        yield f"AlterConfigs {name}", A(resources=[old], validate_only=True), 2


def _of_groups(with_id: bytes) -> Iterator[tuple[str, Message, int]]:
    C, O = m.OffsetCommitRequest, m.OffsetFetchRequest
    for topic in (TOPIC, MISSING):
        at = C.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
        commit = C(
            group_id=GROUP, topics=[C.OffsetCommitRequestTopic(name=topic, partitions=[at])], member_id=""
        )
        yield f"OffsetCommit {topic}", commit, 7
        yield (
            f"OffsetFetch {topic}",
            O(group_id=GROUP, topics=[O.OffsetFetchRequestTopic(name=topic, partition_indexes=[0])]),
            7,
        )
    for name, topic_id in (("by id", with_id), ("by unknown id", b"?" * 16)):
        at = C.OffsetCommitRequestPartition(partition_index=9, committed_offset=1)
        committed = C.OffsetCommitRequestTopic(topic_id=topic_id, partitions=[at])
        yield f"OffsetCommit {name}", C(group_id=GROUP, topics=[committed], member_id=""), 10
        asked = O.OffsetFetchRequestTopics(topic_id=topic_id, partition_indexes=[0])
        group = O.OffsetFetchRequestGroup(group_id=GROUP, topics=[asked])
        yield f"OffsetFetch {name}", O(groups=[group]), 10
    yield from _of_settings(32, GROUP, "consumer.session.timeout.ms", "46000")
    group = O.OffsetFetchRequestGroup(group_id=GROUP, topics=None)
    yield "OffsetFetch all", O(groups=[group]), 8
    yield from (
        ("Join", _join(), 5),
        ("Sync", m.SyncGroupRequest(group_id=GROUP, generation_id=1, member_id="x"), 3),
        ("Heartbeat", m.HeartbeatRequest(group_id=GROUP, generation_id=1, member_id="x"), 3),
        ("Leave", m.LeaveGroupRequest(group_id=GROUP, member_id="x"), 2),
        ("DescribeGroups", m.DescribeGroupsRequest(groups=[GROUP], include_authorized_operations=True), 5),
        ("ConsumerGroupDescribe", m.ConsumerGroupDescribeRequest(group_ids=["nobody's"]), 0),
        ("ListGroups", m.ListGroupsRequest(), 4),
        ("DeleteGroups", m.DeleteGroupsRequest(groups_names=["nobody's"]), 2),
        ("FindCoordinator", m.FindCoordinatorRequest(key_type=0, coordinator_keys=[GROUP]), 4),
        ("FindCoordinator old", m.FindCoordinatorRequest(key_type=0, key=GROUP), 3),
    )
    beat = m.ConsumerGroupHeartbeatRequest(group_id="nobody's", member_id="x", member_epoch=5)
    yield "ConsumerGroupHeartbeat", beat, 0
    D = m.OffsetDeleteRequest
    topic = D.OffsetDeleteRequestTopic(
        name=MISSING, partitions=[D.OffsetDeleteRequestPartition(partition_index=0)]
    )
    yield "OffsetDelete", D(group_id=GROUP, topics=[topic]), 0


def _join() -> m.JoinGroupRequest:
    protocol = m.JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")
    return m.JoinGroupRequest(
        group_id=GROUP,
        session_timeout_ms=10_000,
        member_id="x",
        protocol_type="consumer",
        protocols=[protocol],
    )


def _of_transactions() -> Iterator[tuple[str, Message, int]]:
    unknown: dict[str, Any] = {"producer_id": 4_000_000, "producer_epoch": 0}
    A, T = m.AddPartitionsToTxnRequest, m.TxnOffsetCommitRequest
    yield (
        "InitProducerId",
        m.InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1, producer_id=-1),
        4,
    )
    yield (
        "InitProducerId txn",
        m.InitProducerIdRequest(transactional_id=TRANSACTION, transaction_timeout_ms=-1),
        4,
    )
    for topic in (TOPIC, MISSING):
        added = A(
            v3_and_below_transactional_id=TRANSACTION,
            v3_and_below_producer_id=4_000_000,
            v3_and_below_producer_epoch=0,
            v3_and_below_topics=[A.AddPartitionsToTxnTopic(name=topic, partitions=[0])],
        )
        yield f"AddPartitionsToTxn {topic}", added, 3
    batched = A.AddPartitionsToTxnTransaction(
        transactional_id=TRANSACTION,
        topics=[A.AddPartitionsToTxnTopic(name=TOPIC, partitions=[0])],
        verify_only=True,
        **unknown,
    )
    yield "AddPartitionsToTxn by brokers", A(transactions=[batched]), 4
    offsets = m.AddOffsetsToTxnRequest(transactional_id=TRANSACTION, group_id=GROUP, **unknown)
    yield "AddOffsetsToTxn", offsets, 3
    yield "EndTxn", m.EndTxnRequest(transactional_id=TRANSACTION, committed=True, **unknown), 3
    at = T.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    yield (
        "TxnOffsetCommit",
        T(
            transactional_id=TRANSACTION,
            group_id=GROUP,
            topics=[T.TxnOffsetCommitRequestTopic(name=MISSING, partitions=[at])],
            **unknown,
        ),
        3,
    )
    yield "DescribeTransactions", m.DescribeTransactionsRequest(transactional_ids=[TRANSACTION]), 0
    yield "ListTransactions", m.ListTransactionsRequest(), 0
    found = m.FindCoordinatorRequest(key_type=1, coordinator_keys=[TRANSACTION])
    yield "FindCoordinator txn", found, 4
    W = m.WriteTxnMarkersRequest
    marker = W.WritableTxnMarker(
        transaction_result=False,
        topics=[W.WritableTxnMarkerTopic(name=MISSING, partition_indexes=[0])],
        coordinator_epoch=0,
        **unknown,
    )
    yield "WriteTxnMarkers", W(markers=[marker]), 1


def _of_the_controller() -> Iterator[tuple[str, Message, int]]:
    E, R, L = m.ElectLeadersRequest, m.AlterPartitionReassignmentsRequest, m.AlterReplicaLogDirsRequest
    Q, S = m.DescribeQuorumRequest, m.ListPartitionReassignmentsRequest
    for topic in (TOPIC, MISSING):
        yield f"ElectLeaders {topic}", E(topic_partitions=[E.TopicPartitions(topic=topic, partitions=[0])]), 2
        stays = R.ReassignablePartition(partition_index=0, replicas=None)
        reassigned = R.ReassignableTopic(name=topic, partitions=[stays])
        yield f"AlterPartitionReassignments {topic}", R(topics=[reassigned]), 1
        moved = L.AlterReplicaLogDir(
            path="/nowhere", topics=[L.AlterReplicaLogDirTopic(name=topic, partitions=[0])]
        )
        yield f"AlterReplicaLogDirs {topic}", L(dirs=[moved]), 2
        listed = S.ListPartitionReassignmentsTopics(name=topic, partition_indexes=[0])
        yield f"ListPartitionReassignments {topic}", S(topics=[listed]), 0
    yield "ElectLeaders all", E(topic_partitions=None, election_type=0), 2
    for name in ("__cluster_metadata", TOPIC):
        described = Q.TopicData(topic_name=name, partitions=[Q.PartitionData(partition_index=0)])
        yield f"DescribeQuorum {name}", Q(topics=[described]), 0
    U = m.UpdateFeaturesRequest
    yield (
        "UpdateFeatures",
        U(feature_updates=[U.FeatureUpdateKey(feature="nobody's", max_version_level=1)]),
        2,
    )
    yield "ListConfigResources", m.ListConfigResourcesRequest(resource_types=[16]), 1
    yield "ListConfigResources old", m.ListConfigResourcesRequest(), 0


def _of_the_cluster() -> Iterator[tuple[str, Message, int]]:
    yield from _of_settings(4, "1")
    yield "DescribeCluster", m.DescribeClusterRequest(include_cluster_authorized_operations=True), 0
    yield "DescribeLogDirs", m.DescribeLogDirsRequest(topics=[]), 3
    yield from _of_the_controller()
    nobody = m.DescribeUserScramCredentialsRequest.UserName(name="nobody")
    yield "DescribeUsers", m.DescribeUserScramCredentialsRequest(users=[nobody]), 0
    deletion = m.AlterUserScramCredentialsRequest.ScramCredentialDeletion(name="nobody", mechanism=1)
    yield "AlterUsers", m.AlterUserScramCredentialsRequest(deletions=[deletion]), 0
    D = m.DeleteAclsRequest
    filters: dict[str, Any] = {"pattern_type_filter": 3, "operation": 1, "permission_type": 1}
    yield (
        "DescribeAcls",
        m.DescribeAclsRequest(resource_type_filter=6, resource_name_filter="nothing", **filters),
        3,
    )
    nothing = D.DeleteAclsFilter(resource_type_filter=6, resource_name_filter="nothing", **filters)
    yield "DeleteAcls", D(filters=[nothing]), 3
    yield "CreateAcls", m.CreateAclsRequest(creations=[_no_acl()]), 3
    Q = m.AlterClientQuotasRequest
    user = Q.EntityData(entity_type="user", entity_name="nobody")
    change = Q.EntryData(entity=[user], ops=[Q.OpData(key="producer_byte_rate", value=1)])
    yield "DescribeClientQuotas", m.DescribeClientQuotasRequest(), 1
    yield "AlterClientQuotas", Q(entries=[change], validate_only=True), 1


def _no_acl() -> m.CreateAclsRequest.AclCreation:
    return m.CreateAclsRequest.AclCreation(
        resource_type=4,
        resource_name="no cluster",
        resource_pattern_type=3,
        principal="User:x",
        host="*",
        operation=3,
        permission_type=3,
    )


def rights_in(response: Any) -> list[str]:
    """Return error codes, names and authorized operations of a response, as sorted `field=value` texts."""
    rights: set[str] = set()
    _walk(response, rights)
    return sorted(rights)


_NAMES = ("name", "topic", "group_id", "transactional_id")


def _walk(value: Any, rights: set[str]) -> None:
    if isinstance(value, list):
        for element in value:
            _walk(element, rights)
    elif hasattr(value, "__slots__"):
        for slot in value.__slots__:
            part = getattr(value, slot)
            if slot.endswith(("error_code", "authorized_operations")) or slot in _NAMES:
                rights.add(f"{slot}={part}")
            elif slot != "configs" and not isinstance(part, (str, bytes, int)):
                _walk(part, rights)


GRANTS: dict[str, tuple[ResourceType, str, Operation]] = {
    f"{kind.name.lower()}-{operation.name.lower()}": (kind, name, operation)
    for kind, name, operations in (
        (ResourceType.TOPIC, "secured", (3, 4, 5, 6, 7, 8, 10, 11, 2)),
        (ResourceType.GROUP, "*", (3, 6, 8, 2)),
        (ResourceType.TRANSACTIONAL_ID, "secured-", (4, 8, 2)),
        (ResourceType.CLUSTER, "kafka-cluster", (5, 7, 8, 9, 10, 11, 12, 2)),
    )
    for operation in map(Operation, operations)
}
"""For each user, the only operation that it may do.

The ACLs of topics and transactional ids have a prefix, those of groups the name `*`.
"""
