"""Fixtures: a schema registry in this process, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.schema_registry import Registry, running_registry

from oncelog.schema_registry import SchemaRegistryClient

QUICK = {"retries.wait.ms": 1, "retries.max.wait.ms": 5}


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running_registry() as running:
        yield running


@pytest.fixture
def client(registry: Registry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"schema.registry.url": registry.url, **QUICK}) as client:
        yield client
