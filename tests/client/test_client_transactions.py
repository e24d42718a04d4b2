"""Our transactional producer on our broker and on Apache Kafka: commit, abort, faults and fencing."""

from __future__ import annotations

import asyncio
import itertools
import os

import confluent_kafka
import pytest
from support.servers import bootstrap_servers
from support.topics import new_topic, producer_of, requests, values

from oncelog import Producer, TopicPartition
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import (
    InvalidProducerEpoch,
    MessageTooLarge,
    MisuseError,
    OncelogError,
    ProducerFenced,
    TimedOut,
    TransactionAborted,
    UnknownMemberId,
)
from oncelog.testing.proxy import Proxy, Rule
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata

_numbers = itertools.count()
BROKERS = ("ours", "ours, classic", "apache")


@pytest.fixture(params=BROKERS)
def servers(request: pytest.FixtureRequest) -> str:
    """Run the test on our broker with and without an epoch per transaction, and on Apache Kafka."""
    return bootstrap_servers(request)


def transactional(servers: str, name: str | None = None, **settings: object) -> Producer:
    name = name or f"txn-{os.getpid()}-{next(_numbers)}"
    return producer_of(servers, transactional_id=name, **settings)


def committed_offset(servers: str, group: str, topic: str) -> int:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": group})
    (found,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], 10)
    consumer.close()
    return int(found.offset)


@pytest.mark.behaviour("T4", "T6", "T10")
def test_committed_records_are_visible_and_aborted_ones_are_not(servers: str) -> None:
    topic = new_topic(servers, 2)
    with transactional(servers) as producer:
        producer.init_transactions()
        for number in range(4):
            producer.begin_transaction()
            sent = [producer.send(topic, b"%d" % number, partition=index) for index in range(2)]
            if number % 2:
                producer.flush()
                assert [future.result(60).partition for future in sent] == [0, 1]
                producer.abort_transaction()
            else:
                producer.commit_transaction()
                assert all(future.result(0) for future in sent)
    assert values(servers, topic) == [b"0", b"2", b"0", b"2"]


@pytest.mark.behaviour("T4")
def test_a_block_commits_or_aborts(servers: str) -> None:
    topic = new_topic(servers)
    with transactional(servers) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send(topic, b"kept")
        dropped = []

        def fail() -> None:
            with producer.transaction():
                dropped.append(producer.send(topic, b"dropped"))
                raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            fail()
        with producer.transaction():
            producer.send(topic, b"kept too")
    assert values(servers, topic) == [b"kept", b"kept too"]
    try:
        dropped[0].result(0)
    except TransactionAborted:
        pass  # the record was aborted before it was sent


@pytest.mark.behaviour("T3")
def test_a_new_instance_fences_the_old_one(servers: str) -> None:
    topic = new_topic(servers)
    name = f"fenced-{next(_numbers)}-{os.getpid()}"
    with transactional(servers, name) as old, transactional(servers, name) as new:
        old.init_transactions()
        old.begin_transaction()
        old.send(topic, b"zombie's")
        old.flush()
        new.init_transactions()
        old.send(topic, b"zombie's too")
        with pytest.raises((ProducerFenced, InvalidProducerEpoch)):
            old.commit_transaction()
        with new.transaction():
            new.send(topic, b"successor's")
        assert values(servers, topic) == [b"successor's"]
        with pytest.raises(OncelogError):
            old.abort_transaction()
        with pytest.raises(OncelogError):
            old.send(topic, b"never")


@pytest.mark.behaviour("T7")
def test_offsets_move_with_the_transaction(servers: str) -> None:
    topic, group = new_topic(servers), f"group-{next(_numbers)}-{os.getpid()}"
    with transactional(servers) as producer:
        producer.init_transactions()
        tp = TopicPartition(topic, 0)
        with producer.transaction():
            producer.send(topic, b"out")
            producer.send_offsets_to_transaction({tp: OffsetAndMetadata(7, metadata="note")}, group)
            assert committed_offset(servers, f"{group}-other", topic) == confluent_kafka.OFFSET_INVALID
        assert committed_offset(servers, group, topic) == 7
        producer.begin_transaction()
        producer.send_offsets_to_transaction({tp: 9}, group)
        producer.abort_transaction()
        assert committed_offset(servers, group, topic) == 7


@pytest.mark.behaviour("T7")
def test_offsets_of_a_member_that_is_gone_abort_the_transaction(servers: str) -> None:
    topic, group = new_topic(servers), f"group-{next(_numbers)}-{os.getpid()}"
    reader = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": group})
    reader.subscribe([topic])
    while not reader.assignment():
        reader.poll(0.1)
    zombie = ConsumerGroupMetadata(group, 1, "a-member-that-was")
    with transactional(servers) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"zombie's")
        with pytest.raises(UnknownMemberId) as raised:
            producer.send_offsets_to_transaction({TopicPartition(topic, 0): 5}, zombie)
        assert raised.value.reaction == "abortable"
        with pytest.raises(UnknownMemberId):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"fine")
    reader.close()
    assert values(servers, topic) == [b"fine"]


@pytest.mark.behaviour("T13")
@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_transaction_ends_although_the_response_to_endtxn_is_lost(
    servers: str, proxy: Proxy, outcome: str
) -> None:
    topic = new_topic(servers)
    proxy.add(Rule(action="cut", api="EndTxn", nth=1))
    with transactional(proxy.bootstrap_servers) as producer:
        producer.init_transactions()
        for value in (b"first", b"second"):
            producer.begin_transaction()
            producer.send(topic, value)
            producer.flush()
            if outcome == "commit" or value == b"second":
                producer.commit_transaction()
            else:
                producer.abort_transaction()
    assert len(requests(proxy, "EndTxn")) == 3
    assert values(servers, topic) == ([b"first", b"second"] if outcome == "commit" else [b"second"])


@pytest.mark.behaviour("T6")
@pytest.mark.parametrize("api", ["InitProducerId", "AddPartitionsToTxn", "TxnOffsetCommit", "Produce"])
@pytest.mark.parametrize("direction", ["request", "response"])
def test_a_transaction_survives_the_loss_of_any_other_message(
    servers: str, proxy: Proxy, api: str, direction: str
) -> None:
    topic, group = new_topic(servers), f"group-{next(_numbers)}-{os.getpid()}"
    proxy.add(Rule(action="cut", api=api, nth=1, direction=direction))
    with transactional(proxy.bootstrap_servers) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send(topic, b"once")
            producer.send_offsets_to_transaction({TopicPartition(topic, 0): 3}, group)
    assert values(servers, topic) == [b"once"]
    assert committed_offset(servers, group, topic) == 3


@pytest.mark.behaviour("T13")
def test_a_commit_without_a_response_can_be_called_again(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    with transactional(proxy.bootstrap_servers, request_timeout_ms=300) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"once")
        producer.flush()
        rule = Rule(action="cut", api="EndTxn")
        proxy.add(rule)
        with pytest.raises(TimedOut):
            producer.commit_transaction(timeout=0.5)
        with pytest.raises(MisuseError, match=r"call commit_transaction\(\) again"):
            producer.abort_transaction()
        proxy.clear()
        producer.commit_transaction()
    assert values(servers, topic) == [b"once"]


def test_a_record_that_is_refused_makes_the_transaction_abortable_only(servers: str) -> None:
    topic = new_topic(servers, max_message_bytes=300)
    with transactional(servers) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"small")
        producer.flush()
        large = producer.send(topic, bytes(1000))
        with pytest.raises(MessageTooLarge):
            producer.commit_transaction()
        with pytest.raises(MessageTooLarge):
            large.result(0)
        with pytest.raises(MessageTooLarge):
            producer.send(topic, b"after")
        producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"next")
    assert values(servers, topic) == [b"next"]


@pytest.mark.behaviour("T8")
def test_a_transaction_timeout_above_the_brokers_limit_is_refused(servers: str) -> None:
    topic = new_topic(servers)
    with transactional(servers, transaction_timeout_ms=1_000_000) as producer:
        with pytest.raises(OncelogError, match="INVALID_TRANSACTION_TIMEOUT"):
            producer.init_transactions()
        with pytest.raises(OncelogError, match="INVALID_TRANSACTION_TIMEOUT"):
            producer.begin_transaction()
    assert values(servers, topic) == []


def test_calls_out_of_turn_say_what_to_do(servers: str) -> None:
    topic = new_topic(servers)
    with transactional(servers) as producer:
        with pytest.raises(MisuseError, match=r"init_transactions\(\) first"):
            producer.send(topic, b"x")
        producer.init_transactions()
        with pytest.raises(MisuseError, match="only once"):
            producer.init_transactions()
        with pytest.raises(MisuseError, match=r"begin_transaction\(\) first"):
            producer.send(topic, b"x")
        with pytest.raises(MisuseError, match=r"begin_transaction\(\) first"):
            producer.commit_transaction()
        producer.begin_transaction()
        with pytest.raises(MisuseError, match="a transaction is open"):
            producer.begin_transaction()
        producer.commit_transaction()
    with producer_of(servers) as plain, pytest.raises(MisuseError, match=r"no transactional\.id"):
        plain.begin_transaction()


def test_the_asyncio_producer_commits_and_aborts(servers: str) -> None:
    topic = new_topic(servers)

    async def work() -> None:
        name = f"aio-{next(_numbers)}-{os.getpid()}"
        async with AsyncProducer({"bootstrap.servers": servers, "transactional.id": name}) as producer:
            await producer.init_transactions()
            async with producer.transaction():
                await producer.send(topic, b"kept")
            await producer.begin_transaction()
            await producer.send(topic, b"dropped")
            await producer.abort_transaction()

    asyncio.run(work())
    assert values(servers, topic) == [b"kept"]


@pytest.mark.parametrize("how", ["commit", "abort"])
def test_two_calls_at_once_end_one_transaction(servers: str, how: str) -> None:
    """Regression: the second call ended the next transaction, or the producer forgot that it was open."""
    topic = new_topic(servers)

    async def work() -> None:
        name = f"twice-{next(_numbers)}-{os.getpid()}"
        settings = {"bootstrap.servers": servers, "transactional.id": name}
        limits = {"request.timeout.ms": 5_000, "delivery.timeout.ms": 10_000}
        async with AsyncProducer(settings | limits) as producer:
            end = producer.commit_transaction if how == "commit" else producer.abort_transaction

            async def end_and_begin() -> None:
                await end()
                await producer.begin_transaction()
                await producer.send(topic, b"second")

            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send(topic, b"first")
            await producer.flush()
            await asyncio.gather(end_and_begin(), end())
            await producer.send(topic, b"third")
            await producer.commit_transaction()

    asyncio.run(work())
    assert values(servers, topic) == [b"first"] * (how == "commit") + [b"second", b"third"]


def test_of_two_initializations_at_once_the_second_is_refused(ours: str) -> None:
    """Regression: the second one fenced the first, whose caller could already be in a transaction."""

    async def work() -> None:
        name = f"twice-{next(_numbers)}-{os.getpid()}"
        async with AsyncProducer({"bootstrap.servers": ours, "transactional.id": name}) as producer:
            calls = [producer.init_transactions() for _ in range(2)]
            first, second = await asyncio.gather(*calls, return_exceptions=True)
            assert first is None
            assert isinstance(second, MisuseError)

    asyncio.run(work())


def test_a_call_does_not_wait_for_another_one_beyond_its_timeout(ours: str) -> None:
    async def work() -> None:
        name = f"twice-{next(_numbers)}-{os.getpid()}"
        with Proxy(ours) as proxy:
            proxy.add(Rule(action="delay", api="EndTxn", direction="response", delay_ms=2000))
            settings = {"bootstrap.servers": proxy.bootstrap_servers, "transactional.id": name}
            async with AsyncProducer(settings) as producer:
                await producer.init_transactions()
                await producer.begin_transaction()
                await producer.send(new_topic(ours), b"x")
                committing = asyncio.create_task(producer.commit_transaction())
                await asyncio.sleep(0)
                with pytest.raises(TimedOut, match="another call"):
                    await producer.commit_transaction(0.01)
                await committing

    asyncio.run(work())
