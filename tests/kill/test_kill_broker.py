"""`oncelog serve` as a process: kill -9, SIGTERM, a second broker on the directory, and restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from support.broker import RawClient, batch, fetch_request, produce_request, wait_until

from oncelog.wire.messages import MetadataRequest

READY_SECONDS = 120
SERVE = (sys.executable, "-m", "oncelog.cli.main", "serve", "--data-dir")


def refused(data_dir: Path, *options: str) -> tuple[int, str]:
    """Run a serve command that must fail. Return its exit code and standard error."""
    done = subprocess.run(
        [*SERVE, str(data_dir), *options], capture_output=True, text=True, timeout=READY_SECONDS
    )
    return done.returncode, done.stderr


class Served:
    """An `oncelog serve` process on a free port."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [*SERVE, str(data_dir), "--listen", "127.0.0.1:0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().rstrip("\n")
        self.address = self.first_line.removeprefix("listening on ")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals) -> int:
        """Send the signal, wait, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(READY_SECONDS)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as running:
        yield running


def test_the_broker_prints_its_address_first_and_stops_cleanly(served: Served, tmp_path: Path) -> None:
    assert served.first_line.startswith("listening on 127.0.0.1:")
    with RawClient(served.address) as client:
        client.create_topic("t")
        client.produce("t", batch(b"x"))
        assert served.end(signal.SIGTERM) == 0
    assert (tmp_path / ".kafka_cleanshutdown").exists()
    assert list((tmp_path / "t-0").glob("*.snapshot"))


def test_ctrl_c_is_a_clean_stop_even_with_a_waiting_fetch(served: Served, tmp_path: Path) -> None:
    with RawClient(served.address) as client:
        client.create_topic("t")
        client.send(fetch_request([("t", 0, 0)], max_wait_ms=60_000), 12)
        assert served.end(signal.SIGINT) == 0
    assert (tmp_path / ".kafka_cleanshutdown").exists()


def test_a_second_broker_on_the_directory_is_refused(served: Served, tmp_path: Path) -> None:
    second = subprocess.run(
        [
            sys.executable,
            "-m",
            "oncelog.cli.main",
            "serve",
            "--data-dir",
            str(tmp_path),
            "--listen",
            "127.0.0.1:0",
        ],
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
    )
    assert second.returncode == 1
    assert "in use by another process" in second.stderr
    assert str(tmp_path) in second.stderr
    with RawClient(served.address) as client:
        assert client.new_producer_id() >= 0  # the first broker still serves its client


def test_a_taken_port_is_refused(served: Served, tmp_path: Path) -> None:
    code, text = refused(tmp_path / "other", "--listen", served.address)
    assert code == 1
    assert served.address in text


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_retry_that_straddles_a_restart_is_recognised(tmp_path: Path, number: signal.Signals) -> None:
    with Served(tmp_path) as first, RawClient(first.address) as client:
        client.create_topic("straddle", 2)
        pid = client.new_producer_id()
        sent = [batch(b"%d" % n, pid=pid, sequence=n) for n in range(7)]
        for one in sent[:6]:
            assert client.produce("straddle", one).error_code == 0
        # Do not read the last response: the batch is stored, but the producer gets no acknowledgement.
        client.send(produce_request("straddle", sent[6]), 9)
        with RawClient(first.address) as observer:
            wait_until(lambda: observer.offset("straddle") == 7)
        first.end(number)
    with Served(tmp_path) as second, RawClient(second.address) as client:
        retried = [client.produce("straddle", one) for one in sent[2:]]
        assert [(r.error_code, r.base_offset) for r in retried] == [(0, n) for n in range(2, 7)]
        assert client.produce("straddle", sent[1]).error_code == 45
        assert client.produce("straddle", batch(b"7", pid=pid, sequence=7)).base_offset == 7
        assert client.values("straddle") == [b"%d" % n for n in range(8)]
        assert client.new_producer_id() > pid


def test_topics_and_their_ids_survive_kill_9(tmp_path: Path) -> None:
    ids = {}
    with Served(tmp_path) as first, RawClient(first.address) as client:
        for name in ("a", "b"):
            ids[name] = client.create_topic(name, 3, retention_ms=-1).topic_id
    with Served(tmp_path) as second, RawClient(second.address) as client:
        topics = client.ask(MetadataRequest(topics=None), 12).topics
        assert {t.name: t.topic_id for t in topics} == ids
        assert [len(t.partitions) for t in topics] == [3, 3]


@pytest.mark.behaviour("I17")
def test_acknowledged_records_survive_repeated_kills(tmp_path: Path) -> None:
    acknowledged: list[bytes] = []
    for life in range(4):
        with Served(tmp_path) as broker, RawClient(broker.address) as client:
            if life == 0:
                client.create_topic("lives", internal_segment_bytes=2_000)
            pid = client.new_producer_id()
            for n in range(25):
                value = b"%d-%d" % (life, n) + b"." * 100
                assert client.produce("lives", batch(value, pid=pid, sequence=n)).error_code == 0
                acknowledged.append(value)
    with Served(tmp_path) as last, RawClient(last.address) as client:
        assert client.values("lives") == acknowledged


def test_settings_come_from_the_file_and_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "server.properties"
    config.write_text("# a comment\nnum.partitions = 4\nlog.retention.ms: \\\n  1234\n")
    options = ("--config", str(config), "--set", "num.partitions=6")
    with Served(tmp_path / "data", *options) as broker, RawClient(broker.address) as client:
        request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="auto")])
        assert len(client.ask(request, 9).topics[0].partitions) == 6


def test_a_wrong_setting_is_a_usage_error(tmp_path: Path) -> None:
    code, text = refused(tmp_path, "--set", "num.partition=1")
    assert code == 2
    assert "did you mean num.partitions?" in text
