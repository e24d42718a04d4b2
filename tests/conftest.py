"""Shared fixtures. A test that needs a part that is missing is skipped with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from apache_kafka import ApacheKafka


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("java"):
        return
    for item in items:
        if item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.skip(reason="no Java found: install a JDK 17 or newer to run Spark"))


@pytest.fixture(scope="session")
def apache_kafka() -> Iterator[ApacheKafka]:
    """One Apache Kafka node for the whole run, started by the first test that asks."""
    kafka = ApacheKafka()
    yield kafka
    kafka.stop()
