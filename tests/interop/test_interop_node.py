"""KafkaJS against our broker: its idempotent producer and its admin client, also through faults.

Other clients read what it sent. The other client for Node, @confluentinc/kafka-javascript, is librdkafka,
which is tested through confluent-kafka.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from support.broker import RawClient
from support.foreign.clients import (
    CACHE,
    INTEROP,
    Command,
    load_past_a_kill,
    load_past_a_lost_acknowledgement,
    prepare,
    run,
)

from oncelog import Broker

SOURCES = INTEROP / "node"
pytestmark = pytest.mark.timeout(400)  # the first run downloads KafkaJS


@pytest.fixture(scope="module")
def kafkajs() -> Command:
    """Install KafkaJS beside the program if the program's files have changed since the last installation."""
    for tool in ("node", "npm"):
        if not shutil.which(tool):
            pytest.skip(f"KafkaJS needs {tool}, which is not installed")
    state = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(SOURCES.iterdir()))).hexdigest()
    home = CACHE / f"kafkajs-{state[:16]}"
    if not (home / "complete").exists():
        shutil.copytree(SOURCES, home, dirs_exist_ok=True)
        prepare(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], "KafkaJS", home)
        (home / "complete").touch()
    return lambda *arguments: ["node", str(home / "check.js"), *arguments]


def test_producer_and_admin(kafkajs: Command) -> None:
    with Broker() as broker:
        assert run(kafkajs(broker.bootstrap_servers, "everything")) == ["admin", "producer"]
        with RawClient(broker.bootstrap_servers) as client:
            numbers = [2 + 3 * index for index in range(30)]
            sent = [None if number % 7 == 0 else b"value %d" % number for number in numbers]
            assert client.values("node", 2) == sent * 2


@pytest.mark.behaviour("I1")
def test_a_lost_acknowledgement(kafkajs: Command) -> None:
    load_past_a_lost_acknowledgement(kafkajs)


@pytest.mark.behaviour("I17")
def test_the_broker_is_killed_in_the_middle(kafkajs: Command, tmp_path: Path) -> None:
    load_past_a_kill(kafkajs, tmp_path)
