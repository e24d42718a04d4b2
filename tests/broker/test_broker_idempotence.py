"""Idempotence with real bytes over a real socket: the responses to Produce and the stored batches."""

from __future__ import annotations

import pytest
from support.broker import RawClient, batch, produce_request
from support.wait import pass_time, wait_until

from oncelog.errors import (
    InvalidProducerEpoch,
    InvalidRecord,
    OutOfOrderSequenceNumber,
)
from oncelog.server.embedded import Broker
from oncelog.wire.messages import (
    DeleteTopicsRequest,
    DescribeProducersRequest,
    InitProducerIdRequest,
    ProduceResponse,
)

LAST_SEQUENCE = 2**31 - 1


@pytest.mark.behaviour("I1")
def test_a_retry_after_a_lost_acknowledgement_is_stored_once(
    broker: Broker, client: RawClient, topic: str
) -> None:
    pid = client.new_producer_id()
    sent = batch(b"a", b"b", pid=pid, sequence=0)
    with RawClient(broker.bootstrap_servers) as loser:
        loser.send(produce_request(topic, sent), 9)
        wait_until(lambda: client.offset(topic) == 2)
        # The connection ends before the acknowledgement is read, so the producer cannot know that the batch
        # is stored.
    retried = client.produce(topic, sent)
    assert (retried.error_code, retried.base_offset) == (0, 0)
    assert client.values(topic) == [b"a", b"b"]


@pytest.mark.behaviour("I1")
def test_without_a_producer_id_the_same_retry_is_stored_twice(client: RawClient, topic: str) -> None:
    sent = batch(b"a", b"b")
    assert [client.produce(topic, sent).base_offset for _ in range(2)] == [0, 2]
    assert client.values(topic) == [b"a", b"b", b"a", b"b"]


@pytest.mark.behaviour("I4")
def test_producer_ids_are_unique_over_sessions_and_restarts(tmp_path: object) -> None:
    seen: list[int] = []
    for _ in range(3):
        with Broker(str(tmp_path)) as broker:
            for _ in range(2):
                with RawClient(broker.bootstrap_servers) as session:
                    seen += [session.new_producer_id() for _ in range(3)]
    assert len(set(seen)) == len(seen) == 18
    # Each start assigns ids from a range of its own, above the previous range.
    starts = seen[::6]
    assert starts == sorted(starts) and all(pid - starts[0] == n for n, pid in enumerate(seen[:6]))


def test_init_producer_id_wants_id_and_epoch_or_neither(client: RawClient) -> None:
    request = InitProducerIdRequest(
        transactional_id=None, transaction_timeout_ms=1, producer_id=5, producer_epoch=-1
    )
    assert client.ask(request, 4).error_code == 42
    given = InitProducerIdRequest(
        transactional_id=None, transaction_timeout_ms=1, producer_id=5, producer_epoch=3
    )
    response = client.ask(given, 4)
    assert (response.error_code, response.producer_epoch) == (0, 0)
    assert response.producer_id != 5


@pytest.mark.behaviour("I5")
def test_sequences_wrap_from_2147483647_to_0(client: RawClient, topic: str) -> None:
    pid = client.new_producer_id()
    first = client.produce(topic, batch(b"a", b"b", pid=pid, sequence=LAST_SEQUENCE - 1))
    across = client.produce(topic, batch(b"c", pid=pid, sequence=0))
    assert [(r.error_code, r.base_offset) for r in (first, across)] == [(0, 0), (0, 2)]
    inside = batch(*(b"%d" % n for n in range(4)), pid=client.new_producer_id(), sequence=LAST_SEQUENCE - 1)
    answers = [client.produce(topic, inside) for _ in range(2)]
    assert [(r.error_code, r.base_offset) for r in answers] == [(0, 3), (0, 3)]


@pytest.mark.behaviour("I7")
def test_produce_answers_what_the_append_rule_decides(client: RawClient, topic: str) -> None:
    pid = client.new_producer_id()

    def produce(sequence: int, epoch: int = 0, count: int = 2) -> tuple[int, int]:
        values = [b"%d-%d" % (epoch, sequence + n) for n in range(count)]
        result = client.produce(topic, batch(*values, pid=pid, epoch=epoch, sequence=sequence))
        return result.error_code, result.base_offset

    out_of_order, fenced = OutOfOrderSequenceNumber.code, InvalidProducerEpoch.code
    assert produce(0) == (0, 0)
    assert produce(2) == (0, 2)
    assert produce(0) == (0, 0), "one of the five remembered: the original offset"
    assert produce(6) == (out_of_order, -1), "a gap"
    assert produce(2, count=1) == (out_of_order, -1), "overlaps a remembered batch without being it"
    assert produce(4) == (0, 4), "a refusal changed nothing"
    assert produce(1, epoch=1) == (out_of_order, -1), "a higher epoch starts at 0"
    assert produce(0, epoch=1) == (0, 6)
    assert produce(6, epoch=0) == (fenced, -1)
    assert client.offset(topic) == 8


@pytest.mark.behaviour("I8")
def test_a_batch_older_than_the_five_remembered_is_refused_not_stored(client: RawClient, topic: str) -> None:
    pid = client.new_producer_id()
    sent = [batch(b"%d" % n, pid=pid, sequence=n) for n in range(6)]
    assert [client.produce(topic, one).base_offset for one in sent] == list(range(6))
    oldest, second = client.produce(topic, sent[0]), client.produce(topic, sent[1])
    assert (oldest.error_code, oldest.base_offset) == (OutOfOrderSequenceNumber.code, -1)
    assert (second.error_code, second.base_offset) == (0, 1)
    assert client.offset(topic) == 6


@pytest.mark.behaviour("I14")
def test_a_delayed_message_of_an_older_epoch_changes_no_state(client: RawClient, topic: str) -> None:
    pid = client.new_producer_id()
    client.produce(topic, batch(b"old", pid=pid, epoch=0, sequence=0))
    client.produce(topic, batch(b"new", pid=pid, epoch=1, sequence=0))
    before = describe_producers(client, topic)
    delayed = client.produce(topic, batch(b"late", pid=pid, epoch=0, sequence=1))
    assert delayed.error_code == InvalidProducerEpoch.code
    assert describe_producers(client, topic) == before
    assert client.produce(topic, batch(b"next", pid=pid, epoch=1, sequence=1)).error_code == 0
    assert client.values(topic) == [b"old", b"new", b"next"]


@pytest.mark.behaviour("I15")
def test_an_unknown_producer_id_is_accepted_at_any_sequence(client: RawClient, topic: str) -> None:
    stored = client.produce(topic, batch(b"x", pid=987_654_321, epoch=4, sequence=77))
    following = client.produce(topic, batch(b"y", pid=987_654_321, epoch=4, sequence=78))
    assert [(r.error_code, r.base_offset) for r in (stored, following)] == [(0, 0), (0, 1)]
    assert describe_producers(client, topic)[987_654_321].last_sequence == 78


@pytest.mark.behaviour("I16")
def test_what_idempotence_does_not_cover(client: RawClient, topic: str) -> None:
    first_session, second_session = client.new_producer_id(), client.new_producer_id()
    client.produce(topic, batch(b"same", pid=first_session, sequence=0))
    client.produce(topic, batch(b"same", pid=second_session, sequence=0))
    assert client.values(topic) == [b"same", b"same"], "no de-duplication across sessions"

    client.create_topic("two-partitions", 2)
    sent = batch(b"same", pid=first_session, sequence=0)
    assert [client.produce("two-partitions", sent, p).error_code for p in (0, 1)] == [0, 0]
    assert [client.offset("two-partitions", partition=p) for p in (0, 1)] == [1, 1], "none across partitions"

    client.ask(DeleteTopicsRequest(topic_names=["two-partitions"], timeout_ms=1000), 5)
    client.create_topic("two-partitions", 2)
    assert describe_producers(client, "two-partitions") == {}, "a re-created topic knows no producer"
    again = client.produce("two-partitions", sent)
    assert (again.error_code, again.base_offset) == (0, 0)
    assert client.offset("two-partitions") == 1


@pytest.mark.behaviour("I19")
def test_inactive_producers_expire() -> None:
    config = {"connections.max.idle.ms": -1}
    with Broker(config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("expiring")
        # The records are old, but the broker must remember the producer from the time of the append, not of
        # the record.
        old = 1_000
        client.produce("expiring", batch(b"x", pid=1, sequence=0, timestamp_ms=old))
        pass_time(broker, 86_400_000 + 600_000)
        wait_until(lambda: broker.metrics()["producers_expired"] == 1)
        assert describe_producers(client, "expiring") == {}
        late = client.produce("expiring", batch(b"y", pid=1, sequence=7))
        assert late.error_code == 0, "it goes on where it was; it is not out of order"


def test_a_back_fill_does_not_lose_its_producer() -> None:
    config = {"connections.max.idle.ms": -1}
    with Broker(config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("back-fill")
        pid = client.new_producer_id()
        sent = batch(b"1998", pid=pid, sequence=0, timestamp_ms=900_000_000_000)
        client.produce("back-fill", sent)
        pass_time(broker, 3_600_000)  # the broker checks producers for expiry every ten minutes
        again = client.produce("back-fill", sent)
        assert (again.error_code, again.base_offset) == (0, 0)
        assert client.offset("back-fill") == 1


def test_a_duplicate_tells_the_batch_timestamp(client: RawClient, topic: str) -> None:
    pid = client.new_producer_id()
    sent = batch(b"x", pid=pid, sequence=0, timestamp_ms=1_700_000_000_000)
    times = [client.produce(topic, sent).log_append_time_ms for _ in range(2)]
    assert times == [-1, 1_700_000_000_000]


def test_a_producer_id_without_a_sequence_is_refused(client: RawClient, topic: str) -> None:
    result = client.produce(topic, batch(b"x", pid=3, sequence=None))
    assert result.error_code == InvalidRecord.code
    assert client.offset(topic) == 0


def test_sequences_of_partitions_are_independent(client: RawClient) -> None:
    client.create_topic("independent", 2)
    pid = client.new_producer_id()
    results: list[ProduceResponse.PartitionProduceResponse] = [
        client.produce("independent", batch(b"x", pid=pid, sequence=0), 0),
        client.produce("independent", batch(b"y", pid=pid, sequence=1), 0),
        client.produce("independent", batch(b"z", pid=pid, sequence=0), 1),
        client.produce("independent", batch(b"gap", pid=pid, sequence=5), 1),
    ]
    assert [r.error_code for r in results] == [0, 0, 0, OutOfOrderSequenceNumber.code]


def describe_producers(client: RawClient, topic: str) -> dict[int, object]:
    request = DescribeProducersRequest(
        topics=[DescribeProducersRequest.TopicRequest(name=topic, partition_indexes=[0])]
    )
    partition = client.ask(request, 0).topics[0].partitions[0]
    assert partition.error_code == 0
    return {state.producer_id: state for state in partition.active_producers}
