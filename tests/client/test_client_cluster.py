"""Metadata responses, and the metadata that a client keeps after them."""

from __future__ import annotations

from support.client import metadata

from oncelog.client.connection.metadata import ClusterMetadata
from oncelog.errors import InvalidTopicException, UnknownTopicOrPartition
from oncelog.types import TopicPartition

T0, T9 = TopicPartition("t", 0), TopicPartition("t", 9)


def known(**changes: object) -> ClusterMetadata:
    cluster = ClusterMetadata()
    cluster.update(metadata(9092, {"t": 3}, **changes), 5.0)  # type: ignore[arg-type]
    return cluster


def test_an_update_sets_brokers_topics_and_leaders() -> None:
    cluster = known()
    assert cluster.brokers[1].port == 9092
    assert (cluster.cluster_id, cluster.controller_id, cluster.updated_ms) == ("scripted", 1, 5.0)
    assert cluster.topics() == ["t"]
    assert [part.partition for part in cluster.partitions("t")] == [0, 1, 2]
    assert cluster.partition_count("t") == 3
    assert cluster.leader_of(T0) == 1
    assert cluster.topic_id("t") == b"t" + bytes(15)


def test_unknown_values_are_none() -> None:
    cluster = known()
    assert cluster.leader_of(T9) is None
    assert cluster.leader_of(TopicPartition("other", 0)) is None
    assert cluster.partition_count("other") is None
    assert cluster.partitions("other") == ()
    assert cluster.topic_id("other") is None
    assert ClusterMetadata().updated_ms is None


def test_a_response_about_one_topic_keeps_the_others() -> None:
    cluster = known()
    cluster.update(metadata(9092, {"u": 1}))
    assert cluster.topics() == ["t", "u"]


def test_a_leader_without_a_broker_is_no_leader() -> None:
    assert known(leader=8).leader_of(T0) is None
    assert known(leader=-1).leader_of(T0) is None


def test_an_older_leader_epoch_changes_nothing() -> None:
    cluster = known(leader_epoch=5)
    behind = metadata(9092, {"t": 3}, leader_epoch=4, leader=-1)
    cluster.update(behind)
    assert cluster.leader_of(T0) == 1
    cluster.update(metadata(9092, {"t": 3}, leader_epoch=6, leader=-1))
    assert cluster.leader_of(T0) is None


def test_a_stale_leader_is_asked_again_after_an_older_epoch() -> None:
    """A cluster that was restored from a backup has lower leader epochs than before, and the client must
    accept them.
    """
    cluster = known(leader_epoch=5)
    cluster.mark_stale([T0])
    cluster.update(metadata(9092, {"t": 3}, leader_epoch=4))
    assert cluster.leader_of(T0) == 1


def test_a_recreated_topic_starts_with_its_own_epochs() -> None:
    cluster = known(leader_epoch=5)
    again = metadata(9092, {"t": 3}, leader_epoch=0, leader=-1)
    again.topics[0].topic_id = b"x" * 16
    cluster.update(again)
    assert cluster.leader_of(T0) is None
    assert cluster.topic_id("t") == b"x" * 16


def test_stale_leaders_are_unknown_until_the_next_response() -> None:
    cluster = known()
    cluster.mark_stale([T0])
    assert cluster.leader_of(T0) is None
    cluster.update(metadata(9092, {"t": 3}))
    assert cluster.leader_of(T0) == 1


def test_errors_are_kept_per_topic_until_they_pass() -> None:
    cluster = known()
    cluster.update(metadata(9092, errors={"t": 3, "bad name": 17}))
    assert isinstance(cluster.topic_error("t"), UnknownTopicOrPartition)
    assert isinstance(cluster.topic_error("bad name"), InvalidTopicException)
    assert cluster.partition_count("t") is None
    cluster.update(metadata(9092, {"t": 1}))
    assert cluster.topic_error("t") is None


def test_a_retriable_error_keeps_the_topic() -> None:
    cluster = known()
    cluster.update(metadata(9092, errors={"t": 5}))
    assert cluster.partition_count("t") == 3
    cluster.forget(["t"])
    assert cluster.partition_count("t") is None and cluster.topic_error("t") is None


def test_each_update_raises_the_version() -> None:
    cluster = known()
    cluster.update(metadata(9092))
    assert cluster.version == 2


def test_only_the_topics_that_are_retained_stay_known() -> None:
    cluster = known()
    cluster.update(metadata(9092, {"u": 1}, errors={"gone": 3}), 7.0)
    cluster.mark_stale([T0, TopicPartition("u", 0), TopicPartition("gone", 0)])
    cluster.retain({"u"})
    assert cluster.topics() == ["u"] and cluster.topic_error("gone") is None
    assert cluster._stale == {TopicPartition("u", 0)}
    cluster.forget(["u"])
    assert not cluster._stale and not cluster._unknown_since_ms


def test_a_topic_is_unknown_since_the_first_response_without_it() -> None:
    cluster = known()
    assert cluster.unknown_since_ms("t") is None
    cluster.mark_stale([T0])
    cluster.update(metadata(9092, errors={"t": 3}), 7.0)
    cluster.update(metadata(9092, errors={"t": 3}), 9.0)
    assert cluster.unknown_since_ms("t") == 7.0
    assert not cluster._stale
    cluster.update(metadata(9092, {"t": 3}), 11.0)
    assert cluster.unknown_since_ms("t") is None
