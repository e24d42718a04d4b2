"""Two producers that write while a test disturbs the broker, and checks of their topics afterwards."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from oncelog import Consumer, Producer, Record, TopicPartition
from oncelog.audit.partition import PartitionAudit
from oncelog.local_audit.stored_batches import stored_batch
from oncelog.testing.broker_process import BrokerProcess
from oncelog.types import Isolation
from support.broker import wait_until
from support.topics import new_topic, read, wait_for_markers
from support.wait import pause

PATIENCE_S = 240.0
PARTITIONS = 3
Acknowledged = tuple[dict[bytes, tuple[int, int]], list[int]]
_QUICK = {"retry_backoff_ms": 10, "retry_backoff_max_ms": 100}


class Load:
    """An idempotent and a transactional producer, which write from the start of the `with` block until
    `stop`.

    `stored` has partition and offset of each acknowledged value. `committed` has the numbers of the
    transactions whose commit returned. Both only grow. `padding` is the number of bytes added to each value.
    `pause_s` is the pause of each producer after every round.
    """

    def __init__(self, servers: str, *, padding: int = 0, pause_s: float = 0) -> None:
        self.servers, self._padding, self._pause_s = servers, bytes(padding), pause_s
        self.plain, self.pairs = new_topic(servers, PARTITIONS), new_topic(servers, PARTITIONS)
        self.stored: dict[bytes, tuple[int, int]] = {}
        self.committed: list[int] = []
        self.errors: list[BaseException] = []
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=[work], daemon=True)
            for work in (self._send, self._transact)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def stop(self) -> None:
        """Stop both producers, and wait for the outcome of all records that were sent.

        Fail if a producer raised an error or does not end.
        """
        self._stopped.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a producer does not end"
        assert not self.errors, self.errors

    def acknowledged(self) -> Acknowledged:
        """Return a copy of all acknowledgements so far: of records and of transactions."""
        return dict(self.stored), list(self.committed)

    def wait_for_progress(self, count: int = 5) -> None:
        """Wait until both producers have `count` more acknowledgements."""
        stored, committed = len(self.stored) + count, len(self.committed) + count

        def is_reached() -> bool:
            return len(self.stored) >= stored and len(self.committed) >= committed

        wait_for(lambda: bool(self.errors) or is_reached())
        assert not self.errors, self.errors

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _send(self) -> None:
        number = 0
        with Producer({"bootstrap.servers": self.servers}, linger_ms=1, **_QUICK) as producer:
            while not self._stopped.is_set():
                values = [b"%d:" % each + self._padding for each in range(number, number + 10)]
                number += len(values)
                sent = [
                    producer.send(self.plain, value, partition=index % PARTITIONS)
                    for index, value in enumerate(values)
                ]
                for value, future in zip(values, sent, strict=True):
                    metadata = future.result(PATIENCE_S)
                    self.stored[value] = metadata.partition, metadata.offset
                pause(self._pause_s)

    def _transact(self) -> None:
        settings = {"bootstrap.servers": self.servers, "transactional.id": self.pairs}
        with Producer(settings, linger_ms=0, **_QUICK) as producer:
            producer.init_transactions()
            number = 0
            while not self._stopped.is_set():
                with producer.transaction():
                    for partition in range(PARTITIONS):
                        producer.send(self.pairs, b"%d:" % number + self._padding, partition=partition)
                self.committed.append(number)
                number += 1
                pause(self._pause_s)

    def check(self, servers: str | None = None, acked: Acknowledged | None = None) -> None:
        """Check that everything acknowledged is stored exactly once, transactions completely, and that the
        audit has no finding.

        `acked` is an earlier result of `acknowledged()`. None means its current result.
        """
        servers = servers or self.servers
        stored, committed = acked or self.acknowledged()
        # Read all end offsets at one time. Producers may still be writing, and otherwise a transaction would
        # be read in part.
        with Consumer({"bootstrap.servers": servers}) as consumer:
            topics = itertools.product((self.plain, self.pairs), range(PARTITIONS))
            tps = [TopicPartition(*each) for each in topics]
            if self._stopped.is_set():
                wait_for_markers(servers, tps, consumer)
            ends = consumer.end_offsets(tps)

        def read_now(topic: str) -> list[Record]:
            found = read(servers, topic)
            return [each for each in found if each.offset < ends[TopicPartition(topic, each.partition)]]

        plain = read_now(self.plain)
        found = {record.value or b"": (record.partition, record.offset) for record in plain}
        assert len(found) == len(plain), "a record twice"
        wrong = [(value[:9], at, found.get(value)) for value, at in stored.items() if found.get(value) != at]
        assert not wrong, f"acknowledged, but lost or elsewhere: {len(wrong)} like {wrong[:5]}"
        seen = Counter((each.partition, number_of(each.value)) for each in read_now(self.pairs))
        assert set(seen.values()) <= {1}, "a record of a transaction twice"
        numbers = {number for _, number in seen}
        # While producers write, the newest transaction may not have all of its markers.
        if not self._stopped.is_set():
            numbers = {number for number in numbers if number <= max(committed, default=-1)}
            seen = Counter({each: count for each, count in seen.items() if each[1] in numbers})
        assert len(seen) == PARTITIONS * len(numbers), "a transaction in some partitions only"
        assert set(committed) <= numbers, "a committed transaction is lost"
        assert audit(servers, self.plain, self.pairs) == []


def number_of(value: bytes | None) -> int:
    return int((value or b"").partition(b":")[0])


def audit(servers: str, *topics: str) -> list[str]:
    """Return the findings of the audit without Spark, for the batches below the last stable offset."""
    findings, outcomes = [], defaultdict[tuple[int, int], set[bool]](set)
    with Consumer({"bootstrap.servers": servers}) as consumer:
        tps = [
            TopicPartition(topic, each.partition)
            for topic in topics
            for each in consumer.partitions_for(topic)
        ]
        ends, starts = consumer.end_offsets(tps), consumer.beginning_offsets(tps)
        for tp in tps:
            judge = PartitionAudit(log_start_offset=starts[tp], last_stable_offset=ends[tp])
            for piece in consumer.fetch_chunks(tp, starts[tp], ends[tp], Isolation.READ_COMMITTED):
                for position, header, verdict in piece.batches:
                    judge.see(stored_batch(piece.records, position, header, verdict))
            for outcome in judge.take_outcomes():
                outcomes[outcome.producer_id, outcome.marker_epoch].add(outcome.is_commit)
            findings += [f"{tp}: {each}" for each in judge.finish()[0] if each.kind.is_violation]
    return findings + [f"{who}: two outcomes" for who, said in outcomes.items() if len(said) > 1]


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true. A busy machine does not reach the limit."""
    wait_until(condition, PATIENCE_S)


@contextmanager
def frozen(broker: BrokerProcess) -> Iterator[None]:
    """Suspend a process during the block, as `systemctl freeze`, `docker pause` and `kill -STOP` do."""
    os.kill(broker.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, broker.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


class LimitedBroker(BrokerProcess):
    """Run `oncelog serve` with a limit of open files."""

    def __init__(self, data_dir: Path, open_files: int, settings: dict[str, object]) -> None:
        super().__init__(data_dir, settings=settings)
        self.open_files = open_files

    def _command(self) -> list[str]:
        return ["sh", "-c", f'ulimit -n {self.open_files}; exec "$@"', "sh", *super()._command()]


@contextmanager
def mounted(where: Path, *how: str) -> Iterator[Path]:
    """Mount a file system at `where`. Skip the test if this user may not mount one."""
    where.mkdir()
    refusal = "only root may mount a disk" if os.geteuid() else _failure(["mount", *how, str(where)])
    if refusal:
        pytest.skip(f"no small disk to fill: {refusal}")
    try:
        yield where
    finally:
        _failure(["umount", "--lazy", str(where)])


def _failure(command: Sequence[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return f"there is no {command[0]}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.stderr.strip() or "it failed" if done.returncode else None


def fill(path: Path) -> None:
    """Fill the file system with a file."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(64))
