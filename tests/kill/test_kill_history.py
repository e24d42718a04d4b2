"""Histories of concurrent transactional clients under faults contain no known anomaly."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from oncelog_simulator.history.check import AbortedRead, Anomaly, EarlyRead, Operation, check
from support.history.load import Load, copied_once, has_enough_outcomes, lost_messages, network_faults
from support.wait import pause

from oncelog import Broker
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.proxy import Proxy, Rule

SEED = 4


def judge(load: Load, history: list[Operation]) -> None:
    """Check that the history has no anomaly, and enough operations to be meaningful."""
    found = check(history, dependencies=["wr"] if load.shared else ["wr", "ww"])
    assert not found, "\n".join(map(str, found[:20]))
    # One copied record is enough. An idle machine copies hundreds, but the test must not fail on a slow one.
    assert copied_once(load, history) > 0
    assert has_enough_outcomes(history)


def disturbing(proxy: Proxy, broker: BrokerProcess | None) -> Callable[[float], None]:
    """Return a function that disturbs clients for about the given seconds.

    It cuts connections at random times, and also kills the broker, unless that is None.
    """
    chance = random.Random(SEED)

    def disturb(seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            pause(chance.uniform(0.2, 0.8))
            if broker is not None and chance.random() < 0.6:
                broker.kill()
                broker.start()
            else:
                proxy.cut()
        proxy.clear()

    return disturb


def run(
    direct: str,
    broker: BrokerProcess | None,
    seconds: float,
    *,
    shared: bool = True,
    clients: int = 2,
    rules: list[Rule] | None = None,
) -> None:
    with Proxy(direct, rules=rules or network_faults(), seed=SEED) as proxy:
        load = Load(proxy.bootstrap_servers, SEED, clients + 1, clients, clients, shared)
        load.create_topics(direct)
        load.work(disturbing(proxy, broker), seconds)
        proxy.release()
        history = load.finish(direct)
    judge(load, history)


@pytest.mark.behaviour("T3", "T6", "T7", "T11", "T13")
@pytest.mark.parametrize("shared", [True, False], ids=["partitions shared", "each its own"])
def test_no_anomaly_when_the_broker_is_killed_and_the_network_fails(tmp_path: Path, shared: bool) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        run(broker.bootstrap_servers, broker, 5, shared=shared)


@pytest.mark.behaviour("T3", "T6", "T7", "T11", "T13")
def test_no_anomaly_without_epoch_bumps_when_nothing_arrives_late(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", settings={"oncelog.transaction.version": 1}) as broker:
        run(broker.bootstrap_servers, broker, 5, rules=lost_messages())


@pytest.mark.behaviour("T3", "T6", "T7", "T13")
def test_no_anomaly_when_the_network_of_apache_kafka_fails(apache_kafka: ApacheKafka) -> None:
    run(apache_kafka.bootstrap_servers, None, 5)


LATE_ENDS = Rule(action="duplicate", api="EndTxn", probability=0.5, delay_ms=40)


@pytest.mark.behaviour("T13")
@pytest.mark.parametrize("version", [2, 1])
def test_late_end_txn_requests_are_an_anomaly_only_without_epoch_bumps(version: int) -> None:
    """If each transaction has its own epoch, the broker rejects late EndTxn requests (KAFKA-17754).

    Without epoch bumps, it accepts them.
    """
    found: list[Anomaly] = []
    for seed in range(20 if version == 1 else 1):
        with (
            Broker(config={"oncelog.transaction.version": version}) as broker,
            Proxy(broker.bootstrap_servers, rules=[LATE_ENDS], seed=seed) as proxy,
        ):
            load = Load(proxy.bootstrap_servers, seed)
            load.create_topics(broker.bootstrap_servers)
            load.work(pause, 2)
            found += check(load.finish(broker.bootstrap_servers), dependencies=["wr"])
        # Some seeds find only anomalies of other kinds, so try several.
        if any(isinstance(each, AbortedRead) for each in found):
            break
    assert any(isinstance(each, AbortedRead) for each in found) == (version == 1)
    assert version == 1 or found == []


def test_a_read_uncommitted_reader_shows_anomalies() -> None:
    with Broker() as broker:
        load = Load(broker.bootstrap_servers, isolation="read_uncommitted")
        load.create_topics(broker.bootstrap_servers)
        load.work(pause, 1)
        found = check(load.finish(broker.bootstrap_servers), dependencies=["wr"])
    assert {AbortedRead, EarlyRead} <= {type(each) for each in found}


@pytest.mark.soak
@pytest.mark.behaviour("T3", "T6", "T7", "T11", "T13")
@pytest.mark.parametrize(("seconds", "clients", "shared"), [(300, 2, True), (300, 5, True), (300, 3, False)])
def test_no_anomaly_in_a_long_run(tmp_path: Path, seconds: float, clients: int, shared: bool) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        run(broker.bootstrap_servers, broker, seconds, shared=shared, clients=clients)
