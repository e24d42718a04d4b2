"""pytest fixtures: embedded brokers, a topic for each test, clients, and faults between client and broker.

`oncelog_broker` is a broker for one test. The other fixtures share one broker in the session.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

# Import clients and brokers inside the fixtures: pytest loads this plug-in in every run, but few runs use a
# broker.
if TYPE_CHECKING:
    from oncelog.client.admin.blocking import Admin
    from oncelog.client.consumer.blocking import Consumer
    from oncelog.client.producer.blocking import Producer
    from oncelog.server.embedded import Broker
    from oncelog.testing.proxy.proxy import Proxy

_MARKER = "oncelog_broker(settings): broker settings, by Kafka's keys, of this test's fixture oncelog_broker"
_NOT_IN_TOPIC_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 100


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `oncelog_broker`, which gives settings to a test's broker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def oncelog_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Yield a running `oncelog.Broker` with a temporary data directory, for this test alone.

    `@pytest.mark.oncelog_broker({"num.partitions": 3})` gives it settings.
    """
    from oncelog.server.embedded import Broker

    with Broker(config=_marked_settings(request)) as broker:
        yield broker


def _marked_settings(request: pytest.FixtureRequest) -> Mapping[str, object]:
    """Return the settings of all markers of the test. The closest marker wins."""
    settings: dict[str, object] = {}
    for marker in reversed([*request.node.iter_markers("oncelog_broker")]):
        if marker.kwargs or len(marker.args) != 1 or not isinstance(marker.args[0], Mapping):
            raise pytest.UsageError(
                'the marker oncelog_broker needs one mapping, such as oncelog_broker({"num.partitions": 3})'
            )
        settings |= marker.args[0]
    return settings


@pytest.fixture(scope="session")
def oncelog_session_broker() -> Iterator[Broker]:
    """Yield a running `oncelog.Broker`, one for the session or, with pytest-xdist, for each worker."""
    from oncelog.server.embedded import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def oncelog_admin(oncelog_session_broker: Broker) -> Iterator[Admin]:
    """Yield an `oncelog.Admin` of the session's broker."""
    from oncelog.client.admin.blocking import Admin

    with Admin(_servers(oncelog_session_broker)) as admin:
        yield admin


@pytest.fixture
def oncelog_topic(request: pytest.FixtureRequest, oncelog_admin: Admin) -> Iterator[str]:
    """Yield the name of a new topic with one partition on the session's broker. Delete it after the test."""
    from oncelog.client.admin.types import NewTopic
    from oncelog.errors import UnknownTopicOrPartition

    own_name = _NOT_IN_TOPIC_NAMES.sub("-", request.node.name)[:_MAX_NAME]
    name = f"{own_name}-{uuid.uuid4().hex[:8]}"
    oncelog_admin.create_topics([NewTopic(name)])
    yield name
    # The test may have deleted the topic.
    with contextlib.suppress(UnknownTopicOrPartition):
        oncelog_admin.delete_topics([name])


@pytest.fixture
def oncelog_producer(oncelog_session_broker: Broker) -> Iterator[Producer]:
    """Yield an idempotent `oncelog.Producer` of the session's broker. It is closed after the test."""
    from oncelog.client.producer.blocking import Producer

    with Producer(_servers(oncelog_session_broker)) as producer:
        yield producer


@pytest.fixture
def oncelog_consumer(oncelog_session_broker: Broker, oncelog_topic: str) -> Iterator[Consumer]:
    """Yield an `oncelog.Consumer` that reads `oncelog_topic` from its start, in a group of its own."""
    from oncelog.client.consumer.blocking import Consumer

    settings = {
        **_servers(oncelog_session_broker),
        "group.id": oncelog_topic,
        "auto.offset.reset": "earliest",
    }
    with Consumer(settings) as consumer:
        consumer.subscribe([oncelog_topic])
        yield consumer


@pytest.fixture
def oncelog_faults(oncelog_session_broker: Broker) -> Iterator[Proxy]:
    """Yield a running `oncelog.testing.proxy.Proxy` in front of the session's broker.

    Connect the client under test to its `bootstrap_servers`, and add faults, such as
    `oncelog_faults.lose_ack("orders")`.
    """
    from oncelog.testing.proxy.proxy import Proxy

    with Proxy(oncelog_session_broker.bootstrap_servers) as proxy:
        yield proxy


def _servers(broker: Broker) -> dict[str, object]:
    return {"bootstrap.servers": broker.bootstrap_servers}
