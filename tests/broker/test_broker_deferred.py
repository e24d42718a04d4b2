"""Topics deleted and created again while the broker's background work waits for a slow thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.broker import RawClient, batch, wait_until

from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.background import Kind, RunningCall
from oncelog.server.background import BackgroundRunner
from oncelog.server.embedded import Broker
from oncelog.types import Compression
from oncelog.wire.message import Message
from oncelog.wire.messages import (
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    FetchRequest,
    ListOffsetsRequest,
    ListOffsetsResponse,
    MetadataRequest,
)

WAIT_SECONDS = 60


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event: blocking calls of background tasks start only while it is set."""
    event = threading.Event()
    event.set()
    real = BackgroundRunner._run_in_thread

    async def elsewhere(self: BackgroundRunner, call: RunningCall) -> None:
        await asyncio.to_thread(event.wait, WAIT_SECONDS)
        await real(self, call)

    monkeypatch.setattr(BackgroundRunner, "_run_in_thread", elsewhere)
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
        background = broker._running.node.log_manager.background
        wait_until(lambda: not background)
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


def large_requests(count: int) -> list[tuple[Message, int]]:
    """Return requests that take several steps each, with their versions."""
    looked = [ListOffsetsRequest.ListOffsetsPartition(partition_index=i, timestamp=-1) for i in range(count)]
    read = [FetchRequest.FetchPartition(partition=i, partition_max_bytes=1) for i in range(count)]
    named = [MetadataRequest.MetadataRequestTopic(name=f"?{i}") for i in range(count)]
    made = CreateTopicsRequest.CreatableTopic(name="wide", num_partitions=40, replication_factor=1)
    doomed = DeleteTopicsRequest.DeleteTopicState(name="wide")
    return [
        (
            ListOffsetsRequest(topics=[ListOffsetsRequest.ListOffsetsTopic(name="old", partitions=looked)]),
            7,
        ),
        (FetchRequest(topics=[FetchRequest.FetchTopic(topic="old", partitions=read)], max_bytes=1), 12),
        (MetadataRequest(topics=named, allow_auto_topic_creation=False), 9),
        (CreateTopicsRequest(topics=[made], timeout_ms=5_000), 5),
        (DeleteTopicsRequest(topics=[doomed], timeout_ms=5_000), 6),
    ]


def look_up(offset: int) -> ListOffsetsRequest:
    """Return a request that looks up the timestamp of the record at `offset` in topic t."""
    asked = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=1_000 + offset)
    return ListOffsetsRequest(topics=[ListOffsetsRequest.ListOffsetsTopic(name="t", partitions=[asked])])


def test_large_requests_are_answered_while_a_job_of_the_log_is_running(gate: threading.Event) -> None:
    """Large requests must be answered during a blocking call of the log, which may be a sync on a stalled
    disk.

    They also do not wait for each other's blocking calls.
    """
    count = 2 * DEFAULT_LIMITS.request_step_elements + 1
    with Broker() as broker, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.bootstrap_servers)) for _ in range(3)]
        client, *looking = clients
        client.create_topic("old", segment_bytes=1 << 20)
        client.create_topic("t")
        for number in range(2):
            time_ms = 1_000 + number
            client.produce("t", batch(b"v", timestamp_ms=time_ms, compression=Compression.GZIP))
        for _ in range(12):
            assert client.produce("old", batch(b"old" + bytes(100_000))).error_code == 0
        assert broker._running is not None
        background = broker._running.node.log_manager.background
        wait_until(lambda: not background)
        gate.clear()
        delete_records(client, "old", 11)
        wait_until(lambda: background and not background.is_ready)
        *reading, creation, deletion = large_requests(count)
        for request, version in reading:
            client.ask(request, version)
        for number, each in enumerate(looking):
            each.send(look_up(number), 7)
        wait_until(lambda: len(background._queues[Kind.REQUEST_WITH_CALLS].waiting) == len(looking))
        for request, version in reading:
            client.ask(request, version)
        assert background._queues[Kind.LOG].call is not None, "the job of the log is still waiting"
        gate.set()
        for number, each in enumerate(looking):
            _, response = each.receive(ListOffsetsResponse, 7)
            assert response.topics[0].partitions[0].offset == number
        # The other two requests sync many directories in blocking calls, so they can finish only at the end.
        for request, version in (creation, deletion):
            client.ask(request, version)
