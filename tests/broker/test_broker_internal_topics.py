"""The coordinators' topics are always compacted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.broker import RawClient

from oncelog import Admin, Broker
from oncelog.broker.coordinators.internal_topic_config import (
    CONSUMER_OFFSETS,
    INTERNAL_TOPICS,
    TRANSACTION_STATE,
)
from oncelog.client.admin.types import ConfigResource
from oncelog.wire.messages import CreateTopicsRequest

INVALID_CONFIG = 40


def policies(servers: str, *names: str) -> dict[str, str | None]:
    resources = [ConfigResource("topic", name) for name in names or sorted(INTERNAL_TOPICS)]
    with Admin({"bootstrap.servers": servers}) as admin:
        found = admin.describe_configs(resources)
    return {resource.name: told.entries["cleanup.policy"].value for resource, told in found.items()}


@pytest.mark.behaviour("I27")
def test_internal_topics_made_by_a_client_have_their_coordinators_settings(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        for name in INTERNAL_TOPICS:
            client.create_topic(name, 3, retention_ms=1)
        assert set(policies(broker.bootstrap_servers).values()) == {"compact"}


@pytest.mark.behaviour("I27")
def test_internal_topics_that_an_older_version_took_over_get_their_settings(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        for name in INTERNAL_TOPICS:
            client.create_topic(name, 3)
    file = tmp_path / "oncelog-topics.json"
    content = json.loads(file.read_text())
    for topic in content["topics"]:
        topic["settings"] = {}
    file.write_text(json.dumps(content))
    with Broker(tmp_path) as broker:
        assert set(policies(broker.bootstrap_servers).values()) == {"compact"}


@pytest.mark.parametrize("name", [CONSUMER_OFFSETS, TRANSACTION_STATE])
def test_an_internal_topic_cannot_be_made_or_altered_to_be_deleted_by_age(tmp_path: Path, name: str) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        config = CreateTopicsRequest.CreatableTopicConfig(name="cleanup.policy", value="delete")
        asked = CreateTopicsRequest.CreatableTopic(
            name=name, num_partitions=1, replication_factor=1, configs=[config]
        )
        (result,) = client.ask(CreateTopicsRequest(topics=[asked]), 7).topics
        assert result.error_code == INVALID_CONFIG
        client.create_topic(name)
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            resource = ConfigResource("topic", name)
            outcome = admin.alter_configs({resource: {"cleanup.policy": "delete"}}, raise_errors=False)
            assert "must be compacted" in str(outcome[resource].error)
            admin.alter_configs({resource: {"segment.bytes": "2000000"}})
        assert policies(broker.bootstrap_servers, name) == {name: "compact"}
