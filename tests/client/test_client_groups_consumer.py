"""Our consumer with group.protocol=consumer (KIP-848), on our broker and on Apache Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import confluent_kafka
import pytest
from support.groups.members import (
    Reader,
    fill,
    idle_member_is_left_behind,
    static_member_comes_back,
    take,
    transform_thirty,
    wait_for,
)
from support.groups.members import member as any_member
from support.topics import new_topic

from oncelog import Admin, Consumer
from oncelog.client.admin.types import NewTopic
from oncelog.errors import ConfigError, GroupIdNotFound
from oncelog.testing.broker_process import BrokerProcess

QUICK = {"group.consumer.heartbeat.interval.ms": 100, "group.consumer.session.timeout.ms": 2_000}


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return QUICK


def member(servers: str, group: str, **settings: object) -> Consumer:
    return any_member(servers, group, group_protocol="consumer", **settings)


@pytest.mark.behaviour("T7")
def test_transactions_transform_every_record_once(servers: str, group: str) -> None:
    with member(servers, group, enable_auto_commit=False, max_poll_records=4) as consumer:
        transform_thirty(servers, consumer)


def test_members_share_partitions_and_take_over_those_of_others(servers: str, group: str) -> None:
    """A member keeps reading the partitions it keeps. It revokes the others before another member gets them.

    So nothing is lost or read twice.
    """
    topic = new_topic(servers, 4)
    first = Reader(member(servers, group, enable_auto_commit=False), topic)
    wait_for(lambda: first.events == [("assigned", 4)])
    fill(servers, topic, 0, 40, 4)
    wait_for(lambda: len(first.values) == 40)
    second = Reader(member(servers, group, enable_auto_commit=False), topic)
    wait_for(lambda: sum(count for what, count in second.events if what == "assigned") == 2)
    assert ("revoked", 2) in first.events
    fill(servers, topic, 40, 40, 4)
    wait_for(lambda: len(first.values) + len(second.values) == 80)
    assert second.values
    second.stop(commits=True)
    wait_for(lambda: first.events[-1] == ("assigned", 2))
    fill(servers, topic, 80, 40, 4)
    wait_for(lambda: len(first.values) + len(second.values) == 120)
    first.stop()
    assert sorted(first.values + second.values) == list(range(120))


def test_a_group_of_ours_and_of_librdkafka(servers: str, group: str) -> None:
    topic = new_topic(servers, 4)
    ours = Reader(member(servers, group), topic)
    wait_for(lambda: ours.events == [("assigned", 4)])
    other = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": group, "group.protocol": "consumer",
         "auto.offset.reset": "earliest"}
    )  # fmt: skip
    other.subscribe([topic])

    def both_have_two() -> bool:
        other.poll(0.05)
        return len(other.assignment()) == 2 and ours.events[-1] == ("revoked", 2)

    wait_for(both_have_two)
    other.close()
    wait_for(lambda: ours.events[-1] == ("assigned", 2))
    ours.stop()


def test_a_member_resumes_at_its_commit(ours: str, group: str) -> None:
    topic = new_topic(ours, 2)
    fill(ours, topic, 0, 10, 2)
    with member(ours, group, enable_auto_commit=False) as consumer:
        consumer.subscribe(topic)
        assert sorted(take(consumer, 10)) == list(range(10))
        consumer.commit()
        identity = consumer.group_metadata()
        assert identity.generation_id >= 1 and identity.member_id
    fill(ours, topic, 10, 4, 2)
    with member(ours, group) as successor:
        successor.subscribe([topic])
        assert sorted(take(successor, 4)) == [10, 11, 12, 13]


@pytest.mark.behaviour("T7")
def test_a_member_that_does_not_poll_is_left_behind(ours: str, group: str) -> None:
    idle_member_is_left_behind(ours, lambda **settings: member(ours, group, **settings))


def test_a_static_member_comes_back_to_what_it_had(ours: str, group: str) -> None:
    static_member_comes_back(ours, lambda name: member(ours, group, group_instance_id=name))


def test_a_matching_topic_that_is_created_again_is_read(ours: str, group: str) -> None:
    name = f"pattern-{group}"
    with (
        Admin({"bootstrap.servers": ours}) as admin,
        member(ours, group, metadata_max_age_ms=200) as consumer,
    ):
        consumer.subscribe(pattern=f"{name}-.*")
        assert consumer.poll(0.3) == []
        admin.create_topics([NewTopic(f"{name}-1", 2)])
        fill(ours, f"{name}-1", 0, 4, 2)
        assert sorted(take(consumer, 4)) == [0, 1, 2, 3]
        admin.delete_topics([f"{name}-1"])
        wait_for(lambda: consumer.poll(0.1) == [] and consumer.assignment() == [])
        admin.create_topics([NewTopic(f"{name}-1", 1)])
        fill(ours, f"{name}-1", 10, 2, 1)
        assert sorted(take(consumer, 2)) == [10, 11], "another topic, from its first record"


def test_members_read_on_after_the_broker_was_killed(tmp_path: Path, group: str) -> None:
    # On a busy machine, a member may be late for two seconds, and would have left the group.
    patient = QUICK | {"group.consumer.session.timeout.ms": 60_000}
    with BrokerProcess(tmp_path / "data", settings=patient) as broker:
        servers = broker.bootstrap_servers
        topic = new_topic(servers, 2)
        reader = Reader(member(servers, group, enable_auto_commit=False), topic)
        wait_for(lambda: reader.events == [("assigned", 2)])
        fill(servers, topic, 0, 10, 2)
        wait_for(lambda: len(reader.values) == 10)
        broker.kill()
        broker.start()
        fill(servers, topic, 10, 10, 2)
        wait_for(lambda: sorted(reader.values) == list(range(20)))
        reader.stop(commits=True)


def test_an_unknown_assignor_and_a_classic_setting_are_refused(ours: str, group: str) -> None:
    topic = new_topic(ours)
    with member(ours, group, group_remote_assignor="odd") as odd:
        odd.subscribe(topic)
        with pytest.raises(Exception, match="UNSUPPORTED_ASSIGNOR"):
            wait_for(lambda: odd.poll(0.1))
    with member(ours, group, session_timeout_ms=6_000) as settled:
        settled.subscribe(topic)
        with pytest.raises(ConfigError, match=r"session\.timeout\.ms cannot be set"):
            settled.poll(0.1)


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_a_stable_group_is_described_whatever_its_protocol(servers: str, group: str, protocol: str) -> None:
    topic = new_topic(servers, 3)
    with (
        any_member(
            servers, group, group_protocol=protocol, client_id="who", enable_auto_commit=False
        ) as consumer,
        Admin({"bootstrap.servers": servers}) as admin,
    ):
        consumer.subscribe([topic])

        def is_shared_out() -> bool:
            consumer.poll(0.1)
            return len(consumer.assignment()) == 3

        wait_for(is_shared_out)
        wait_for(lambda: is_shared_out() and admin.describe_groups(group)[group].state == "Stable")
        described = admin.describe_groups(group)[group]
        assert (described.group_id, described.protocol_type) == (group, "consumer")
        assert described.assignor
        (member_of_it,) = described.members
        assert member_of_it.member_id == consumer.group_metadata().member_id
        assert (member_of_it.client_id, member_of_it.host) == ("who", "127.0.0.1")
        assert sorted(member_of_it.partitions) == sorted(consumer.assignment())


def test_a_group_that_is_not_there_is_not_found_by_either_api(servers: str, group: str) -> None:
    with Admin({"bootstrap.servers": servers}) as admin, pytest.raises(GroupIdNotFound, match=group):
        admin.describe_groups(group)
