"""Published anomalies of Kafka's transactions, and how our clients behave in them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.topics import new_topic, producer_of, values

from oncelog import Broker, Consumer, Producer, TopicPartition
from oncelog.errors import BrokerError, MisuseError, TimedOut
from oncelog.testing.proxy import Proxy, Rule
from oncelog.testing.proxy.events import Fate


@pytest.fixture(scope="module")
def classic() -> Iterator[str]:
    with Broker(config={"oncelog.transaction.version": 1}) as broker:
        yield broker.bootstrap_servers


def until(consumer: Consumer, count: int) -> list[bytes]:
    """Return the values of the next `count` records."""
    got: list[bytes] = []
    while len(got) < count:
        got += [record.value or b"" for record in consumer.poll(10, max_records=count - len(got))]
    return got


def late_commit(servers: str, topic: str, name: str) -> str:
    """Commit `first`. Let a copy of its EndTxn arrive while the transaction of `second` is open, and abort
    `second`.

    Return the name of the abort's error, or NONE.
    """
    settings = {"transactional_id": name, "request_timeout_ms": 2000}
    with Proxy(servers) as proxy, producer_of(proxy.bootstrap_servers, **settings) as producer:
        producer.init_transactions(120)  # the first transactional id takes long on a new Apache Kafka
        proxy.add(Rule(action="duplicate", api="EndTxn", nth=1, delay_ms=60_000))
        producer.begin_transaction()
        producer.send(topic, b"first")
        producer.commit_transaction()
        producer.begin_transaction()
        producer.send(topic, b"second")
        producer.flush()
        proxy.release()
        assert proxy.wait_until(lambda events: any(event.fate is Fate.UNEXPECTED for event in events))
        try:
            producer.abort_transaction()
        except BrokerError as error:
            return error.kafka_name
    return "NONE"


@pytest.mark.behaviour("T13")
def test_a_late_commit_is_refused(servers: str) -> None:
    """KAFKA-17754: the late commit has the epoch of its own transaction, which is over."""
    topic = new_topic(servers)
    assert late_commit(servers, topic, f"late-{os.getpid()}") == "NONE"
    assert values(servers, topic) == [b"first"]


def test_a_late_commit_ends_the_open_transaction_where_epochs_stay(classic: str) -> None:
    """Without an epoch per transaction, the late commit ends whatever transaction is open; see
    docs/guides/transactions.md.
    """
    topic = new_topic(classic)
    assert late_commit(classic, topic, "late") == "INVALID_TXN_STATE"
    assert values(classic, topic) == [b"first", b"second"]


@pytest.mark.parametrize("goes_back", [True, False])
@pytest.mark.behaviour("T7")
def test_an_abort_does_not_move_the_consumers_position_back(servers: str, goes_back: bool) -> None:
    """KAFKA-17582: an abort discards the offsets sent to the group, but does not move the consumer's
    position.
    """
    source, target, name = new_topic(servers), new_topic(servers), f"rewind-{os.getpid()}-{goes_back}"
    with producer_of(servers) as producer:
        for number in range(6):
            producer.send(source, b"%d" % number)
    with (
        Consumer(
            {"bootstrap.servers": servers, "group.id": name},
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer,
        producer_of(servers, transactional_id=name) as producer,
    ):
        producer.init_transactions()
        consumer.assign([TopicPartition(source, 0)])
        for turn in range(4 if goes_back else 3):
            records = until(consumer, 2)
            producer.begin_transaction()
            for value in records:
                producer.send(target, value)
            positions = {TopicPartition(source, 0): consumer.position(TopicPartition(source, 0))}
            producer.send_offsets_to_transaction(positions, consumer.group_metadata())
            if turn == 1:
                producer.abort_transaction()
                if goes_back:
                    consumer.seek_to_committed()
            else:
                producer.commit_transaction()
    expected = [b"0", b"1", b"2", b"3", b"4", b"5"] if goes_back else [b"0", b"1", b"4", b"5"]
    assert values(servers, target) == expected


@pytest.mark.behaviour("T3", "T13")
@pytest.mark.parametrize("lost", ["request", "response"])
def test_after_a_commit_without_a_response_a_new_instance_completes_it(servers: str, lost: str) -> None:
    """The new instance completes a decided transaction and aborts an undecided one.

    The old instance may only repeat its commit.
    """
    topic, name = new_topic(servers), f"unanswered-{os.getpid()}-{lost}"
    with (
        Proxy(servers) as proxy,
        producer_of(proxy.bootstrap_servers, transactional_id=name, request_timeout_ms=300) as old,
        Producer({"bootstrap.servers": servers, "transactional.id": name}) as new,
    ):
        old.init_transactions()
        old.begin_transaction()
        old.send(topic, b"first")
        old.flush()
        proxy.add(Rule(action="cut", api="EndTxn", direction=lost))
        with pytest.raises(TimedOut):
            old.commit_transaction(timeout=0.5)
        with pytest.raises(MisuseError, match=r"call commit_transaction\(\) again"):
            old.abort_transaction()
        new.init_transactions()
        expected = [b"first"] if lost == "response" else []
        assert values(servers, topic) == expected
        proxy.clear()
        with pytest.raises(BrokerError):
            old.commit_transaction()
        with new.transaction():
            new.send(topic, b"second")
    assert values(servers, topic) == [*expected, b"second"]
