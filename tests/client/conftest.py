"""Fixtures: our broker, Apache Kafka, and the name of an unused group."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping

import pytest
from support.wait import JumpingClock

from oncelog import Admin, Broker
from oncelog.testing.proxy import Proxy

_numbers = itertools.count()
SOON = {"group.consumer.min.heartbeat.interval.ms": 300, "group.consumer.heartbeat.interval.ms": 300}
"""With these settings, members of the consumer protocol learn of changes as soon as they do on Apache
Kafka.
"""
FEW = {"offsets.topic.num.partitions": 4, "transaction.state.log.num.partitions": 4}
"""Partition counts of the internal topics. They are small, because a broker syncs each of these partitions
when it stops.
"""


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return SOON | FEW


@pytest.fixture(scope="module")
def classic() -> Iterator[str]:
    """Yield the address of our broker with transaction.version 0: a producer keeps its epoch across
    transactions.
    """
    with Broker(config={"oncelog.transaction.version": 0, **FEW}) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def proxy(servers: str) -> Iterator[Proxy]:
    with Proxy(servers) as proxy:
        yield proxy


@pytest.fixture
def admin(broker: Broker) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        yield admin


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> JumpingClock:
    return JumpingClock(monkeypatch)


@pytest.fixture
def group() -> str:
    return f"group-{os.getpid()}-{next(_numbers)}"
