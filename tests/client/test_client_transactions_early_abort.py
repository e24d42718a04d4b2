"""A transaction begins while the coordinator still writes the markers of the previous one, and is aborted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from support.broker import RawClient
from support.topics import new_topic, producer_of, requests, values
from support.wait import LIMIT_S, until, wait_until

from oncelog import Admin, Broker, Producer, TopicPartition
from oncelog.broker.coordinators import transactions
from oncelog.broker.coordinators.markers import MarkerWriter
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import (
    ConcurrentTransactions,
    InvalidTxnState,
    KafkaStorageError,
    ProducerFenced,
    TransactionAborted,
)
from oncelog.limits import Limits
from oncelog.rules.idempotence.append import Reject
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.server.embedded import recover_node
from oncelog.testing.proxy import Proxy, Rule
from oncelog.wire.messages import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest

_names = (f"early-{number}" for number in itertools.count())
GROUP = "readers"
PROMPT = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 200}
"""A short interval between the coordinator's attempts to write failed markers. The default is ten seconds."""


@pytest.fixture(scope="module", params=[2, 0], ids=["epoch per transaction", "classic"])
def servers(request: pytest.FixtureRequest) -> Iterator[str]:
    with Broker(config={"oncelog.transaction.version": request.param, **PROMPT}) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def last_epoch(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a broker whose new transactional ids begin with the last epoch of their producer id."""
    limits = Limits(first_producer_epoch=32_766)
    monkeypatch.setattr("oncelog.server.embedded.recover_node", partial(recover_node, limits=limits))
    with Broker(config=PROMPT) as broker:
        yield broker.bootstrap_servers


class Markers:
    """Replaces the marker writers of all brokers in this process. While `are_held`, writing a marker
    fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.are_held = self.is_older = False
        """If `is_older` is True, the broker behaves like versions before 0.5.1: it refuses to end a
        transaction while markers are missing.
        """
        write: Callable[..., Any] = MarkerWriter.write

        def write_unless_held(*arguments: Any) -> Any:
            if self.are_held:
                raise KafkaStorageError("this test holds the markers")
            return write(*arguments)

        decide: Callable[..., Any] = transactions.decide_end

        def decide_as_older(entry: Any, producer: ProducerIdAndEpoch, *arguments: Any, **named: Any) -> Any:
            verdict = decide(entry, producer, *arguments, **named)
            is_early = isinstance(verdict, Reject) and verdict.error is ConcurrentTransactions
            if self.is_older and is_early and named["client_version"] >= 2:
                return Reject(ProducerFenced, "as an older broker says")
            return verdict

        monkeypatch.setattr(MarkerWriter, "write", write_unless_held)
        monkeypatch.setattr(transactions, "decide_end", decide_as_older)


@pytest.fixture
def markers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Markers]:
    held = Markers(monkeypatch)
    yield held
    held.are_held = False


def state_of(servers: str, name: str) -> str:
    with Admin({"bootstrap.servers": servers}) as admin:
        return admin.describe_transactions(name)[name].state


def commit_and_begin(producer: Producer, servers: str, topic: str, name: str, markers: Markers) -> None:
    """Commit a transaction whose markers cannot be written, and begin another one without records."""
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(topic, b"before")
    producer.flush()
    markers.are_held = True
    producer.commit_transaction()
    assert state_of(servers, name) == "PrepareCommit"
    producer.begin_transaction()


def tries(proxy: Proxy) -> int:
    """Count the requests that try to add a partition to the transaction."""
    return len(requests(proxy)) + len(requests(proxy, "AddPartitionsToTxn"))


def is_waiting(proxy: Proxy) -> Callable[[], bool]:
    """Return a function that returns True once EndTxn or InitProducerId was sent twice after this call."""
    before = {api: len(requests(proxy, api)) for api in ("EndTxn", "InitProducerId")}
    return lambda: any(len(requests(proxy, api)) >= count + 2 for api, count in before.items())


def send_refused(producer: Producer, proxy: Proxy, topic: str, what: str) -> None:
    """Send a request that the coordinator refuses for now, or whose response is lost."""
    if what == "answers lost":
        proxy.add(Rule(action="cut", api="Produce", direction="response"))
        proxy.add(Rule(action="cut", api="AddPartitionsToTxn", direction="response"))
    if what == "offsets":
        with suppress(Exception):
            producer.send_offsets_to_transaction({TopicPartition(topic, 0): 7}, GROUP, timeout=0.2)
        return
    count = tries(proxy)
    producer.send(topic, b"dropped")
    # The producer repeats the request only if the coordinator refused it, or its response was lost.
    wait_until(lambda: tries(proxy) >= count + 2)


@pytest.mark.behaviour("T4", "T13")
@pytest.mark.parametrize("is_older", [False, True], ids=["", "older broker"])
@pytest.mark.parametrize("what", ["records", "answers lost", "offsets"])
def test_an_abort_waits_for_the_markers_of_the_transaction_before(
    servers: str, proxy: Proxy, markers: Markers, what: str, is_older: bool
) -> None:
    markers.is_older = is_older
    topic, name = new_topic(servers), next(_names)
    with (
        producer_of(proxy.bootstrap_servers, transactional_id=name) as producer,
        ThreadPoolExecutor(1) as thread,
    ):
        commit_and_begin(producer, servers, topic, name, markers)
        send_refused(producer, proxy, topic, what)
        proxy.clear()
        waits = is_waiting(proxy)
        aborting = thread.submit(producer.abort_transaction)
        wait_until(lambda: aborting.done() or waits())
        assert state_of(servers, name) == "PrepareCommit"
        markers.are_held = False
        aborting.result(LIMIT_S)
        with producer.transaction():
            producer.send(topic, b"after")
    assert values(servers, topic) == [b"before", b"after"]


@pytest.mark.behaviour("T4")
def test_an_asyncio_producer_aborts_while_the_markers_of_the_transaction_before_are_written(
    servers: str, proxy: Proxy, markers: Markers
) -> None:
    topic, name = new_topic(servers), next(_names)

    async def run() -> None:
        config = {"bootstrap.servers": proxy.bootstrap_servers, "transactional.id": name}
        async with AsyncProducer(config) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await (await producer.send(topic, b"before"))
            markers.are_held = True
            await producer.commit_transaction()
            await producer.begin_transaction()
            count, waits = tries(proxy), is_waiting(proxy)
            dropped = await producer.send(topic, b"dropped")
            await until(lambda: tries(proxy) >= count + 2)
            aborting = asyncio.create_task(producer.abort_transaction())
            await until(lambda: aborting.done() or waits())
            markers.are_held = False
            await aborting
            with pytest.raises(TransactionAborted):
                await dropped
            async with producer.transaction():
                await producer.send(topic, b"after")

    asyncio.run(run())
    assert values(servers, topic) == [b"before", b"after"]


@pytest.mark.behaviour("T3")
def test_a_fenced_producer_that_aborts_late_leaves_the_newer_ones_transaction_alone(
    servers: str, proxy: Proxy, markers: Markers
) -> None:
    """The older producer's abort gets CONCURRENT_TRANSACTIONS first. Then the newer producer starts."""
    topic, name = new_topic(servers), next(_names)
    with producer_of(proxy.bootstrap_servers, transactional_id=name) as older:
        commit_and_begin(older, servers, topic, name, markers)
        send_refused(older, proxy, topic, "records")
        proxy.add(Rule(action="cut", api="Produce", direction="request"))
        proxy.add(Rule(action="cut", api="AddPartitionsToTxn", direction="request"))
        markers.are_held = False
        with producer_of(servers, transactional_id=name) as newer:
            newer.init_transactions()
            newer.begin_transaction()
            newer.send(topic, b"newer")
            newer.flush()
            with pytest.raises(ProducerFenced):
                older.abort_transaction()
            newer.commit_transaction()
    assert values(servers, topic) == [b"before", b"newer"]


@pytest.mark.behaviour("T4")
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_producer_whose_epochs_ran_out_goes_on_while_markers_are_written(
    last_epoch: str, markers: Markers, is_aborted: bool
) -> None:
    """The response to the commit contains the next producer id. The coordinator adopts that id when it has
    written the last marker.
    """
    topic, name = new_topic(last_epoch), next(_names)
    with (
        Proxy(last_epoch) as proxy,
        producer_of(proxy.bootstrap_servers, transactional_id=name) as producer,
        ThreadPoolExecutor(1) as thread,
    ):
        commit_and_begin(producer, last_epoch, topic, name, markers)
        send_refused(producer, proxy, topic, "records")
        waits = is_waiting(proxy)
        ending = thread.submit(producer.abort_transaction if is_aborted else producer.flush)
        if is_aborted:
            wait_until(lambda: ending.done() or waits())
        assert state_of(last_epoch, name) == "PrepareCommit"
        markers.are_held = False
        ending.result(LIMIT_S)
        if not is_aborted:
            producer.commit_transaction()
        with producer.transaction():
            producer.send(topic, b"after")
    expected = [b"before", b"after"] if is_aborted else [b"before", b"dropped", b"after"]
    assert values(last_epoch, topic) == expected


@pytest.mark.behaviour("T13")
@pytest.mark.parametrize(
    ("version", "then"), [(5, 0), (4, InvalidTxnState.code)], ids=["epoch per transaction", "classic"]
)
def test_an_end_during_the_markers_of_the_transaction_before_is_retriable(
    servers: str, markers: Markers, version: int, then: int
) -> None:
    """Apache Kafka also answers CONCURRENT_TRANSACTIONS. Java's producer retries this error; PRODUCER_FENCED
    would be fatal.
    """
    topic, name = new_topic(servers), next(_names)
    with RawClient(servers) as client:

        def end(producer: ProducerIdAndEpoch, *, is_commit: bool) -> tuple[int, ProducerIdAndEpoch]:
            fields = {"producer_id": producer.producer_id, "producer_epoch": producer.producer_epoch}
            answer = client.ask(EndTxnRequest(transactional_id=name, committed=is_commit, **fields), version)
            return answer.error_code, ProducerIdAndEpoch(answer.producer_id, answer.producer_epoch)

        request = InitProducerIdRequest(
            transactional_id=name, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
        )
        answer = client.ask(request, 4)
        producer = ProducerIdAndEpoch(answer.producer_id, answer.producer_epoch)
        added = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=producer.producer_id,
            v3_and_below_producer_epoch=producer.producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=[0])
            ],
        )
        client.ask(added, 3)
        markers.are_held = True
        code, following = end(producer, is_commit=True)
        assert code == 0
        if version == 5:
            producer = following
        for is_commit in (True, False):
            assert end(producer, is_commit=is_commit)[0] == ConcurrentTransactions.code
        markers.are_held = False
        wait_until(lambda: state_of(servers, name) == "CompleteCommit")
        assert end(producer, is_commit=False)[0] == then
