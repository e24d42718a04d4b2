"""Hostile clients that are slow, silent, many or greedy: memory stays bounded, and others are served."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import ssl
import struct
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.broker import RawClient, batch, fetch_request, produce_request, split_batches
from support.security.brokers import Certificates, make_certificates, secured_broker
from support.wait import pass_time, wait_until

from oncelog.config import BROKER
from oncelog.errors import ConfigError
from oncelog.log.partition import Partition
from oncelog.server import listener, server
from oncelog.server.embedded import Broker
from oncelog.testing.broker_process import BrokerProcess
from oncelog.wire.frames import encode_request
from oncelog.wire.messages import ApiVersionsRequest, FetchResponse, InitProducerIdRequest, MetadataRequest

MB = 1 << 20


@contextlib.contextmanager
def many(broker: Broker, count: int) -> Iterator[list[RawClient]]:
    clients: list[RawClient] = []
    try:
        for _ in range(count):
            clients.append(RawClient(broker.bootstrap_servers))
        yield clients
    finally:
        for client in clients:
            client.socket.close()


def tls_client(broker: Broker, certificates: Certificates) -> RawClient:
    client = RawClient(broker.bootstrap_servers)
    # With a small receive buffer, the broker soon has to keep the bytes that the client does not read.
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    context = ssl.create_default_context(cafile=str(certificates.authority))
    client.socket = context.wrap_socket(client.socket, server_hostname="127.0.0.1")
    return client


@pytest.fixture(params=["uvloop", "asyncio"])
def event_loop_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the broker use this event loop."""
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    else:
        pytest.importorskip("uvloop")
    return str(request.param)


def is_served(broker: Broker) -> bool:
    with RawClient(broker.bootstrap_servers) as other:
        return other.ask(ApiVersionsRequest(), 0).error_code == 0


def ended(broker: Broker, bound: str) -> float:
    return broker.metrics()[f"connections_ended.{bound}"]


# --- slow


def test_a_request_that_drips_in_is_cut_off() -> None:
    config = {"oncelog.request.read.timeout.ms": 30_000}
    with Broker(config=config) as broker, many(broker, 20) as slow, many(broker, 1) as (quick,):
        quick.create_topic("t")
        frame = encode_request(produce_request("t", batch(b"slow")), 9, 1, "x")
        for each in slow:
            each.socket.sendall(frame[:3])
        with contextlib.suppress(OSError):
            for byte in frame[3:60]:
                slow[0].socket.sendall(bytes([byte]))
                assert quick.produce("t", batch(b"quick")).error_code == 0
                pass_time(broker, 1_000)
        assert all(each.is_closed() for each in slow)
        assert ended(broker, "oncelog.request.read.timeout.ms") == 20
        assert quick.offset("t") > 0 and b"slow" not in quick.values("t")


def test_a_steady_stream_of_requests_is_not_taken_for_a_slow_one() -> None:
    """Each read ends in the middle of a request, and all reads together take longer than the deadline of one
    request.
    """
    with (
        Broker(config={"oncelog.request.read.timeout.ms": 60_000}) as broker,
        many(broker, 1) as (client,),
    ):
        stream = encode_request(ApiVersionsRequest(), 0, 7, "x") * 200
        step = len(stream) // 60
        for start in range(0, len(stream), step):
            client.socket.sendall(stream[start : start + step])
            client.socket.recv(65_536)
            pass_time(broker, 20_000)
        assert ended(broker, "oncelog.request.read.timeout.ms") == 0


def test_a_handshake_that_drips_in_is_cut_off(tmp_path: Path) -> None:
    with (
        secured_broker(tmp_path / "data", make_certificates(tmp_path), sasl=False) as broker,
        many(broker, 20) as slow,
    ):
        for each in slow:
            each.socket.sendall(b"\x16\x03\x01")
        wait_until(lambda: broker.metrics()["connections"] == 20)
        pass_time(broker, server.HANDSHAKE_MS + 1)
        assert all(each.is_closed() for each in slow)
        assert ended(broker, "handshake") == 20
        assert broker.metrics()["connections"] == 0


def test_connections_count_during_the_handshake(tmp_path: Path) -> None:
    config = {"max.connections.per.ip": 3}
    with (
        secured_broker(tmp_path / "data", make_certificates(tmp_path), sasl=False, **config) as broker,
        many(broker, 3),
    ):
        wait_until(lambda: broker.metrics()["connections"] == 3)
        with RawClient(broker.bootstrap_servers) as fourth:
            assert fourth.is_closed()
        assert ended(broker, "max.connections.per.ip") == 1


def test_a_client_that_never_says_who_it_is_is_cut_off(tmp_path: Path) -> None:
    with secured_broker(tmp_path / "data", users=("alice",)) as broker, many(broker, 20) as slow:
        for each in slow[:10]:
            each.send(ApiVersionsRequest(), 0)
        for each in slow[10:]:
            each.socket.sendall(b"\0\0\1")
        for each in slow[:10]:
            assert each.read_frame() is not None
        wait_until(lambda: broker.metrics()["connections"] == 20)
        pass_time(broker, server.AUTHENTICATION_MS + 1)
        assert all(each.is_closed() for each in slow)
        assert ended(broker, "authentication") == 20


@pytest.mark.skipif(os.geteuid() != 0 or not hasattr(socket, "TCP_KEEPIDLE"), reason="needs TCP_REPAIR")
def test_a_peer_that_vanishes_silently_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer waits for the response to a fetch of one day, so only TCP keep-alive can detect that it has
    vanished.
    """
    probes = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1}
    monkeypatch.setattr(listener, "KEEP_ALIVE", probes)
    with Broker() as broker, many(broker, 1) as (gone,):
        gone.create_topic("t")
        gone.send(fetch_request([("t", 0, 0)], max_wait_ms=86_400_000), 12)
        wait_until(lambda: broker.metrics()["fetches_waiting"] == 1)
        try:
            gone.socket.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR: the close sends no packet
        except PermissionError:
            pytest.skip("the system does not allow TCP_REPAIR")
        gone.socket.close()
        wait_until(lambda: broker.metrics()["connections"] == 0)
        assert broker.metrics()["fetches_waiting"] == 0


# --- many


def test_more_connections_from_an_address_than_it_may_have_are_refused() -> None:
    config = {"max.connections.per.ip": 1, "max.connections.per.ip.overrides": "127.0.0.1:3"}
    with Broker(config=config) as broker:
        with many(broker, 3) as first, RawClient(broker.bootstrap_servers) as fourth:
            assert all(each.ask(ApiVersionsRequest(), 0).error_code == 0 for each in first)
            assert fourth.is_closed()
        wait_until(lambda: broker.metrics()["connections"] == 0)
        assert is_served(broker)
        assert ended(broker, "max.connections.per.ip") == 1
    with pytest.raises(ConfigError, match="ADDRESS:LIMIT"):
        Broker(config={"max.connections.per.ip.overrides": "many"}).start()
    with pytest.raises(ConfigError, match=r"socket\.request\.max\.bytes"):
        Broker(config={"queued.max.request.bytes": MB}).start()


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_many_connections_at_once(tmp_path: Path, count: int) -> None:
    settings = {"max.connections": count + 10}
    with BrokerProcess(tmp_path / "data", settings=settings) as broker, contextlib.ExitStack() as stack:
        quick = stack.enter_context(RawClient(broker.bootstrap_servers))
        quick.create_topic("t")
        before_kb = _rss_kb(broker.pid)
        clients = [stack.enter_context(RawClient(broker.bootstrap_servers)) for _ in range(count)]
        for client in clients:
            client.send(ApiVersionsRequest(), 0)
            client.socket.sendall(struct.pack(">i", 100 * MB) + b"12345")  # begins a request of 100 MB
        assert quick.produce("t", batch(b"beside")).error_code == 0
        assert all(each.read_frame() for each in clients)
        assert quick.produce("t", batch(b"after")).error_code == 0
        per_connection_kb = (_rss_kb(broker.pid) - before_kb) / count
        assert per_connection_kb < 32, f"{per_connection_kb:.1f} KB a connection"


def _rss_kb(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux only")
def test_the_broker_survives_running_out_of_descriptors(tmp_path: Path) -> None:
    """Open many connections. First only the descriptors reserved for the log stay free, then none."""
    with BrokerProcess(tmp_path / "data") as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        assert client.produce("t", batch(b"before")).error_code == 0
        limits = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
        for free in (40, -6):
            used = len(os.listdir(f"/proc/{broker.pid}/fd"))
            resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (used + free, limits[1]))
            with contextlib.ExitStack() as stack:
                for _ in range(used + 60):
                    stack.enter_context(RawClient(broker.bootstrap_servers))
                assert client.produce("t", batch(b"amid")).error_code == 0
                if free > 0:
                    client.create_topic("u", 5)
                    assert client.produce("u", batch(b"amid"), 4).error_code == 0
            resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, limits)
            with RawClient(broker.bootstrap_servers) as late:
                assert late.produce("t", batch(b"after")).error_code == 0


# --- greedy


def test_a_size_that_is_only_claimed_takes_no_memory(broker: Broker) -> None:
    with many(broker, 50) as clients:
        gc.collect()
        tracemalloc.start()
        try:
            for client in clients:
                client.socket.sendall(struct.pack(">i", 100 * MB) + b"x" * 10)
            wait_until(lambda: broker.metrics()["request_bytes_held"] >= 50 * 14)
            assert tracemalloc.get_traced_memory()[1] < 50 * 16_384
        finally:
            tracemalloc.stop()
    wait_until(lambda: broker.metrics()["request_bytes_held"] == 0)
    assert is_served(broker)


def test_half_sent_requests_are_bounded_together() -> None:
    config = {"queued.max.request.bytes": 8 * MB, "socket.request.max.bytes": 8 * MB}
    with Broker(config=config) as broker, many(broker, 30) as greedy:
        for each in greedy:
            with contextlib.suppress(OSError):
                each.socket.sendall(struct.pack(">i", 2 * MB) + bytes(MB))
            assert broker.metrics()["request_bytes_held"] <= 9 * MB
        # Make these connections slower than a new client, which the broker therefore prefers.
        pass_time(broker, 1_500)
        with RawClient(broker.bootstrap_servers) as quick:
            quick.create_topic("t", max_message_bytes=4 * MB)
            assert quick.produce("t", batch(b"x" * 3 * MB)).error_code == 0
        assert ended(broker, "queued.max.request.bytes") > 0


def test_answers_that_nobody_takes_are_bounded_together() -> None:
    """Each client requests 40 MB again and again.

    The broker first makes the responses smaller, and then closes the connections of clients that do not read.
    """
    limit_bytes = 24 * MB
    config = {"oncelog.queued.max.response.bytes": limit_bytes}
    with Broker(config=config) as broker, RawClient(broker.bootstrap_servers) as quick:
        quick.create_topic("t", max_message_bytes=2 * MB)
        for _ in range(40):
            assert quick.produce("t", batch(b"x" * MB)).error_code == 0
        with many(broker, 40) as greedy:
            for each in greedy:
                for _ in range(8):
                    with contextlib.suppress(OSError):
                        each.send(fetch_request([("t", 0, 0)], partition_max_bytes=40 * MB), 12)
                assert broker.metrics()["response_bytes_held"] <= limit_bytes
            data = quick.fetch("t", 0, partition_max_bytes=40 * MB).records
            assert split_batches(data), "who takes its answers gets some"
            assert ended(broker, "oncelog.queued.max.response.bytes") > 0
        wait_until(lambda: broker.metrics()["connections"] == 1)
        wait_until(lambda: broker.metrics()["response_bytes_held"] == 0)
        assert len(split_batches(quick.fetch("t", 0, partition_max_bytes=12 * MB).records)) > 3


def test_responses_that_wait_for_the_disk_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1790: a response behind one that waits for a sync was counted only by the next check of its
    connection. Until then, each client got as much as if it were the only one.
    """
    limit_bytes, flush, may_sync = 24 * MB, Partition.flush, threading.Event()

    def slow_flush(partition: Partition) -> None:
        may_sync.wait(60)
        flush(partition)

    monkeypatch.setattr(server, "SWEEP_SECONDS", 1_000.0)
    config = {"oncelog.queued.max.response.bytes": limit_bytes}
    with Broker(config=config) as broker, many(broker, 11) as (quick, *greedy):
        quick.create_topic("t", max_message_bytes=2 * MB)
        for _ in range(10):
            assert quick.produce("t", batch(b"x" * MB)).error_code == 0
        quick.create_topic("synced", flush_messages=1)
        monkeypatch.setattr(Partition, "flush", slow_flush)
        try:
            for count, each in enumerate(greedy, 1):
                each.send(produce_request("synced", batch(b"x")), 9)
                each.send(fetch_request([("t", 0, 0)], partition_max_bytes=10 * MB), 12)
                wait_until(lambda count=count: broker.metrics()["requests.Fetch"] == count)
                assert broker._running is not None
                waiting = [each._responses.slot_bytes for each in list(broker._running.server.connections)]
                assert sum(waiting) <= limit_bytes
            assert broker.metrics()["response_bytes_held"] >= sum(waiting) > limit_bytes // 2
        finally:
            may_sync.set()


@pytest.mark.usefixtures("event_loop_of")
def test_unread_responses_over_tls_are_bounded_together(tmp_path: Path) -> None:
    """Each client requests 40 MB once. The write buffer size of a TLS transport omits the bytes that the
    socket has not accepted.
    """
    certificates, limit_bytes = make_certificates(tmp_path), 24 * MB
    config = {"oncelog.queued.max.response.bytes": limit_bytes}
    with (
        secured_broker(tmp_path / "data", certificates, sasl=False, **config) as broker,
        contextlib.ExitStack() as stack,
    ):
        quick = stack.enter_context(tls_client(broker, certificates))
        quick.create_topic("t", max_message_bytes=2 * MB)
        stored = [bytes(batch(bytes([number]) * MB)) for number in range(40)]
        for each in stored:
            assert quick.produce("t", each).error_code == 0
        greedy = [stack.enter_context(tls_client(broker, certificates)) for _ in range(20)]
        for client in greedy:
            client.send(fetch_request([("t", 0, 0)], partition_max_bytes=40 * MB), 12)
        # The kernel takes up to 4 MB of each response, and the broker holds the rest.
        wait_until(lambda: broker.metrics()["response_bytes_held"] >= 2 * MB)
        assert broker.metrics()["response_bytes_held"] <= limit_bytes
        for client in greedy:
            _, response = client.receive(FetchResponse, 12)
            batches = split_batches(response.responses[0].partitions[0].records)
            assert [each[61:] for each in batches] == [each[61:] for each in stored[: len(batches)]]
            assert batches
        wait_until(lambda: broker.metrics()["response_bytes_held"] == 0)


@pytest.mark.usefixtures("event_loop_of")
def test_a_tls_client_that_resets_its_connection_costs_a_few_of_its_fetches(tmp_path: Path) -> None:
    """A TLS transport does not report that the socket's transport has failed, and discards all further
    writes. The broker must still stop the client's fetches.
    """
    certificates = make_certificates(tmp_path)
    with (
        secured_broker(tmp_path / "data", certificates, sasl=False) as broker,
        tls_client(broker, certificates) as quick,
    ):
        quick.create_topic("t", max_message_bytes=2 * MB)
        for _ in range(8):
            assert quick.produce("t", batch(b"x" * MB)).error_code == 0
        hostile = tls_client(broker, certificates)
        fetch = encode_request(fetch_request([("t", 0, 0)], partition_max_bytes=8 * MB), 12, 1, "x")
        hostile.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        hostile.socket.sendall(fetch * 60)
        os.close(hostile.socket.detach())
        wait_until(lambda: broker.metrics()["connections"] == 1)
        assert quick.produce("t", batch(b"after")).error_code == 0
        assert broker.metrics().get("requests.Fetch", 0) < 10


@pytest.mark.usefixtures("event_loop_of")
def test_a_large_response_over_tls_is_sent_before_the_connection_is_closed(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    with (
        secured_broker(tmp_path / "data", certificates, sasl=False) as broker,
        tls_client(broker, certificates) as client,
    ):
        client.create_topic("t", max_message_bytes=2 * MB)
        for _ in range(8):
            assert client.produce("t", batch(b"x" * MB)).error_code == 0
        fetch = encode_request(fetch_request([("t", 0, 0)], partition_max_bytes=9 * MB), 12, 1, "x")
        client.socket.sendall(fetch + struct.pack(">i", -1))
        wait_until(lambda: broker.metrics()["response_bytes_held"] > 0)
        _, response = client.receive(FetchResponse, 12)
        assert len(split_batches(response.responses[0].partitions[0].records)) == 8
        assert client.is_closed()
        wait_until(lambda: broker.metrics()["connections"] == 0)


@pytest.mark.usefixtures("event_loop_of")
def test_the_checks_go_on_after_a_paused_tls_connection_was_closed(tmp_path: Path) -> None:
    """R1761: the second `close` of asyncio's TLS transport made the check of the connection raise, and no
    deadline of any connection was checked again.
    """
    certificates = make_certificates(tmp_path)
    with (
        secured_broker(tmp_path / "data", certificates, sasl=False) as broker,
        tls_client(broker, certificates) as client,
    ):
        assert client.ask(ApiVersionsRequest(), 0).error_code == 0
        running, thread = broker._running, broker._thread
        assert running is not None and thread is not None
        (connection,) = running.server.connections

        async def close_while_paused() -> None:
            connection.pause_writing()
            connection.close("a test")
            connection.resume_writing()  # the client has read everything
            connection.note_responses(0)

        thread.run(close_while_paused(), 60)
        assert client.is_closed()


def test_a_check_that_fails_does_not_end_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker(config={"connections.max.idle.ms": 60_000}) as broker, many(broker, 2) as clients:
        for client in clients:
            assert client.ask(ApiVersionsRequest(), 0).error_code == 0
        assert broker._running is not None
        first, _ = broker._running.server.connections
        monkeypatch.setattr(first, "note_responses", Mock(side_effect=AttributeError))
        pass_time(broker, 61_000)
        assert clients[1].is_closed()


def test_unread_responses_to_thousands_of_requests_are_bounded() -> None:
    """The responses are much larger than the requests. New requests start only while the client reads."""
    with Broker() as broker, RawClient(broker.bootstrap_servers) as quick:
        for number in range(5):
            quick.create_topic(f"{number:03}-" + "x" * 200, 50)
        request = encode_request(MetadataRequest(topics=None), 9, 1, "x")
        with many(broker, 5) as greedy:
            for each in greedy:
                each.socket.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    each.socket.sendall(request * 3_000)
                assert quick.produce("000-" + "x" * 200, batch(b"beside")).error_code == 0
            assert broker.metrics()["requests.Metadata"] < 5 * 3_000
            assert broker.metrics()["response_bytes_held"] < 5 * 2 * MB
            # A client that starts to read gets every response.
            reader, answers = greedy[0], 0
            reader.socket.settimeout(60)
            for _ in range(200):
                answers += reader.read_frame() is not None
            assert answers == 200


def test_a_fetch_of_a_day_does_not_keep_what_is_sent_behind_it() -> None:
    with Broker() as broker, many(broker, 1) as (client,), many(broker, 1) as (other,):
        client.create_topic("t")
        client.send(fetch_request([("t", 0, 0)], max_wait_ms=86_400_000), 12)
        stream = encode_request(ApiVersionsRequest(), 0, 7, "x") * 400_000
        client.socket.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            client.socket.sendall(stream)
        assert broker.metrics()["request_bytes_held"] < 3 * MB
        assert other.produce("t", batch(b"x")).error_code == 0
        client.socket.settimeout(60)
        assert all(client.read_frame() is not None for _ in range(1_000))


def test_connections_keep_no_long_client_ids() -> None:
    """R1762: a client id took 131 KB for each connection, and twice as much while a fetch waited."""
    count, client_id = 20, "\U0001f600" + "x" * 32_600
    requests: list[tuple[Any, int]] = [
        (InitProducerIdRequest(transactional_id=None), 4),
        (fetch_request([("t", 0, 0)], max_wait_ms=600_000), 12),
    ]
    with Broker() as broker, many(broker, count) as clients, many(broker, 1) as (other,):
        other.create_topic("t")
        wait_until(lambda: broker.metrics()["connections"] == count + 1)
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for client in clients:
                for message, version in requests:
                    client.socket.sendall(encode_request(message, version, 1, client_id))
            wait_until(lambda: broker.metrics()["fetches_waiting"] == count)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (after - before) / count < 50_000


def test_settings_have_kafkas_names_and_defaults() -> None:
    defaults = {setting.key: setting.default for setting in BROKER.settings}
    assert defaults["connections.max.idle.ms"] == 600_000
    assert defaults["max.connections.per.ip"] == 2**31 - 1
    assert defaults["max.connections.per.ip.overrides"] == ""
    assert defaults["socket.request.max.bytes"] == 104_857_600
