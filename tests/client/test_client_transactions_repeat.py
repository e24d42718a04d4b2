"""Calls of a transactional producer that meet something half done, where transactions keep their epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from helpers_producer import new_topic, producer_of, requests, values

from oncelog import Broker
from oncelog.errors import MessageTooLarge, TimedOut
from oncelog.faults import Proxy, Rule


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with Broker(config={"oncelog.transaction.version": 0}) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def proxy(servers: str) -> Iterator[Proxy]:
    with Proxy(servers) as running:
        yield running


def test_an_abort_waits_for_the_partition_that_is_being_added(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    proxy.add(Rule(action="delay", api="AddPartitionsToTxn", direction="response", nth=1, delay_ms=400))
    with producer_of(proxy.bootstrap_servers, transactional_id="abort-while-adding") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"dropped")
        while not requests(proxy, "AddPartitionsToTxn"):
            time.sleep(0.01)
        producer.abort_transaction()
        assert len(requests(proxy, "EndTxn")) == 1
        with producer.transaction():
            producer.send(topic, b"kept")
        assert len(requests(proxy, "AddPartitionsToTxn")) == 2
    assert values(servers, topic) == [b"kept"]


@pytest.mark.behaviour("T13")
def test_an_abort_without_its_new_epoch_can_be_called_again(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers, max_message_bytes=300)
    with producer_of(proxy.bootstrap_servers, transactional_id="abort-twice") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"dropped")
        producer.flush()
        producer.send(topic, bytes(1000))
        with pytest.raises(MessageTooLarge):
            producer.commit_transaction()
        proxy.add(Rule(action="cut", api="InitProducerId"))
        with pytest.raises(TimedOut):
            producer.abort_transaction(timeout=0.5)
        proxy.clear()
        producer.abort_transaction()
        assert len(requests(proxy, "EndTxn")) == 1
        with producer.transaction():
            producer.send(topic, b"kept")
    assert values(servers, topic) == [b"kept"]
