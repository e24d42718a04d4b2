"""The counters of the broker, their form for Prometheus, and the alert rules on their names."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.broker import RawClient, batch, wait_until
from support.client import append, batch_of
from support.fuzz.targets import open_node
from support.tool import load_tool

import oncelog
from oncelog.broker.append_events import AppendEvent
from oncelog.broker.metrics import GAUGES, Metrics, families, prometheus_lines
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import ConfigError, InvalidProducerEpoch, InvalidRecord, OutOfOrderSequenceNumber
from oncelog.log.partition import Partition
from oncelog.runtime.clock import Clock
from oncelog.server import metrics_http
from oncelog.server.embedded import Broker, check_metrics, recover_node
from oncelog.server.metrics_http import MAX_CONNECTIONS, MetricsServer
from oncelog.server.process_metrics import LoopLag
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import TopicPartition

ALERTS = Path(__file__).parents[2] / "docs" / "alerts.yml"
DASHBOARD = ALERTS.with_name("grafana.json")
METRIC = re.compile(r"(?:oncelog|process)_\w+")


def scrape(broker: Broker) -> dict[str, float]:
    """Return the metrics page as Prometheus reads it, with the value of each `name{labels}`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.metrics_port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


@pytest.mark.behaviour("I22", "I19")
def test_duplicates_refusals_and_fenced_producers_are_counted() -> None:
    with Broker(metrics_port=0) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("counted")
        pid = client.new_producer_id()
        assert client.produce("counted", batch(b"1", b"2", pid=pid, sequence=0)).error_code == 0
        assert client.produce("counted", batch(b"1", b"2", pid=pid, sequence=0)).error_code == 0
        gap = client.produce("counted", batch(b"9", pid=pid, sequence=9))
        assert gap.error_code == OutOfOrderSequenceNumber.code
        assert client.produce("counted", batch(b"3", pid=pid, epoch=1, sequence=0)).error_code == 0
        late = client.produce("counted", batch(b"4", pid=pid, epoch=0, sequence=2))
        assert late.error_code == InvalidProducerEpoch.code
        read, counted = scrape(broker), broker.metrics()
    assert read["oncelog_duplicates_acknowledged_total"] == counted["duplicates_acknowledged"] == 1
    assert read["oncelog_out_of_order_refused_total"] == counted["out_of_order_refused"] == 1
    assert read["oncelog_fenced_refused_total"] == counted["fenced_refused"] == 1
    assert read["oncelog_producer_ids_active"] == counted["producer_ids_active"] == 1
    assert read["oncelog_batches_stored_total"] == 2
    assert read["oncelog_records_stored_total"] == 3
    assert read['oncelog_request_duration_seconds_count{api="Produce"}'] == 5
    assert read['oncelog_append_errors_total{error="OUT_OF_ORDER_SEQUENCE_NUMBER"}'] == 1


@pytest.mark.behaviour("I23")
@pytest.mark.parametrize(
    "number", [0, 999_999, 1_234_567, 1_234_571, 123_456_789_012, 2**53 - 1, 2**53 + 1, 2**63 - 1]
)
def test_a_counter_is_exported_with_all_its_digits(number: int) -> None:
    metrics = Metrics(bytes_received=number)
    metrics.append_errors["CORRUPT_MESSAGE"] = number
    metrics.append_errors['a "name"\\ of\ntwo lines'] = 1
    for _ in range(3):
        metrics.observe("Produce", 0.1)
    gauges = {name: 0.0 for name in GAUGES} | {"disk_free_bytes": 79_149_312_345.0, "connections": number}
    text = "".join(prometheus_lines(families(metrics, gauges)))
    samples = {
        (sample.name, *sample.labels.values()): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert f"\noncelog_bytes_received_total {number}\n" in text
    assert samples["oncelog_bytes_received_total",] == samples["oncelog_connections",] == float(number)
    assert samples["oncelog_append_errors_total", "CORRUPT_MESSAGE"] == float(number)
    assert samples["oncelog_append_errors_total", 'a "name"\\ of\ntwo lines'] == 1
    assert samples["oncelog_disk_free_bytes",] == 79_149_312_345.0
    assert samples["oncelog_request_duration_seconds_sum", "Produce"] == 0.1 + 0.1 + 0.1
    assert samples["oncelog_request_duration_seconds_count", "Produce"] == 3


@pytest.mark.behaviour("I23")
def test_counters_that_alerts_watch_begin_at_zero() -> None:
    """Prometheus sees no increase between the absence of a counter and its first value."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    # Counters whose labels are matched by a pattern ({label=~"..."}) are left out.
    counter = re.compile(r'oncelog_\w+_total(?:\{\w+="[^"]*"\}|(?!\w|\{))')
    watched = {name for rule in rules for name in counter.findall(rule["expr"])}
    assert 'oncelog_append_errors_total{error="KAFKA_STORAGE_ERROR"}' in watched
    with Broker(metrics_port=0) as broker:
        read = scrape(broker)
    assert {name: read.get(name) for name in watched} == dict.fromkeys(watched, 0)


def test_every_alert_is_about_metrics_that_are_exported() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    with Broker(metrics_port=0) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("alerted")
        client.produce("alerted", batch(b"gap", pid=client.new_producer_id(), epoch=0, sequence=1))
        exported = {name.partition("{")[0] for name in scrape(broker)}
    named = {name for rule in rules for name in re.findall(r"oncelog_\w+", rule["expr"])}
    assert named <= exported
    panels = json.loads(DASHBOARD.read_text())["panels"]
    drawn = {
        name for panel in panels for target in panel["targets"] for name in METRIC.findall(target["expr"])
    }
    by_name = {
        f"oncelog_partition_{name}" for name in ("start_offset", "stable_offset", "end_offset", "size_bytes")
    }
    assert drawn and drawn - by_name <= exported | {"oncelog_request_duration_seconds_bucket"}
    for about in ("out_of_order_refused", "fenced_refused", "transactions_timed_out"):
        assert any(about in name for name in named)
    for rule in rules:
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_the_dashboard_is_fresh() -> None:
    assert DASHBOARD.read_text() == load_tool("dashboard").text(), "run: make reference"


def test_metrics_need_the_token_if_one_is_set(caplog: pytest.LogCaptureFixture) -> None:
    with Broker(metrics_port=0, config={"oncelog.metrics.token": "s3cr3t"}) as broker:
        url = f"http://127.0.0.1:{broker.metrics_port}/metrics"
        for shown in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cr3t"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(url, headers=shown), timeout=60)
        right = urllib.request.Request(url, headers={"Authorization": "Bearer s3cr3t"})
        with urllib.request.urlopen(right, timeout=60) as page:
            assert b"oncelog_connections" in page.read()
    assert "s3cr3t" not in caplog.text


def test_an_empty_metrics_token_is_refused() -> None:
    for token in ("", " "):
        with pytest.raises(ConfigError, match=r"oncelog\.metrics\.token is empty"):
            check_metrics("127.0.0.1", BROKER.parse({"oncelog.metrics.token": token}))
        with (
            pytest.raises(ConfigError, match="is empty"),
            Broker(metrics_port=0, config={"oncelog.metrics.token": token}),
        ):
            pass


def test_metrics_by_partition_are_exported_if_a_setting_allows_their_names() -> None:
    for is_allowed in (False, True):
        config = {"oncelog.metrics.names": is_allowed, "transaction.partition.verification.enable": False}
        with Broker(metrics_port=0, config=config) as broker, RawClient(broker.bootstrap_servers) as client:
            client.create_topic("named", 2)
            client.produce("named", batch(b"1", b"2"))
            lost = batch_of(b"3", producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True)
            append(broker.bootstrap_servers, TopicPartition("named", 0), lost, transactional_id="open")
            read = scrape(broker)
        assert read["oncelog_records_held_back"] == 1 and read["oncelog_partitions_held_back"] == 1
        named = {name: value for name, value in read.items() if "partition=" in name}
        assert bool(named) is is_allowed
        if is_allowed:
            where = '{topic="named",partition="0"}'
            assert named[f"oncelog_partition_start_offset{where}"] == 0
            assert named[f"oncelog_partition_stable_offset{where}"] == 2
            assert named[f"oncelog_partition_end_offset{where}"] == 3
            assert named[f"oncelog_partition_size_bytes{where}"] > 2 * 61


def test_clients_are_served_while_the_metrics_of_many_partitions_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One topic is created and another one deleted meanwhile."""
    monkeypatch.setattr(metrics_http, "STEP_SECONDS", 0.0)
    node = recover_node(MemoryDisk(), BROKER.parse({"oncelog.metrics.names": True}), Clock())
    topic, _ = node.topics.create("t", 100, {}, 0), node.topics.create("left", 1, {}, 0)
    turns: list[int] = []

    async def serve_others() -> None:
        while True:
            turns.append(len(turns))
            if len(turns) == 20:
                node.topics.delete([topic])
                node.topics.create("new", 1, {}, 0)
            await asyncio.sleep(0)

    async def collect() -> str:
        others = asyncio.get_running_loop().create_task(serve_others())
        try:
            return await MetricsServer(node, "127.0.0.1", 0)._text()
        finally:
            others.cancel()

    text = asyncio.run(collect())
    assert len(turns) > 100
    assert "\noncelog_partitions 101.0\n" in text
    assert 'oncelog_partition_end_offset{topic="left",partition="0"} 0.0\n' in text


def test_responses_with_metrics_are_made_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1344: with 20 scrapes at once, the broker did a step of each of them before it served a client."""
    monkeypatch.setattr(metrics_http, "STEP_SECONDS", 0.0)
    node = recover_node(MemoryDisk(), BROKER.parse({}), Clock())
    node.topics.create("t", 100, {}, 0)
    turns = 0

    async def serve_others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def collect(times: int) -> int:
        nonlocal turns
        server, turns = MetricsServer(node, "127.0.0.1", 0), 0
        others = asyncio.get_running_loop().create_task(serve_others())
        await asyncio.gather(*(server._response(b"GET /metrics HTTP/1.1") for _ in range(times)))
        others.cancel()
        return turns

    assert asyncio.run(collect(5)) >= 5 * asyncio.run(collect(1)) - 20


@pytest.mark.parametrize("request_text", [b"", b"GET /metrics HTTP/1.1\r\n\r\n"], ids=["idle", "scrape"])
def test_a_stop_while_metrics_are_collected_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, request_text: bytes
) -> None:
    """R1345: Python 3.11 printed the traceback of a CancelledError for each connection."""
    monkeypatch.setattr(metrics_http, "STEP_SECONDS", 0.0)
    node = recover_node(MemoryDisk(), BROKER.parse({}), Clock())
    node.topics.create("t", 1_000, {}, 0)
    errors: list[Any] = []

    async def stop_early() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        server = MetricsServer(node, "127.0.0.1", 0)
        await server.start()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_text)
        while not server._connection_count or server._is_collecting.locked() is not bool(request_text):
            await asyncio.sleep(0)
        await server.stop()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        while server._connection_count:
            await asyncio.sleep(0)
        for _ in range(5):  # the callback of the task that has ended
            await asyncio.sleep(0)
        writer.close()

    asyncio.run(stop_early())
    assert not errors


def test_the_process_is_measured_under_prometheus_names() -> None:
    with Broker(metrics_port=0) as broker:
        read = scrape(broker)
    assert read["process_cpu_seconds_total"] > 0 and read["process_start_time_seconds"] > 1.6e9
    assert (
        read["process_resident_memory_bytes"] > 1e6 and 0 < read["process_open_fds"] < read["process_max_fds"]
    )
    assert read["oncelog_event_loop_lag_seconds"] >= 0
    (build,) = (name for name in read if name.startswith("oncelog_build_info"))
    assert f'version="{oncelog.__version__}"' in build and "pure Python" in build


def test_the_loops_lag_is_the_longest_of_the_last_minute() -> None:
    lag = LoopLag()
    assert lag.max_seconds == 0.0
    for now_s, delay_s, longest in (
        (0, 0.2, 0.2),
        (10, 0.5, 0.5),
        (20, 0.1, 0.5),
        (71, 0.3, 0.3),
        (140, 0.0, 0.0),
    ):
        lag.note(now_s, delay_s)
        assert lag.max_seconds == longest, now_s


def _status(broker: Broker, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{broker.metrics_port}{path}", timeout=60) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_is_told_without_the_token_and_readiness_counts_offline_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Broker(metrics_port=0, config={"oncelog.metrics.token": "t"}) as broker:
        with RawClient(broker.bootstrap_servers) as client:
            client.create_topic("ready")
        assert _status(broker, "/healthz") == (200, "ok\n")
        assert _status(broker, "/readyz") == (200, "ready\n")
        assert _status(broker, "/metrics")[0] == 401
        monkeypatch.setattr(Partition, "is_offline", property(lambda self: True))
        status, text = _status(broker, "/readyz")
        assert status == 503 and "partitions are offline" in text


def test_health_is_told_to_get_and_head_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker(metrics_port=0, config={"oncelog.metrics.token": "t"}) as broker:
        with RawClient(broker.bootstrap_servers) as client:
            client.create_topic("ready")

        def status(path: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", broker.metrics_port, timeout=60)
            connection.request("HEAD", path)
            with contextlib.closing(connection.getresponse()) as response:
                return response.status, response.read()

        assert [status(path) for path in ("/healthz", "/readyz")] == [(200, b""), (200, b"")]
        monkeypatch.setattr(Partition, "is_offline", property(lambda self: True))
        assert status("/readyz") == (503, b"")
        assert status("/metrics") == (401, b"")


@pytest.mark.behaviour("I29")
def test_silent_readers_of_metrics_take_a_bounded_number_of_descriptors() -> None:
    with Broker(metrics_port=0) as broker, ExitStack() as stack:
        address = "127.0.0.1", broker.metrics_port
        silent = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(60)]
        ended = 0
        for each in silent[MAX_CONNECTIONS:]:
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""
            ended += 1
        assert ended == 60 - MAX_CONNECTIONS
        for each in silent:
            each.close()
        wait_until(lambda: _is_readable(broker))


def _is_readable(broker: Broker) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{broker.metrics_port}/metrics", timeout=60) as page:
            return b"oncelog_connections" in page.read()
    except OSError:
        return False


def test_metrics_are_on_loopback_unless_they_are_locked() -> None:
    check_metrics("127.0.0.1", BROKER.parse({}))
    with pytest.raises(ConfigError, match=r"oncelog\.metrics\.token"):
        check_metrics("0.0.0.0", BROKER.parse({}))
    check_metrics("0.0.0.0", BROKER.parse({"oncelog.metrics.token": "t"}))
    check_metrics("0.0.0.0", BROKER.parse({"oncelog.insecure": "true"}))


@pytest.mark.behaviour("I23")
def test_prometheus_takes_the_alert_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (of Prometheus) is not installed, so the rule file is not loaded for real")
    checked = subprocess.run(
        [promtool, "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=240
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS" in checked.stdout


def test_every_verdict_is_an_event() -> None:
    """`oncelog explain` draws these events: stored, duplicate and refused, each with the batch's numbers."""
    events: list[AppendEvent] = []
    with Broker(on_append=events.append) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("told")
        for sequence, count in ((0, 2), (0, 2), (7, 1)):
            client.produce("told", batch(*[b"x"] * count, pid=3, epoch=1, sequence=sequence))
        client.produce("told", b"no batch at all")
    told = [(e.verdict, e.base_sequence, e.last_sequence, e.base_offset, e.error_code) for e in events]
    assert told == [
        ("stored", 0, 1, 0, 0),
        ("duplicate", 0, 1, 0, 0),
        ("refused", 7, 7, None, OutOfOrderSequenceNumber.code),
        ("refused", None, None, None, InvalidRecord.code),
    ]
    assert {(e.topic, e.partition, e.client_id) for e in events} == {("told", 0, "raw")}


def test_metrics_are_served_on_localhost_where_ipv6_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/hosts maps localhost to ::1 even in containers without IPv6."""
    real, found = socket.socket.bind, AsyncMock()

    def bind(this: socket.socket, address: tuple[object, ...]) -> None:
        if this.family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        real(this, address)

    async def answer(node: BrokerState) -> bytes:
        server = MetricsServer(node, "localhost", 0)
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "bind", bind)
            patched.setattr(asyncio.BaseEventLoop, "getaddrinfo", found)
            await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        page = await reader.read()
        writer.close()
        await server.stop()
        return page

    kind = socket.SOCK_STREAM
    found.return_value = [
        (socket.AF_INET6, kind, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, kind, 6, "", ("127.0.0.1", 0)),
    ]
    assert asyncio.run(answer(open_node(MemoryDisk()))).startswith(b"HTTP/1.1 200")
