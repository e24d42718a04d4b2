"""Topics deleted and created again while the broker's deferred work waits for a slow thread."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from helpers_broker import RawClient, batch, wait_until

from oncelog.edge.broker import Broker
from oncelog.edge.chores import ChoreDriver
from oncelog.log.chores import Job
from oncelog.wire.messages import DeleteRecordsRequest, DeleteTopicsRequest

WAIT_SECONDS = 60


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Jobs of deferred work begin only while it is set."""
    event = threading.Event()
    event.set()
    real = ChoreDriver._elsewhere

    async def elsewhere(self: ChoreDriver, job: Job) -> None:
        await asyncio.to_thread(event.wait, WAIT_SECONDS)
        await real(self, job)

    monkeypatch.setattr(ChoreDriver, "_elsewhere", elsewhere)
    return event


def delete_topic(client: RawClient, name: str) -> None:
    topics = [DeleteTopicsRequest.DeleteTopicState(name=name)]
    response = client.ask(DeleteTopicsRequest(topics=topics, timeout_ms=5_000), 6)
    assert response.responses[0].error_code == 0


def delete_records(client: RawClient, name: str, offset: int) -> None:
    partitions = [DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=offset)]
    topics = [DeleteRecordsRequest.DeleteRecordsTopic(name=name, partitions=partitions)]
    response = client.ask(DeleteRecordsRequest(topics=topics, timeout_ms=5_000), 2)
    assert response.topics[0].partitions[0].error_code == 0


def test_acknowledged_records_of_a_topic_created_again_survive_deletions_of_the_old_one(
    tmp_path: Path, gate: threading.Event
) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t", segment_bytes=1 << 20)
        for _ in range(12):
            assert client.produce("t", batch(b"old" + bytes(100_000))).error_code == 0
        assert broker._running is not None
        chores = broker._running.node.log_manager.chores
        wait_until(lambda: not chores)
        gate.clear()
        delete_records(client, "t", 11)
        delete_topic(client, "t")
        client.create_topic("t", flush_messages=1)
        expected = [b"new-%d" % number for number in range(20)]
        assert all(client.produce("t", batch(value)).error_code == 0 for value in expected)
        gate.set()
        wait_until(lambda: not list(tmp_path.glob("*-delete")))
        names = [path.name for path in (tmp_path / "t-0").iterdir()]
        assert f"{0:020d}.log" in names
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.values("t") == expected
