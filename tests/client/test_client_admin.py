"""Admin requests and responses without I/O, and Admin against a broker that is old, not ready, or sends wrong
responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.client import ScriptedBroker, api_versions, free_port, metadata, scripted_broker

import oncelog
from oncelog.aio import Admin
from oncelog.client.admin.blocking import ConfigResource, Feature, NewTopic, TopicOutcome
from oncelog.client.admin.core import config_text, raise_first, topic_id_text
from oncelog.errors import (
    BrokerError,
    CoordinatorLoadInProgress,
    GroupIdNotFound,
    GroupSubscribedToTopic,
    InvalidTopicException,
    MisuseError,
    NotController,
    SecurityDisabled,
    TimedOut,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)
from oncelog.rules.limits.quotas import QuotaEntity, QuotaFilter
from oncelog.rules.security.authorization import AclFilter
from oncelog.types import TopicPartition
from oncelog.wire.messages import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    ApiVersionsResponse,
    CreateTopicsResponse,
    DeleteTopicsResponse,
    DescribeAclsResponse,
    DescribeConfigsResponse,
    DescribeProducersResponse,
    FindCoordinatorResponse,
    ListGroupsResponse,
    ListTransactionsResponse,
    MetadataResponse,
    OffsetCommitResponse,
    OffsetDeleteResponse,
)

T0 = TopicPartition("t", 0)
Story = Callable[[ScriptedBroker, Admin], Coroutine[Any, Any, None]]


def play(story: Story, limits: dict[int, tuple[int, int]] | None = None, **settings: object) -> None:
    async def run() -> None:
        async with scripted_broker() as broker:
            broker.topics = {"t": 1}
            if limits:
                broker.handlers["ApiVersions"] = lambda header, message: api_versions(limits)
            async with Admin(
                {"bootstrap.servers": broker.bootstrap_servers, "retry.backoff.ms": 1}, **settings
            ) as admin:
                await story(broker, admin)

    asyncio.run(run())


def creates(*codes: int) -> Callable[[Any, Any], CreateTopicsResponse]:
    """Return a handler for CreateTopics. Its responses have the given codes in order, and then always the
    last one.
    """
    left = list(codes)

    def handler(header: Any, message: Any) -> CreateTopicsResponse:
        code = left.pop(0) if len(left) > 1 else left[0]
        row = CreateTopicsResponse.CreatableTopicResult
        return CreateTopicsResponse(
            topics=[row(name=topic.name, error_code=code) for topic in message.topics]
        )

    return handler


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (False, "false"), (5, "5"), (None, None), (["a", "b"], "a,b"), ("x", "x")],
)
def test_config_values_as_text(value: object, text: str | None) -> None:
    assert config_text(value) == text


def test_topic_ids_as_kafka_prints_them() -> None:
    assert topic_id_text(bytes(range(16))) == "AAECAwQFBgcICQoLDA0ODw"
    assert topic_id_text(bytes(16)) is None
    assert topic_id_text(None) is None


def test_the_first_error_is_raised_with_the_others_as_notes() -> None:
    first, second = TopicAlreadyExists("a"), InvalidTopicException("b")
    with pytest.raises(TopicAlreadyExists) as caught:
        raise_first([TopicOutcome("ok"), TopicOutcome("a", first), TopicOutcome("b", second)])
    assert caught.value.__notes__ == ["also: INVALID_TOPIC_EXCEPTION (17): b"]
    raise_first([TopicOutcome("ok")])


def test_retriable_errors_are_retried() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        broker.handlers["CreateTopics"] = creates(NotController.code, NotController.code, 0)
        created = await admin.create_topics([NewTopic("n", 1, 1)])
        assert created["n"].error is None
        assert [name for name, _ in broker.seen].count("CreateTopics") == 3

    play(story)


def test_only_items_that_failed_are_requested_again() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        requested: list[list[str]] = []

        def handler(header: Any, message: Any) -> CreateTopicsResponse:
            requested.append([topic.name for topic in message.topics])
            row = CreateTopicsResponse.CreatableTopicResult
            codes = {"a": 0, "b": 41 if len(requested) == 1 else 0, "c": 36}
            return CreateTopicsResponse(
                topics=[
                    row(name=name, error_code=codes[name], error_message="said so") for name in requested[-1]
                ]
            )

        broker.handlers["CreateTopics"] = handler
        created = await admin.create_topics([NewTopic(n, 1, 1) for n in "abc"], raise_errors=False)
        assert requested == [["a", "b", "c"], ["b"]]
        assert created["a"].error is None and created["b"].error is None
        assert isinstance(created["c"].error, TopicAlreadyExists)
        assert "creating topic 'c': said so" in str(created["c"].error)

    play(story)


def coordinator_at(broker: ScriptedBroker) -> FindCoordinatorResponse:
    host, port = broker.bootstrap_servers.split(":")
    row = FindCoordinatorResponse.Coordinator(key="g", node_id=1, host=host, port=int(port), error_code=0)
    return FindCoordinatorResponse(coordinators=[row])


def commits(*codes: int) -> Callable[[Any, Any], OffsetCommitResponse]:
    """Return a handler for OffsetCommit. Its responses have the given codes in order, and then always the
    last one.
    """
    remaining = list(codes)

    def handler(header: Any, message: Any) -> OffsetCommitResponse:
        code = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        partition = OffsetCommitResponse.OffsetCommitResponsePartition(partition_index=0, error_code=code)
        topic = OffsetCommitResponse.OffsetCommitResponseTopic(name="t", partitions=[partition])
        return OffsetCommitResponse(topics=[topic])

    return handler


def test_offsets_of_a_topic_that_the_coordinator_does_not_know_yet_are_committed() -> None:
    """Apache Kafka's coordinator may learn of a topic after CreateTopics has returned."""

    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        unknown = UnknownTopicOrPartition.code
        broker.handlers["FindCoordinator"] = lambda header, message: coordinator_at(broker)
        broker.handlers["OffsetCommit"] = commits(unknown, unknown, 0)
        await admin.alter_group_offsets("g", {T0: 1})
        assert [name for name, _ in broker.seen].count("OffsetCommit") == 3

        broker.handlers["OffsetCommit"] = commits(unknown)
        with pytest.raises(UnknownTopicOrPartition, match="create it first"):
            await admin.alter_group_offsets("g", {T0: 1})

    play(story, request_timeout_ms=1_000)


def test_retries_end_with_the_time() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        broker.handlers["CreateTopics"] = creates(NotController.code)
        with pytest.raises(NotController):
            await admin.create_topics([NewTopic("n", 1, 1)])

    play(story, request_timeout_ms=1_000)


def test_no_answer_is_a_timeout_that_names_the_broker() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        broker.handlers["CreateTopics"] = lambda header, message: None
        with pytest.raises(TimedOut, match=rf"127\.0\.0\.1:{broker.port} did not respond to CreateTopics"):
            await admin.create_topics([NewTopic("n", 1, 1)])

    play(story, request_timeout_ms=100)


def test_an_item_that_the_answer_leaves_out_is_an_error() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        broker.handlers["DeleteTopics"] = lambda header, message: DeleteTopicsResponse()
        outcomes = await admin.delete_topics(["t"], raise_errors=False)
        assert isinstance(outcomes["t"].error, BrokerError)

    play(story)


def test_topics_are_deleted_by_name_in_every_version() -> None:
    for version in (1, 5, 6):

        async def story(broker: ScriptedBroker, admin: Admin, version: int = version) -> None:
            def handler(header: Any, message: Any) -> DeleteTopicsResponse:
                names = [state.name for state in message.topics] or message.topic_names
                row = DeleteTopicsResponse.DeletableTopicResult
                return DeleteTopicsResponse(responses=[row(name=name) for name in names])

            broker.handlers["DeleteTopics"] = handler
            assert list(await admin.delete_topics(["x", "y"])) == ["x", "y"]
            assert ("DeleteTopics", version) in broker.seen

        play(story, {20: (1, version)})


def test_default_partition_counts_need_a_broker_that_supports_them() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        broker.handlers["CreateTopics"] = creates(0)
        with pytest.raises(
            UnsupportedVersion, match="in versions 2-3; this client needs one of the versions 4-"
        ):
            await admin.create_topics([NewTopic("n")])
        assert (await admin.create_topics([NewTopic("n", 2, 1)]))["n"].num_partitions is None

    play(story, {19: (2, 3)})


def test_settings_of_an_old_broker_have_a_default_but_no_type_and_meaning() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        resource, message = ConfigResource("topic", "t"), DescribeConfigsResponse
        synonyms = [
            message.DescribeConfigsSynonym(name="a", value="1", source=1),
            message.DescribeConfigsSynonym(name="log.a", value="2", source=4),
            message.DescribeConfigsSynonym(name="log.a", value="3", source=5),
        ]
        row = message.DescribeConfigsResourceResult(name="a", value="1", config_source=1, synonyms=synonyms)
        broker.handlers["DescribeConfigs"] = lambda header, request: message(
            results=[message.DescribeConfigsResult(resource_type=2, resource_name="t", configs=[row])]
        )
        entry = (await admin.describe_configs(resource, documented=True))[resource].entries["a"]
        assert (entry.value, entry.default, entry.kind, entry.doc) == ("1", "3", "", "")

    play(story, {32: (1, 2)})


def test_a_feature_without_a_range_and_an_unknown_api_are_described() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        answer = api_versions()
        answer.api_keys.append(ApiVersionsResponse.ApiVersion(api_key=9999, min_version=0, max_version=3))
        answer.finalized_features = [
            ApiVersionsResponse.FinalizedFeatureKey(name="f", max_version_level=2, min_version_level=1)
        ]
        broker.handlers["ApiVersions"] = lambda header, message: answer
        (versions,) = await admin.describe_broker_versions()
        assert versions.features == (Feature("f", 2, None, None),)
        assert versions.node_id == 1 and versions.apis[9999] == (0, 3)

    play(story)


def test_each_partition_of_a_deletion_of_offsets_has_its_own_error() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        part = OffsetDeleteResponse.OffsetDeleteResponsePartition
        topic = OffsetDeleteResponse.OffsetDeleteResponseTopic(
            name="t",
            partitions=[part(partition_index=0), part(partition_index=1, error_code=86)],
        )
        broker.handlers["FindCoordinator"] = lambda header, message: coordinator_at(broker)
        broker.handlers["OffsetDelete"] = lambda header, message: OffsetDeleteResponse(topics=[topic])
        t1 = TopicPartition("t", 1)
        results = await admin.delete_group_offsets("g", [T0, t1], raise_errors=False)
        assert results[T0].error is None and isinstance(results[t1].error, GroupSubscribedToTopic)
        with pytest.raises(GroupSubscribedToTopic, match="offset of group 'g' for t-1"):
            await admin.delete_group_offsets("g", [T0, t1])
        broker.handlers["OffsetDelete"] = lambda header, message: OffsetDeleteResponse(error_code=69)
        with pytest.raises(GroupIdNotFound, match="group 'g' does not exist"):
            await admin.delete_group_offsets("g", T0)

    play(story)


def test_altering_on_a_broker_without_incremental_changes_keeps_the_rest() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        resource = ConfigResource("topic", "t")
        entry = DescribeConfigsResponse.DescribeConfigsResourceResult
        broker.handlers["DescribeConfigs"] = lambda header, message: DescribeConfigsResponse(
            results=[
                DescribeConfigsResponse.DescribeConfigsResult(
                    resource_type=2,
                    resource_name="t",
                    configs=[
                        entry(name="kept", value="1", config_source=1),
                        entry(name="removed", value="2", config_source=1),
                        entry(name="default", value="3", config_source=5),
                    ],
                )
            ]
        )
        row = AlterConfigsResponse.AlterConfigsResourceResponse
        broker.handlers["AlterConfigs"] = lambda header, message: AlterConfigsResponse(
            responses=[row(resource_type=2, resource_name="t")]
        )
        await admin.alter_configs({resource: {"new": 4, "removed": None}})
        (request,) = [m for m in broker.messages if isinstance(m, AlterConfigsRequest)]
        assert {c.name: c.value for c in request.resources[0].configs} == {"kept": "1", "new": "4"}

    play(story, {44: (5, 6)})


def test_broker_settings_are_requested_from_that_broker() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        with pytest.raises(MisuseError, match="expected a node id"):
            await admin.describe_configs([ConfigResource("broker", "x")])

    play(story)


def test_producers_without_sequence_or_transaction_have_none() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        message = DescribeProducersResponse
        states = [
            message.ProducerState(producer_id=5, coordinator_epoch=-1),
            message.ProducerState(
                producer_id=4,
                producer_epoch=2,
                last_sequence=7,
                last_timestamp=99,
                current_txn_start_offset=3,
            ),
        ]
        broker.handlers["DescribeProducers"] = lambda header, request: message(
            topics=[
                message.TopicResponse(
                    name="t",
                    partitions=[message.PartitionResponse(partition_index=0, active_producers=states)],
                )
            ]
        )
        first, second = (await admin.describe_producers([T0]))[T0].producers
        assert (first.producer_id, first.producer_epoch, first.last_sequence) == (4, 2, 7)
        assert (first.coordinator_epoch, first.current_txn_start_offset) == (0, 3)
        assert (second.last_sequence, second.last_timestamp_ms) == (None, None)
        assert (second.coordinator_epoch, second.current_txn_start_offset) == (None, None)

    play(story)


def test_describing_never_creates_a_topic() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        broker.handlers["Metadata"] = lambda header, message: metadata(broker.port, errors={"x": 3})
        outcome = await admin.describe_topics(["x"], raise_errors=False)
        assert outcome["x"].error is not None and outcome["x"].partitions == ()
        assert broker.messages[-1].allow_auto_topic_creation is False

    play(story)


def test_the_old_name_of_a_filter_parameter_works_with_a_warning() -> None:
    acl_warning = pytest.warns(DeprecationWarning, match="wanted is deprecated; use acl_filter")
    quota_warning = pytest.warns(DeprecationWarning, match="wanted is deprecated; use quota_filter")
    with oncelog.Broker() as broker, oncelog.Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        entity = QuotaEntity(client_id="a")
        for name in ("a", "b"):
            admin.alter_client_quotas({QuotaEntity(client_id=name): {"producer_byte_rate": 1000.0}})
        with quota_warning:
            assert set(admin.describe_client_quotas(wanted=QuotaFilter({"client-id": "a"}))) == {entity}  # type: ignore[call-arg]
        with acl_warning, pytest.raises(SecurityDisabled):
            admin.describe_acls(wanted=AclFilter())  # type: ignore[call-arg]

        async def describe() -> None:
            async with Admin({"bootstrap.servers": broker.bootstrap_servers}) as client:
                with pytest.warns(DeprecationWarning, match="quota_filter"):
                    found = await client.describe_client_quotas(wanted=QuotaFilter({"client-id": "b"}))  # type: ignore[call-arg]
                assert set(found) == {QuotaEntity(client_id="b")}

        asyncio.run(describe())


@pytest.mark.parametrize("call", ["describe_acls", "list_groups", "list_transactions"])
def test_a_broker_that_has_left_the_cluster_gets_no_more_requests(call: str) -> None:
    """Regression: until metadata.max.age.ms had passed, each call failed that the gone controller, or every
    broker, had to answer.
    """

    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        gone = MetadataResponse.MetadataResponseBroker(node_id=2, host="127.0.0.1", port=await free_port())

        def with_gone_controller(header: Any, message: Any) -> MetadataResponse:
            answer = metadata(broker.port)
            answer.brokers.append(gone)
            answer.controller_id = gone.node_id
            return answer

        present = broker.handlers["Metadata"]
        broker.handlers |= {
            "Metadata": with_gone_controller,
            "DescribeAcls": lambda header, message: DescribeAclsResponse(resources=[]),
            "ListGroups": lambda header, message: ListGroupsResponse(groups=[]),
            "ListTransactions": lambda header, message: ListTransactionsResponse(transaction_states=[]),
        }
        assert (await admin.describe_cluster()).controller_id == gone.node_id
        broker.handlers["Metadata"] = present
        assert await getattr(admin, call)() == []

    play(story)


def test_a_coordinator_that_still_loads_is_asked_for_its_groups_again() -> None:
    async def story(broker: ScriptedBroker, admin: Admin) -> None:
        codes = [CoordinatorLoadInProgress.code, 0]

        def handler(header: Any, message: Any) -> ListGroupsResponse:
            group = ListGroupsResponse.ListedGroup(
                group_id="g", protocol_type="consumer", group_state="Stable"
            )
            return ListGroupsResponse(error_code=codes.pop(0), groups=[group])

        broker.handlers["ListGroups"] = handler
        assert [group.group_id for group in await admin.list_groups()] == ["g"]

    play(story)
