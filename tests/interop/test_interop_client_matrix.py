"""The programs of the matrix of clients run, and give the cells of docs/conformance.md."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka, MissingDependency
from oncelog_devtools.client_matrix.clients import CLIENTS
from oncelog_devtools.client_matrix.judgements import ROWS
from oncelog_devtools.client_matrix.matrix import measure
from support import TESTS

from oncelog import Broker

PROGRAMS = TESTS.parent / "tools" / "client_matrix"
RESULTS = TESTS.parent / "bench" / "clients"
SHORT = ("default", "lost-ack", "transaction-v2", "read-committed")
"""Rows whose scenarios wait for no time-out, and whose cells depend on no timing."""
OTHERS = [client.key for client in CLIENTS if client.key not in ("oncelog", "oncelog-aio", "librdkafka")]


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with Broker() as broker:
        yield broker.bootstrap_servers


def verdicts(key: str, servers: str, row_keys: tuple[str, ...]) -> dict[str, str]:
    """Return the verdicts of a client, and skip the test if its program cannot be built."""
    client = next(client for client in CLIENTS if client.key == key)
    rows = [row for row in ROWS if row.key in row_keys]
    try:
        result = measure(client, PROGRAMS, servers, "a broker", rows)
    except MissingDependency as reason:
        pytest.skip(str(reason))
    print(result["cells"])  # pytest shows it if the test fails
    assert result["version"] and result["versions"]["ApiVersions"] >= 0
    return {row: cell["verdict"] for row, cell in result["cells"].items()}


def published(key: str, row_keys: tuple[str, ...]) -> dict[str, str]:
    """Return the stored verdicts of a client."""
    cells = json.loads((RESULTS / f"{key}.json").read_text())["cells"]
    return {row: cells[row]["verdict"] for row in row_keys}


@pytest.mark.behaviour("P12")
@pytest.mark.parametrize("key", ["oncelog", "oncelog-aio", "librdkafka"])
def test_a_python_client_gives_the_published_cells(key: str, servers: str) -> None:
    assert verdicts(key, servers, SHORT) == published(key, SHORT)


@pytest.mark.full("builds programs in other languages")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", OTHERS)
def test_another_client_gives_the_published_cells(key: str, servers: str) -> None:
    assert verdicts(key, servers, SHORT) == published(key, SHORT)


@pytest.mark.parametrize("key", ["oncelog", "librdkafka"])
def test_a_client_does_the_same_on_apache_kafka(key: str, apache_kafka: ApacheKafka) -> None:
    assert verdicts(key, apache_kafka.bootstrap_servers, SHORT) == published(key, SHORT)
