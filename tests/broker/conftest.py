"""One broker for the tests of a file. Every test uses its own topics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.broker import RawClient

from oncelog.server.embedded import Broker


@pytest.fixture
def client(broker: Broker) -> Iterator[RawClient]:
    with RawClient(broker.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def topic(client: RawClient, request: pytest.FixtureRequest) -> str:
    """Create a topic of one partition, named after the test, and return its name."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:200]
    client.create_topic(name)
    return name
