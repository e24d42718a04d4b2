"""Consume, transform, produce while brokers or clients are killed or stopped: what goes in comes out once.

The grid is that of Apache Kafka's own system test of transactions: both ways of ending, both ends, ordered
(one partition) and not (several), positions committed with the member's metadata and by the group's name.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_producer import new_topic, producer_of, read

from oncelog import Consumer, TopicPartition
from oncelog.dev.process import end_process
from oncelog.dev.served import ServedBroker
from oncelog.errors import OncelogError

SIZE, COPIERS, BOUNCES = 750, 2, 2
SETTINGS = {"group.min.session.timeout.ms": 500}  # so that a killed member is missed soon


class Copier:
    """tests/kill/copier.py as a process; `copied`: the records of the transactions it said it committed."""

    def __init__(self, folder: Path, **told: object) -> None:
        self._command = [sys.executable, str(Path(__file__).with_name("copier.py")), json.dumps(told)]
        self._out, self._errors = folder / f"{told['name']}.out", folder / f"{told['name']}.err"
        self.start()

    def start(self) -> None:
        with self._out.open("ab") as out, self._errors.open("ab") as errors:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=errors)

    @property
    def copied(self) -> int:
        return sum(map(int, self._out.read_text().split()))

    def bounce(self, how: signal.Signals) -> None:
        end_process(self.process, how)
        self.start()

    def is_done(self) -> bool:
        """Started again if it ended before all was copied: its producer could not go on."""
        code = self.process.poll()
        if code:
            self.start()
        return code == 0


class Watcher(threading.Thread):
    """A read_committed reader that is there all the time."""

    def __init__(self, servers: str, topic: str, partitions: int, count: int) -> None:
        super().__init__(daemon=True)
        self.count, self.seen = count, list[tuple[int, int]]()
        self.stopped = threading.Event()
        self._consumer = Consumer({"bootstrap.servers": servers}, auto_offset_reset="earliest")
        self._consumer.assign([TopicPartition(topic, each) for each in range(partitions)])
        self.start()

    def run(self) -> None:
        with self._consumer:
            while len(self.seen) < self.count and not self.stopped.is_set():
                try:
                    records = self._consumer.poll(0.1)
                except OncelogError:
                    continue  # the broker is away
                self.seen += [(record.partition, int(record.value or b"")) for record in records]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def copy_and_bounce(
    folder: Path, how: signal.Signals, target: str, order: str, group: str, count: int, pause: float
) -> None:
    chance, partitions = random.Random(f"{how}{target}{order}{group}"), 1 if order == "ordered" else 4
    patience_s = 60 + count / 1000
    with ServedBroker(folder / "data", settings=SETTINGS) as broker:
        servers = broker.bootstrap_servers
        source, outward = new_topic(servers, partitions), new_topic(servers, partitions)
        fill(servers, source, partitions, count)
        shares = [list(range(number, partitions, COPIERS)) for number in range(COPIERS)]
        told = {"servers": servers, "source": source, "target": outward, "partitions": partitions}
        told |= {"group": "copiers", "size": SIZE, "pause": pause}
        copiers = [
            Copier(folder, **told, name=f"copier-{number}", share=share if group == "by name" else None)
            for number, share in enumerate(shares)
            if share or group == "by metadata"
        ]
        watcher = Watcher(servers, outward, partitions, count)
        try:
            for bounce in range(1, BOUNCES + 1):
                due = count * bounce // (BOUNCES + 2)
                wait_until(lambda due=due: sum(each.copied for each in copiers) >= due, patience_s)
                time.sleep(chance.uniform(0, pause))
                if target == "broker":
                    broker.kill() if how is signal.SIGKILL else broker.stop()
                    broker.start()
                else:
                    for copier in copiers:
                        copier.bounce(how)
            wait_until(lambda: all([each.is_done() for each in copiers]), patience_s)
            watcher.join(patience_s)
        finally:
            watcher.stopped.set()
            for copier in copiers:
                end_process(copier.process, signal.SIGKILL)
        final = [(record.partition, int(record.value or b"")) for record in read(servers, outward)]
    for seen in (watcher.seen, final):
        assert sorted(value for _, value in seen) == list(range(count))
        if order == "ordered":
            assert [value for _, value in seen] == list(range(count))


def fill(servers: str, topic: str, partitions: int, count: int) -> None:
    with producer_of(servers, linger_ms=5) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, partition=number % partitions)
        producer.flush()


GRID = [
    pytest.mark.parametrize("group", ["by metadata", "by name"]),
    pytest.mark.parametrize("order", ["ordered", "unordered"]),
    pytest.mark.parametrize("target", ["broker", "clients"]),
    pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "stop"]),
]


def over_the_grid(test: Callable[..., None]) -> Callable[..., None]:
    for mark in GRID:
        test = mark(test)
    return test


@pytest.mark.behaviour("T6", "T7", "T11")
@over_the_grid
def test_copied_once(tmp_path: Path, how: signal.Signals, target: str, order: str, group: str) -> None:
    copy_and_bounce(tmp_path, how, target, order, group, 5 * SIZE, 0.1)


@pytest.mark.soak
@pytest.mark.behaviour("T6", "T7", "T11")
@over_the_grid
def test_many_copied_once(tmp_path: Path, how: signal.Signals, target: str, order: str, group: str) -> None:
    copy_and_bounce(tmp_path, how, target, order, group, 100_000, 0.1)
