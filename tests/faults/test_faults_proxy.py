"""The proxy over real sockets, between a minimal client and a scripted broker."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest
from support.faults import ScriptedBroker, TinyClient, base_offset, produce

from oncelog.errors import ConfigError, MisuseError
from oncelog.testing.proxy import Direction, Fate, Proxy, Rule, WireEvent
from oncelog.testing.proxy.decode import request_event, response_event
from oncelog.testing.proxy.group_messages import MemberRequest
from oncelog.testing.proxy.txn_messages import TxnRequest
from oncelog.wire.frames import encode_request
from oncelog.wire.messages import (
    ApiVersionsRequest,
    ConsumerGroupHeartbeatRequest,
    DescribeClusterRequest,
    EndTxnRequest,
    EndTxnResponse,
    FetchRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    JoinGroupRequest,
    Message,
    MetadataRequest,
    TxnOffsetCommitRequest,
)

VERSION = 9


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as scripted:
        yield scripted


def fates(events: Sequence[WireEvent], direction: Direction) -> list[Fate]:
    return [event.fate for event in events if event.direction is direction]


def seen(count: int, fate: Fate, direction: Direction) -> object:
    return lambda events: fates(events, direction).count(fate) >= count


def test_messages_pass_unchanged_and_are_recorded(broker: ScriptedBroker) -> None:
    with Proxy(broker.address) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        assert base_offset(client.call(produce(0), VERSION)) == 0
        assert client.call(InitProducerIdRequest(), 4).producer_id == 1000
        request, response, _, init = proxy.events
    assert (request.api, request.api_version, request.client_id, request.acks) == ("Produce", 9, "tiny", -1)
    (batch,) = request.batches
    assert (batch.topic, batch.partition, batch.producer_id, batch.producer_epoch) == ("t", 0, 1000, 0)
    assert (batch.base_sequence, batch.last_sequence, batch.records_count) == (0, 0, 1)
    assert (response.outcomes[0].base_offset, response.outcomes[0].error_code) == (0, 0)
    assert response.correlation_id == request.correlation_id
    assert init.producer == (1000, 0)
    assert [event.number for event in proxy.events] == [1, 2, 3, 4]
    assert broker.sequences == [0]


def test_a_cut_response_was_handled_by_the_broker_and_ends_the_connection(broker: ScriptedBroker) -> None:
    rule = Rule(action="cut", api="Produce", nth=2)
    with Proxy(broker.address, rules=[rule]) as proxy:
        with TinyClient(proxy.bootstrap_servers) as client:
            assert client.call(produce(0), VERSION) is not None
            assert client.call(produce(1), VERSION) is None
        with TinyClient(proxy.bootstrap_servers) as client:
            assert base_offset(client.call(produce(1), VERSION)) == 20
        assert fates(proxy.events, Direction.RESPONSE) == [Fate.PASSED, Fate.CUT, Fate.PASSED]
    assert broker.sequences == [0, 1, 1]


def test_a_cut_request_never_reaches_the_broker(broker: ScriptedBroker) -> None:
    rule = Rule(action="cut", api="Produce", direction="request", nth=1)
    with Proxy(broker.address, rules=[rule]) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        assert client.call(produce(0), VERSION) is None
    assert broker.sequences == []


def test_requests_sent_before_a_cut_are_still_handled_and_their_responses_lost(
    broker: ScriptedBroker,
) -> None:
    rules = [
        Rule(action="hold", api="Produce", direction="response", nth=1, release_after=2),
        Rule(action="cut", api="Produce", nth=2),
    ]
    with Proxy(broker.address, rules=rules) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        for sequence in range(3):
            client.send(produce(sequence), VERSION)
        assert base_offset(client.receive()) == 0
        assert client.receive() is None
        assert proxy.wait_until(seen(1, Fate.LOST, Direction.RESPONSE))
        assert fates(proxy.events, Direction.RESPONSE).count(Fate.CUT) == 1
    assert broker.sequences == [0, 1, 2]


@pytest.mark.parametrize("direction", ["request", "response"])
def test_after_a_dropped_message_the_connection_stays_open_and_silent(
    broker: ScriptedBroker, direction: str
) -> None:
    rule = Rule(action="drop", api="Produce", direction=direction, nth=1)
    with Proxy(broker.address, rules=[rule]) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        client.send(produce(0), VERSION)
        client.send(produce(1), VERSION)
        assert proxy.wait_until(seen(1, Fate.LOST, Direction.RESPONSE))
        assert client.is_silent()
    assert broker.sequences == ([1] if direction == "request" else [0, 1])


def test_a_held_request_is_overtaken_and_responses_keep_the_order_of_the_client(
    broker: ScriptedBroker,
) -> None:
    rule = Rule(action="hold", api="Produce", nth=2, release_after=1)
    with Proxy(broker.address, rules=[rule]) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        for sequence in range(4):
            client.send(produce(sequence), VERSION)
        assert [base_offset(client.receive()) for _ in range(4)] == [0, 20, 10, 30]
        assert Fate.QUEUED in fates(proxy.events, Direction.RESPONSE)
    assert broker.sequences == [0, 2, 1, 3]


def test_a_held_request_arrives_after_its_connection_ended(broker: ScriptedBroker) -> None:
    rule = Rule(action="hold", api="Produce", nth=1)
    with Proxy(broker.address, rules=[rule]) as proxy:
        with TinyClient(proxy.bootstrap_servers) as client:
            client.send(produce(0), VERSION)
            assert proxy.wait_until(seen(1, Fate.HELD, Direction.REQUEST))
        with TinyClient(proxy.bootstrap_servers) as client:
            client.call(produce(1), VERSION)
        assert proxy.release() == 1
        assert proxy.wait_until(seen(1, Fate.UNEXPECTED, Direction.RESPONSE))
        assert proxy.release() == 0
    assert broker.sequences == [1, 0]


def test_a_held_request_can_be_lost_or_released_after_a_delay(broker: ScriptedBroker) -> None:
    rules = [
        Rule(action="hold", api="Produce", nth=1),
        Rule(action="hold", api="Produce", nth=2, delay_ms=20),
    ]
    with Proxy(broker.address, rules=rules) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        client.send(produce(0), VERSION)
        client.send(produce(1), VERSION)
        assert proxy.wait_until(seen(1, Fate.RELEASED, Direction.REQUEST))
        assert proxy.release(lose=True) == 1
        assert fates(proxy.events, Direction.REQUEST)[-1] is Fate.LOST
        assert proxy.wait_until(seen(1, Fate.QUEUED, Direction.RESPONSE))
    assert broker.sequences == [1]


def test_a_duplicate_reaches_the_broker_twice_and_the_client_gets_one_response(
    broker: ScriptedBroker,
) -> None:
    rule = Rule(action="duplicate", api="Produce", nth=1)
    with Proxy(broker.address, rules=[rule]) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        assert base_offset(client.call(produce(0), VERSION)) == 0
        assert base_offset(client.call(produce(1), VERSION)) == 20
        assert fates(proxy.events, Direction.REQUEST) == [Fate.PASSED, Fate.COPY, Fate.PASSED]
        assert Fate.UNEXPECTED in fates(proxy.events, Direction.RESPONSE)
    assert broker.sequences == [0, 0, 1]


def test_a_late_copy_waits_for_later_requests(broker: ScriptedBroker) -> None:
    rule = Rule(action="duplicate", api="Produce", nth=1, release_after=2)
    with Proxy(broker.address, rules=[rule]) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        assert [base_offset(client.call(produce(n), VERSION)) for n in range(3)] == [0, 10, 20]
        assert proxy.wait_until(seen(1, Fate.UNEXPECTED, Direction.RESPONSE))
    assert broker.sequences == [0, 1, 2, 0]


def test_a_failed_request_is_answered_by_the_proxy(broker: ScriptedBroker) -> None:
    rules = [
        Rule(action="fail", api="Produce", nth=1, error="NOT_ENOUGH_REPLICAS"),
        Rule(action="fail", api="Produce", direction="response", nth=1, error="REQUEST_TIMED_OUT"),
    ]
    with Proxy(broker.address, rules=rules) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        answers = [client.call(produce(n), VERSION) for n in range(3)]
        codes = [answer.responses[0].partition_responses[0].error_code for answer in answers]
        assert codes == [19, 7, 0]
        forged = [event for event in proxy.events if event.fate is Fate.FORGED]
        assert [event.outcomes[0].error_name for event in forged if event.outcomes] == [
            "NOT_ENOUGH_REPLICAS",
            "REQUEST_TIMED_OUT",
        ]
    assert broker.sequences == [1, 2]


def test_requests_without_acknowledgement_have_no_response(broker: ScriptedBroker) -> None:
    rule = Rule(action="drop", api="Produce", nth=2)
    with Proxy(broker.address, rules=[rule]) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        for sequence in range(3):
            client.send(produce(sequence, acks=0), VERSION, answered=False)
        assert base_offset(client.call(produce(3), VERSION)) == 20
    assert broker.sequences == [0, 2, 3]


def test_delay_and_throttle_lose_nothing(broker: ScriptedBroker) -> None:
    rules = [
        Rule(action="delay", api="Produce", delay_ms=5),
        Rule(action="throttle", api="Produce", direction="response", rate_bytes_s=100_000),
    ]
    with Proxy(broker.address, rules=rules) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        assert [base_offset(client.call(produce(n), VERSION)) for n in range(5)] == [0, 10, 20, 30, 40]


def test_every_broker_of_a_cluster_is_reached_through_the_proxy() -> None:
    with ScriptedBroker() as one, ScriptedBroker() as two, ScriptedBroker() as three:
        peers = [(n, "127.0.0.1", broker.port) for n, broker in enumerate((one, two, three))]
        real = {broker.port for broker in (one, two, three)}
        for broker in (one, two, three):
            broker.peers = peers
        with Proxy(one.address) as proxy:
            with TinyClient(proxy.bootstrap_servers) as client:
                ports = {b.node_id: b.port for b in client.call(MetadataRequest(), 9).brokers}
                assert ports[0] == proxy.port
                assert len(set(ports.values()) | real) == 6
                cluster = client.call(DescribeClusterRequest(), 0)
                assert {b.broker_id: b.port for b in cluster.brokers} == ports
                assert client.call(FindCoordinatorRequest(key="g"), 2).port == ports[2]
                response = client.call(FindCoordinatorRequest(coordinator_keys=["g"]), 4)
                assert response.coordinators[0].port == ports[2]
                answer = client.call(produce(0), 10)
                assert {n.node_id: n.port for n in answer.node_endpoints} == ports
                fetched = client.call(FetchRequest(), 16)
                assert {n.node_id: n.port for n in fetched.node_endpoints} == ports
            with TinyClient(f"127.0.0.1:{ports[2]}") as client:
                assert client.call(produce(7), VERSION) is not None
            assert proxy.events[-1].node == three.address
        assert three.sequences == [7]


def test_versions_that_the_proxy_cannot_decode_are_not_offered(broker: ScriptedBroker) -> None:
    with Proxy(broker.address) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        rows = {row.api_key: row.max_version for row in client.call(ApiVersionsRequest(), 3).api_keys}
    assert rows == {0: 12, 18: 4}


def test_one_seed_gives_the_same_fates(broker: ScriptedBroker) -> None:
    def run(seed: int) -> list[Fate]:
        rule = Rule(action="duplicate", api="Produce", probability=0.4)
        with Proxy(broker.address, rules=[rule], seed=seed) as proxy:
            with TinyClient(proxy.bootstrap_servers) as client:
                for sequence in range(30):
                    client.call(produce(sequence), VERSION)
            return fates(proxy.events, Direction.REQUEST)

    assert run(5) == run(5) != run(6)


def test_cut_ends_all_connections_and_later_ones_work(broker: ScriptedBroker) -> None:
    with Proxy(broker.address) as proxy:
        with TinyClient(proxy.bootstrap_servers) as client:
            client.call(produce(0), VERSION)
            assert proxy.cut() == 1
            assert client.sock.recv(1) == b""
        with TinyClient(proxy.bootstrap_servers) as client:
            assert client.call(produce(1), VERSION) is not None


def test_an_absent_broker_is_a_closed_connection_and_a_note() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Proxy(f"127.0.0.1:{port}") as proxy, TinyClient(proxy.bootstrap_servers) as client:
        assert client.sock.recv(1) == b""
        assert "no broker at" in proxy.events[0].detail


@pytest.mark.parametrize("noise", [b"\xff\xff\xff\xff rubbish", b"\x00\x00\x00\x02xx"])
def test_a_client_of_another_protocol_is_disconnected(broker: ScriptedBroker, noise: bytes) -> None:
    with Proxy(broker.address) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        client.sock.sendall(noise)
        assert client.sock.recv(1) == b""
        assert "not a Kafka client" in proxy.events[0].detail


def test_a_broker_that_ends_closes_the_client_after_its_responses(broker: ScriptedBroker) -> None:
    with Proxy(broker.address) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        assert client.call(produce(0), VERSION) is not None
        broker.__exit__()
        assert client.sock.recv(1) == b""


def test_misuse_raises_misuse_error(broker: ScriptedBroker) -> None:
    proxy = Proxy(broker.address)
    with pytest.raises(MisuseError, match="not started"):
        _ = proxy.bootstrap_servers
    with pytest.raises(MisuseError, match="not running"):
        proxy.release()
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        Proxy("localhost")


def test_responses_behind_a_held_one_wait_and_are_lost_with_it(broker: ScriptedBroker) -> None:
    rule = Rule(action="hold", api="Produce", direction="response", nth=1)
    with Proxy(broker.address, rules=[rule]) as proxy, TinyClient(proxy.bootstrap_servers) as client:
        for sequence in range(6):
            client.send(produce(sequence), VERSION)
        assert proxy.wait_until(seen(5, Fate.QUEUED, Direction.RESPONSE))
        assert client.is_silent(0.05)
        assert proxy.release(lose=True) == 1
        assert client.receive() is None
        response_fates = fates(proxy.events, Direction.RESPONSE)
        assert response_fates == [Fate.HELD, *[Fate.QUEUED] * 5, Fate.CUT, *[Fate.LOST] * 5]
    assert broker.sequences == list(range(6))


def test_clients_can_get_another_host_name_of_the_proxy(broker: ScriptedBroker) -> None:
    with Proxy(broker.address, advertised_host="localhost") as proxy:
        assert proxy.bootstrap_servers == f"localhost:{proxy.port}"
        with TinyClient(f"127.0.0.1:{proxy.port}") as client:
            (named,) = client.call(MetadataRequest(), 9).brokers
    assert (named.host, named.port) == ("localhost", proxy.port)


def test_events_of_transactions_carry_fields_beside_their_text() -> None:
    message = EndTxnRequest(transactional_id="id/3", producer_id=7, producer_epoch=2, committed=True)
    frame = encode_request(message, 3, 1, "c")[4:]
    header, request = request_event(frame, 1, "broker:1")
    assert request.txn == TxnRequest("id/3", producer_id=7, producer_epoch=2, is_commit=True)
    assert (request.said, request.to_dict()["txn"]["producer_id"]) == ("COMMIT  pid 7 epoch 2", 7)
    response = response_event(request, frame, EndTxnResponse(error_code=47))
    assert (response.txn_error_code, response.said) == (47, "INVALID_PRODUCER_EPOCH")
    _, malformed = request_event(frame[: header.body_position], 1, "broker:1")
    assert malformed.txn is None and malformed.said == malformed.decode_error != ""


@pytest.mark.parametrize(
    ("message", "version", "member"),
    [
        (JoinGroupRequest(group_id="g", group_instance_id="i"), 5, MemberRequest("g", "", None, "i")),
        (
            ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=4),
            0,
            MemberRequest("g", "m", 4, None),
        ),
        (
            TxnOffsetCommitRequest(group_id="g", generation_id=3, member_id="m"),
            3,
            MemberRequest("g", "m", 3, None),
        ),
        (TxnOffsetCommitRequest(group_id="g"), 0, MemberRequest("g", "", None, None)),
    ],
)
def test_events_name_the_member_of_a_group(message: Message, version: int, member: MemberRequest) -> None:
    _, event = request_event(encode_request(message, version, 1, "c")[4:], 1, "broker:1")
    assert event.member == member


@pytest.mark.parametrize("level", [0, 1])
def test_events_name_the_isolation_level_of_a_fetch(level: int) -> None:
    frame = encode_request(FetchRequest(isolation_level=level), 4, 1, "c")[4:]
    assert request_event(frame, 1, "broker:1")[1].isolation_level == level
