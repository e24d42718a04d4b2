"""Admin against our broker over a real socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.client import append, batch_of
from support.wait import JumpingClock

from oncelog import Admin, Broker, NewTopic, TopicPartition
from oncelog.client.admin import request_router
from oncelog.client.admin.blocking import ConfigResource
from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.connection.coordinator import GROUP
from oncelog.errors import (
    BrokerNotAvailable,
    InvalidConfig,
    InvalidPartitions,
    InvalidTopicException,
    MisuseError,
    NotCoordinator,
    OffsetOutOfRange,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)

T0, T9 = TopicPartition("t", 0), TopicPartition("t", 9)
TOPIC = ConfigResource("topic", "t")


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


def test_topics_are_created_listed_described_and_deleted(admin: Admin) -> None:
    created = admin.create_topics([NewTopic("t", 3, configs={"retention.ms": 5000}), NewTopic("u")])
    assert (created["t"].num_partitions, created["t"].replication_factor) == (3, 1)
    assert [(t.name, t.partition_count) for t in admin.list_topics()] == [("t", 3), ("u", 1)]
    described = admin.describe_topics(["t"])["t"]
    assert described.topic_id == created["t"].topic_id is not None
    assert [part.leader for part in described.partitions] == [1, 1, 1]
    admin.delete_topics(["t"])
    assert [t.name for t in admin.list_topics()] == ["u"]


def test_a_dry_run_creates_nothing(admin: Admin) -> None:
    assert admin.create_topics([NewTopic("t", 3)], validate_only=True)["t"].error is None
    assert admin.list_topics() == []


@pytest.mark.behaviour("I18")
def test_errors_are_typed_per_item(admin: Admin) -> None:
    admin.create_topics([NewTopic("t", 1)])
    outcomes = admin.create_topics(
        [
            NewTopic("t", 1),
            NewTopic("b d"),
            NewTopic("v", 0),
            NewTopic("w", configs={"nonsense": 1}),
            NewTopic("x"),
        ],
        raise_errors=False,
    )
    assert isinstance(outcomes["t"].error, TopicAlreadyExists)
    assert isinstance(outcomes["b d"].error, InvalidTopicException)
    assert isinstance(outcomes["v"].error, InvalidPartitions)
    assert isinstance(outcomes["w"].error, InvalidConfig)
    assert outcomes["x"].error is None
    with pytest.raises(TopicAlreadyExists, match="'t'"):
        admin.create_topics([NewTopic("t", 1)])
    with pytest.raises(UnknownTopicOrPartition, match="gone"):
        admin.describe_topics(["gone"])
    with pytest.raises(UnknownTopicOrPartition, match="gone"):
        admin.delete_topics(["gone"])


def test_topics_grow_but_do_not_shrink(admin: Admin) -> None:
    admin.create_topics([NewTopic("t", 2)])
    admin.create_partitions({"t": 4})
    assert len(admin.describe_topics(["t"])["t"].partitions) == 4
    with pytest.raises(InvalidPartitions):
        admin.create_partitions({"t": 3})


def test_settings_are_described_altered_and_reset(admin: Admin) -> None:
    admin.create_topics([NewTopic("t", 1, configs={"retention.ms": "5000"})])
    entry = admin.describe_configs([TOPIC])[TOPIC].entries["retention.ms"]
    assert (entry.value, entry.source, entry.is_default) == ("5000", "topic", False)
    admin.alter_configs({TOPIC: {"segment.bytes": 2_000_000, "retention.ms": None}})
    entries = admin.describe_configs([TOPIC])[TOPIC].entries
    assert entries["segment.bytes"].value == "2000000"
    assert entries["retention.ms"].is_default
    with pytest.raises(InvalidConfig):
        admin.alter_configs({TOPIC: {"segment.bytes": "many"}})
    node = ConfigResource("broker", "1")
    assert admin.describe_configs([node])[node].entries["num.partitions"].value == "1"


def test_offsets_are_listed_and_records_deleted(broker: Broker, admin: Admin) -> None:
    admin.create_topics([NewTopic("t", 1)])
    append(
        broker.bootstrap_servers,
        T0,
        batch_of(*[b"x"] * 10, timestamp_ms=1000),
        batch_of(b"y", timestamp_ms=500),
    )
    assert admin.list_offsets({T0: "latest"})[T0].offset == 11
    assert admin.list_offsets({T0: "earliest"})[T0].offset == 0
    newest = admin.list_offsets({T0: "max-timestamp"})[T0]
    assert (newest.offset, newest.timestamp_ms) == (9, 1009)
    assert admin.list_offsets({T0: 1004})[T0].offset == 4
    assert admin.list_offsets({T0: 5000})[T0].offset is None
    assert admin.delete_records({T0: 3})[T0].low_watermark == 3
    assert admin.list_offsets({T0: "earliest"})[T0].offset == 3
    with pytest.raises(OffsetOutOfRange, match="t-0"):
        admin.delete_records({T0: 99})
    assert admin.delete_records({T0: None})[T0].low_watermark == 11
    with pytest.raises(MisuseError, match="earliest, latest"):
        admin.list_offsets({T0: "newest"})  # type: ignore[dict-item]


def test_a_partition_that_does_not_exist_raises(broker: Broker, clock: JumpingClock) -> None:
    with Admin({"bootstrap.servers": broker.bootstrap_servers}, request_timeout_ms=60_000) as admin:
        admin.create_topics([NewTopic("t", 1)])
        outcomes = clock.outcome_of(
            lambda: admin.list_offsets({T0: "latest", T9: "latest"}, raise_errors=False), 1
        )
        assert outcomes[T0].offset == 0
        assert isinstance(outcomes[T9].error, UnknownTopicOrPartition)
        assert "no partition 9" in str(outcomes[T9].error)


def test_cluster_and_log_directories_are_described(broker: Broker, admin: Admin) -> None:
    admin.create_topics([NewTopic("t", 1)])
    append(broker.bootstrap_servers, T0, batch_of(b"x" * 1000))
    cluster = admin.describe_cluster()
    assert [(b.node_id, b.port) for b in cluster.brokers] == [(1, broker.port)]
    assert cluster.controller_id == 1 and cluster.cluster_id
    (directory,) = admin.describe_log_dirs()
    assert directory.path == str(broker.data_dir)
    assert {log.tp: log.size_bytes for log in directory.replicas}[T0] >= 1061


@pytest.mark.behaviour("I16")
def test_producers_are_known_until_their_topic_is_deleted_and_made_again(
    broker: Broker, admin: Admin
) -> None:
    admin.create_topics([NewTopic("t", 1)])
    numbered = [
        batch_of(b"a", b"b", producer_id=77, producer_epoch=0, base_sequence=0),
        batch_of(b"c", producer_id=77, producer_epoch=0, base_sequence=2),
    ]
    append(broker.bootstrap_servers, T0, *numbered)
    (producer,) = admin.describe_producers([T0])[T0].producers
    assert (producer.producer_id, producer.producer_epoch, producer.last_sequence) == (77, 0, 2)
    assert append(broker.bootstrap_servers, T0, numbered[1]) == [2]  # a retry, still recognised
    admin.delete_topics(["t"])
    admin.create_topics([NewTopic("t", 1)])
    assert admin.describe_producers([T0])[T0].producers == ()
    # The batch is stored again, because the deletion of the topic also deleted the memory of its batches.
    assert append(broker.bootstrap_servers, T0, numbered[0]) == [0]
    assert admin.list_offsets({T0: "latest"})[T0].offset == 2


def test_a_broker_that_does_not_exist_raises_at_once(admin: Admin) -> None:
    with pytest.raises(BrokerNotAvailable, match=r"broker 9 does not exist; the cluster has brokers \[1\]"):
        admin.describe_configs([ConfigResource("broker", "9")])
    with pytest.raises(BrokerNotAvailable, match="broker 9 does not exist"):
        admin.describe_log_dirs([1, 9])


def test_an_absent_broker_does_not_affect_the_results_of_other_resources(admin: Admin) -> None:
    """Regression: the setting of the topic was changed, but the result for the topic had the error of the
    absent broker.
    """
    admin.create_topics([NewTopic("t", 1)])
    away = ConfigResource("broker", "9")
    changed = admin.alter_configs(
        {TOPIC: {"retention.ms": "12345"}, away: {"log.retention.ms": "1"}}, raise_errors=False
    )
    found = admin.describe_configs([away, TOPIC], raise_errors=False)
    assert changed[TOPIC].error is None and found[TOPIC].entries["retention.ms"].value == "12345"
    assert isinstance(changed[away].error, BrokerNotAvailable)
    assert isinstance(found[away].error, BrokerNotAvailable)


def test_many_threads_share_one_client(admin: Admin) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: admin.create_topics([NewTopic(f"t{n}", 1)]), range(20)))
    assert len(admin.list_topics()) == 20


def test_a_closed_client_raises(admin: Admin) -> None:
    admin.close()
    admin.close()
    with pytest.raises(MisuseError, match="closed"):
        admin.list_topics()


def test_a_coordinator_is_looked_up_again_after_an_error(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    find, refused = request_router.find_coordinator, [NotCoordinator("moved"), None, None]

    async def counted(cluster: ClusterConnection, kind: int, name: str) -> int:
        found.append(name)
        return await find(cluster, kind, name)

    async def attempt(cluster: ClusterConnection, node_id: int) -> int:
        if (error := refused.pop(0)) is not None:
            raise error
        return node_id

    monkeypatch.setattr(request_router, "find_coordinator", counted)
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        for _ in range(2):
            admin._thread.run(admin._async._router.at_coordinator(GROUP, "group", attempt))
    assert found == ["group", "group"] and not refused
