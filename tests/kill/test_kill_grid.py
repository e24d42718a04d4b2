"""Consume-transform-produce while brokers or clients are killed or stopped: every record is copied once.

The cells of the grid are those of Apache Kafka's system test of transactions: all combinations of four
choices. Processes are killed or stopped cleanly. They are brokers or clients. The topic has one partition
(ordered) or several (unordered). Offsets are committed as a member of the group or by the group's name.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.topics import new_topic, producer_of, read
from support.wait import pause, wait_until

from oncelog import Consumer, TopicPartition
from oncelog.errors import OncelogError
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.process import end_process

SIZE, COPIERS, BOUNCES = 750, 2, 2
SETTINGS = {"group.min.session.timeout.ms": 500}  # the group removes a killed member soon


class Copier:
    """A process of tests/kill/copier.py. `copied` counts the records in transactions that it reported as
    committed.
    """

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
        """Return True if the process has copied everything. If it ended because of a fatal error, start it
        again.
        """
        code = self.process.poll()
        if code:
            self.start()
        return code == 0


class Watcher(threading.Thread):
    """A read_committed reader that runs during all kills. `seen` has its records."""

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
                    continue  # the broker is down
                self.seen += [(record.partition, int(record.value or b"")) for record in records]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the grid: what is killed or stopped, and how records are copied."""

    how: signal.Signals
    target: str
    order: str
    group: str

    @property
    def partitions(self) -> int:
        return 1 if self.order == "ordered" else 4

    def start_copiers(self, folder: Path, **told: object) -> list[Copier]:
        """Start two members of the group. If partitions are assigned by hand, start at most one process for
        each partition.
        """
        shares = [list(range(number, self.partitions, COPIERS)) for number in range(COPIERS)]
        by_name = self.group == "by name"
        return [
            Copier(folder, **told, name=f"{told['group']}-{number}", share=share if by_name else None)
            for number, share in enumerate(shares)
            if share or not by_name
        ]

    def bounce(self, broker: BrokerProcess, copiers: list[Copier]) -> None:
        """Kill or stop the brokers or clients of this cell, and start them again."""
        if self.target == "broker":
            broker.kill() if self.how is signal.SIGKILL else broker.stop()
            broker.start()
            return
        for copier in copiers:
            copier.bounce(self.how)


def copy_and_bounce(broker: BrokerProcess, folder: Path, cell: Cell, count: int, pause_s: float) -> None:
    """Copy `count` records, and kill or stop processes twice during the copy."""
    servers, patience_s, chance = broker.bootstrap_servers, 60 + count / 1000, random.Random(str(cell))
    source, target = new_topic(servers, cell.partitions), new_topic(servers, cell.partitions)
    fill(servers, source, cell.partitions, count)
    watcher = Watcher(servers, target, cell.partitions, count)
    told = {"servers": servers, "source": source, "target": target, "partitions": cell.partitions}
    copiers = cell.start_copiers(folder, **told, group=f"of-{source}", size=SIZE, pause=pause_s)
    try:
        for bounce in range(1, BOUNCES + 1):
            due = count * bounce // (BOUNCES + 2)
            wait_until(lambda due=due: sum(each.copied for each in copiers) >= due, patience_s)
            pause(chance.uniform(0, pause_s))
            cell.bounce(broker, copiers)
        wait_until(lambda: all([each.is_done() for each in copiers]), patience_s)
        watcher.join(patience_s)
    finally:
        watcher.stopped.set()
        for copier in copiers:
            end_process(copier.process, signal.SIGKILL)
    final = [(record.partition, int(record.value or b"")) for record in read(servers, target)]
    for seen in (watcher.seen, final):
        assert sorted(value for _, value in seen) == list(range(count))
        if cell.order == "ordered":
            assert [value for _, value in seen] == list(range(count))


def fill(servers: str, topic: str, partitions: int, count: int) -> None:
    with producer_of(servers, linger_ms=5) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, partition=number % partitions)
        producer.flush()


CELLS = [
    pytest.param(Cell(how, *rest), id=" ".join(["SIGKILL" if how is signal.SIGKILL else "stop", *rest]))
    for how, *rest in itertools.product(
        (signal.SIGKILL, signal.SIGTERM),
        ("broker", "clients"),
        ("ordered", "unordered"),
        ("by metadata", "by name"),
    )
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Run one broker for all cells of the grid, so that each cell starts with the state that earlier cells
    left.
    """
    with BrokerProcess(tmp_path_factory.mktemp("grid") / "data", settings=SETTINGS) as served:
        yield served


@pytest.mark.behaviour("T6", "T7", "T11")
@pytest.mark.parametrize("cell", CELLS)
def test_records_are_copied_once(broker: BrokerProcess, tmp_path: Path, cell: Cell) -> None:
    copy_and_bounce(broker, tmp_path, cell, 5 * SIZE, 0.1)


@pytest.mark.soak
@pytest.mark.behaviour("T6", "T7", "T11")
@pytest.mark.parametrize("cell", CELLS)
def test_many_records_are_copied_once(broker: BrokerProcess, tmp_path: Path, cell: Cell) -> None:
    copy_and_bounce(broker, tmp_path, cell, 100_000, 0.1)
