"""A transaction whose offsets may not have reached the group cannot be committed; close() ends it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from support.broker import wait_until
from support.servers import bootstrap_servers
from support.topics import new_topic, producer_of, requests, values
from support.wait import until

from oncelog import Admin, Broker, Consumer, Producer, TopicPartition
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import (
    BrokerError,
    MessageTooLarge,
    MisuseError,
    OncelogError,
    TimedOut,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from oncelog.rules.transactions.client_session import State
from oncelog.testing.proxy import Proxy, Rule
from oncelog.types import OffsetAndMetadata

_numbers = itertools.count()
SOON_GIVEN_UP = {"request.timeout.ms": 2_000}
"""A short time-out for a producer. The proxy drops one of its requests, and the next request on the
connection waits for the dropped one.
"""
ASKED = [
    ("ours", "TxnOffsetCommit"),
    ("ours, classic", "TxnOffsetCommit"),
    ("ours, classic", "AddOffsetsToTxn"),
    ("apache", "TxnOffsetCommit"),
]
"""Pairs of a broker and a request that the proxy drops.

With an epoch per transaction, no client sends AddOffsetsToTxn.
"""


@pytest.fixture(params=["ours", "ours, classic", "apache"])
def servers(request: pytest.FixtureRequest) -> str:
    """Run the test on our broker with and without an epoch per transaction, and on Apache Kafka."""
    return bootstrap_servers(request)


def name() -> str:
    return f"close-{os.getpid()}-{next(_numbers)}"


def committed(servers: str, group: str, tp: TopicPartition) -> OffsetAndMetadata | None:
    with Consumer({"bootstrap.servers": servers, "group.id": group}) as consumer:
        return consumer.committed([tp])[tp]


def open_on(producer: Producer, topic: str | None) -> None:
    producer.init_transactions()
    producer.begin_transaction()
    if topic is not None:
        producer.send(topic, b"with offsets").result(60)


@pytest.mark.behaviour("T7", "T13")
@pytest.mark.parametrize("has_records", [True, False], ids=["with records", "offsets only"])
@pytest.mark.parametrize(("servers", "lost"), ASKED, indirect=["servers"])
@pytest.mark.parametrize("direction", ["request", "response"])
def test_a_transaction_is_not_committed_without_the_offsets_that_timed_out(
    servers: str, proxy: Proxy, lost: str, direction: str, has_records: bool
) -> None:
    topic, group = new_topic(servers), name()
    tp = TopicPartition(topic, 0)
    with producer_of(proxy.bootstrap_servers, transactional_id=name()) as producer:
        open_on(producer, topic if has_records else None)
        proxy.add(Rule(action="cut", api=lost, direction=direction))
        with pytest.raises(TimedOut):
            producer.send_offsets_to_transaction({tp: 17}, group, timeout=0.5)
        with pytest.raises(OncelogError, match="call it again with the same arguments") as raised:
            producer.commit_transaction()
        assert getattr(raised.value, "reaction", None) == "abortable"
        proxy.clear()
        producer.send_offsets_to_transaction({tp: 18}, group)
        # A late copy of the first offsets may still arrive and replace the new ones.
        with pytest.raises(OncelogError, match="same arguments"):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"next")
            producer.send_offsets_to_transaction({tp: 19}, group)
        assert producer._transactions is not None
        assert producer._transactions.session.state is State.READY
    assert values(servers, topic) == [b"next"]
    assert committed(servers, group, tp) == OffsetAndMetadata(19)


@pytest.mark.behaviour("T7", "T13")
def test_offsets_that_timed_out_are_committed_once_the_same_call_returned(servers: str, proxy: Proxy) -> None:
    topic, group = new_topic(servers), name()
    tp = TopicPartition(topic, 0)
    with producer_of(proxy.bootstrap_servers, transactional_id=name()) as producer:
        open_on(producer, topic)
        proxy.add(Rule(action="cut", api="TxnOffsetCommit"))
        with pytest.raises(TimedOut):
            producer.send_offsets_to_transaction({tp: 17}, group, timeout=0.5)
        proxy.clear()
        producer.send_offsets_to_transaction({tp: OffsetAndMetadata(17)}, group)
        producer.commit_transaction()
    assert values(servers, topic) == [b"with offsets"]
    assert committed(servers, group, tp) == OffsetAndMetadata(17)


@pytest.mark.behaviour("T13")
def test_a_cancelled_call_for_offsets_keeps_the_transaction_from_being_committed(
    servers: str, proxy: Proxy
) -> None:
    topic = new_topic(servers)

    async def run() -> None:
        config = {"bootstrap.servers": proxy.bootstrap_servers, "transactional.id": name()}
        async with AsyncProducer(config | SOON_GIVEN_UP) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await (await producer.send(topic, b"x"))
            proxy.add(Rule(action="drop", api="TxnOffsetCommit"))
            sending = asyncio.create_task(
                producer.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, name())
            )
            await until(lambda: requests(proxy, "TxnOffsetCommit"))
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            with pytest.raises(OncelogError, match="same arguments"):
                await producer.commit_transaction()
            proxy.clear()
            await producer.abort_transaction()
            async with producer.transaction():
                await producer.send(topic, b"y")

    asyncio.run(run())
    assert values(servers, topic) == [b"y"]


def test_an_abort_ends_a_call_for_offsets_that_still_runs(ours: str) -> None:
    topic = new_topic(ours)

    async def run(proxy: Proxy) -> None:
        config = {"bootstrap.servers": proxy.bootstrap_servers, "transactional.id": name()}
        async with AsyncProducer(config) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            proxy.add(Rule(action="delay", api="TxnOffsetCommit", direction="response", delay_ms=300))
            proxy.add(Rule(action="cut", api="TxnOffsetCommit"))
            sending = asyncio.create_task(
                producer.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, name())
            )
            await until(lambda: requests(proxy, "TxnOffsetCommit"))
            await producer.abort_transaction()
            proxy.clear()
            with pytest.raises(TransactionAborted):
                await sending
            async with producer.transaction():
                await producer.send(topic, b"y")

    with Proxy(ours) as proxy:
        asyncio.run(run(proxy))
    assert values(ours, topic) == [b"y"]


@pytest.mark.behaviour("T13")
def test_a_cancelled_commit_counts_as_one_that_may_be_decided(ours: str) -> None:
    topic = new_topic(ours)

    async def run(proxy: Proxy) -> bool:
        config = {"bootstrap.servers": proxy.bootstrap_servers, "transactional.id": name()}
        async with AsyncProducer(config | SOON_GIVEN_UP) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await (await producer.send(topic, b"x"))
            proxy.add(Rule(action="drop", api="EndTxn"))
            committing = asyncio.create_task(producer.commit_transaction())
            await until(lambda: requests(proxy, "EndTxn"))
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
            assert producer._transactions is not None
            may_be_committed = producer._transactions._may_be_committed
            with pytest.raises(MisuseError, match="again"):
                await producer.abort_transaction()
            proxy.clear()
            await producer.commit_transaction()
            return may_be_committed

    with Proxy(ours) as proxy:
        assert asyncio.run(run(proxy))
    assert values(ours, topic) == [b"x"]


def is_open(servers: str, tp: TopicPartition) -> bool:
    with Admin({"bootstrap.servers": servers}) as admin:
        return bool(admin.open_transactions(tp.topic))


@pytest.mark.behaviour("T4")
@pytest.mark.parametrize("how", ["close()", "close(5)", "the block raised", "asyncio"])
def test_closing_the_producer_aborts_its_open_transaction(servers: str, how: str) -> None:
    topic = new_topic(servers)
    settings = {"bootstrap.servers": servers, "transactional.id": name(), "linger.ms": 60_000}

    async def run() -> None:
        async with AsyncProducer(settings) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send(topic, b"never seen", partition=0)
            await producer.flush()
            await producer.send(topic, b"never sent", partition=0)

    def use(producer: Producer) -> None:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"never seen")
        producer.flush()
        producer.send(topic, b"never sent")

    if how == "asyncio":
        asyncio.run(run())
    elif how == "the block raised":
        with suppress(KeyError), Producer(settings) as producer:
            use(producer)
            raise KeyError
    else:
        producer = Producer(settings)
        use(producer)
        producer.close(*([5] if "5" in how else []))
    tp = TopicPartition(topic, 0)
    wait_until(lambda: not is_open(servers, tp))
    with producer_of(servers) as plain:
        plain.send(topic, b"plain").result(60)
    assert values(servers, topic) == [b"plain"]


@pytest.mark.behaviour("T13")
def test_closing_the_producer_repeats_a_commit_that_was_called(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    with producer_of(proxy.bootstrap_servers, transactional_id=name()) as producer:
        open_on(producer, topic)
        proxy.add(Rule(action="cut", api="EndTxn"))
        with pytest.raises(TimedOut):
            producer.commit_transaction(timeout=0.3)
        proxy.clear()
    assert values(servers, topic) == [b"with offsets"]


def test_closing_takes_no_longer_than_its_timeout(ours: str) -> None:
    topic = new_topic(ours)
    with Proxy(ours) as proxy:
        producer = producer_of(proxy.bootstrap_servers, transactional_id=name(), max_block_ms=3_600_000)
        open_on(producer, topic)
        proxy.add(Rule(action="cut", api="EndTxn"))
        # The test's time-out is below max.block.ms, so waiting for the latter would fail the test.
        producer.close(0.5)
        assert not producer._thread.is_running


@contextmanager
def producers_of_one_id(*addresses: str) -> Iterator[list[Producer]]:
    """Yield a producer for each address, all with one transactional id. The first begins a transaction."""
    owner_id = name()
    with ExitStack() as stack:
        producers = [
            stack.enter_context(producer_of(address, transactional_id=owner_id)) for address in addresses
        ]
        producers[0].init_transactions()
        producers[0].begin_transaction()
        yield producers


def test_closing_a_producer_that_joined_leaves_the_transaction_to_its_owner(servers: str) -> None:
    topic = new_topic(servers, 2)
    owner_id = name()
    with producer_of(servers, transactional_id=owner_id) as owner:
        owner.init_transactions()
        owner.begin_transaction()
        owner.send(topic, b"owner's", partition=0).result(60)
        with producer_of(servers, transactional_id=owner_id) as joined:
            joined.join_transaction(owner.share_transaction())
            joined.send(topic, b"joined", partition=1)
        owner.commit_transaction()
    assert values(servers, topic) == [b"owner's", b"joined"]


@pytest.mark.parametrize("is_commit", [True, False])
def test_the_owner_ends_a_transaction_to_which_only_others_have_sent(
    request: pytest.FixtureRequest, servers: str, is_commit: bool
) -> None:
    """R1751: no EndTxn was sent. A commit returned, and the records were in no transaction that ended. After
    an abort, the next commit made them visible. If the epoch stays, the owner's next record had the sequence
    of the joined one.
    """
    topic = new_topic(servers)
    with producers_of_one_id(servers, servers) as (owner, joined):
        joined.join_transaction(owner.share_transaction())
        joined.send(topic, b"joined").result(60)
        (owner.commit_transaction if is_commit else owner.abort_transaction)()
        stored = [b"joined"] * is_commit
        assert values(servers, topic) == stored
        if is_commit and "classic" in request.node.name:
            with pytest.raises(MisuseError, match="create a new producer"):
                owner.begin_transaction()
            return
        with owner.transaction():
            owner.send(topic, b"next")
    assert values(servers, topic) == [*stored, b"next"]


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_shared_transaction_without_records_can_be_ended(servers: str, is_commit: bool) -> None:
    topic = new_topic(servers)
    with producer_of(servers, transactional_id=name()) as owner:
        owner.init_transactions()
        for _ in range(2):
            owner.begin_transaction()
            owner.share_transaction()
            (owner.commit_transaction if is_commit else owner.abort_transaction)()
        with owner.transaction():
            owner.send(topic, b"next")
    assert values(servers, topic) == [b"next"]


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_producer_that_took_over_loses_no_record_of_its_next_transaction(
    request: pytest.FixtureRequest, servers: str, is_commit: bool
) -> None:
    """R1773: if the epoch stays, its first record had the sequence of the other producer's."""
    topic = new_topic(servers)
    with producers_of_one_id(servers, servers) as (first, other):
        first.send(topic, b"first")
        other.take_over_transaction(first.hand_over_transaction())
        (other.commit_transaction if is_commit else other.abort_transaction)()
        stored = [b"first"] * is_commit
        if "classic" in request.node.name:
            with pytest.raises(MisuseError, match="create a new producer"):
                other.begin_transaction()
        else:
            with other.transaction():
                other.send(topic, b"next")
            stored.append(b"next")
    assert values(servers, topic) == stored


@pytest.mark.parametrize("is_commit", [True, False])
def test_an_empty_transaction_that_was_handed_over_can_be_ended(
    request: pytest.FixtureRequest, servers: str, is_commit: bool
) -> None:
    """R1802: the coordinator knew of no transaction, and the producer failed with INVALID_TXN_STATE."""
    topic = new_topic(servers)
    with producers_of_one_id(servers, servers, servers) as (first, second, third):
        second.take_over_transaction(first.hand_over_transaction())
        third.take_over_transaction(second.hand_over_transaction())
        (third.commit_transaction if is_commit else third.abort_transaction)()
        if "classic" in request.node.name and not is_commit:
            with pytest.raises(MisuseError, match="create a new producer"):
                third.begin_transaction()
            return
        with third.transaction():
            third.send(topic, b"next")
    assert values(servers, topic) == [b"next"]


@pytest.mark.parametrize("is_joined", [False, True])
def test_no_call_waits_for_records_of_a_transaction_that_can_only_be_aborted(
    servers: str, proxy: Proxy, is_joined: bool
) -> None:
    """R1803: the records that had not been sent waited for delivery.timeout.ms, and flush() for them."""
    topic, owner_id = new_topic(servers, 2, max_message_bytes=300), name()
    with (
        producer_of(servers, transactional_id=owner_id) as owner,
        producer_of(
            proxy.bootstrap_servers, transactional_id=owner_id, max_in_flight_requests_per_connection=1
        ) as producer,
    ):
        if is_joined:
            open_on(owner, None)
            producer.join_transaction(owner.share_transaction())
        else:
            open_on(producer, None)
        for partition in range(2):
            producer.send(topic, b"aborted", partition=partition).result(60)
        proxy.add(Rule(action="hold", api="Produce"))
        # A request to a new topic may have been repeated.
        before = len(requests(proxy))
        refused = producer.send(topic, bytes(1000), partition=0)
        wait_until(lambda: len(requests(proxy)) == before + 1)
        waiting = producer.send(topic, b"not sent", partition=1)
        proxy.clear()
        proxy.release()
        with pytest.raises(MessageTooLarge):
            refused.result(60)
        producer.flush(20)
        with pytest.raises(TransactionAborted):
            waiting.result(0)
    assert values(servers, topic) == []


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_joined_producer_loses_no_record_after_a_transaction_of_its_owner(
    request: pytest.FixtureRequest, servers: str, is_commit: bool
) -> None:
    """R1801: if the epoch stays, its first record had the sequence of the owner's earlier one."""
    topic, owner_id = new_topic(servers), name()
    with (
        producer_of(servers, transactional_id=owner_id) as owner,
        producer_of(servers, transactional_id=owner_id) as joined,
    ):
        open_on(owner, topic)
        (owner.commit_transaction if is_commit else owner.abort_transaction)()
        owner.begin_transaction()
        if "classic" in request.node.name:
            with pytest.raises(MisuseError, match="create a new producer to share"):
                owner.share_transaction()
            owner.send(topic, b"next")
        else:
            joined.join_transaction(owner.share_transaction())
            joined.send(topic, b"next").result(60)
        owner.commit_transaction()
    assert values(servers, topic) == [b"with offsets"] * is_commit + [b"next"]


def test_only_the_owner_ends_a_shared_transaction(servers: str) -> None:
    """R1800: a producer that had joined could commit, abort, share and hand over the owner's transaction."""
    topic = new_topic(servers)
    with producers_of_one_id(servers, servers) as (owner, joined):
        joined.join_transaction(owner.share_transaction())
        joined.send(topic, b"joined").result(60)
        for call in (
            joined.commit_transaction,
            joined.abort_transaction,
            joined.share_transaction,
            joined.hand_over_transaction,
            lambda: joined.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, name()),
        ):
            with pytest.raises(MisuseError, match="joined the transaction of another one"):
                call()
        with pytest.raises(MisuseError, match="commit or abort it itself"):
            owner.hand_over_transaction()
        assert values(servers, topic) == []
        owner.commit_transaction()
    assert values(servers, topic) == [b"joined"]


def test_a_producer_that_handed_its_transaction_over_adds_nothing_to_it(servers: str) -> None:
    """R1800: its next transaction was the one that it had handed over, and the other producer committed its
    records before their own commit. The other producer's records could have the sequences of stored ones.
    """
    topic = new_topic(servers)
    with producers_of_one_id(servers, servers) as (first, other):
        first.send(topic, b"first")
        other.take_over_transaction(first.hand_over_transaction())
        with pytest.raises(MisuseError, match="create a new producer"):
            first.begin_transaction()
        with pytest.raises(MisuseError, match="sequences would collide"):
            other.send(topic, b"other")
        other.commit_transaction()
    assert values(servers, topic) == [b"first"]


def test_a_joined_producer_that_sends_after_the_commit_is_fenced(servers: str, proxy: Proxy) -> None:
    """R1772: nothing had been sent, so the commit left the epoch as it was. The late record was in the next
    transaction, and the owner's next record was taken for a repetition of it, and lost.
    """
    topic = new_topic(servers)
    with producers_of_one_id(proxy.bootstrap_servers, servers) as (owner, joined):
        joined.join_transaction(owner.share_transaction())
        proxy.add(Rule(action="cut", api="InitProducerId"))
        with pytest.raises(TimedOut):
            owner.commit_transaction(timeout=0.3)
        proxy.clear()
        owner.commit_transaction()
        with pytest.raises(OncelogError):
            joined.send(topic, b"late").result(60)
        with owner.transaction():
            owner.send(topic, b"next")
    assert values(servers, topic) == [b"next"]


@pytest.mark.parametrize("api", ["InitProducerId", "EndTxn", "DescribeTransactions"])
def test_the_abort_of_a_shared_transaction_can_be_called_again(servers: str, proxy: Proxy, api: str) -> None:
    """R1770: without an epoch per transaction, the first call had raised the epoch itself, so the second one
    raised ProducerFenced.
    """
    topic = new_topic(servers)
    with producers_of_one_id(proxy.bootstrap_servers, servers) as (owner, joined):
        joined.join_transaction(owner.share_transaction())
        joined.send(topic, b"aborted").result(60)
        proxy.add(Rule(action="cut", api=api))
        with suppress(TimedOut):
            owner.abort_transaction(timeout=0.3)
        proxy.clear()
        with suppress(MisuseError):  # the first call succeeds if it does not need this request
            owner.abort_transaction()
        with owner.transaction():
            owner.send(topic, b"next")
    assert values(servers, topic) == [b"next"]


@pytest.mark.parametrize("version", [0, 2])
def test_a_late_record_of_a_joined_producer_is_in_no_later_transaction(version: int) -> None:
    """Brokers before Kafka 3.6 do not verify that a record belongs to an open transaction."""
    settings = {"oncelog.transaction.version": version, "transaction.partition.verification.enable": False}
    with Broker(config=settings) as broker:
        servers = broker.bootstrap_servers
        topic = new_topic(servers)
        with producers_of_one_id(servers, servers) as (owner, joined):
            joined.join_transaction(owner.share_transaction())
            joined.send(topic, b"aborted").result(60)
            owner.abort_transaction()
            with pytest.raises(OncelogError):
                joined.send(topic, b"late").result(60)
            with owner.transaction():
                owner.send(topic, b"next")
        assert values(servers, topic) == [b"next"]


@pytest.mark.behaviour("T7")
def test_offsets_for_a_topic_that_does_not_exist_say_so_soon(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncelog.rules.transactions.client_session.UNKNOWN_TOPIC_PATIENCE_MS", 300)
    missing = f"missing-{next(_numbers)}-{os.getpid()}"
    # max.block.ms is longer than this test may take
    with producer_of(servers, transactional_id=name(), max_block_ms=3_600_000) as producer:
        open_on(producer, new_topic(servers))
        with pytest.raises(UnknownTopicOrPartition, match=f"topic '{missing}' does not exist") as raised:
            producer.send_offsets_to_transaction({TopicPartition(missing, 0): 1}, name())
        assert isinstance(raised.value, BrokerError) and raised.value.reaction == "abortable"
        with pytest.raises(UnknownTopicOrPartition):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send(new_topic(servers), b"x")
    with (
        Consumer({"bootstrap.servers": servers, "group.id": name()}) as consumer,
        pytest.raises(UnknownTopicOrPartition, match=f"topic '{missing}' does not exist"),
    ):
        consumer.commit({TopicPartition(missing, 0): 1})


@pytest.mark.behaviour("P6")
def test_a_transaction_that_is_not_handed_over_in_time_is_not_committed(servers: str, proxy: Proxy) -> None:
    """R76: close() committed rows of the Spark sink before its driver had decided to commit."""
    topic = new_topic(servers)
    with producer_of(proxy.bootstrap_servers, transactional_id=name()) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        proxy.add(Rule(action="fail", api="Produce", error="NOT_ENOUGH_REPLICAS"))
        producer.send(topic, b"not decided")
        with pytest.raises(TimedOut):
            producer.hand_over_transaction(timeout=0.3)
        proxy.clear()
    assert values(servers, topic) == []
    with producer_of(servers, transactional_id=name()) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"decided")
        share = producer.hand_over_transaction()
        with pytest.raises(MisuseError):
            producer.hand_over_transaction()
    with producer_of(servers, transactional_id=share.transactional_id) as other:
        other.take_over_transaction(share)
        other.commit_transaction()
    assert values(servers, topic) == [b"decided"]
