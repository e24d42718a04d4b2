"""Large requests are handled in bounded steps, between which the broker serves other clients."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, pairwise
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest
from support.broker import RawClient
from support.fuzz import targets
from support.fuzz.targets import NOW_MS, open_node

from oncelog.broker import dispatch, encoded_response, purgatory
from oncelog.broker.coordinators.internal_topic_config import CONSUMER_OFFSETS, TRANSACTION_STATE
from oncelog.broker.coordinators.markers import MARKER_COST, OFFSETS_PER_ELEMENT, Marker
from oncelog.broker.coordinators.transactions import MAX_MARKERS_AT_ONCE
from oncelog.broker.dispatch import end_round, tick
from oncelog.broker.encoded_response import ENCODED_PER_STEP, EncodedInSteps, encoding_of
from oncelog.broker.handlers import metadata, produce
from oncelog.broker.handlers.delete_acls import MAX_REPEATED
from oncelog.broker.purgatory import Disconnect, PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.security.authorizer import MAX_CHANGED_IN_PLACE, Authorizer, encode_acl
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import FREE_STEPS, MAX_LARGE, ResponseSlots, run_work
from oncelog.broker.topics import topics
from oncelog.broker.topics.topics import NewTopic, Topic
from oncelog.broker.topics.topics_file import FILE_NAME
from oncelog.errors import (
    DuplicateResource,
    InvalidTopicException,
    KafkaStorageError,
    NotCoordinator,
    PolicyViolation,
    ResourceNotFound,
    StorageError,
    TopicAlreadyExists,
    UnknownMemberId,
    UnknownTopicId,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
)
from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.background import BackgroundQueue, BackgroundTask, Kind
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.groups.consumer import Heartbeat, OrderedNames
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.limits.quotas import QuotaEntity
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType
from oncelog.rules.transactions.entry import TransactionState
from oncelog.server import request_handler
from oncelog.server.embedded import Broker
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import RequestHeader
from oncelog.wire.message import EncodedResponse, Message
from oncelog.wire.messages import (
    AddPartitionsToTxnRequest,
    AlterClientQuotasRequest,
    AlterUserScramCredentialsRequest,
    ConsumerGroupDescribeRequest,
    CreateAclsRequest,
    CreateTopicsRequest,
    DeleteAclsRequest,
    DeleteGroupsRequest,
    DeleteRecordsRequest,
    DescribeAclsRequest,
    DescribeClientQuotasRequest,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeGroupsRequest,
    DescribeLogDirsRequest,
    DescribeProducersRequest,
    DescribeQuorumRequest,
    DescribeTopicPartitionsRequest,
    DescribeTransactionsRequest,
    DescribeUserScramCredentialsRequest,
    ElectLeadersRequest,
    FetchRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    JoinGroupRequest,
    ListGroupsRequest,
    ListOffsetsRequest,
    ListTransactionsRequest,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    OffsetForLeaderEpochRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
    WriteTxnMarkersRequest,
)
from oncelog.wire.records import NewRecord

STEP_ELEMENTS = DEFAULT_LIMITS.request_step_elements
PARTITIONS_PER_STEP = DEFAULT_LIMITS.partitions_per_step
MANY = 3 * STEP_ELEMENTS + 1
NAMES = [f"name-{number}" for number in range(MANY)]


def driven(disk: MemoryDisk) -> BrokerState:
    """Return a node whose background tasks run only in `finish`."""
    node = open_node(disk)
    node.log_manager.background.on_added = lambda: None
    return node


def handle(node: BrokerState, message: Any, version: int | None = None) -> Any:
    header = RequestHeader(
        message.api.key, message.api.max_version if version is None else version, 1, "c", 0
    )
    return dispatch.handle(node, Request(1, header, message, "/127.0.0.1"), NOW_MS)


def finish(node: BrokerState, deferred: PendingResponse, *, may_block: bool = False) -> tuple[int, Any]:
    """Run the remaining steps of a response; return their number and the response.

    With `may_block`, also run blocking calls. Without it, fail if a step needs one.
    """
    answers: list[Any] = []
    deferred.add_done_callback(answers.append)
    steps = 0
    while not answers:
        job = node.log_manager.background.step()
        if job is not None:
            assert may_block
            job()
        steps += 1
    return steps, answers[0]


def large_requests() -> list[Any]:
    directory = DescribeLogDirsRequest.DescribableLogDirTopic
    delete, epochs = DeleteRecordsRequest, OffsetForLeaderEpochRequest
    offset, fetch, metadata = ListOffsetsRequest, OffsetFetchRequest, MetadataRequest
    deleted = [delete.DeleteRecordsPartition(partition_index=0, offset=0)] * MANY
    ends = [epochs.OffsetForLeaderPartition(partition=0, leader_epoch=0)] * MANY
    looked = [offset.ListOffsetsPartition(partition_index=i, timestamp=-1) for i in range(MANY)]
    fetched = [fetch.OffsetFetchRequestTopics(name="t", partition_indexes=[0] * MANY)]
    return [
        delete(topics=[delete.DeleteRecordsTopic(name="t", partitions=deleted)]),
        epochs(topics=[epochs.OffsetForLeaderTopic(topic="t", partitions=ends)]),
        offset(topics=[offset.ListOffsetsTopic(name="t", partitions=looked)]),
        fetch(groups=[fetch.OffsetFetchRequestGroup(group_id="g", topics=fetched)]),
        metadata(
            topics=[metadata.MetadataRequestTopic(name=f"?{i}") for i in range(MANY)],
            allow_auto_topic_creation=False,
        ),
        *large_requests_to_coordinators(),
        ConsumerGroupDescribeRequest(group_ids=NAMES),
        DescribeTransactionsRequest(transactional_ids=NAMES),
        DescribeLogDirsRequest(topics=[directory(topic=name, partitions=[0]) for name in NAMES]),
        *large_requests_of_administrators(),
    ]


def large_requests_of_administrators() -> list[Any]:
    quorum, elect = DescribeQuorumRequest, ElectLeadersRequest
    page, users = DescribeTopicPartitionsRequest, DescribeUserScramCredentialsRequest
    voters = [quorum.PartitionData(partition_index=i) for i in range(MANY)]
    return [
        page(topics=[page.TopicRequest(name=name) for name in NAMES], response_partition_limit=2_000),
        quorum(topics=[quorum.TopicData(topic_name="t", partitions=voters)]),
        elect(topic_partitions=[elect.TopicPartitions(topic="t", partitions=list(range(MANY)))]),
        users(users=[users.UserName(name=name) for name in NAMES]),
    ]


def large_requests_to_coordinators() -> list[Any]:
    commit, pending, find = OffsetCommitRequest, TxnOffsetCommitRequest, FindCoordinatorRequest
    add, write, deletion = AddPartitionsToTxnRequest, WriteTxnMarkersRequest, OffsetDeleteRequest
    producers, read = DescribeProducersRequest, FetchRequest
    names = [f"g{i}" for i in range(MANY)]
    rows = [commit.OffsetCommitRequestPartition(partition_index=i, committed_offset=1) for i in range(MANY)]
    pending_rows = [
        pending.TxnOffsetCommitRequestPartition(partition_index=i, committed_offset=1) for i in range(MANY)
    ]
    added = add.AddPartitionsToTxnTopic(name="t", partitions=list(range(MANY)))
    marked = write.WritableTxnMarkerTopic(name="t", partition_indexes=[0] * MANY)
    doomed = [deletion.OffsetDeleteRequestPartition(partition_index=i) for i in range(MANY)]
    described = producers.TopicRequest(name="t", partition_indexes=list(range(MANY)))
    fetched = [
        read.FetchPartition(partition=i, fetch_offset=0, partition_max_bytes=1 << 20) for i in range(MANY)
    ]
    return [
        DeleteGroupsRequest(groups_names=names),
        DescribeGroupsRequest(groups=names),
        find(key_type=0, coordinator_keys=names),
        commit(group_id="g", topics=[commit.OffsetCommitRequestTopic(name="t", partitions=rows)]),
        pending(
            group_id="g",
            transactional_id="x",
            topics=[pending.TxnOffsetCommitRequestTopic(name="t", partitions=pending_rows)],
        ),
        deletion(group_id="kept", topics=[deletion.OffsetDeleteRequestTopic(name="t", partitions=doomed)]),
        add(transactions=[add.AddPartitionsToTxnTransaction(transactional_id="x", topics=[added])]),
        write(markers=[write.WritableTxnMarker(producer_id=1, topics=[marked])]),
        producers(topics=[described]),
        read(topics=[read.FetchTopic(topic_id=bytes(16), topic="t", partitions=fetched)], max_bytes=1 << 20),
    ]


def with_topic(node: BrokerState) -> BrokerState:
    """Create topic t, commit an offset of group `kept` for it, and return the node."""
    node.topics.create("t", 1, {}, NOW_MS)
    commit(node, "kept", [0])
    return node


def commit(node: BrokerState, group: str, partitions: Iterable[int]) -> None:
    offsets = {TopicPartition("t", index): CommittedOffset(1, -1, "", NOW_MS, -1, -1) for index in partitions}
    node.groups.offsets.commit(group, offsets, NOW_MS)


def test_a_request_of_many_elements_lets_others_have_their_turn() -> None:
    for message in large_requests():
        node = with_topic(driven(MemoryDisk()))
        answer = handle(node, message)
        assert isinstance(answer, PendingResponse), message.api.name
        steps, response = finish(node, answer)
        assert steps >= MANY // STEP_ELEMENTS
        alone = with_topic(open_node(MemoryDisk()))
        version = message.api.max_version
        response_alone = handle(alone, message)
        assert response.encode(version) == response_alone.encode(version), message.api.name


def test_every_large_response_is_encoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1565: the response to CreateTopics of 5,000 topics was encoded in one step of 0.2 s.

    R1600: that to Produce, in which the throttle time comes last, still was.
    """
    encode_in_steps, counts = Message.encode_in_steps, [0]

    def counted(message: Message, version: int, append: Callable[[Any], None]) -> Iterator[None]:
        for _ in encode_in_steps(message, version, append):
            counts[-1] += 1
            yield

    monkeypatch.setattr(Message, "encode_in_steps", counted)
    monkeypatch.setattr(produce, "STEP_COST", 10 * produce.PARTITION_COST)
    data = [ProduceRequest.PartitionProduceData(index=index) for index in range(MANY)]
    topics = [ProduceRequest.TopicProduceData(name="t", partition_data=data)]
    for message in (*large_requests(), ProduceRequest(acks=1, topic_data=topics)):
        if isinstance(message, FetchRequest):
            continue
        node, version, answers = with_topic(driven(MemoryDisk())), message.api.max_version, list[Any]()
        answer = handle(node, message)
        answer.encode = partial(encoding_of, version=version)
        answer.add_done_callback(answers.append)
        counts[:] = [0]
        while not answers:
            node.log_manager.background.step()
            counts.append(0)
        assert isinstance(answers[0], EncodedInSteps), message.api.name
        assert 0 < max(counts) <= ENCODED_PER_STEP, message.api.name
        alone = handle(with_topic(open_node(MemoryDisk())), message)
        for throttle_ms in (0, 7) if hasattr(alone, "throttle_time_ms") else (0,):
            if throttle_ms:
                answers[0].throttle_time_ms = alone.throttle_time_ms = throttle_ms
            assert answers[0].encode(version) == alone.encode(version), message.api.name


def test_the_server_has_late_responses_encoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[type[Any]] = []
    encode_response = request_handler.encode_response
    monkeypatch.setattr(
        request_handler, "encode_response", lambda r, *a: encoded.append(type(r)) or encode_response(r, *a)
    )
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        response = client.ask(DescribeGroupsRequest(groups=NAMES), 5)
        assert [group.group_id for group in response.groups] == NAMES
        client.ask(MetadataRequest(topics=None), 12)
    assert encoded[0] is EncodedInSteps and encoded[1] is not EncodedInSteps


def test_a_cached_response_has_the_throttle_time_of_its_own_client() -> None:
    node = open_node(MemoryDisk())
    node.topics.create("t", DEFAULT_LIMITS.large_answer_partitions, {}, NOW_MS)
    first, second = (handle(node, MetadataRequest(topics=None)) for _ in range(2))
    first.throttle_time_ms = 7
    version = MetadataRequest.api.max_version
    times = [
        MetadataResponse.decode(version, each.encode(version)).throttle_time_ms for each in (first, second)
    ]
    assert times == [7, 0]
    old = handle(node, MetadataRequest(topics=None), 2)  # has no throttle time
    assert len(MetadataResponse.decode(2, old.encode(2)).topics) == 1


def test_responses_with_long_names_are_not_cached_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1676: 16 responses were cached, of any size, and with all names of their requests."""
    monkeypatch.setattr(topics, "MAX_CACHED_BYTES", 100_000)
    node = open_node(MemoryDisk())
    node.topics.create("t", DEFAULT_LIMITS.large_answer_partitions, {}, NOW_MS)

    def ask(*names: str) -> int:
        requested = [MetadataRequest.MetadataRequestTopic(name=name) for name in ("t", *names)]
        handle(node, MetadataRequest(topics=requested, allow_auto_topic_creation=False))
        return len(node.topics.large_responses)

    # A name of 20,000 characters is both in the request and in the response.
    assert [ask(str(number) * 20_000) for number in range(5)] == [1, 2, 1, 2, 1]
    # A repeated name is only once in the response.
    assert ask(*("repeated" * 1_000 for _ in range(20))) == 1
    assert ask() == 2
    node.topics.create("u", 1, {}, NOW_MS)
    assert [ask(str(number) * 20_000) for number in range(2)] == [1, 2]


def metadata_of(*names: str) -> MetadataRequest:
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    return MetadataRequest(topics=topics, allow_auto_topic_creation=True)


def test_a_topic_that_could_not_be_created_is_created_by_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R1690: the cached response said for good that the topic does not exist, so it was never created."""
    monkeypatch.setattr(metadata, "MAX_PARTITIONS_PER_REQUEST", 2)
    node = open_node(MemoryDisk())
    node.topics.create("large", DEFAULT_LIMITS.large_answer_partitions, {}, NOW_MS)

    def ask() -> list[int]:
        answer, version = handle(node, metadata_of("large", "a", "b", "c")), MetadataRequest.api.max_version
        response = MetadataResponse.decode(version, answer.encode(version))
        return [topic.error_code for topic in response.topics]

    assert ask() == [0, 0, 0, UnknownTopicOrPartition.code]
    assert ask() == [0, 0, 0, 0]
    assert len(node.topics.large_responses) == 1


def test_no_topic_gets_the_name_of_the_metadata_log() -> None:
    """R1760: the next start took the topic for the metadata log of Apache Kafka."""
    disk = MemoryDisk()
    answer = handle(open_node(disk), metadata_of("__cluster_metadata", "t"))
    assert [topic.error_code for topic in answer.topics] == [UnknownTopicOrPartition.code, 0]
    assert disk.is_directory("t-0") and not disk.is_directory("__cluster_metadata-0")


def test_metadata_creates_the_topics_of_coordinators_with_their_own_partition_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R1764: they had num.partitions partitions for good."""
    counts = {"offsets.topic.num.partitions": 3, "transaction.state.log.num.partitions": 2}
    monkeypatch.setattr(targets, "_SETTINGS", targets._SETTINGS.replaced(counts))
    answer = handle(open_node(MemoryDisk()), metadata_of(CONSUMER_OFFSETS, TRANSACTION_STATE, "t"))
    assert [len(topic.partitions) for topic in answer.topics] == [3, 2, 1]


def test_the_partitions_of_a_metadata_response_share_their_lists() -> None:
    """R1768: the lists of each partition took 60 % of the memory of responses in progress."""
    node = open_node(MemoryDisk())
    node.topics.create("t", 2, {}, NOW_MS)
    (topic,) = handle(node, metadata_of("t")).topics
    lists = [(p.replica_nodes, p.isr_nodes, p.offline_replicas) for p in topic.partitions]
    assert lists == [([1], [1], [])] * 2
    assert len({id(nodes) for partition in lists for nodes in partition}) == 2


def test_names_of_topics_that_may_be_created_are_checked_in_steps() -> None:
    """R1691: a request for 49,000 invalid names blocked all other clients for 1.3 s."""
    node = driven(MemoryDisk())
    answer = handle(node, metadata_of(*(f"not a name {number}" for number in range(MANY))))
    assert isinstance(answer, PendingResponse)
    steps, response = finish(node, answer)
    assert steps >= 2 * (MANY // STEP_ELEMENTS)  # half of them check the names
    assert {topic.error_code for topic in response.topics} == {InvalidTopicException.code}


def test_the_description_of_topics_that_may_be_created_goes_with_its_connection() -> None:
    """R1692: it was made to its end without a slot, also for clients that were gone."""
    node = open_node(MemoryDisk())
    node.topics.create("t", (FREE_STEPS + 3) * STEP_ELEMENTS, {}, NOW_MS)
    node.log_manager.background.on_added = lambda: None
    answers = [handle(node, metadata_of("t", f"not {number}")) for number in range(2 * MAX_LARGE)]
    assert all(isinstance(answer, PendingResponse) for answer in answers)
    for _ in range((FREE_STEPS + 2) * len(answers)):
        node.log_manager.background.step()
    assert len(node.slots._waiters) == MAX_LARGE
    for answer in answers:
        answer.cancel()
    node.log_manager.background.finish()
    assert not node.slots._waiters and not node.slots._used_count
    assert not node.topics.large_responses


def test_users_are_listed_in_steps() -> None:
    node = driven(MemoryDisk())
    change = 1, b"salt", bytes(32), 4096
    node.users.alter_all([(name, [], [change]) for name in NAMES])
    answer = handle(node, DescribeUserScramCredentialsRequest(users=None))
    node.users.alter(NAMES[-1], [1], [])
    _, response = finish(node, answer)
    assert [result.user for result in response.results] == sorted(NAMES[:-1])
    assert not any(result.error_code for result in response.results)


def test_lists_of_many_acls_quotas_and_topics_let_others_have_their_turn() -> None:
    """R1531: 64 pipelined requests for ACLs that do not exist compared 20,000 ACLs each, and blocked all
    other clients for 0.9 s.
    """
    node = node_with_acls(*TOPIC_ACLS)
    quotas = ((QuotaEntity(user=name), [("producer_byte_rate", 1.0)]) for name in NAMES)
    assert not any(node.quotas.alter_all(quotas, is_test=False))
    node.log_manager.background.on_added = None
    node.topics.create_all([NewTopic(name, 1, {}) for name in NAMES[:100]], NOW_MS)
    node.log_manager.background.on_added = lambda: None
    answer = handle(node, DescribeAclsRequest(**FILTER))
    assert isinstance(answer, PendingResponse)
    node.authorizer.remove(TOPIC_ACLS[1:2])  # type: ignore[union-attr]
    steps, response = finish(node, answer)
    assert steps >= MANY // STEP_ELEMENTS
    assert [row.resource_name for row in response.resources] == sorted(NAMES)
    answer = handle(node, DescribeClientQuotasRequest(components=[]))
    assert isinstance(answer, PendingResponse)
    assert not any(node.quotas.alter_all([(QuotaEntity(user="z"), [])], is_test=False))
    steps, response = finish(node, answer)
    assert steps >= MANY // STEP_ELEMENTS
    assert [row.entity[0].entity_name for row in response.entries] == NAMES
    before = node.round_meter.records
    page = DescribeTopicPartitionsRequest(response_partition_limit=1)
    assert handle(node, page).next_cursor.topic_name == "name-1"
    assert node.round_meter.records > before + 100


def test_acls_in_any_order_are_sorted_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1547: sorting 20,000 ACLs that were not created in their order took 0.06 s in one step."""
    node = node_with_acls(*sorted(TOPIC_ACLS, key=lambda acl: acl.name[::-1]))
    monkeypatch.setattr(Acl, "__lt__", lambda acl, other: pytest.fail("a comparison without a key"))
    message = DescribeAclsRequest(**FILTER)
    _, response = finish(node, handle(node, message))
    assert [row.resource_name for row in response.resources] == sorted(NAMES)


def test_changes_of_many_users_quotas_and_acls_let_others_have_their_turn() -> None:
    """R1535: 5,000 users in one request took 0.16 s in one step, and 5,000 quotas 0.1 s."""
    node = node_with_acls()
    users, quotas, acls = AlterUserScramCredentialsRequest, AlterClientQuotasRequest, CreateAclsRequest
    user = {"mechanism": 1, "salt": b"salt", "salted_password": bytes(32), "iterations": 4096}
    op = [quotas.OpData(key="producer_byte_rate", value=1.0, remove=False)]
    acl = {"resource_type": 2, "resource_pattern_type": 3, "host": "*", "operation": 3, "permission_type": 3}
    for message in (
        users(upsertions=[users.ScramCredentialUpsertion(name=name, **user) for name in NAMES]),
        quotas(
            entries=[
                quotas.EntryData(entity=[quotas.EntityData(entity_type="user", entity_name=name)], ops=op)
                for name in NAMES
            ],
        ),
        acls(creations=[acls.AclCreation(resource_name=name, principal="User:a", **acl) for name in NAMES]),
    ):
        answer = handle(node, message)
        assert isinstance(answer, PendingResponse), message.api.name
        steps, response = finish(node, answer, may_block=True)
        assert steps >= MANY // STEP_ELEMENTS
        rows = response.entries if message.api.name == "AlterClientQuotas" else response.results
        assert len(rows) == MANY and not any(row.error_code for row in rows), message.api.name
    assert sorted(node.users.names()) == sorted(NAMES)
    assert [entity.user for entity in node.quotas.values] == NAMES
    assert [acl.name for acl in node.authorizer.acls] == NAMES  # type: ignore[union-attr]


def test_a_credential_that_is_deleted_between_two_steps_is_not_found() -> None:
    node = driven(MemoryDisk())
    users = AlterUserScramCredentialsRequest
    for name in NAMES[:300]:
        node.users.alter(name, [], [(1, b"salt", bytes(32), 4096)])
    doomed = [users.ScramCredentialDeletion(name=name, mechanism=1) for name in NAMES[:300]]
    first, second = (handle(node, users(deletions=doomed)) for _ in range(2))
    steps, response = finish(node, first, may_block=True)
    assert steps >= 1 and not any(row.error_code for row in response.results)
    _, response = finish(node, second, may_block=True)
    assert {row.error_code for row in response.results} == {ResourceNotFound.code}
    assert node.users.names() == []


def test_a_change_that_is_not_made_keeps_no_memory() -> None:
    """R1546: the rows of a refused change stayed in memory until the next change of the file."""
    node, upsertions, _ = driven(MemoryDisk()), *new_users_and_quotas()
    users = AlterUserScramCredentialsRequest
    _, refused = finish(node, handle(node, users(upsertions=[*upsertions, *upsertions])))
    assert {row.error_code for row in refused.results} == {DuplicateResource.code}
    assert node.users.names() == [] and node.users._rows._rows == {}


def test_a_change_that_has_begun_is_made_after_its_client_has_disconnected() -> None:
    """The file may be written already, and then the memory must not keep the old content."""
    node, upsertions, entries = driven(MemoryDisk()), *new_users_and_quotas()
    for message in (
        AlterUserScramCredentialsRequest(upsertions=upsertions),
        AlterClientQuotasRequest(entries=entries),
    ):
        handle(node, message).cancel()
    node.log_manager.background.finish()
    assert node.users.names() == NAMES and len(node.quotas.values) == MANY


def new_users_and_quotas() -> tuple[list[Any], list[Any]]:
    users, quotas = AlterUserScramCredentialsRequest, AlterClientQuotasRequest
    user = {"mechanism": 1, "salt": b"salt", "salted_password": bytes(32), "iterations": 4096}
    op = [quotas.OpData(key="producer_byte_rate", value=1.0, remove=False)]
    return [users.ScramCredentialUpsertion(name=name, **user) for name in NAMES], [
        quotas.EntryData(entity=[quotas.EntityData(entity_type="user", entity_name=name)], ops=op)
        for name in NAMES
    ]


@pytest.mark.parametrize("count", [1, 2 * MAX_CHANGED_IN_PLACE])
def test_changes_of_acls_wait_for_each_other_and_are_in_effect_after_their_write(count: int) -> None:
    """R1601: each change wrote the file in the broker's thread, 0.05 s with 50,000 ACLs."""
    node, disk = node_with_acls(), MemoryDisk()
    node.authorizer = authorizer = Authorizer(disk, "", allows_if_none=True)
    authorizer.add([acl_of("old")])
    added = [acl_of(f"a{number}") for number in range(count)]
    work = authorizer.add_in_steps({acl: encode_acl(acl) for acl in added})
    call = next(call for call in work if call is not None)
    others = [authorizer.remove_in_steps([acl_of("old")]), authorizer.add_in_steps({acl_of("b"): ROW_OF_B})]
    for other in others:
        assert [next(other) for _ in range(3)] == [None] * 3
    assert list(authorizer.acls) == [acl_of("old")]
    call()
    assert list(authorizer.acls) == [acl_of("old")]
    for change in (work, *others):
        run_work(change)
    assert list(authorizer.acls) == [*added, acl_of("b")]
    assert list(Authorizer(disk, "", allows_if_none=True).acls) == list(authorizer.acls)


@pytest.mark.parametrize("count", [1, 2 * MAX_CHANGED_IN_PLACE])
def test_acls_do_not_change_if_their_file_cannot_be_written(count: int) -> None:
    authorizer = Authorizer(MemoryDisk(), "", allows_if_none=True)
    authorizer.add([acl_of("old")])
    work = authorizer.add_in_steps(
        {acl: encode_acl(acl) for acl in (acl_of(f"a{number}") for number in range(count))}
    )
    assert any(call is not None for call in work)
    with pytest.raises(StorageError, match="full"):
        work.throw(StorageError("the disk is full"))
    assert list(authorizer.acls) == [acl_of("old")]
    authorizer.remove([acl_of("old")])
    assert list(authorizer.acls) == []


def acl_of(name: str) -> Acl:
    return Acl(ResourceType.TOPIC, name, PatternType.LITERAL, "User:a", "*", Operation.READ, Permission.ALLOW)


ROW_OF_B = encode_acl(acl_of("b"))


def test_lists_of_many_groups_and_transactional_ids_let_others_have_their_turn() -> None:
    node = driven(MemoryDisk())
    tp, committed = TopicPartition("t", 0), CommittedOffset(1, -1, "", NOW_MS, -1, -1)
    for name in NAMES:
        node.groups.offsets.commit(name, {tp: committed}, NOW_MS)
        node.transactions.init(name, None, 1000, NOW_MS)
    answer = handle(node, ListGroupsRequest())
    assert isinstance(answer, PendingResponse)
    *others, being_deleted, deleted = sorted(NAMES)
    node.groups.offsets._drop(deleted, tp)
    with node.groups.topic.reserved(being_deleted):
        steps, response = finish(node, answer)
    assert steps >= MANY // STEP_ELEMENTS
    assert [group.group_id for group in response.groups] == others
    for message in (ListTransactionsRequest(), ListTransactionsRequest(transactional_id_pattern="name.*")):
        answer = handle(node, message)
        assert isinstance(answer, PendingResponse)
        steps, response = finish(node, answer)
        assert steps >= MANY // STEP_ELEMENTS
        assert {state.transactional_id for state in response.transaction_states} == set(NAMES)


class Compared(int):
    """A producer id that counts comparisons. The class keeps one count for all ids."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_filters_cost_no_work_for_each_id() -> None:
    node = driven(MemoryDisk())
    first, *_ = [node.transactions.init(name, None, 1000, NOW_MS).entry for name in NAMES]
    Compared.count = 0
    filters = [Compared(number) for number in range(MANY)] + [Compared(first.producer_id)]
    _, response = finish(node, handle(node, ListTransactionsRequest(producer_id_filters=filters)))
    assert [state.transactional_id for state in response.transaction_states] == [first.transactional_id]
    assert Compared.count < 10 * MANY, "not ids times filters"


def test_named_topics_of_many_partitions_are_described_in_steps() -> None:
    node = open_node(MemoryDisk())
    names = ["a", "b", "c", "d"]
    for name in names:
        node.topics.create(name, STEP_ELEMENTS, {}, NOW_MS)
    node.log_manager.background.on_added = lambda: None
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    answer = handle(node, MetadataRequest(topics=topics))
    assert isinstance(answer, PendingResponse)
    steps, _ = finish(node, answer)
    assert steps > len(names)


def test_each_deletion_of_records_is_a_step_of_its_own() -> None:
    """A deletion may create the files of a segment and sync a directory. Regression: one request with
    thousands of deletions blocked all clients.
    """
    node = open_node(MemoryDisk())
    topic = node.topics.create("t", 20, {}, NOW_MS)
    for partition in topic.partitions[:10]:
        data = build_batch([NewRecord(NOW_MS, b"k", b"v")])
        partition.append(memoryview(data), origin=Origin.CLIENT, now_ms=NOW_MS)
    node.log_manager.background.on_added = lambda: None
    request = DeleteRecordsRequest
    deleted = [request.DeleteRecordsPartition(partition_index=i, offset=-1) for i in range(20)]
    answer = handle(node, request(topics=[request.DeleteRecordsTopic(name="t", partitions=deleted)]))
    assert topic.partitions[0].log_start_offset == 1 and topic.partitions[1].log_start_offset == 0
    steps, response = finish(node, answer, may_block=True)
    assert steps >= 10
    results = response.topics[0].partitions
    assert [(result.error_code, result.low_watermark) for result in results] == [(0, 1)] * 10 + [(0, 0)] * 10


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_a_repeated_deletion_of_records_ends_steps_too(is_disk_full: bool) -> None:
    """R1341: the log start had moved before, and segments were left. A step dropped those of 1,000
    partitions.
    """
    disk = MemoryDisk()
    node = open_node(disk)
    topic = node.topics.create("t", 20, {"segment.ms": "1000"}, NOW_MS)
    for partition in topic.partitions:
        for number in range(1 if is_disk_full else 20):
            data = build_batch([NewRecord(NOW_MS + number * 2_000, b"k", b"v")])
            partition.append(memoryview(data), origin=Origin.CLIENT, now_ms=NOW_MS)
        partition.flush()
    node.log_manager.background.on_added = lambda: None
    if is_disk_full:
        disk.errors["create", ".log"] = errno.ENOSPC
    request = DeleteRecordsRequest
    deleted = [request.DeleteRecordsPartition(partition_index=i, offset=-1) for i in range(20)]
    message = request(topics=[request.DeleteRecordsTopic(name="t", partitions=deleted)])
    for _ in range(2):
        answer = handle(node, message)
        assert isinstance(answer, PendingResponse)
        steps, response = finish(node, answer, may_block=True)
        assert steps >= 20 - FREE_STEPS
        codes = {result.error_code for result in response.topics[0].partitions}
        assert codes == {KafkaStorageError.code if is_disk_full else 0}


def test_the_work_of_later_steps_is_charged() -> None:
    for message in large_requests():
        node = with_topic(driven(MemoryDisk()))
        answer = handle(node, message)
        charged = []

        def measure(work: Callable[[], Any], charged: list[int] = charged) -> Any:
            charged.append(1)
            return work()

        answer.measure = measure
        steps, _ = finish(node, answer)
        assert len(charged) == steps - 1  # the first step belongs to `handle`, which already charged it


def create(name: str, partition_count: int) -> CreateTopicsRequest:
    topic = CreateTopicsRequest.CreatableTopic(
        name=name, num_partitions=partition_count, replication_factor=1, assignments=[], configs=[]
    )
    return CreateTopicsRequest(topics=[topic], timeout_ms=1000)


def test_a_topic_of_many_partitions_is_made_in_steps_and_seen_whole() -> None:
    node, count = driven(MemoryDisk()), 5 * PARTITIONS_PER_STEP
    answer = handle(node, create("many", count))
    assert isinstance(answer, PendingResponse)
    node.log_manager.background.step()
    assert node.topics.get("many") is None
    assert handle(node, create("many", 1)).topics[0].error_code == 36
    asked = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="many")])
    assert handle(node, asked).topics[0].error_code == 3
    steps, response = finish(node, answer, may_block=True)
    assert steps >= 4
    assert [topic.error_code for topic in response.topics] == [0]
    assert len(node.topics.get("many").partitions) == count  # type: ignore[union-attr]


def test_the_directory_of_many_new_partitions_is_synced_in_another_thread() -> None:
    disk = MemoryDisk()
    node = driven(disk)
    answer = handle(node, create("many", 2 * PARTITIONS_PER_STEP))
    background = node.log_manager.background
    while (call := background.step()) is None:
        assert node.topics.get("many") is None
    # This request does not wait for the sync of the other one.
    assert handle(node, create("other", 1)).topics[0].error_code == 0
    call()
    _, response = finish(node, answer)
    assert response.topics[0].error_code == 0
    assert len(node.topics.get("many").partitions) == 2 * PARTITIONS_PER_STEP  # type: ignore[union-attr]


def test_a_topic_is_made_to_its_end_though_its_client_went_away() -> None:
    node, count = driven(MemoryDisk()), 5 * PARTITIONS_PER_STEP
    answer = handle(node, create("many", count))
    answer.cancel()
    node.log_manager.background.finish()
    assert len(node.topics.get("many").partitions) == count  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [CONSUMER_OFFSETS, TRANSACTION_STATE])
def test_a_coordinator_whose_topic_a_client_is_creating_is_not_available_yet(name: str) -> None:
    """R1694: the clients of the coordinator got TOPIC_ALREADY_EXISTS, which they do not retry."""
    node = driven(MemoryDisk())
    answer = handle(node, create(name, 2 * PARTITIONS_PER_STEP))
    assert isinstance(answer, PendingResponse)
    if name == CONSUMER_OFFSETS:
        partitions = [OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=0)]
        named = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=partitions)
        node.topics._by_name["t"] = Topic("t", bytes(16), {}, node.settings, [Mock()])
        commit = OffsetCommitRequest(
            group_id="g", generation_id_or_member_epoch=-1, member_id="", topics=[named]
        )
        code = handle(node, commit, 8).topics[0].partitions[0].error_code
    else:
        code = handle(
            node, InitProducerIdRequest(transactional_id="t", transaction_timeout_ms=1000)
        ).error_code
    assert code == NotCoordinator.code
    finish(node, answer, may_block=True)


def create_many(count: int, *, validate_only: bool = False) -> CreateTopicsRequest:
    new = CreateTopicsRequest.CreatableTopic
    topics = [new(name=f"new-{number}", num_partitions=1, replication_factor=1) for number in range(count)]
    return CreateTopicsRequest(topics=topics, timeout_ms=1000, validate_only=validate_only)


@pytest.mark.parametrize("validate_only", [True, False])
def test_many_new_topics_are_checked_in_steps(validate_only: bool) -> None:
    node, count = driven(MemoryDisk()), 5 * PARTITIONS_PER_STEP
    answer = handle(node, create_many(count, validate_only=validate_only))
    assert isinstance(answer, PendingResponse)
    other = handle(node, create("new-0", 2))  # this topic is created before the first request writes the file
    assert other.topics[0].error_code == 0
    steps, response = finish(node, answer, may_block=True)
    assert steps >= (5 if validate_only else 10)
    codes = [topic.error_code for topic in response.topics]
    assert codes == ([0] if validate_only else [TopicAlreadyExists.code]) + [0] * (count - 1)
    assert len(node.topics) == (1 if validate_only else count)


def test_topics_that_are_being_checked_when_the_broker_stops_are_not_made() -> None:
    disk = MemoryDisk()
    node = driven(disk)
    handle(node, create_many(5 * PARTITIONS_PER_STEP)).cancel()
    node.close(NOW_MS)
    again = open_node(disk)
    assert again.log_manager.was_clean and not len(again.topics)


def test_settings_of_many_topics_are_described_in_steps() -> None:
    count, asked = 200, DescribeConfigsRequest.DescribeConfigsResource
    node = driven(MemoryDisk())
    for number in range(count):
        node.topics.create(f"t{number}", 1, {}, NOW_MS)
    resources = [asked(resource_type=2, resource_name=f"t{n}", configuration_keys=None) for n in range(count)]
    answer = handle(node, DescribeConfigsRequest(resources=resources))
    assert isinstance(answer, PendingResponse)
    steps, encoded = finish(node, answer)
    # The results are encoded as they are made. To encode those of 10,000 topics at once took 0.7 s.
    assert isinstance(encoded, EncodedResponse)
    encoded.throttle_time_ms = 7
    version = encoded.api.max_version
    response = DescribeConfigsResponse.decode(version, encoded.encode(version))
    assert response.throttle_time_ms == 7
    assert sum(len(result.configs) for result in response.results) // steps <= 2 * STEP_ELEMENTS
    assert [result.resource_name for result in response.results] == [f"t{n}" for n in range(count)]


def node_with_acls(*acls: Acl) -> BrokerState:
    node = driven(MemoryDisk())
    node.authorizer = Authorizer(MemoryDisk(), "", allows_if_none=True)
    node.authorizer.add(acls)
    return node


NEW_ACL = CreateAclsRequest(
    creations=[
        CreateAclsRequest.AclCreation(
            resource_type=2, resource_name="t", resource_pattern_type=3, principal="User:a", host="*",
            operation=3, permission_type=3,
        )
    ]
)  # fmt: skip
ACL_FILTER = DeleteAclsRequest.DeleteAclsFilter
ANY_ACL = ACL_FILTER(
    resource_type_filter=1, resource_name_filter=None, pattern_type_filter=1, operation=1, permission_type=1
)
FILTER = {
    "resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1,
}  # fmt: skip
TOPIC_ACLS = [
    Acl(ResourceType.TOPIC, name, PatternType.LITERAL, "User:a", "*", Operation.READ, Permission.ALLOW)
    for name in NAMES
]


def test_acls_are_looked_for_in_steps_and_deleted_at_once() -> None:
    node = node_with_acls(*TOPIC_ACLS)
    answer = handle(node, DeleteAclsRequest(filters=[ANY_ACL]))
    assert isinstance(answer, PendingResponse)
    added = Acl(ResourceType.GROUP, "g", PatternType.LITERAL, "User:a", "*", Operation.READ, Permission.ALLOW)
    assert node.authorizer is not None and len(node.authorizer.acls) == MANY
    node.authorizer.add([added])
    steps, response = finish(node, answer, may_block=True)
    assert steps >= MANY // STEP_ELEMENTS
    assert len(response.filter_results[0].matching_acls) == MANY
    assert list(node.authorizer.acls) == [added]


def test_the_search_of_acls_to_delete_stops_if_its_client_disconnects() -> None:
    """R1655: eight searches of 1,500 filters in 20,000 ACLs held all slots, although their client had
    disconnected, and no large request was answered for a minute.
    """
    node = node_with_acls(*TOPIC_ACLS)
    background = node.log_manager.background
    answer = handle(node, DeleteAclsRequest(filters=[ANY_ACL] * 10))
    background.step()
    answer.cancel()
    assert background.step() is None and not background
    assert node.authorizer is not None and len(node.authorizer.acls) == MANY
    answer = handle(node, DeleteAclsRequest(filters=[ANY_ACL]))
    call = None
    while call is None:
        call = background.step()
    answer.cancel()  # the file may be written already
    call()
    background.finish()
    assert list(node.authorizer.acls) == []


def test_a_change_does_not_wait_for_the_blocking_calls_of_look_ups() -> None:
    """R1656: one ACL took 12 s beside 20 clients that looked up times in large compressed batches."""
    node = node_with_acls()
    background = node.log_manager.background

    def look_up() -> BackgroundTask:
        yield lambda: None

    background.add(look_up(), Kind.REQUEST_WITH_CALLS)
    assert background.step() is not None  # the call of the look-up is running
    answer = handle(node, NEW_ACL)
    assert isinstance(answer, PendingResponse)
    answers: list[Any] = []
    answer.add_done_callback(answers.append)
    while background.is_ready:
        call = background.step()
        if call is not None:
            call()
    assert [result.error_code for result in answers[0].results] == [0]


def test_acls_that_filters_name_are_found_without_a_look_at_all_others() -> None:
    filters = [
        ACL_FILTER(
            resource_type_filter=2,
            resource_name_filter=name,
            pattern_type_filter=3,
            operation=3,
            permission_type=3,
        )
        for name in NAMES
    ]
    node = node_with_acls(*TOPIC_ACLS)
    answer = handle(node, DeleteAclsRequest(filters=filters))
    steps, response = finish(node, answer, may_block=True)
    assert steps <= 4 * MANY // STEP_ELEMENTS + 3  # one of them ends the write
    assert [len(result.matching_acls) for result in response.filter_results] == [1] * MANY


def test_filters_that_take_the_same_acls_again_and_again_delete_nothing() -> None:
    node = node_with_acls(*TOPIC_ACLS)
    answer = handle(node, DeleteAclsRequest(filters=[ANY_ACL] * (MAX_REPEATED // MANY + 2)))
    _, response = finish(node, answer)
    assert {result.error_code for result in response.filter_results} == {PolicyViolation.code}
    assert node.authorizer is not None and len(node.authorizer.acls) == MANY


def test_a_topic_that_is_half_made_when_the_broker_stops_is_whole_at_the_next_start() -> None:
    disk, count = MemoryDisk(), 5 * PARTITIONS_PER_STEP
    node = driven(disk)
    handle(node, create("many", count))
    node.topics.create("other", 1, {}, NOW_MS)  # writes the topics file while the first request is under way
    named = {topic["name"]: topic["partitions"] for topic in json.loads(disk.read(FILE_NAME))["topics"]}
    assert named == {"many": count, "other": 1}
    node.close(NOW_MS)
    again = open_node(disk)
    assert again.log_manager.was_clean
    assert len(again.topics.get("many").partitions) == count  # type: ignore[union-attr]


MANY_OFFSETS = 3 * DEFAULT_LIMITS.max_tombstones_per_batch + 1


def test_a_group_of_many_offsets_is_deleted_in_steps_in_which_nobody_may_use_it() -> None:
    node = with_topic(driven(MemoryDisk()))
    commit(node, "g", range(MANY_OFFSETS))
    answer = handle(node, DeleteGroupsRequest(groups_names=["g"]))
    assert isinstance(answer, PendingResponse)
    node.log_manager.background.step()
    assert 0 < len(node.groups.offsets.of("g")) < MANY_OFFSETS
    row = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=2)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[row])
    request = OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1, topics=[topic])
    assert commit_error(node, request) == NotCoordinator.code
    assert handle(node, DeleteGroupsRequest(groups_names=["g"])).results[0].error_code == NotCoordinator.code
    _, response = finish(node, answer)
    assert response.results[0].error_code == 0
    assert not node.groups.has("g")
    assert commit_error(node, request) == 0


def test_a_group_that_expires_while_it_is_deleted_in_steps_is_deleted() -> None:
    """The group's only member id was assigned but never used, and it expires during the deletion."""
    node = with_topic(driven(MemoryDisk()))
    commit(node, "g", range(MANY_OFFSETS))
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range")
    join = JoinGroupRequest(
        group_id="g", session_timeout_ms=6000, protocol_type="consumer", protocols=[protocol]
    )
    handle(node, join)
    answer = handle(node, DeleteGroupsRequest(groups_names=["g"]))
    assert isinstance(answer, PendingResponse)
    node.log_manager.background.step()
    tick(node, NOW_MS + 6001)
    _, response = finish(node, answer)
    assert response.results[0].error_code == 0
    assert not node.groups.has("g")


def commit_error(node: BrokerState, request: OffsetCommitRequest) -> int:
    header = RequestHeader(request.api.key, 9, 1, "c", 0)
    answer: Any = dispatch.handle(node, Request(1, header, request, "/127.0.0.1"), NOW_MS)
    return int(answer.topics[0].partitions[0].error_code)


def test_the_offsets_of_one_group_expire_in_steps() -> None:
    node = with_topic(driven(MemoryDisk()))
    commit(node, "g", range(MANY_OFFSETS))
    node.groups.expire(NOW_MS + 30 * 86_400_000)
    steps = []
    while node.log_manager.background:
        if (job := node.log_manager.background.step()) is not None:
            job()
        steps.append(len(node.groups.offsets.of("g")))
    assert len(steps) >= 3 and steps[-1] == 0
    assert all(before - after <= STEP_ELEMENTS for before, after in pairwise([MANY_OFFSETS, *steps]))
    assert not node.groups.has("g")


def test_offsets_of_a_topic_that_is_deleted_between_the_steps_of_their_commit_are_refused() -> None:
    node = with_topic(driven(MemoryDisk()))
    rows = [OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=2)] * MANY
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=rows)
    request = OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1, topics=[topic])
    header = RequestHeader(request.api.key, 9, 1, "c", 0)
    answer: Any = dispatch.handle(node, Request(1, header, request, "/127.0.0.1"), NOW_MS)
    assert isinstance(answer, PendingResponse)
    node.topics.delete([node.topics.get("t")])  # type: ignore[list-item]
    node.topics.create("t", 1, {}, NOW_MS)
    answers: list[Any] = []
    answer.add_done_callback(answers.append)
    node.log_manager.background.finish()
    (response,) = answers
    assert {row.error_code for row in response.topics[0].partitions} == {UnknownTopicOrPartition.code}
    assert not node.groups.offsets.has("g")


def test_a_fetch_of_several_steps_that_waits_goes_with_its_connection() -> None:
    node = driven(MemoryDisk())
    topic = node.topics.create("t", MANY, {}, NOW_MS)
    rows = [
        FetchRequest.FetchPartition(partition=i, fetch_offset=0, partition_max_bytes=1 << 20)
        for i in range(MANY)
    ]
    named = FetchRequest.FetchTopic(topic_id=topic.topic_id, partitions=rows)
    answer = handle(node, FetchRequest(topics=[named], max_bytes=1 << 20, min_bytes=1, max_wait_ms=60_000))
    assert isinstance(answer, PendingResponse)
    node.log_manager.background.finish()
    assert len(node.fetch_purgatory) == 1
    answer.cancel()
    assert len(node.fetch_purgatory) == 0


def test_a_waiting_fetch_does_not_keep_its_request() -> None:
    """R1693: a request that names one partition 99,000 times took 12 MB while its fetch waited."""
    node = open_node(MemoryDisk())
    topic = node.topics.create("t", 1, {}, NOW_MS)

    class Requested(FetchRequest.FetchPartition):  # type: ignore[misc]
        __slots__ = ("__weakref__",)

    rows = [Requested(partition=0, fetch_offset=0, partition_max_bytes=1) for _ in range(3)]
    references = [ref(row) for row in rows]
    named = FetchRequest.FetchTopic(topic_id=topic.topic_id, partitions=rows)
    message = FetchRequest(topics=[named], max_bytes=1, min_bytes=1, max_wait_ms=60_000, session_epoch=-1)
    assert isinstance(handle(node, message), PendingResponse)
    del rows, named, message
    # Only the last one is among the fetch's partitions.
    assert [row() is None for row in references] == [True, True, False]


def waiting_fetch(node: BrokerState) -> tuple[Topic, PendingResponse]:
    """Create a topic of many partitions, and start a fetch that waits for committed records in any of them.

    Return the topic and the pending response.
    """
    topic = node.topics.create("t", MANY, {}, NOW_MS)
    rows = [FetchRequest.FetchPartition(partition=i, partition_max_bytes=1 << 20) for i in range(MANY)]
    named = FetchRequest.FetchTopic(topic_id=topic.topic_id, partitions=rows)
    request = FetchRequest(topics=[named], max_bytes=1 << 20, min_bytes=1, max_wait_ms=500, isolation_level=1)
    answer = handle(node, request)
    assert isinstance(answer, PendingResponse)
    node.log_manager.background.finish()
    assert len(node.fetch_purgatory) == 1
    return topic, answer


def append(node: BrokerState, topic: Topic, sequence: int) -> None:
    """Append a batch of an open transaction, and complete the fetches that it satisfies."""
    record = NewRecord(NOW_MS, None, b"v")
    stored = build_batch(
        [record], producer_id=5, producer_epoch=0, base_sequence=sequence, is_transactional=True
    )
    topic.partitions[0].append(memoryview(stored), origin=Origin.CLIENT, now_ms=NOW_MS)
    node.note_stored(topic.partitions[0], len(stored))
    end_round(node)


def test_a_waiting_fetch_of_many_partitions_is_read_again_in_steps() -> None:
    node, responses = driven(MemoryDisk()), list[Any]()
    topic, answer = waiting_fetch(node)
    answer.add_done_callback(responses.append)
    background = node.log_manager.background
    for sequence in range(3):
        append(node, topic, sequence)
        background.finish()
    append(node, topic, 3)
    assert not background  # no new record is committed, so no partition is read again
    assert len(node.fetch_purgatory) == 1
    node.markers.write(topic.partitions[0].topic_partition, Marker(5, 0, 0, True), NOW_MS)
    end_round(node)
    assert len(background) == 1 and not responses
    steps = 0
    while background:
        background.step()
        steps += 1
    assert steps > MANY // STEP_ELEMENTS
    (response,) = responses
    assert response.responses[0].partitions[0].records
    assert len(node.fetch_purgatory) == 0


def test_a_deadline_of_a_waiting_fetch_of_many_partitions_is_kept_in_steps() -> None:
    node, responses = driven(MemoryDisk()), list[Any]()
    topic, answer = waiting_fetch(node)
    answer.add_done_callback(responses.append)
    append(node, topic, 0)  # starts reading the partitions again; the fetch's deadline passes meanwhile
    tick(node, NOW_MS + 501)
    assert len(node.log_manager.background) == 1 and not responses
    node.log_manager.background.finish()
    assert len(responses) == 1
    assert len(node.fetch_purgatory) == 0


def test_a_waiting_fetch_that_is_read_again_goes_with_its_connection() -> None:
    node = driven(MemoryDisk())
    topic, answer = waiting_fetch(node)
    append(node, topic, 0)
    answer.cancel()
    node.log_manager.background.finish()
    assert len(node.fetch_purgatory) == 0
    assert not node.fetch_purgatory.is_watched(topic.partitions[0].topic_partition)


def list_many_groups(node: BrokerState, count: int) -> list[PendingResponse]:
    """Send `count` requests that list more groups than fit into a small response."""
    tp, committed = TopicPartition("t", 0), CommittedOffset(1, -1, "", NOW_MS, -1, -1)
    for number in range((FREE_STEPS + 3) * STEP_ELEMENTS):
        node.groups.offsets.commit(f"g{number}", {tp: committed}, NOW_MS)
    answers = [handle(node, ListGroupsRequest()) for _ in range(count)]
    assert all(isinstance(answer, PendingResponse) for answer in answers)
    return answers


def test_large_answers_to_small_requests_are_made_a_few_at_a_time() -> None:
    node, responses = driven(MemoryDisk()), list[Any]()
    *answers, last = list_many_groups(node, MAX_LARGE + 3)
    for answer in answers:
        answer.add_done_callback(responses.append)
    background = node.log_manager.background
    for _ in range((FREE_STEPS + 2) * (len(answers) + 1)):
        if len(background) > MAX_LARGE:
            background.step()
    assert len(background) == MAX_LARGE
    last.cancel()  # this request still waits for a slot
    background.finish()
    assert len(responses) == len(answers)
    assert len({response.encode(5) for response in responses}) == 1


def test_places_for_large_answers_are_given_in_the_order_in_which_they_are_asked_for() -> None:
    queue, called = ResponseSlots(BackgroundQueue()), list[str]()
    calls = [lambda name=name: called.append(name) for name in ("first", "second", "third")]
    for _ in range(MAX_LARGE):
        assert queue.try_acquire(lambda: None)
    assert not any(queue.try_acquire(call) for call in calls)
    queue.release()
    assert called == ["first"]
    newcomer = list[None]()
    # The free slot is reserved for the request that has waited longest.
    assert not queue.try_acquire(lambda: newcomer.append(None))
    assert queue.try_acquire(calls[0])
    queue.remove_waiter(calls[1])
    queue.release()
    assert called == ["first", "third"]
    queue.decline(calls[2])
    assert newcomer == [None]


def test_offsets_named_by_the_id_of_a_deleted_topic_are_not_those_of_a_new_one() -> None:
    node, numbers = driven(MemoryDisk()), count(1)
    node.topics._new_uuid = lambda: bytes([next(numbers)]) * 16
    with_topic(node)
    other = node.topics.create("other", 1, {}, NOW_MS)
    deleted = node.topics.get("t")
    assert deleted is not None
    row = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=2)
    topics = [
        OffsetCommitRequest.OffsetCommitRequestTopic(topic_id=topic_id, partitions=rows)
        for topic_id, rows in ((other.topic_id, [row] * MANY), (deleted.topic_id, [row]))
    ]
    answer = handle(node, OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1, topics=topics))
    assert isinstance(answer, PendingResponse)
    node.topics.delete([deleted])
    node.topics.create("t", 1, {}, NOW_MS)
    responses: list[Any] = []
    answer.add_done_callback(responses.append)
    node.log_manager.background.finish()
    (response,) = responses
    assert [topic.partitions[0].error_code for topic in response.topics] == [0, UnknownTopicId.code]
    assert set(node.groups.offsets.of("g")) == {TopicPartition("other", 0)}


def test_offsets_fetched_by_the_id_of_a_deleted_topic_are_not_those_of_a_new_one() -> None:
    node, numbers = driven(MemoryDisk()), count(1)
    node.topics._new_uuid = lambda: bytes([next(numbers)]) * 16
    with_topic(node)
    deleted = node.topics.get("t")
    assert deleted is not None
    asked = OffsetFetchRequest.OffsetFetchRequestTopics(
        topic_id=deleted.topic_id, partition_indexes=[0] * MANY
    )
    group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="kept", topics=[asked])
    answer = handle(node, OffsetFetchRequest(groups=[group]))
    assert isinstance(answer, PendingResponse)
    node.topics.delete([deleted])
    node.topics.create("t", 1, {}, NOW_MS)
    responses: list[Any] = []
    answer.add_done_callback(responses.append)
    node.log_manager.background.finish()
    (response,) = responses
    (topic,) = response.groups[0].topics
    assert topic.topic_id == deleted.topic_id
    assert {row.error_code for row in topic.partitions} == {UnknownTopicId.code}


@pytest.mark.parametrize("version", [7, 9])
def test_an_offset_that_is_committed_between_the_steps_of_a_fetch_is_returned(version: int) -> None:
    """R1710: the response said that the group had no offset, and a consumer began at auto.offset.reset."""
    node = driven(MemoryDisk())
    node.topics.create("t", MANY, {}, NOW_MS)
    offsets, index = node.groups.offsets, node.groups.offsets_partition("g", NOW_MS).partition
    for producer_id, partition in ((1, MANY - 1), (2, 0)):
        committed = {TopicPartition("t", partition): CommittedOffset(5, -1, "", NOW_MS, -1, -1)}
        offsets.commit_pending("g", ProducerIdAndEpoch(producer_id, 0), committed, NOW_MS)
    indexes = list(range(1, MANY))
    fetch = OffsetFetchRequest
    named = fetch.OffsetFetchRequestGroup(
        group_id="g", topics=[fetch.OffsetFetchRequestTopics(name="t", partition_indexes=indexes)]
    )
    single = [fetch.OffsetFetchRequestTopic(name="t", partition_indexes=indexes)]
    answer = handle(node, fetch(group_id="g", topics=single, groups=[named], require_stable=True), version)
    assert isinstance(answer, PendingResponse)
    offsets.on_marker(index, 1, True)
    _, response = finish(node, answer)
    rows = (response.groups[0] if version >= 8 else response).topics[0].partitions
    assert {row.error_code for row in rows} == {0}
    assert [row.partition_index for row in rows if row.committed_offset == 5] == [MANY - 1]


@pytest.mark.parametrize("version", [7, 9])
def test_all_offsets_of_a_group_are_sorted_in_steps(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1715: a request without topics checked and sorted all offsets at once: 0.1 s for 20,000.

    R1735: it then merged the sorted offsets of each topic at once.
    """
    node, checks = driven(MemoryDisk()), 0
    node.groups.offsets_partition("g", NOW_MS)
    places = [TopicPartition(f"t{number % 3}", number) for number in reversed(range(MANY))]
    node.groups.offsets.commit(
        "g", {tp: CommittedOffset(tp.partition, -1, "", NOW_MS, -1, -1) for tp in places}, NOW_MS
    )

    def is_authorized(request: Request, *names: Any, original: Any = Request.is_authorized) -> bool:
        nonlocal checks
        checks += 1
        return bool(original(request, *names))

    monkeypatch.setattr(Request, "is_authorized", is_authorized)
    fetch = OffsetFetchRequest
    everything = fetch.OffsetFetchRequestGroup(group_id="g", topics=None)
    answer = handle(node, fetch(group_id="g", topics=None, groups=[everything]), version)
    assert isinstance(answer, PendingResponse) and checks <= STEP_ELEMENTS + 2
    steps, response = finish(node, answer)
    # The permissions, the merged offsets and their rows take as many steps each.
    assert steps >= 3 * MANY // STEP_ELEMENTS - 1
    topics = (response.groups[0] if version >= 8 else response).topics
    fetched = [
        (TopicPartition(topic.name, row.partition_index), row.committed_offset)
        for topic in topics
        for row in topic.partitions
    ]
    assert fetched == [(tp, tp.partition) for tp in sorted(places)]


def test_the_members_of_a_consumer_group_are_described_in_steps() -> None:
    """R1716: all members of a group were described in one step: 0.1 s for 8,000."""
    node = driven(MemoryDisk())
    ids = [f"m{number}" for number in range(MANY)]
    for member_id in ids:
        beat = Heartbeat(member_id, 0, rebalance_timeout_ms=1000, topics=frozenset("t"), owned=frozenset())
        node.groups.consumer_heartbeat("g", beat, NOW_MS)
    answer = handle(node, ConsumerGroupDescribeRequest(group_ids=["g"]))
    assert isinstance(answer, PendingResponse)
    # A member that leaves between two steps is still described: the response is of one moment.
    node.groups.consumer_heartbeat("g", Heartbeat(ids[-1], -1), NOW_MS)
    steps, response = finish(node, answer)
    (group,) = response.groups
    assert steps >= MANY // STEP_ELEMENTS
    assert [member.member_id for member in group.members] == ids


def test_the_names_that_members_share_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1763: the names of all members were collected, and their permissions checked, in one step."""
    node = driven(MemoryDisk())
    for member_id in ("a", "b", "c"):
        topics = OrderedNames(sorted(NAMES))
        beat = Heartbeat(member_id, 0, rebalance_timeout_ms=1000, topics=topics, owned=frozenset())
        node.groups.consumer_heartbeat("g", beat, NOW_MS)
    checked: list[str] = []
    monkeypatch.setattr(Request, "is_authorized", lambda _, kind, name: checked.append(name) or True)
    answer = handle(node, ConsumerGroupDescribeRequest(group_ids=["g"]))
    answers: list[Any] = []
    answer.add_done_callback(answers.append)
    while not answers:
        before = len(checked)
        node.log_manager.background.step()
        assert len(checked) - before <= STEP_ELEMENTS
    assert sorted(checked) == sorted(["g", *NAMES])
    (group,) = answers[0].groups
    assert [member.subscribed_topic_names for member in group.members] == [sorted(NAMES)] * 3


def test_a_response_that_repeats_many_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1794: members that share names were described with their names each. 500 members with 40,000 names
    gave a response of 180 MB.
    """
    monkeypatch.setattr(encoded_response, "MAX_RESPONSE_BYTES", 20 * sum(map(len, NAMES)))
    monkeypatch.setattr(encoded_response, "ENCODED_PER_STEP", STEP_ELEMENTS)
    for member_count, is_bounded in ((10, False), (60, True)):
        node = driven(MemoryDisk())
        for number in range(member_count):
            topics = OrderedNames(sorted(NAMES))
            beat = Heartbeat(f"m{number}", 0, rebalance_timeout_ms=1000, topics=topics, owned=frozenset())
            node.groups.consumer_heartbeat("g", beat, NOW_MS)
        answer = handle(node, ConsumerGroupDescribeRequest(group_ids=["g"]))
        answer.encode = partial(encoding_of, version=1)
        _, response = finish(node, answer)
        assert isinstance(response, Disconnect) is is_bounded


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_fetches_of_several_steps_share_the_memory_for_answers(is_cancelled: bool) -> None:
    node = driven(MemoryDisk())
    topic = node.topics.create("t", 1, {}, NOW_MS)
    stored = build_batch([NewRecord(NOW_MS, None, bytes(1000))])
    for _ in range(100):
        topic.partitions[0].append(memoryview(bytearray(stored)), origin=Origin.CLIENT, now_ms=NOW_MS)
    rows = [FetchRequest.FetchPartition(partition=i, partition_max_bytes=1 << 20) for i in range(MANY)]
    named = FetchRequest.FetchTopic(topic_id=topic.topic_id, partitions=rows)
    node.response_memory.limit_bytes = limit_bytes = 100_000
    answers = [handle(node, FetchRequest(topics=[named], max_bytes=1 << 20)) for _ in range(20)]
    responses: list[Any] = []
    for answer in answers:
        answer.cancel() if is_cancelled else answer.add_done_callback(responses.append)
    node.log_manager.background.finish()
    records = [response.responses[0].partitions[0].records for response in responses]
    assert len(records) == (0 if is_cancelled else len(answers))
    # Each response has at least one batch, even above the limit.
    assert sum(map(len, records)) < limit_bytes + len(answers) * len(stored)
    assert node.response_memory.unfinished_bytes == 0


def commit_large_transaction(node: BrokerState) -> list[TopicPartition]:
    """Commit a transaction of 250 partitions, and return them.

    The request itself writes the first markers. Background steps write the others.
    """
    partition_count = 250
    node.topics.create("t", partition_count, {}, NOW_MS)
    entry = node.transactions.init("x", None, 60_000, NOW_MS).entry
    who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    partitions = [TopicPartition("t", index) for index in range(partition_count)]
    node.transactions.add_partitions("x", who, partitions, NOW_MS)
    node.log_manager.background.on_added = lambda: None
    node.transactions.end("x", who, True, 0, NOW_MS)
    return partitions


def test_the_markers_of_a_large_transaction_are_written_in_steps() -> None:
    node = open_node(MemoryDisk())
    partitions = commit_large_transaction(node)
    marked = []
    while node.log_manager.background:
        marked.append(sum(node.topics.partition(tp)[1].log_end_offset for tp in partitions))
        assert state_of(node, "x") is TransactionState.PREPARE_COMMIT
        node.transactions.retry_markers(NOW_MS)  # a retry during the steps must not write markers twice
        node.log_manager.background.step()
    per_step = STEP_ELEMENTS // MARKER_COST
    assert marked == [per_step, 2 * per_step]
    assert state_of(node, "x") is TransactionState.COMPLETE_COMMIT
    assert all(node.topics.partition(tp)[1].log_end_offset == 1 for tp in partitions)


def test_the_markers_of_many_transactions_are_written_a_few_at_once() -> None:
    """One sync can make the decisions of many transactions durable, so their markers become due together."""
    node, partition_count = open_node(MemoryDisk()), MAX_MARKERS_AT_ONCE // 2
    topic = node.topics.create("t", partition_count, {}, NOW_MS)
    partitions = [TopicPartition("t", index) for index in range(partition_count)]
    ids = [f"x{number}" for number in range(8)]
    identities = {}
    for name in ids:
        entry = node.transactions.init(name, None, 60_000, NOW_MS).entry
        identities[name] = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        node.transactions.add_partitions(name, identities[name], partitions, NOW_MS)
    node.log_manager.background.on_added = lambda: None
    state_topic = node.topics.get("__transaction_state")
    assert state_topic is not None
    state_topic.flush_messages = 1
    for name in ids:
        node.transactions.end(name, identities[name], True, 0, NOW_MS)
    end_round(node)
    for partition in node.flush_queue.take_due():
        partition.flush()
        node.flush_queue.complete(partition, None)
    assert sum(partition.log_end_offset for partition in topic.partitions) == MAX_MARKERS_AT_ONCE
    node.log_manager.background.finish()
    assert sum(partition.log_end_offset for partition in topic.partitions) == len(ids) * partition_count


@pytest.mark.parametrize("how", ["one transaction", "many transactions", "time-outs", "request"])
def test_markers_that_begin_many_segments_are_written_in_steps(how: str) -> None:
    """Regression: 100 segments in one step blocked all clients for 0.4 s, as Produce requests did (R1340)."""
    node, count = open_node(MemoryDisk()), 24
    topic = node.topics.create("t", count, {"segment.ms": "1000"}, NOW_MS)
    stored = build_batch([NewRecord(NOW_MS - 5_000, b"k", b"v")])
    for partition in topic.partitions:
        partition.append(memoryview(bytearray(stored)), origin=Origin.CLIENT, now_ms=NOW_MS)
    node.log_manager.background.on_added = lambda: None
    of_each = [range(count)] if how == "one transaction" else [[index] for index in range(count)]
    if how == "request":
        named = WriteTxnMarkersRequest.WritableTxnMarkerTopic(name="t", partition_indexes=list(range(count)))
        marker = WriteTxnMarkersRequest.WritableTxnMarker(
            producer_id=5, producer_epoch=0, transaction_result=True, coordinator_epoch=1, topics=[named]
        )
        handle(node, WriteTxnMarkersRequest(markers=[marker]))
        of_each = []
    for number, indexes in enumerate(of_each):
        entry = node.transactions.init(f"x{number}", None, 1_000, NOW_MS).entry
        who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        partitions = [TopicPartition("t", index) for index in indexes]
        node.transactions.add_partitions(f"x{number}", who, partitions, NOW_MS)
        if how != "time-outs":
            node.transactions.end(f"x{number}", who, True, 0, NOW_MS)
    if how == "time-outs":
        node.transactions.abort_timed_out(NOW_MS + 1_001)

    def begun() -> int:
        return sum(len(partition.log.segments) - 1 for partition in topic.partitions)

    before = 0
    while node.log_manager.background:
        assert begun() - before <= 4
        before = begun()
        if call := node.log_manager.background.step():
            call()
        node.transactions.end_round()
    assert begun() == count


@pytest.mark.parametrize("transaction_count", [1, 6])
def test_markers_that_commit_many_offsets_are_written_in_steps(
    transaction_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1412: a transaction with 500,000 offsets of 50 groups was committed in one step of 0.3 s."""
    monkeypatch.setattr(
        targets, "_SETTINGS", targets._SETTINGS.replaced({"offsets.topic.num.partitions": 50})
    )
    node, groups = open_node(MemoryDisk()), {}
    for number in range(100):
        groups.setdefault(node.groups.offsets_partition(f"g{number}", NOW_MS), f"g{number}")
    offset = CommittedOffset(5, -1, "", NOW_MS, -1, -1)
    offsets = {TopicPartition("t", index): offset for index in range(STEP_ELEMENTS * OFFSETS_PER_ELEMENT)}
    node.log_manager.background.on_added = lambda: None
    chosen = list(groups.items())[:6]
    for number in range(transaction_count):
        entry = node.transactions.init(f"x{number}", None, 1_000, NOW_MS).entry
        who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        for tp, group in chosen[number::transaction_count]:
            node.transactions.add_partitions(f"x{number}", who, [tp], NOW_MS)
            node.groups.offsets.commit_pending(group, who, offsets, NOW_MS)
    for number in range(transaction_count):
        entry = node.transactions.get(f"x{number}")
        assert entry is not None
        who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        node.transactions.end(f"x{number}", who, True, 0, NOW_MS)

    def committed() -> int:
        return sum(len(node.groups.offsets.of(group)) == len(offsets) for _, group in chosen)

    before = 0
    while committed() < len(chosen):
        assert committed() - before <= 1
        before = committed()
        assert node.log_manager.background.step() is None
        node.transactions.end_round()
    assert committed() - before == 1


def test_the_sizes_of_all_partitions_are_described_in_steps() -> None:
    """R1415: the size of one partition was found among those of all others, 0.03 s for 10,000."""
    node = driven(MemoryDisk())
    node.log_manager.background.on_added = None
    node.topics.create_all([NewTopic(name, 2, {}) for name in ("a", "b")], NOW_MS)
    node.topics.create("many", STEP_ELEMENTS, {}, NOW_MS)
    node.log_manager.background.on_added = lambda: None
    steps, answer = finish(node, handle(node, DescribeLogDirsRequest(topics=None)))
    assert steps >= 1
    assert {topic.name: len(topic.partitions) for topic in answer.results[0].topics} == {
        "a": 2,
        "b": 2,
        "many": STEP_ELEMENTS,
    }
    wanted = DescribeLogDirsRequest.DescribableLogDirTopic
    topics = [wanted(topic="b", partitions=[1, 7]), wanted(topic="none", partitions=[0])]
    topics.append(wanted(topic="b", partitions=[0]))
    answer = handle(node, DescribeLogDirsRequest(topics=topics))  # in one step
    (topic,) = answer.results[0].topics
    assert (topic.name, [row.partition_index for row in topic.partitions]) == ("b", [0, 1])
    deferred = handle(node, DescribeLogDirsRequest(topics=None))
    node.topics.begin_deletion([topic for topic in node.topics.all() if topic.name == "many"])
    answer = finish(node, deferred)[1]
    assert [topic.name for topic in answer.results[0].topics] == ["a", "b"]


@pytest.mark.parametrize("cause", ["append", "deadline", "deletion"])
def test_many_fetches_that_are_completed_together_are_read_in_steps(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1417: an append that completed 200 fetches of 900 partitions blocked all clients for 1.1 s."""
    monkeypatch.setattr(purgatory, "MAX_PARTITIONS_AT_ONCE", 4)
    node = open_node(MemoryDisk())
    topic = node.topics.create("t", 3, {}, NOW_MS)
    node.log_manager.background.on_added = lambda: None
    rows = [FetchRequest.FetchPartition(partition=index, partition_max_bytes=1_000) for index in range(3)]
    named = FetchRequest.FetchTopic(topic="t", topic_id=topic.topic_id, partitions=rows)
    answers: list[Any] = []
    for _ in range(6):
        deferred = handle(node, FetchRequest(max_wait_ms=500, min_bytes=1, max_bytes=9_000, topics=[named]))
        deferred.add_done_callback(answers.append)
    stored = build_batch([NewRecord(NOW_MS, b"k", b"v")])
    if cause == "append":
        topic.partitions[1].append(memoryview(stored), origin=Origin.CLIENT, now_ms=NOW_MS)
        node.note_stored(topic.partitions[1], len(stored))
        end_round(node)
    elif cause == "deadline":
        tick(node, NOW_MS + 500)
    else:
        node.topics.begin_deletion([topic])
        node.fetch_purgatory.complete_all(TopicPartition("t", 1))
    assert len(answers) == 2
    while len(answers) < 6:
        before = len(answers)
        assert node.log_manager.background.step() is None
        assert len(answers) <= before + 1
    read = [[len(row.records or b"") for row in answer.responses[0].partitions] for answer in answers]
    assert read == [[0, len(stored) if cause == "append" else 0, 0]] * 6
    assert len(node.fetch_purgatory) == 0 and not node.fetch_purgatory.is_watching
    end_round(node)
    assert node.fetch_purgatory._partitions_at_once == 4


def test_markers_that_a_full_disk_refuses_are_tried_in_steps() -> None:
    disk = MemoryDisk()
    node = open_node(disk)
    commit_large_transaction(node)
    disk.capacity_bytes = disk.used_bytes()
    node.log_manager.background.finish()
    node.transactions.retry_markers(NOW_MS)
    assert node.log_manager.background  # the first step has already tried to write some of the markers
    node.log_manager.background.finish()
    assert state_of(node, "x") is TransactionState.PREPARE_COMMIT
    disk.capacity_bytes = None
    node.transactions.retry_markers(NOW_MS)
    node.log_manager.background.finish()
    assert state_of(node, "x") is TransactionState.COMPLETE_COMMIT


def test_transactions_of_many_partitions_time_out_a_few_in_a_step() -> None:
    node, ids, partition_count = open_node(MemoryDisk()), ("a", "b", "c", "d"), STEP_ELEMENTS // MARKER_COST
    node.topics.create("t", partition_count, {}, NOW_MS)
    partitions = [TopicPartition("t", index) for index in range(partition_count)]
    for transactional_id in ids:
        entry = node.transactions.init(transactional_id, None, 1000, NOW_MS).entry
        who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        node.transactions.add_partitions(transactional_id, who, partitions, NOW_MS)
    node.log_manager.background.on_added = lambda: None
    node.transactions.abort_timed_out(NOW_MS + 1001)
    written = [0]
    while node.log_manager.background:
        node.log_manager.background.step()
        written.append(sum(node.topics.partition(tp)[1].log_end_offset for tp in partitions))
    assert max(after - before for before, after in pairwise(written)) <= partition_count
    assert {state_of(node, each) for each in ids} == {TransactionState.COMPLETE_ABORT}


def state_of(node: BrokerState, transactional_id: str) -> TransactionState:
    entry = node.transactions.get(transactional_id)
    assert entry is not None
    return entry.state


class HashedPlace(TopicPartition):
    """A partition that counts calls of its hash function, that is, look-ups in a dict or set.

    The class keeps one count for all partitions.
    """

    looked = 0

    def __hash__(self) -> int:
        HashedPlace.looked += 1
        return super().__hash__()


def test_an_offset_is_fetched_without_a_look_at_all_pending() -> None:
    """Regression: with 500,000 pending offsets, each fetch of one offset kept the broker's only thread busy
    for 16 ms.
    """
    node = open_node(MemoryDisk())
    node.topics.create("t", 100, {}, NOW_MS)
    offsets = node.groups.offsets
    node.groups.offsets_partition("g", NOW_MS)
    committed = CommittedOffset(5, -1, "", NOW_MS, -1, -1)
    for producer_id in range(100):
        places = {HashedPlace("t", index): committed for index in range(1, 100)}
        offsets.commit_pending("g", ProducerIdAndEpoch(producer_id, 0), places, NOW_MS)
    HashedPlace.looked = 0
    asked = OffsetFetchRequest.OffsetFetchRequestGroup(
        group_id="g",
        topics=[OffsetFetchRequest.OffsetFetchRequestTopics(name="t", partition_indexes=[0, 1])],
    )
    header = RequestHeader(OffsetFetchRequest.api.key, 9, 1, "c", 0)
    message = OffsetFetchRequest(groups=[asked], require_stable=True)
    response = dispatch.handle(node, Request(1, header, message, "/127.0.0.1"), NOW_MS)
    assert not isinstance(response, PendingResponse)
    ((topic,),) = (group.topics for group in response.groups)
    assert [row.error_code for row in topic.partitions] == [0, UnstableOffsetCommit.code]
    with pytest.raises(UnknownMemberId):
        node.groups.check_commit("g", 1, "m", None)
    assert HashedPlace.looked < 100
    for producer_id in range(100):
        offsets.on_marker(offsets._topic.partition_of("g"), producer_id, False)
        assert bool(offsets.pending_of("g")) == (producer_id < 99)
    assert not offsets.has("g")


def test_pending_offsets_are_deleted_without_a_look_at_other_transactions() -> None:
    """Regression: with 10,000 open transactions of one offset each, one step deleted 1,000 of them in 7 s."""
    node = open_node(MemoryDisk())
    node.topics.create("t", 100, {}, NOW_MS)
    offsets = node.groups.offsets
    node.groups.offsets_partition("g", NOW_MS)
    looked = 0

    class Pending(dict[str, Any]):
        def __getitem__(self, group: str) -> Any:
            nonlocal looked
            looked += 1
            return super().__getitem__(group)

    places = [TopicPartition("t", index) for index in range(100)]
    for producer_id, tp in enumerate(places):
        committed = {tp: CommittedOffset(5, -1, "", NOW_MS, -1, -1)}
        offsets.commit_pending("g", ProducerIdAndEpoch(producer_id, 0), committed, NOW_MS)
    offsets._pending.update({key: Pending(groups) for key, groups in offsets._pending.items()})
    offsets.delete("g", places[1:], NOW_MS)
    assert set(offsets.pending_of("g")) == {places[0]}
    assert looked <= len(places)
    offsets.delete("g", places, NOW_MS)
    assert not offsets.has("g")


def test_offsets_are_deleted_without_a_look_at_each_open_transaction() -> None:
    """Regression: with 10,000 open transactions, one step deleted 1,000 offsets of their group in 5 s."""
    node = open_node(MemoryDisk())
    node.topics.create("t", 100, {}, NOW_MS)
    offsets = node.groups.offsets
    node.groups.offsets_partition("g", NOW_MS)
    committed = CommittedOffset(5, -1, "", NOW_MS, -1, -1)
    places = [TopicPartition("t", index) for index in range(100)]
    offsets.commit("g", dict.fromkeys(places[1:], committed), NOW_MS)
    looked = 0

    class Pending(dict[str, Any]):
        def __getitem__(self, group: str) -> Any:
            nonlocal looked
            looked += 1
            return super().__getitem__(group)

    for producer_id in range(100):
        offsets.commit_pending("g", ProducerIdAndEpoch(producer_id, 0), {places[0]: committed}, NOW_MS)
    offsets._pending.update({key: Pending(groups) for key, groups in offsets._pending.items()})
    offsets.delete("g", places[1:], NOW_MS)
    assert (set(offsets.of("g")), set(offsets.pending_of("g"))) == (set(), {places[0]})
    assert looked == 0
    offsets.delete("g", places, NOW_MS)
    assert not offsets.has("g")


def test_partitions_that_many_entries_add_to_one_transaction_are_added_in_steps() -> None:
    """Regression: the record of each entry has all partitions of the transaction, and up to 1,000 such
    records were written in one step.
    """
    node, count = driven(MemoryDisk()), STEP_ELEMENTS // 4
    node.topics.create("t", count, {}, NOW_MS)
    entry = node.transactions.init("x", None, 60_000, NOW_MS).entry
    request = AddPartitionsToTxnRequest
    answer = handle(
        node,
        request(
            transactions=[
                request.AddPartitionsToTxnTransaction(
                    transactional_id="x",
                    producer_id=entry.producer_id,
                    producer_epoch=entry.producer_epoch,
                    verify_only=False,
                    topics=[request.AddPartitionsToTxnTopic(name="t", partitions=[index])],
                )
                for index in range(count)
            ]
        ),
    )
    steps, response = finish(node, answer)
    assert steps > count // 10
    results = [result.topic_results[0].results_by_partition[0] for result in response.results_by_transaction]
    assert {result.partition_error_code for result in results} == {0}
    added = node.transactions.get("x")
    assert added is not None and len(added.partitions) == count
