"""Transactional calls are repeated after unfinished steps, on brokers where a producer keeps its epoch across
transactions.
"""

from __future__ import annotations

import pytest
from support.topics import new_topic, producer_of, requests, values
from support.wait import JumpingClock, wait_until

from oncelog.errors import MessageTooLarge, TimedOut, TransactionAbortable
from oncelog.testing.proxy import Proxy, Rule


@pytest.fixture
def servers(classic: str) -> str:
    return classic


def test_an_abort_waits_for_the_partition_that_is_being_added(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    proxy.add(Rule(action="delay", api="AddPartitionsToTxn", direction="response", nth=1, delay_ms=400))
    with producer_of(proxy.bootstrap_servers, transactional_id="abort-while-adding") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"dropped")
        wait_until(lambda: requests(proxy, "AddPartitionsToTxn"))
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


@pytest.mark.behaviour("T13")
@pytest.mark.parametrize("api", ["AddPartitionsToTxn", "Produce"])
def test_a_transaction_whose_requests_timed_out_must_be_aborted(
    servers: str, proxy: Proxy, api: str, clock: JumpingClock
) -> None:
    """If commit_transaction() raised TimedOut, the caller would repeat it forever."""
    topic, name = new_topic(servers), f"out-of-time-{api}"
    with producer_of(proxy.bootstrap_servers, transactional_id=name, max_block_ms=60_000) as producer:
        producer.init_transactions()
        proxy.add(Rule(action="cut", api=api, direction="request"))
        producer.begin_transaction()
        producer.send(topic, b"dropped")
        with pytest.raises(TransactionAbortable) as raised:
            clock.outcome_of(lambda: producer.commit_transaction(600), 10)
        assert raised.value.reaction == "abortable"
        assert isinstance(raised.value.__cause__, TimedOut)
        with pytest.raises(TransactionAbortable):
            producer.commit_transaction()
        proxy.clear()
        producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"kept")
            producer.flush()
    assert values(servers, topic) == [b"kept"]
