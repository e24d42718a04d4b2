"""SIGTERM under load, also repeated; SIGKILL a hundred times in a row."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.operations import Load
from support.wait import pause

from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.process import STOP_TIMEOUT_S


@pytest.fixture
def heeds_hangup() -> Iterator[None]:
    """Let brokers end at SIGHUP. If the tests run under nohup, their child processes would ignore that
    signal.
    """
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


def end(broker: BrokerProcess, *signals: signal.Signals) -> int:
    """Send these signals right after each other, and return the process's exit code."""
    process = broker._process
    assert process is not None
    for number in signals:
        if process.poll() is None:
            process.send_signal(number)
    code = process.wait(STOP_TIMEOUT_S)
    broker.kill()
    return code


@pytest.mark.behaviour("I17")
@pytest.mark.usefixtures("heeds_hangup")
def test_a_stop_under_load(tmp_path: Path) -> None:
    """Even if the signals are repeated, the broker ends cleanly, clients reconnect, and the next start
    recovers nothing.
    """
    settings = {"log.flush.interval.messages": 1}
    with (
        BrokerProcess(tmp_path / "data", settings=settings) as broker,
        Load(broker.bootstrap_servers) as load,
    ):
        for signals in (
            [signal.SIGTERM],
            [signal.SIGTERM, signal.SIGTERM, signal.SIGINT],
            [signal.SIGINT, signal.SIGTERM],
            [signal.SIGHUP],
        ):
            load.wait_for_progress()
            assert end(broker, *signals) == 0
            assert (tmp_path / "data" / ".kafka_cleanshutdown").exists()
            broker.start()
        load.wait_for_progress()
        load.stop()
        load.check()
        log = broker.log_file.read_text()
    opened = [
        line.rpartition("clean=")[2].split()[0]
        for line in log.splitlines()
        if "data directory opened" in line
    ]
    assert opened == ["False", "True", "True", "True", "True"]
    assert "log repaired" not in log and "Traceback" not in log


@pytest.mark.soak
def test_a_signal_during_the_start_leaves_what_was_there(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker, Load(broker.bootstrap_servers) as load:
        load.wait_for_progress()
        for delay_s in (0.1, 0.2, 0.3):
            broker.kill()
            with broker.log_file.open("ab") as log:
                process = subprocess.Popen(broker._command(), stdout=subprocess.DEVNULL, stderr=log)
            pause(delay_s)
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) in (0, -signal.SIGTERM)
            broker.start()
        load.wait_for_progress()
        load.stop()
        load.check()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.behaviour("I17", "T6")
@pytest.mark.parametrize("flush_messages", [1, 2**63 - 1], ids=["synced", "not synced"])
def test_killed_a_hundred_times_in_a_row(tmp_path: Path, flush_messages: int) -> None:
    """An audit after each kill finds no lost or doubled record, and no partly visible transaction."""
    chance = random.Random(100)
    settings = {"log.flush.interval.messages": flush_messages, "log.flush.offset.checkpoint.interval.ms": 500}
    with (
        BrokerProcess(tmp_path / "data", settings=settings) as broker,
        Load(broker.bootstrap_servers, pause_s=0.02) as load,
    ):
        for _ in range(100):
            load.wait_for_progress(1)
            pause(chance.uniform(0, 0.3))
            broker.kill()
            acked = load.acknowledged()
            broker.start()
            load.check(acked=acked)
        load.stop()
        load.check()
        assert "Traceback" not in broker.log_file.read_text()
