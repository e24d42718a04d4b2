"""Our broker and Apache Kafka, and a group nobody else has."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.wait import JumpingClock

from oncelog import Broker

_numbers = itertools.count()
SOON = {"group.consumer.min.heartbeat.interval.ms": 300, "group.consumer.heartbeat.interval.ms": 300}
"""So that members of the consumer protocol learn of changes soon, as those of Apache Kafka in these tests."""
FEW = {"offsets.topic.num.partitions": 4, "transaction.state.log.num.partitions": 4}
"""Each partition is synced when the broker stops."""


@pytest.fixture(scope="module")
def ours() -> Iterator[str]:
    with Broker(config=SOON | FEW) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(scope="module")
def classic() -> Iterator[str]:
    """Our broker without an epoch per transaction."""
    with Broker(config={"oncelog.transaction.version": 0, **FEW}) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(params=["ours", "apache"])
def servers(request: pytest.FixtureRequest) -> str:
    if request.param == "apache":
        kafka: ApacheKafka = request.getfixturevalue("apache_kafka")
        return kafka.bootstrap_servers
    address: str = request.getfixturevalue("ours")
    return address


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> JumpingClock:
    return JumpingClock(monkeypatch)


@pytest.fixture
def group() -> str:
    return f"group-{os.getpid()}-{next(_numbers)}"
