"""A producer stays usable after requests for offsets or partitions are refused or lose their responses."""

from __future__ import annotations

import asyncio
import itertools
import os
from contextlib import suppress
from pathlib import Path

import pytest
from support.broker import wait_until
from support.security.brokers import AUTHORIZER
from support.servers import bootstrap_servers
from support.topics import new_topic, producer_of, requests, values
from support.wait import JumpingClock, until

from oncelog import Admin, Broker, TopicPartition
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import GroupAuthorizationFailed, TimedOut, TransactionAborted
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType
from oncelog.rules.transactions.client_session import State
from oncelog.testing.proxy import Proxy, Rule

_numbers = itertools.count()


@pytest.fixture(params=["ours", "ours, classic"])
def servers(request: pytest.FixtureRequest) -> str:
    """Run the test on our broker with and without an epoch per transaction."""
    return bootstrap_servers(request)


def name() -> str:
    return f"refused-{os.getpid()}-{next(_numbers)}"


@pytest.mark.behaviour("T4", "T13")
@pytest.mark.parametrize("lost", ["EndTxn", "InitProducerId"])
def test_an_abort_without_confirmed_offsets_can_be_repeated_whichever_answer_was_lost(
    servers: str, lost: str
) -> None:
    topic, group = new_topic(servers), name()
    tp = TopicPartition(topic, 0)
    with Proxy(servers) as proxy, producer_of(proxy.bootstrap_servers, transactional_id=name()) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        proxy.add(Rule(action="cut", api="AddOffsetsToTxn"))
        proxy.add(Rule(action="cut", api="TxnOffsetCommit"))
        with pytest.raises(TimedOut):
            producer.send_offsets_to_transaction({tp: 17}, group, timeout=0.5)
        proxy.clear()
        proxy.add(Rule(action="cut", api=lost, direction="response"))
        with suppress(TimedOut):
            producer.abort_transaction(timeout=0.5)
        proxy.clear()
        if producer._transactions is not None and producer._transactions.session.state is State.ABORTING:
            producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"next")
            producer.send_offsets_to_transaction({tp: 19}, group)
    assert values(servers, topic) == [b"next"]


@pytest.mark.behaviour("T4")
def test_a_partition_whose_adding_was_not_answered_can_be_aborted(servers: str, clock: JumpingClock) -> None:
    topic = new_topic(servers)
    with (
        Proxy(servers) as proxy,
        producer_of(proxy.bootstrap_servers, transactional_id=name(), max_block_ms=60_000) as producer,
    ):
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.send(topic, b"warm-up").result(30)
        producer.abort_transaction(30)
        producer.begin_transaction()
        proxy.add(Rule(action="cut", api="AddPartitionsToTxn", direction="response"))
        proxy.add(Rule(action="cut", api="Produce", direction="response"))
        producer.send(topic, b"never seen")
        wait_until(lambda: bool(requests(proxy, "AddPartitionsToTxn")[1:] or requests(proxy)[1:]))
        session = producer._transactions.session if producer._transactions is not None else None
        if session is not None and requests(proxy, "AddPartitionsToTxn"):
            clock.jump_until(lambda: session.state is State.ABORTABLE_ERROR, 10)
        proxy.clear()
        producer.abort_transaction(30)
        producer.begin_transaction()
        producer.send(topic, b"next")
        producer.commit_transaction(30)
    assert values(servers, topic) == [b"next"]


@pytest.mark.behaviour("T4")
def test_an_abort_ends_a_call_for_a_group_that_still_runs(classic: str) -> None:
    topic = new_topic(classic)

    async def run(proxy: Proxy) -> None:
        config = {"bootstrap.servers": proxy.bootstrap_servers, "transactional.id": name()}
        async with AsyncProducer(config) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await (await producer.send(topic, b"x"))
            proxy.add(Rule(action="cut", api="AddOffsetsToTxn"))
            sending = asyncio.create_task(
                producer.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, name())
            )
            await until(lambda: requests(proxy, "AddOffsetsToTxn"))
            await producer.abort_transaction()
            await producer.begin_transaction()
            proxy.clear()
            with pytest.raises(TransactionAborted):
                await sending
            await producer.send(topic, b"y")
            await producer.commit_transaction()

    with Proxy(classic) as proxy:
        asyncio.run(run(proxy))
    assert values(classic, topic) == [b"y"]


@pytest.mark.behaviour("T4")
def test_a_group_that_may_not_be_read_leaves_a_transaction_that_can_be_aborted(tmp_path: Path) -> None:
    config = {
        "oncelog.transaction.version": 0,
        "authorizer.class.name": AUTHORIZER,
        "allow.everyone.if.no.acl.found": True,
    }
    with Broker(tmp_path, config=config) as broker:
        servers, group = broker.bootstrap_servers, name()
        topic = new_topic(servers)
        acl_of_group = (ResourceType.GROUP, group, PatternType.LITERAL, "User:ANONYMOUS", "*")
        acl = Acl(*acl_of_group, Operation.READ, Permission.DENY)
        with Admin({"bootstrap.servers": servers}) as admin:
            admin.create_acls([acl])
        with producer_of(servers, transactional_id=name()) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            with pytest.raises(GroupAuthorizationFailed):
                producer.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, group)
            producer.abort_transaction()
            with producer.transaction():
                producer.send(topic, b"next")
        assert values(servers, topic) == [b"next"]


def test_close_returns_in_time_without_a_coordinator(servers: str) -> None:
    topic = new_topic(servers)
    with Proxy(servers) as proxy:
        producer = producer_of(
            proxy.bootstrap_servers,
            transactional_id=name(),
            request_timeout_ms=3_600_000,
            max_block_ms=3_600_000,
        )
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"never seen").result(60)
        proxy.add(Rule(action="cut", api="EndTxn"))
        proxy.add(Rule(action="drop", api="FindCoordinator"))
        # The test's time-out is below request.timeout.ms, so waiting for the latter would fail the test.
        producer.close(0.5)
    assert values(servers, topic) == []
