"""A partition of a coordinator's topic is damaged: the broker starts, but the keys in that partition have no
coordinator.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.broker import RawClient, batch
from support.topics import producer_of

from oncelog import Broker
from oncelog.broker.coordinators.internal_topic import partition_for
from oncelog.broker.coordinators.internal_topic_config import CONSUMER_OFFSETS, TRANSACTION_STATE
from oncelog.errors import NotCoordinator, StorageError
from oncelog.log.contents import CONTENTS
from oncelog.wire import messages as m
from oncelog.wire.batch import iter_batches

PARTITIONS = 4
CONFIG = {
    "offsets.topic.num.partitions": PARTITIONS,
    "transaction.state.log.num.partitions": PARTITIONS,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 50,
}
KEYS = ("a", "b")
"""Two keys, used as groups and as transactional ids, that belong to different partitions. The tests damage
the partition of "a".
"""
assert partition_for("a", PARTITIONS) != partition_for("b", PARTITIONS)


def commit_request(group: str, offset: int) -> m.OffsetCommitRequest:
    partition = m.OffsetCommitRequest.OffsetCommitRequestPartition(
        partition_index=0, committed_offset=offset, committed_metadata=""
    )
    return m.OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[m.OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[partition])],
    )


def fetched(client: RawClient, group: str) -> tuple[int, int | None]:
    asked = m.OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)
    (found,) = client.ask(m.OffsetFetchRequest(groups=[asked]), 8).groups
    offsets = [partition.committed_offset for topic in found.topics for partition in topic.partitions]
    return found.error_code, offsets[0] if offsets else None


def init_request(transactional_id: str) -> m.InitProducerIdRequest:
    return m.InitProducerIdRequest(
        transactional_id=transactional_id, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create a data directory with offsets of two groups, and open transactions of two ids in topic t."""
    with Broker(tmp_path, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t", 2)
        for offset in (1, 2):
            for key in KEYS:
                response = client.ask(commit_request(key, offset), 8)
                assert response.topics[0].partitions[0].error_code == 0
        for partition, key in enumerate(KEYS):
            who = client.ask(init_request(key), 4)
            made = batch(
                b"open", pid=who.producer_id, epoch=who.producer_epoch, sequence=0, is_transactional=True
            )
            assert _produce(client, key, partition, made) == 0
    return tmp_path


def _produce(client: RawClient, key: str, partition: int, made: bytearray) -> int:
    request = m.ProduceRequest(
        transactional_id=key,
        acks=-1,
        timeout_ms=5_000,
        topic_data=[
            m.ProduceRequest.TopicProduceData(
                name="t",
                partition_data=[m.ProduceRequest.PartitionProduceData(index=partition, records=made)],
            )
        ],
    )
    response: Any = client.ask(request, 12)
    return int(response.responses[0].partition_responses[0].error_code)


def flip(data: Path, topic: str, key: str) -> Path:
    """Flip one bit in the first batch of the partition that holds the key. A second call restores the bit."""
    directory = data / f"{topic}-{partition_for(key, PARTITIONS)}"
    log = directory / f"{0:020}.log"
    content = bytearray(log.read_bytes())
    content[70] ^= 1
    log.write_bytes(content)
    return log


@pytest.mark.behaviour("I27", "T6")
def test_a_flipped_bit_in_the_offsets_stops_one_partitions_coordinator(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = flip(data, CONSUMER_OFFSETS, "a")
    before = log.read_bytes()
    with caplog.at_level(logging.ERROR, "oncelog.broker"), Broker(data, config=CONFIG) as broker:
        assert f"{CONSUMER_OFFSETS}-" in caplog.text and str(log) in caplog.text and "offset=0" in caplog.text
        with RawClient(broker.bootstrap_servers) as client:
            assert fetched(client, "b") == (0, 2)
            assert fetched(client, "a") == (NotCoordinator.code, None)
            for request, version in _group_requests("a"):
                assert NotCoordinator.code in _codes(client.ask(request, version)), request
            assert client.ask(commit_request("b", 3), 8).topics[0].partitions[0].error_code == 0
    # The broker wrote nothing to the damaged log, so flipping the bit back repairs it.
    assert log.read_bytes() == before
    flip(data, CONSUMER_OFFSETS, "a")
    with Broker(data, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        assert (fetched(client, "a"), fetched(client, "b")) == ((0, 2), (0, 3))


def _group_requests(group: str) -> list[tuple[Any, int]]:
    join = m.JoinGroupRequest(
        group_id=group,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        member_id="",
        protocol_type="consumer",
        protocols=[m.JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    beat = m.ConsumerGroupHeartbeatRequest(
        group_id=group,
        member_id="m",
        member_epoch=0,
        rebalance_timeout_ms=10_000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    return [
        (commit_request(group, 9), 8),
        (join, 5),
        (beat, 0),
        (m.HeartbeatRequest(group_id=group, generation_id=1, member_id="m"), 4),
        (m.SyncGroupRequest(group_id=group, generation_id=1, member_id="m", assignments=[]), 3),
        (m.LeaveGroupRequest(group_id=group, member_id="m"), 2),
        (m.DescribeGroupsRequest(groups=[group]), 5),
        (m.ConsumerGroupDescribeRequest(group_ids=[group]), 0),
        (m.DeleteGroupsRequest(groups_names=[group]), 2),
        (m.OffsetDeleteRequest(group_id=group, topics=[]), 0),
        (m.OffsetFetchRequest(group_id=group, topics=None), 5),
    ]


def _codes(value: Any) -> set[int]:
    """Return every error code in a response."""
    codes = set()
    for name in getattr(value, "__slots__", ()):
        field = getattr(value, name)
        if name.endswith("error_code"):
            codes.add(field)
        for each in field if isinstance(field, list) else (field,):
            codes |= _codes(each) if hasattr(each, "_struct") else set()
    return codes


@pytest.mark.behaviour("I27", "T6")
def test_a_flipped_bit_in_the_transaction_log_tears_no_transaction(data: Path) -> None:
    flip(data, TRANSACTION_STATE, "a")
    with Broker(data, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.ask(init_request("a"), 4).error_code == NotCoordinator.code
        described = client.ask(m.DescribeTransactionsRequest(transactional_ids=["a", "b"]), 0)
        codes = {state.transactional_id: state.error_code for state in described.transaction_states}
        assert codes == {"a": NotCoordinator.code, "b": 0}
        # The other id, "b", works: its earlier transaction is aborted.
        with producer_of(broker.bootstrap_servers, transactional_id="b") as producer:
            producer.init_transactions()
        # The transaction of id "a" stays open: it is neither aborted nor visible.
        producers = _open_transactions(client)
        assert producers == {0: 1, 1: 0}
    flip(data, TRANSACTION_STATE, "a")
    with (
        Broker(data, config=CONFIG) as broker,
        RawClient(broker.bootstrap_servers) as client,
        producer_of(broker.bootstrap_servers, transactional_id="a") as producer,
    ):
        producer.init_transactions()
        assert _open_transactions(client) == {0: 0, 1: 0}


def _open_transactions(client: RawClient) -> dict[int, int]:
    asked = m.DescribeProducersRequest.TopicRequest(name="t", partition_indexes=[0, 1])
    (topic,) = client.ask(m.DescribeProducersRequest(topics=[asked]), 0).topics
    return {
        partition.partition_index: sum(p.current_txn_start_offset >= 0 for p in partition.active_producers)
        for partition in topic.partitions
    }


@pytest.mark.behaviour("I27")
@pytest.mark.parametrize("cut", [None, 0])
def test_a_record_of_an_unknown_version_is_named_with_its_offset(
    data: Path, caplog: pytest.LogCaptureFixture, cut: int | None
) -> None:
    """The batch is valid, but its record's value has a version that the broker does not know. The error names
    the offset.
    """
    directory = data / f"{TRANSACTION_STATE}-{partition_for('a', PARTITIONS)}"
    log = directory / f"{0:020}.log"
    size = log.stat().st_size
    from oncelog.broker.coordinators.transaction_log import encode_key
    from oncelog.wire.batch import build_batch, stamp
    from oncelog.wire.records import NewRecord

    last = [header for _, header in iter_batches(memoryview(log.read_bytes()))][-1].last_offset
    made = build_batch([NewRecord(1, encode_key("a"), b"\x00\x63???" if cut is None else b"")])
    stamp(memoryview(made), 0, last + 1, 0)
    log.write_bytes(log.read_bytes()[:size] + bytes(made))
    (data / ".kafka_cleanshutdown").unlink()
    with caplog.at_level(logging.ERROR, "oncelog.broker"), Broker(data, config=CONFIG) as broker:
        assert f"offset={last + 1}" in caplog.text
        with RawClient(broker.bootstrap_servers) as client:
            assert client.ask(init_request("a"), 4).error_code == NotCoordinator.code
            # success, or CONCURRENT_TRANSACTIONS while the coordinator still aborts the open transaction
            assert client.ask(init_request("b"), 4).error_code in (0, 51)


@pytest.mark.behaviour("I27")
def test_a_coordinator_uses_no_log_that_lost_records(data: Path) -> None:
    """Regression: the group went back to its offset before the lost record, without a report.

    A kill, a compaction or a marker must not make the broker forget the loss.
    """
    log = data / f"{CONSUMER_OFFSETS}-{partition_for('a', PARTITIONS)}" / f"{0:020}.log"
    stored = log.read_bytes()
    positions = [position for position, _ in iter_batches(memoryview(stored))]
    log.write_bytes(stored[: positions[-1]])
    for _ in range(2):
        with pytest.raises(StorageError, match=f"{log.parent.name}/{log.name} has .* but the last stop left"):
            Broker(data, config=CONFIG).start()
    log.write_bytes(stored)
    with Broker(data, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        assert fetched(client, "a") == (0, 2)
    log.write_bytes(stored[: positions[-1]])
    (data / CONTENTS).unlink()
    with Broker(data, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        assert (fetched(client, "a"), fetched(client, "b")) == ((0, 1), (0, 2))


def _delete_topic(client: RawClient) -> None:
    state = m.DeleteTopicsRequest.DeleteTopicState(name="t")
    (result,) = client.ask(m.DeleteTopicsRequest(topics=[state], timeout_ms=5_000), 6).responses
    assert result.error_code == 0


@pytest.mark.behaviour("I27", "T7")
@pytest.mark.parametrize("starts", [1, 2])
def test_offsets_of_a_topic_that_is_deleted_while_they_are_damaged_do_not_come_back(
    data: Path, starts: int
) -> None:
    flip(data, CONSUMER_OFFSETS, "a")
    with Broker(data, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        _delete_topic(client)
        client.create_topic("t", 2)
        assert client.ask(commit_request("b", 7), 8).topics[0].partitions[0].error_code == 0
    # The log is still damaged, so the deletion of the topic's offsets must stay pending.
    for _ in range(1, starts):
        with Broker(data, config=CONFIG) as broker:
            pass
    flip(data, CONSUMER_OFFSETS, "a")
    with Broker(data, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        assert (fetched(client, "a"), fetched(client, "b")) == ((0, None), (0, 7))
        assert client.ask(commit_request("a", 8), 8).topics[0].partitions[0].error_code == 0
    with Broker(data, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        assert (fetched(client, "a"), fetched(client, "b")) == ((0, 8), (0, 7))
    assert "offsets_to_delete" not in (data / "oncelog-topics.json").read_text()
