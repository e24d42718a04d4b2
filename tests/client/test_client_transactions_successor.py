"""The coordinator ends a producer's transaction from outside. The producer must find out if a successor has
replaced it (R1226).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from support.broker import RawClient
from support.servers import bootstrap_servers
from support.topics import new_topic, producer_of, requests, values
from support.wait import JumpingClock, pass_time, wait_until

from oncelog import Admin, Broker, Producer, TopicPartition
from oncelog.client.connection.core import ConnectionCore
from oncelog.errors import (
    ConcurrentTransactions,
    DeliveryUnknown,
    InvalidProducerIdMapping,
    ProducerFenced,
    TimedOut,
    UnsupportedVersion,
)
from oncelog.limits import Limits
from oncelog.rules.transactions.entry import EXHAUSTED_EPOCH
from oncelog.server.embedded import recover_node
from oncelog.testing.proxy import Proxy, Rule
from oncelog.wire.messages import InitProducerIdRequest

_numbers = itertools.count()


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 100}


@pytest.fixture(params=["ours", "ours, classic", "apache"])
def servers(request: pytest.FixtureRequest) -> str:
    return bootstrap_servers(request)


def state_of(servers: str, name: str) -> str:
    with Admin({"bootstrap.servers": servers}) as admin:
        return admin.describe_transactions([name])[name].state


def start_of_another(servers: str, name: str) -> int:
    """Send InitProducerId once, as a starting producer does. Return the error code."""
    request = InitProducerIdRequest(
        transactional_id=name, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )
    with RawClient(servers) as client:
        return int(client.ask(request, 4).error_code)


def is_replaced(producer: Producer, *, may_have_timed_out: bool) -> bool:
    manager = producer._transactions
    assert manager is not None
    return producer._thread.run(manager.is_replaced(may_have_timed_out=may_have_timed_out))


@pytest.fixture
def interrupted(servers: str) -> Iterator[tuple[str, str, Producer]]:
    """Yield a producer whose open transaction a second producer's start has aborted.

    The second producer has not yet replaced the first one.
    """
    name = f"successor-{os.getpid()}-{next(_numbers)}"
    with producer_of(servers, transactional_id=name) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(new_topic(servers), b"x").result(30)
        assert start_of_another(servers, name) == ConcurrentTransactions.code
        wait_until(lambda: state_of(servers, name) == "CompleteAbort")
        yield servers, name, producer


def test_an_abort_that_a_successor_began_is_a_successors(interrupted: tuple[str, str, Producer]) -> None:
    """The transaction cannot have timed out, so only InitProducerId can have ended it."""
    assert is_replaced(interrupted[2], may_have_timed_out=False)


def test_a_successor_shows_when_it_has_its_producer_id(interrupted: tuple[str, str, Producer]) -> None:
    servers, name, producer = interrupted
    assert start_of_another(servers, name) == 0
    assert is_replaced(producer, may_have_timed_out=True)


def test_a_transaction_that_timed_out_has_no_successor(broker: Broker, clock: JumpingClock) -> None:
    servers = broker.bootstrap_servers
    name = f"successor-{os.getpid()}-{next(_numbers)}"
    with producer_of(servers, transactional_id=name, transaction_timeout_ms=60_000) as producer:
        producer.init_transactions()
        assert not is_replaced(producer, may_have_timed_out=False)
        producer.begin_transaction()
        producer.send(new_topic(servers), b"x").result(30)
        pass_time(broker, 61_000)
        wait_until(lambda: state_of(servers, name) == "CompleteAbort")
        assert not clock.outcome_of(lambda: is_replaced(producer, may_have_timed_out=True), 1)


def test_an_abort_at_the_last_epoch_does_not_abort_the_successors_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R1346: the coordinator took its InitProducerId for a repetition of the successor's."""
    limits = Limits(first_producer_epoch=EXHAUSTED_EPOCH)
    monkeypatch.setattr("oncelog.server.embedded.recover_node", partial(recover_node, limits=limits))
    with (
        Broker(config={"oncelog.transaction.version": 0}) as broker,
        producer_of(broker.bootstrap_servers, transactional_id="x") as first,
        producer_of(broker.bootstrap_servers, transactional_id="x") as second,
    ):
        topic = new_topic(broker.bootstrap_servers)
        first.init_transactions()
        second.init_transactions()
        second.begin_transaction()
        second.send(topic, b"second")
        second.flush()
        first.begin_transaction()
        first.send(topic, b"first")
        with pytest.raises(InvalidProducerIdMapping):
            first.commit_transaction()
        with pytest.raises(ProducerFenced):
            first.abort_transaction()
        second.commit_transaction()


@pytest.mark.parametrize("version", [0, 2])
def test_an_abort_of_nothing_does_not_abort_the_successors_transaction(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """R1406: no record was sent, so no EndTxn was refused, and InitProducerId ended the other transaction."""
    with (
        Broker(config={"oncelog.transaction.version": version}) as broker,
        producer_of(
            broker.bootstrap_servers, transactional_id="x", request_timeout_ms=500, delivery_timeout_ms=500
        ) as first,
        producer_of(broker.bootstrap_servers, transactional_id="x") as second,
    ):
        topic = new_topic(broker.bootstrap_servers)
        first.init_transactions()
        first._look_up_topic(topic)
        first.begin_transaction()
        with monkeypatch.context() as patched:  # a partition without a leader
            patched.setattr(first._driver.core.metadata, "leader_of", lambda tp: None)
            assert isinstance(first.send(topic, b"first").exception(60), TimedOut)
        second.init_transactions()
        second.begin_transaction()
        second.send(topic, b"second").result(60)
        with pytest.raises(ProducerFenced):
            first.abort_transaction()
        second.commit_transaction()
        assert values(broker.bootstrap_servers, topic) == [b"second"]


def abort_beside_a_successor(proxy: Proxy, first: Producer, second: Producer, topic: str) -> None:
    """Lose the InitProducerId with which `first` aborts, until `second` has sent in a transaction of its own.
    Then `first` is fenced, and `second` commits.
    """
    lost = proxy.add(Rule(action="drop", api="InitProducerId"))
    with ThreadPoolExecutor() as threads:
        abort = threads.submit(first.abort_transaction)
        wait_until(lambda: len(requests(proxy, "InitProducerId")) == 2)
        second.init_transactions()
        second.begin_transaction()
        second.send(topic, b"second").result(60)
        proxy.remove(lost)
        with pytest.raises(ProducerFenced):
            abort.result(60)
    second.commit_transaction()


def test_a_repeated_request_for_an_epoch_does_not_abort_the_successors_transaction(classic: str) -> None:
    """R1453: EndTxn succeeded, and the InitProducerId after it was lost. Until it was sent again, a successor
    had begun a transaction.
    """
    name = f"successor-{os.getpid()}-{next(_numbers)}"
    topic = new_topic(classic)
    with (
        Proxy(classic) as proxy,
        producer_of(
            proxy.bootstrap_servers, transactional_id=name, request_timeout_ms=500, delivery_timeout_ms=500
        ) as first,
        producer_of(classic, transactional_id=name) as second,
    ):
        first.init_transactions()
        first.begin_transaction()
        first.send(topic, b"first").result(60)
        lost = proxy.add(Rule(action="drop", api="Produce"))
        assert isinstance(first.send(topic, b"first").exception(60), DeliveryUnknown)
        proxy.remove(lost)
        abort_beside_a_successor(proxy, first, second, topic)
        assert values(classic, topic) == [b"second"]


def test_a_repeated_abort_of_a_shared_transaction_does_not_abort_the_successors(classic: str) -> None:
    """R1771: the InitProducerId of the abort was lost, and sent again without a look for a successor."""
    name = f"successor-{os.getpid()}-{next(_numbers)}"
    topic = new_topic(classic)
    with (
        Proxy(classic) as proxy,
        producer_of(proxy.bootstrap_servers, transactional_id=name, request_timeout_ms=500) as first,
        producer_of(classic, transactional_id=name) as second,
    ):
        first.init_transactions()
        first.begin_transaction()
        first.share_transaction()
        abort_beside_a_successor(proxy, first, second, topic)
        assert values(classic, topic) == [b"second"]


@pytest.mark.parametrize("is_open", [False, True])
def test_a_repeated_abort_of_a_shared_transaction_fences_no_idle_successor(
    classic: str, is_open: bool
) -> None:
    """R1804: the abort timed out because InitProducerId was lost, and was called again after a successor had
    started. It got the next epoch, as a new instance, and the successor was fenced.
    """
    name = f"successor-{os.getpid()}-{next(_numbers)}"
    topic = new_topic(classic)
    with (
        Proxy(classic) as proxy,
        producer_of(proxy.bootstrap_servers, transactional_id=name, request_timeout_ms=500) as first,
        producer_of(classic, transactional_id=name) as second,
        producer_of(classic, transactional_id=name) as joined,
    ):
        first.init_transactions()
        first.begin_transaction()
        joined.join_transaction(first.share_transaction())
        if is_open:
            joined.send(topic, b"aborted").result(60)
        lost = proxy.add(Rule(action="drop", api="InitProducerId"))
        with pytest.raises(TimedOut):
            first.abort_transaction(timeout=0.3)
        proxy.remove(lost)
        second.init_transactions()
        with pytest.raises(ProducerFenced):
            first.abort_transaction()
        with second.transaction():
            second.send(topic, b"second")
        assert values(classic, topic) == [b"second"]


def test_an_expired_id_is_used_again_on_brokers_that_describe_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1402: brokers before Kafka 3.0 have no DescribeTransactions, and the abort failed the producer."""
    version_for = ConnectionCore.version_for

    def old_version_for(core: ConnectionCore, api: Any, *limits: int | None) -> int:
        if api.name == "DescribeTransactions":
            raise UnsupportedVersion("this broker is old")
        return version_for(core, api, *limits)

    config = {
        "oncelog.transaction.version": 0,
        "transactional.id.expiration.ms": 1_000,
        "transaction.remove.expired.transaction.cleanup.interval.ms": 50,
    }
    with (
        Broker(config=config) as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
        producer_of(broker.bootstrap_servers, transactional_id="x") as producer,
    ):
        topic = new_topic(broker.bootstrap_servers)
        producer.init_transactions()
        wait_until(lambda: not admin.list_transactions())
        monkeypatch.setattr(ConnectionCore, "version_for", old_version_for)
        producer.begin_transaction()
        producer.send(topic, b"lost")
        with pytest.raises(InvalidProducerIdMapping):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"stored")
        assert values(broker.bootstrap_servers, topic) == [b"stored"]


def test_a_producer_that_another_request_fails_raises_the_error_of_that_request(classic: str) -> None:
    """R1290: AddPartitionsToTxn was fenced while AddOffsetsToTxn was in flight, and the call raised
    TransactionAborted. A processing loop then made a new producer, which fenced its successor.
    """
    name = f"successor-{os.getpid()}-{next(_numbers)}"
    topic = new_topic(classic)
    with Proxy(classic) as proxy, producer_of(proxy.bootstrap_servers, transactional_id=name) as producer:
        producer.init_transactions()
        assert start_of_another(classic, name) == 0
        proxy.add(Rule(action="delay", api="AddPartitionsToTxn", delay_ms=300))
        producer.begin_transaction()
        producer.send(topic, b"x")
        wait_until(lambda: requests(proxy, "AddPartitionsToTxn"))
        with pytest.raises(ProducerFenced):
            producer.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, name)
        assert is_replaced(producer, may_have_timed_out=False)
