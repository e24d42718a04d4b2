"""Requests of many elements are decoded in steps, between which the broker serves other clients."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import pytest
from oncelog_devtools.worst_requests import from_tables
from support.broker import RawClient
from support.fuzz.targets import NOW_MS
from support.wait import wait_until

from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.state import OFFERED
from oncelog.broker.stepwise import Continuation, ResponseSlots, Work, respond_in_steps
from oncelog.errors import PeerError
from oncelog.log.background import BackgroundQueue
from oncelog.server import request_handler
from oncelog.server.background import BackgroundRunner
from oncelog.server.embedded import Broker
from oncelog.server.request_reader import RequestReader
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import encode_request
from oncelog.wire.message import Api, Message
from oncelog.wire.messages import API_BY_NAME, DescribeGroupsRequest, ProduceRequest
from oncelog.wire.primitives import TooManyElements
from oncelog.wire.records import NewRecord

MANY, AT_ONCE = 100, 10
NAMES = [f"g{number}" for number in range(MANY)]
APIS = [api for api in API_BY_NAME.values() if api.key in OFFERED]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handler, "DECODED_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(request_handler, "DECODED_PER_STEP", AT_ONCE)


def decode_in_steps(api: Api, version: int, body: bytes, **limits: int) -> tuple[int, Any]:
    """Return the number of yields, and the message or the text of the PeerError."""
    steps, yields = api.request.decode_in_steps(version, memoryview(body), 0, **limits), 0
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return yields, done.value
        except PeerError as error:
            return yields, str(error)
        yields += 1


def decode_at_once(api: Api, version: int, body: bytes) -> Any:
    """Return the message, or the text of the PeerError."""
    try:
        return api.request.decode(version, body)
    except PeerError as error:
        return str(error)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_decoding_in_steps_has_the_result_of_decoding_at_once(api: Api) -> None:
    for worst in from_tables(api, 600):
        version = worst.version
        yields, message = decode_in_steps(api, version, worst.body)
        assert message == decode_at_once(api, version, worst.body), worst.name
        if "equal" in worst.name or "tagged fields" in worst.name.removesuffix("of the header"):
            assert yields >= 1
        for size in range(0, len(worst.body), 1 + len(worst.body) // 20):
            body = worst.body[:size]
            assert decode_in_steps(api, version, body)[1] == decode_at_once(api, version, body), worst.name


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_more_elements_than_the_limit_are_told_from_malformed_bytes(api: Api) -> None:
    for worst in from_tables(api, 600):
        if not any(word in worst.name for word in ("equal", "different", "tagged fields")):
            continue
        if "header" in worst.name:
            continue
        with pytest.raises(TooManyElements):
            api.request.decode(worst.version, worst.body, max_elements=0)
        with pytest.raises(PeerError) as malformed:
            api.request.decode(worst.version, worst.body[: len(worst.body) // 2])
        assert not isinstance(malformed.value, TooManyElements)


@pytest.mark.usefixtures("small_steps")
def test_a_request_of_many_elements_is_decoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1600: 99,000 partitions of a Produce request were decoded in one step of 0.07 s, and 40 connections
    did so in one turn of the event loop.
    """
    counts, decode, work = [0], Message.decode_in_steps.__func__, BackgroundQueue.step  # type: ignore[attr-defined]

    def counted(cls: type[Message], *args: Any, **limits: Any) -> Generator[None, None, Any]:
        steps = decode(cls, *args, **limits)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return done.value
            counts[-1] += 1
            yield

    def step(self: BackgroundQueue) -> Any:
        counts.append(0)
        return work(self)

    monkeypatch.setattr(Message, "decode_in_steps", classmethod(counted))
    monkeypatch.setattr(BackgroundQueue, "step", step)
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        for names in (NAMES[:AT_ONCE], NAMES):
            response = client.ask(DescribeGroupsRequest(groups=names), 5)
            assert [group.group_id for group in response.groups] == names
            assert bool(sum(counts)) == (names == NAMES)
    assert sum(counts) >= MANY and max(counts) <= AT_ONCE


@pytest.mark.usefixtures("small_steps")
def test_a_request_that_is_malformed_after_many_elements_ends_its_connection_only() -> None:
    frame = bytearray(encode_request(DescribeGroupsRequest(groups=NAMES), 5, 1, "raw"))
    frame[frame.index(b"g99")] = 0xFF  # not UTF-8
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        client.socket.sendall(frame)
        assert client.is_closed()
        with RawClient(broker.bootstrap_servers) as other:
            assert len(other.ask(DescribeGroupsRequest(groups=NAMES), 5).groups) == MANY


@pytest.mark.usefixtures("small_steps")
def test_a_request_without_a_response_is_decoded_and_stored_after_a_disconnect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, work = threading.Event(), BackgroundRunner._work
    monkeypatch.setattr(BackgroundRunner, "_work", lambda self: work(self) if gate.is_set() else None)
    batch = bytes(build_batch([NewRecord(NOW_MS, b"k", b"v")]))
    data = [ProduceRequest.PartitionProduceData(index=index, records=batch) for index in range(MANY)]
    topic = ProduceRequest.TopicProduceData(name="t", partition_data=data)
    frame = encode_request(ProduceRequest(acks=0, timeout_ms=5_000, topic_data=[topic]), 9, 1, "c")
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        assert broker._running is not None
        node, connections = broker._running.node, broker._running.server.connections
        gate.set()
        client.create_topic("t", MANY)
        gate.clear()
        with RawClient(broker.bootstrap_servers) as other:
            other.socket.sendall(frame * 2)
            wait_until(lambda: node.request_memory.total_bytes >= len(frame) - 4)
        wait_until(lambda: any(connection.is_gone for connection in connections))
        assert node.metrics.records_stored == 0
        gate.set()
        wait_until(lambda: node.metrics.records_stored == 2 * MANY)
        wait_until(lambda: node.connection_count == 1 and not node.request_memory.total_bytes)


def test_a_frame_that_is_kept_does_not_keep_the_backlog() -> None:
    """R1657: a request of 6 KB that waited for a slot kept a backlog of 1 MB, and counted as 6 KB."""
    shared = memoryview(bytearray(1_000))
    reader = RequestReader(shared, 1_000)
    shared[996:] = (0).to_bytes(4)
    shared[:14] = (10).to_bytes(4) + b"0123456789"
    reader.keep(shared)
    alone = memoryview(bytearray(shared[:14]))
    for data, is_copied in ((shared, True), (reader.backlog, True), (alone, False)):
        frame, _ = reader.frames.first(data)
        assert frame is not None
        kept = reader.keep_frame(frame)
        assert kept == b"0123456789" and (kept.obj is not frame.obj) == is_copied


def test_a_continuation_gets_the_slot_of_the_work_before_it() -> None:
    background = BackgroundQueue()
    background.on_added = lambda: None
    slots, used = ResponseSlots(background), list[int]()

    def second() -> Work[str]:
        for _ in range(2):
            used.append(slots._used_count)
            yield None
        return "done"

    def first() -> Work[Any]:
        yield None
        used.append(slots._used_count)
        return Continuation(lambda: respond_in_steps(slots, second()))

    pending = respond_in_steps(slots, first(), free_steps=0)
    assert isinstance(pending, PendingResponse) and slots._used_count == 0
    responses: list[Any] = []
    pending.add_done_callback(responses.append)
    background.finish()
    assert responses == ["done"] and used == [1, 1, 1] and slots._used_count == 0
