"""Members that subscribe to topics that do not exist yet, may not be read, or have an invalid name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.groups.members import fill, member, take
from support.security.brokers import AUTHORIZER, PASSWORD, secured_broker
from support.topics import new_topic

from oncelog import Admin, Broker, Consumer, NewTopic, Producer, TopicPartition
from oncelog.errors import InvalidTopicException, OncelogError, TopicAlreadyExists, TopicAuthorizationFailed
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType

HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def careful() -> Iterator[str]:
    """Provide a broker that does not create topics automatically."""
    quick = {"group.consumer.min.heartbeat.interval.ms": 300, "group.consumer.heartbeat.interval.ms": 300}
    with Broker(config={"auto.create.topics.enable": False, **quick}) as broker:
        yield broker.bootstrap_servers


def poll_until_error(consumer: Consumer) -> tuple[OncelogError, list[int]]:
    """Poll until an error is raised. Return the error, and the records of all polls before it."""
    values: list[int] = []
    while True:
        try:
            values += [int(record.value or b"") for record in consumer.poll(1)]
        except OncelogError as error:
            return error, values


def create(servers: str, topic: str) -> None:
    with Admin({"bootstrap.servers": servers}) as admin, suppress(TopicAlreadyExists):
        admin.create_topics([NewTopic(topic, 1)])


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_topic_that_is_created_after_subscribing_is_read_soon(
    careful: str, group: str, protocol: str, beside: bool
) -> None:
    """The member does not wait until its metadata expire, which takes an hour here and five minutes by
    default.
    """
    late = f"late-{group}"
    topics = [late, new_topic(careful)] if beside else [late]
    with member(careful, group, group_protocol=protocol, metadata_max_age_ms=HOUR_MS) as consumer:
        consumer.subscribe(topics)
        while len(consumer.assignment()) < len(topics) - 1:
            consumer.poll(0.1)
        assert consumer.poll(0.5) == []
        create(careful, late)
        fill(careful, late, 0, 3, 1)
        assert take(consumer, 3) == [0, 1, 2]


def test_a_topic_that_apache_kafka_creates_for_a_member_is_read_soon(
    apache_kafka: ApacheKafka, group: str
) -> None:
    """Apache Kafka creates the topic when a member asks for it, but first answers that it does not exist."""
    servers = apache_kafka.bootstrap_servers
    late = f"late-{group}"
    with member(servers, group, metadata_max_age_ms=HOUR_MS) as consumer:
        consumer.subscribe(late)
        while not consumer.assignment():
            consumer.poll(0.1)
        create(servers, late)
        fill(servers, late, 0, 3, 1)
        assert take(consumer, 3) == [0, 1, 2]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_is_told_of_a_name_that_no_topic_can_have(careful: str, group: str, protocol: str) -> None:
    good = new_topic(careful)
    fill(careful, good, 0, 3, 1)
    with member(careful, group, group_protocol=protocol) as consumer:
        consumer.subscribe(["bad name", good])
        error, before = poll_until_error(consumer)
        assert isinstance(error, InvalidTopicException)
        assert "bad name" in str(error)
        assert [*before, *take(consumer, 3 - len(before))] == [0, 1, 2], "the other topic is read"


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_is_told_again_of_a_name_that_no_topic_can_have(
    careful: str, group: str, protocol: str
) -> None:
    """An application that ignored the error gets it again after each metadata.max.age.ms."""
    with member(careful, group, group_protocol=protocol, metadata_max_age_ms=50) as consumer:
        consumer.subscribe(["bad name", new_topic(careful)])
        for _ in range(3):
            assert isinstance(poll_until_error(consumer)[0], InvalidTopicException)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_that_subscribes_to_more_topics_has_them_created(
    ours: str, group: str, protocol: str
) -> None:
    first, late = new_topic(ours), f"late-{group}-{protocol}"
    with member(ours, group, group_protocol=protocol, metadata_max_age_ms=HOUR_MS) as consumer:
        consumer.subscribe(first)
        while not consumer.assignment():
            consumer.poll(0.1)
        consumer.subscribe([first, late])
        while TopicPartition(late, 0) not in consumer.assignment():
            consumer.poll(0.1)
        consumer.subscribe([first, late, "bad name"])
        assert isinstance(poll_until_error(consumer)[0], InvalidTopicException)


def test_a_member_is_told_of_a_topic_that_it_may_not_read(tmp_path: Path) -> None:
    config = {"authorizer.class.name": AUTHORIZER, "super.users": "User:admin"}
    with secured_broker(tmp_path / "data", users=("admin", "bob"), **config) as broker:

        def settings(user: str) -> dict[str, object]:
            return {
                "bootstrap.servers": broker.bootstrap_servers,
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "SCRAM-SHA-256",
                "sasl.username": user,
                "sasl.password": PASSWORD,
            }

        with Admin(settings("admin")) as admin:
            admin.create_topics([NewTopic("open", 1), NewTopic("secret", 1)])
            admin.create_acls(
                Acl(kind, name, PatternType.LITERAL, "User:bob", "*", Operation.READ, Permission.ALLOW)
                for kind, name in ((ResourceType.TOPIC, "open"), (ResourceType.GROUP, "bobs"))
            )
        with Producer(settings("admin")) as producer:
            producer.send("open", b"0").result()
        consumer = Consumer(settings("bob"), group_id="bobs", auto_offset_reset="earliest")
        with consumer:
            consumer.subscribe(["open", "secret"])
            error, before = poll_until_error(consumer)
            assert isinstance(error, TopicAuthorizationFailed)
            assert "secret" in str(error)
            assert before or take(consumer, 1) == [0], "the other topic is read"


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_the_leader_of_members_with_other_topics_does_not_rebalance_by_age(
    careful: str, group: str, strategy: str
) -> None:
    settings = {"partition_assignment_strategy": strategy, "enable_auto_commit": False}
    one, two = new_topic(careful), new_topic(careful)
    with (
        member(careful, group, metadata_max_age_ms=50, **settings) as first,
        member(careful, group, metadata_max_age_ms=50, **settings) as second,
    ):
        first.subscribe(one)
        while not first.assignment():
            first.poll(0.05)
        second.subscribe(two)
        while not (first.assignment() and second.assignment()):
            first.poll(0.05)
            second.poll(0.05)

        def generation() -> int:
            return first.group_metadata().generation_id

        def refreshes() -> int:
            cluster = first._async._cluster
            assert cluster is not None
            return cluster.metadata.version

        settled, before = generation(), refreshes()
        while refreshes() < before + 10:
            first.poll(0.05)
            second.poll(0.05)
        assert generation() == settled
        assert first.assignment()
