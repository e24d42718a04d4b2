"""Connections with invalid bytes, bounds on each connection, and slow and idle clients."""

from __future__ import annotations

import gc
import random
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from support.broker import RawClient, batch, fetch_request, produce_request, split_batches, wait_until

from oncelog.broker.stepwise import ELEMENT_RECORDS, MAX_LARGE
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.server import server
from oncelog.server.background import BackgroundRunner
from oncelog.server.connection import Connection
from oncelog.server.embedded import Broker
from oncelog.server.request_handler import (
    DECODED_AT_ONCE,
    MAX_ROUND_REQUESTS,
    METERED_RECORDS,
    REQUEST_BYTES,
    RequestHandler,
)
from oncelog.types import TopicPartition
from oncelog.wire.frames import encode_request
from oncelog.wire.message import Message
from oncelog.wire.messages import (
    AddPartitionsToTxnRequest,
    AlterClientQuotasRequest,
    AlterUserScramCredentialsRequest,
    ApiVersionsRequest,
    CreateAclsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteAclsRequest,
    DeleteTopicsRequest,
    DescribeTopicPartitionsRequest,
    EndTxnRequest,
    FetchResponse,
    InitProducerIdRequest,
    ListGroupsRequest,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)


def is_served(broker: Broker) -> bool:
    with RawClient(broker.bootstrap_servers) as other:
        return other.ask(ApiVersionsRequest(), 0).error_code == 0


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", -1),
        struct.pack(">i", 104_857_601),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack(">i", 0),
        struct.pack(">i", 3) + b"abc",
        struct.pack(">ihhih", 10, 18, 0, 1, 500),
        struct.pack(">ihhih", 10, 3, 9, 1, -1),
        struct.pack(">ihhihb", 11, 3, 9, 1, -1, 0),
    ],
)
def test_bytes_that_are_no_request_end_their_connection_only(
    broker: Broker, client: RawClient, frame: bytes
) -> None:
    client.socket.sendall(frame)
    assert client.is_closed()
    assert is_served(broker)


def test_random_bytes_in_every_api_never_take_the_broker_down(broker: Broker) -> None:
    source = random.Random(20)
    for key in (0, 1, 2, 3, 10, 18, 19, 20, 21, 22, 23, 32, 33, 35, 37, 44, 60, 61):
        for version in (0, 4, 9):
            with RawClient(broker.bootstrap_servers) as attacker:
                body = struct.pack(">hhih", key, version, 1, -1) + source.randbytes(source.randrange(200))
                attacker.socket.sendall(struct.pack(">i", len(body)) + body)
                attacker.socket.shutdown(socket.SHUT_WR)
                attacker.is_closed()
    assert is_served(broker)


def test_an_answer_before_garbage_still_leaves(client: RawClient) -> None:
    good = encode_request(ApiVersionsRequest(), 0, 7, "x")
    client.socket.sendall(good)
    client.socket.sendall(struct.pack(">ihhih", 10, 3, 9, 1, -1))
    frame = client.read_frame()
    assert frame is not None and struct.unpack_from(">i", frame)[0] == 7
    assert client.is_closed()


def test_a_request_may_come_byte_by_byte(client: RawClient, topic: str) -> None:
    frame = encode_request(produce_request(topic, batch(b"slow")), 9, 1, "x")
    for byte in frame:
        client.socket.sendall(bytes([byte]))
    assert client.read_frame() is not None
    assert client.values(topic) == [b"slow"]


def test_a_request_cut_off_by_the_end_of_its_connection_does_nothing(
    broker: Broker, client: RawClient, topic: str
) -> None:
    frame = encode_request(produce_request(topic, batch(b"cut")), 9, 1, "x")
    with RawClient(broker.bootstrap_servers) as cut:
        cut.socket.sendall(frame[:-1])
    assert client.offset(topic) == 0
    assert is_served(broker)


def test_requests_without_a_response_are_handled_after_a_disconnect(
    broker: Broker, client: RawClient, topic: str
) -> None:
    """A producer with acks=0 may disconnect right after its last request. The broker must handle all its
    requests, although one round handles only 64.
    """
    request = encode_request(produce_request(topic, batch(b"sent"), acks=0), 9, 1, "x")
    with RawClient(broker.bootstrap_servers) as other:
        other.socket.sendall(request * 1_000)
    wait_until(lambda: client.offset(topic) == 1_000)
    wait_until(lambda: broker.metrics()["connections"] == 1)


def answered(client: RawClient, topic: str) -> None:
    client.ask(produce_request(topic, batch(b"sent")), 9)
    client.ask(fetch_request([(topic, 0, 0)]), 12)


def with_a_waiting_fetch(client: RawClient, topic: str) -> None:
    client.send(fetch_request([(topic, 0, client.offset(topic))], max_wait_ms=2**31 - 1, min_bytes=1), 12)


def with_requests_behind_its_end(client: RawClient, topic: str) -> None:
    client.offset(topic)
    client.socket.sendall(encode_request(produce_request(topic, batch(b"sent"), acks=0), 9, 1, "x") * 1_000)


def closed_for_cause(client: RawClient, topic: str) -> None:
    client.socket.sendall(struct.pack(">i", -1))
    assert client.is_closed()


@pytest.mark.parametrize(
    "use",
    [answered, with_a_waiting_fetch, with_requests_behind_its_end, closed_for_cause],
    ids=lambda use: use.__name__,
)
def test_a_closed_connection_is_freed_without_the_garbage_collector(
    broker: Broker, topic: str, use: Callable[[RawClient, str], None]
) -> None:
    """Regression: each 10,000 closed connections left 40 MB behind.

    GcTuner freezes the objects that survive a long collection, and the collector never frees frozen objects.
    A connection that is open at that time must therefore not be part of a reference cycle.
    """

    def connection_count() -> int:
        return sum(type(thing) is Connection for thing in gc.get_objects())

    gc.collect()
    before = connection_count()
    gc.disable()
    try:
        for _ in range(3):
            with RawClient(broker.bootstrap_servers) as other:
                use(other, topic)
        wait_until(lambda: connection_count() == before)
    finally:
        gc.enable()


def test_a_closed_connection_keeps_no_incomplete_request(broker: Broker) -> None:
    """R1765: the list of a sweep refers to closed connections for up to a second."""
    assert broker._running is not None
    connections = broker._running.server.connections
    before = set(connections)
    with RawClient(broker.bootstrap_servers) as other:
        other.socket.sendall(struct.pack(">i", 1_000_000) + bytes(500_000))
        wait_until(lambda: broker.metrics()["request_bytes_held"] >= 500_000)
        (connection,) = set(connections) - before
    wait_until(lambda: connection not in connections)
    assert connection.reader.held_bytes == 0


def test_a_waiting_request_drops_the_requests_behind_it_when_the_client_is_gone(
    broker: Broker, client: RawClient, topic: str
) -> None:
    wait = encode_request(fetch_request([(topic, 0, 0)], max_wait_ms=2**31 - 1, min_bytes=1), 12, 1, "x")
    request = encode_request(produce_request(topic, batch(b"sent"), acks=0), 9, 1, "x")
    with RawClient(broker.bootstrap_servers) as other:
        other.socket.sendall(wait + request)
    wait_until(lambda: broker.metrics()["connections"] == 1)
    assert client.offset(topic) == 0


def test_a_failed_response_drops_the_requests_behind_it_when_the_client_is_gone(
    broker: Broker, client: RawClient, topic: str
) -> None:
    """Regression: the broker carried out all pipelined fetches of a disconnected client, 64 of them in one
    step.
    """
    for _ in range(4):
        client.ask(produce_request(topic, batch(bytes(900_000))), 9)
    size_bytes = 50_000_000
    fetch = fetch_request([(topic, 0, 0)], partition_max_bytes=size_bytes, max_bytes=size_bytes)
    request = encode_request(produce_request(topic, batch(b"sent"), acks=0), 9, 1, "x")
    with RawClient(broker.bootstrap_servers) as other:
        # The client reads nothing, and the responses are larger than the socket buffers.
        other.socket.sendall(encode_request(fetch, 12, 1, "x") * 50 + request)
    wait_until(lambda: broker.metrics()["connections"] == 1)
    assert client.offset(topic) == 4


def test_the_request_limit_is_a_setting() -> None:
    config = {"socket.request.max.bytes": 2_000}
    with Broker(config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("small")
        assert client.produce("small", batch(b"x" * 1_000)).error_code == 0
        client.send(produce_request("small", batch(b"x" * 3_000)), 9)
        assert client.is_closed()
        assert broker.metrics()["connections_closed_for_cause"] == 1
        assert is_served(broker)


def test_a_large_request_and_small_ones_behind_it(client: RawClient) -> None:
    client.create_topic("large", max_message_bytes=20_000_000)
    first = client.send(produce_request("large", batch(b"L" * 9_000_000)), 9)
    rest = [client.send(produce_request("large", batch(b"s")), 9) for _ in range(3)]
    frames = [client.read_frame() for _ in range(4)]
    assert [struct.unpack_from(">i", f or b"")[0] for f in frames] == [first, *rest]
    assert client.offset("large") == 4


def test_requests_behind_a_waiting_fetch_are_bounded_and_all_answered() -> None:
    config = {"oncelog.connection.max.pending.requests": 5}
    with Broker(config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("queue")
        sent = [client.send(fetch_request([("queue", 0, 0)], max_wait_ms=10_000), 12)]
        sent += [client.send(produce_request("queue", batch(b"%d" % n)), 9) for n in range(50)]
        with RawClient(broker.bootstrap_servers) as other:
            other.produce("queue", batch(b"first"))
        frames = [client.read_frame() for _ in sent]
        assert [struct.unpack_from(">i", f or b"")[0] for f in frames] == sent
        assert client.values("queue")[:2] == [b"first", b"0"]


def test_a_client_that_does_not_read_is_paused_and_not_disconnected() -> None:
    """The client requests 60 MB without reading.

    The broker buffers a bounded part and serves other clients.
    """
    config = {"oncelog.connection.max.pending.bytes": 1_000_000}
    with Broker(config=config) as broker, RawClient(broker.bootstrap_servers) as slow:
        slow.create_topic("bulk", max_message_bytes=2_000_000)
        slow.produce("bulk", batch(b"x" * 1_000_000))
        count = 60
        for _ in range(count):
            slow.send(fetch_request([("bulk", 0, 0)], partition_max_bytes=2_000_000), 12)
        wait_until(lambda: broker.metrics().get("requests.Fetch", 0) >= 1)
        assert is_served(broker)
        assert broker.metrics()["requests.Fetch"] < count, "the rest waits until the client reads"
        for _ in range(count):
            _, response = slow.receive(FetchResponse, 12)
            assert len(split_batches(response.responses[0].partitions[0].records)) == 1
        assert broker.metrics()["requests.Fetch"] == count


def test_an_idle_connection_is_closed() -> None:
    with Broker(config={"connections.max.idle.ms": 50}) as broker:
        with RawClient(broker.bootstrap_servers) as client:
            assert client.is_closed()
        assert is_served(broker)


def test_the_checks_of_many_connections_are_spread_over_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that arrives during the checks waits for one small part of them at most."""
    monkeypatch.setattr(server, "SWEEP_SLICE", 2)
    # The other brokers of this process check their connections, too.
    turns: dict[server.Server, list[tuple[int, float]]] = defaultdict(list)
    check_slice = server.Server._sweep_slice

    def record(self: server.Server, connections: list[Connection], pause_s: float) -> None:
        before = len(connections)
        check_slice(self, connections, pause_s)
        turns[self].append((before - len(connections), pause_s))

    with Broker() as broker, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.bootstrap_servers)) for _ in range(7)]
        for client in clients:
            assert client.ask(ApiVersionsRequest(), 0).error_code == 0
        monkeypatch.setattr(server.Server, "_sweep_slice", record)
        one_sweep = [(2, 0.25), (2, 0.25), (2, 0.25), (1, 0.25)]
        wait_until(
            lambda: any(one_sweep == own[i : i + 4] for own in list(turns.values()) for i in range(len(own)))
        )


def test_connections_above_the_limit_are_refused() -> None:
    with Broker(config={"max.connections": 2}) as broker:
        first, second = RawClient(broker.bootstrap_servers), RawClient(broker.bootstrap_servers)
        assert first.ask(ApiVersionsRequest(), 0).error_code == 0
        assert second.ask(ApiVersionsRequest(), 0).error_code == 0
        with RawClient(broker.bootstrap_servers) as third:
            assert third.is_closed()
        first.socket.close()
        second.socket.close()
        wait_until(lambda: broker.metrics()["connections"] == 0)
        assert is_served(broker)


def test_large_requests_wait_as_bytes_while_many_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a request can take eighty times as much memory as its bytes, so only a few large requests are
    decoded together.

    Small requests are served meanwhile. The waiting requests are complete, so the time-out for incomplete
    requests does not apply to them.
    """
    gate, work = threading.Event(), BackgroundRunner._work
    monkeypatch.setattr(BackgroundRunner, "_work", lambda self: work(self) if gate.is_set() else None)
    rows = [OffsetForLeaderEpochRequest.OffsetForLeaderPartition(partition=i) for i in range(10_000)]
    request = OffsetForLeaderEpochRequest(
        topics=[OffsetForLeaderEpochRequest.OffsetForLeaderTopic(topic="t", partitions=rows)]
    )
    waiting_count = 4
    with Broker() as broker, ExitStack() as stack:
        assert broker._running is not None
        node = broker._running.node
        clients = [
            stack.enter_context(RawClient(broker.bootstrap_servers)) for _ in range(MAX_LARGE + waiting_count)
        ]
        for client in clients:
            client.send(request, 3)
            client.send(ApiVersionsRequest(), 0)
        frame_bytes = len(encode_request(request, 3, 1, "raw"))
        background = node.log_manager.background
        wait_until(lambda: len(background) == MAX_LARGE)
        wait_until(lambda: node.request_memory.total_bytes >= waiting_count * frame_bytes)
        assert is_served(broker)
        assert len(background) == MAX_LARGE
        assert {c.reader.incomplete_since_ms for c in broker._running.server.connections} == {None}
        clients.pop().socket.close()  # its request is probably one of those that wait
        gate.set()
        for client in clients:
            _, response = client.receive(OffsetForLeaderEpochResponse, 3)
            assert len(response.topics[0].partitions) == len(rows)
            assert client.read_frame() is not None
        wait_until(lambda: not node.request_memory.total_bytes)


def test_a_large_request_is_begun_while_many_small_ones_are_answered_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A waiting large request must get its turn. Otherwise an OffsetCommit of 4 KB would wait forever while
    other clients keep listing many groups.
    """
    gate, work = threading.Event(), BackgroundRunner._work
    monkeypatch.setattr(BackgroundRunner, "_work", lambda self: work(self) if gate.is_set() else None)
    tp, committed = TopicPartition("t", 0), CommittedOffset(1, -1, "", 1, -1, -1)
    rows = [OffsetForLeaderEpochRequest.OffsetForLeaderPartition(partition=i) for i in range(5_000)]
    request = OffsetForLeaderEpochRequest(
        topics=[OffsetForLeaderEpochRequest.OffsetForLeaderTopic(topic="t", partitions=rows)]
    )
    with Broker() as broker, ExitStack() as stack:
        assert broker._running is not None
        node = broker._running.node
        for number in range(2_000):
            node.groups.offsets.commit(f"g{number}", {tp: committed}, 1)
        for _ in range(MAX_LARGE + 1):
            stack.enter_context(RawClient(broker.bootstrap_servers)).send(ListGroupsRequest(), 4)
        wait_until(lambda: len(node.log_manager.background) == MAX_LARGE + 1)
        client = stack.enter_context(RawClient(broker.bootstrap_servers))
        client.send(request, 3)
        wait_until(lambda: len(node.log_manager.background) == MAX_LARGE + 2)
        gate.set()
        _, response = client.receive(OffsetForLeaderEpochResponse, 3)
        assert len(response.topics[0].partitions) == len(rows)


def test_offsets_stored_in_a_later_step_are_synced_and_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The response must not wait for a timer or another request.

    The test turns off all timers.
    """
    monkeypatch.setattr(server, "next_wakeup_ms", lambda state: 1 << 50)
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[partition] * 3_000)
    request = OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1, topics=[topic])
    with (
        Broker(config={"log.flush.interval.messages": 1}) as broker,
        RawClient(broker.bootstrap_servers) as client,
    ):
        client.create_topic("t")
        response = client.ask(request, 8)
        assert {row.error_code for row in response.topics[0].partitions} == {0}


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the cost of each request that a broker carries out."""
    found: list[int] = []
    original = RequestHandler.carry_out

    def carry_out(self: RequestHandler, frame: memoryview, now_ms: int, started: float) -> int:
        found.append(original(self, frame, now_ms, started))
        return found[-1]

    monkeypatch.setattr(RequestHandler, "carry_out", carry_out)
    return found


def small_requests_that_write_a_file() -> list[tuple[Message, int]]:
    created = CreateTopicsRequest.CreatableTopic(name="new", num_partitions=1, replication_factor=-1)
    more = CreatePartitionsRequest.CreatePartitionsTopic(name="new", count=2)
    named = MetadataRequest.MetadataRequestTopic(name="auto")
    return [
        (CreateTopicsRequest(topics=[created], timeout_ms=1_000), 5),
        (CreatePartitionsRequest(topics=[more], timeout_ms=1_000), 3),
        (MetadataRequest(topics=[named], allow_auto_topic_creation=True), 9),
        (DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name="new")], timeout_ms=1_000), 6),
        (CreateAclsRequest(creations=[]), 3),
        (DeleteAclsRequest(filters=[]), 3),
        (AlterClientQuotasRequest(entries=[]), 1),
        (AlterUserScramCredentialsRequest(deletions=[], upsertions=[]), 0),
    ]


def test_small_requests_with_much_work_end_the_round(client: RawClient, costs: list[int]) -> None:
    """R1410: 64 pipelined requests, each of which created a topic, blocked all other clients for 1 s."""
    client.ask(ApiVersionsRequest(), 0)
    for message, version in small_requests_that_write_a_file():
        costs.clear()
        client.ask(message, version)
        assert len(costs) == 1 and costs[0] >= MAX_ROUND_REQUESTS, message.api.name
    costs.clear()
    client.ask(ApiVersionsRequest(), 0)
    assert costs == [1]


def test_requests_that_almost_fill_a_step_end_their_round(client: RawClient, costs: list[int]) -> None:
    """R1531: 64 pipelined requests of 30 bytes that described 990 partitions each took 0.08 s together."""
    client.create_topic("described", 990)
    page = DescribeTopicPartitionsRequest
    for topics in ([page.TopicRequest(name="described")], []):
        costs.clear()
        client.ask(page(topics=topics, response_partition_limit=2_000), 0)
        client.ask(page(topics=topics, response_partition_limit=1), 0)
        assert costs[0] >= 990 * ELEMENT_RECORDS // METERED_RECORDS and costs[1] == 1


def test_a_produce_request_for_many_partitions_ends_its_round(client: RawClient, costs: list[int]) -> None:
    """R1553: requests without a response that write to 990 partitions each took 0.2 s in a round of 1 MB."""
    client.create_topic("small", 1)
    for many in (990, 1):
        message = produce_request("small", batch(b"v"), acks=0)
        message.topic_data[0].partition_data *= many
        costs.clear()
        client.send(message, 9)
        client.ask(ApiVersionsRequest(), 0)
        expected = 1 + many * ELEMENT_RECORDS // METERED_RECORDS
        assert costs[0] >= expected if many > 1 else costs[0] == expected


def test_a_produce_request_of_many_topics_costs_more_of_its_round(
    client: RawClient, costs: list[int]
) -> None:
    """R1640: requests for 3,000 topics without partitions took 0.28 s in a round of 1 MB. Requests for more
    than 2,000 are decoded in steps.
    """
    client.create_topic("records", 1)
    message = produce_request("records", batch(b"v" * 100_000), acks=0)
    client.send(message, 9)
    message.topic_data *= DECODED_AT_ONCE - 1
    for topic in message.topic_data:
        topic.name, topic.partition_data = "", []
    client.send(message, 9)
    client.ask(ApiVersionsRequest(), 0)
    # A topic without a name and partitions has three bytes.
    assert costs[-3] == 1 and costs[-2] >= 1 + 3 * DECODED_AT_ONCE // REQUEST_BYTES


def test_changes_of_a_large_transaction_cost_more_of_the_round(client: RawClient, costs: list[int]) -> None:
    """R1411: each change of a transaction of 10,000 partitions took 17 ms, and a round had 64 of them."""
    client.create_topic("t", 2_000)
    made = client.ask(InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=60_000), 4)
    add = AddPartitionsToTxnRequest
    costs.clear()
    for first, end in ((0, 1), (1, 1_999), (1_999, 2_000)):
        topic = add.AddPartitionsToTxnTopic(name="t", partitions=list(range(first, end)))
        message = add(
            v3_and_below_transactional_id="x",
            v3_and_below_producer_id=made.producer_id,
            v3_and_below_producer_epoch=made.producer_epoch,
            v3_and_below_topics=[topic],
        )
        (result,) = client.ask(message, 3).results_by_topic_v3_and_below
        assert not any(row.partition_error_code for row in result.results_by_partition)
    end_txn = EndTxnRequest(
        transactional_id="x",
        producer_id=made.producer_id,
        producer_epoch=made.producer_epoch,
        committed=False,
    )
    assert client.ask(end_txn, 3).error_code == 0
    assert costs[0] == 1 and costs[2] > 10 and costs[3] > 10
