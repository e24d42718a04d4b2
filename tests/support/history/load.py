"""Concurrent transactional clients that record their operations for `oncelog_simulator.history` to check.

Writers send transactions to the topic `inward`. Copiers, which are one consumer group, copy its records to
`outward` and commit their offsets in the same transactions. Readers read both topics. Each client is a
thread. A copied record has the value `VALUE>PROCESS.TRANSACTION`, so copies by two transactions differ.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from oncelog_simulator.history.check import Kind, Operation, Outcome

from oncelog import Consumer, TopicPartition
from oncelog.testing.proxy import Rule
from support.broker import wait_until
from support.history.clients import PATIENCE_S, Client, Copier, Reader, Writer
from support.topics import new_topic
from support.wait import attempts, pause

_runs = itertools.count(time.time_ns())


def lost_messages() -> list[Rule]:
    """Return rules that cut connections at requests and responses of a transaction's APIs, and at Fetch."""
    apis = ("Produce", "EndTxn", "TxnOffsetCommit", "InitProducerId", "AddPartitionsToTxn", "AddOffsetsToTxn")
    lost = [
        Rule(action="cut", api=api, direction=direction, probability=0.03)
        for api in apis
        for direction in ("request", "response")
    ]
    return [*lost, Rule(action="cut", api="Fetch", probability=0.005)]


def network_faults() -> list[Rule]:
    """Return the rules of `lost_messages`, and rules that repeat messages or deliver them after their
    connection has ended.
    """
    late = [
        Rule(action=action, api=api, probability=0.03, delay_ms=900)
        for api in ("Produce", "EndTxn", "TxnOffsetCommit")
        for action in ("hold", "duplicate")
    ]
    return [*lost_messages(), *late]


@dataclass(slots=True)
class Load:
    """The topics, clients and stop signals of one run.

    With `shared`, all writers use all partitions; otherwise each writer has one. `isolation` is the readers'
    isolation level.
    """

    servers: str
    seed: int = 1
    writers: int = 3
    copiers: int = 2
    readers: int = 2
    shared: bool = True
    isolation: str = "read_committed"
    run: str = field(default_factory=lambda: f"history-{next(_runs)}")
    inward: str = ""
    outward: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)
    halted: threading.Event = field(default_factory=threading.Event)
    clients: list[Client] = field(default_factory=list)

    def create_topics(self, direct: str) -> None:
        self.inward, self.outward = new_topic(direct, self.writers), new_topic(direct, self.copiers)

    def work(self, disturb: Callable[[float], None], seconds: float) -> None:
        """Run all clients while `disturb(seconds)` injects faults, then stop the writers.

        On a slow machine, continue until enough transactions have ended for a meaningful check.
        """
        self.clients = [
            *(Writer(self, f"w{number}", number) for number in range(self.writers)),
            *(Copier(self, f"c{number}", number) for number in range(self.copiers)),
            *(Reader(self, f"r{number}", number) for number in range(self.readers)),
        ]
        for client in self.clients:
            client.start()
        try:
            disturb(seconds)
            wait_until(lambda: has_enough_outcomes(self.operations_so_far()), PATIENCE_S)
            self.stopped.set()
            self._wait_for("w")
        finally:
            self.stopped.set()

    def operations_so_far(self) -> list[Operation]:
        """Return the operations that all clients have recorded so far."""
        return [operation for client in self.clients for operation in list(client.operations)]

    def finish(self, direct: str) -> list[Operation]:
        """Wait until all records are copied, stop the clients, and return all operations.

        The last operations are those of a reader that reads everything once more. `direct` is the broker's
        address without the proxy.
        """
        try:
            self._wait_until_copied(direct)
        finally:
            self.halted.set()
            self._wait_for("wcr")
        last = Reader(self, "last", 0)
        last.read_all(direct)
        failed = [client.error for client in self.clients if client.error is not None]
        if failed:
            raise failed[0]
        return [*self.operations_so_far(), *last.operations]

    def _wait_for(self, kinds: str) -> None:
        for client in self.clients:
            if client.name[0] in kinds:
                client.join(PATIENCE_S)
                assert not client.is_alive(), f"{client.name} does not end"

    def _wait_until_copied(self, direct: str) -> None:
        partitions = [TopicPartition(self.inward, index) for index in range(self.writers)]
        committed: dict[TopicPartition, int] = {}
        with Consumer({"bootstrap.servers": direct, "group.id": f"{self.run}-copiers"}) as consumer:
            ends = consumer.end_offsets(partitions)
            for _ in attempts(lambda: f"the copiers are at {committed} of {ends}", PATIENCE_S):
                offsets = consumer.committed(partitions)
                committed.update({tp: entry.offset if entry else 0 for tp, entry in offsets.items()})
                # Between a committed offset and the end, only markers may be left. Consumers read over
                # markers without moving the committed offset.
                if all(
                    _is_empty_range(consumer, partition, committed[partition], ends[partition])
                    for partition in partitions
                ):
                    return
                pause(0.1)


def has_enough_outcomes(history: list[Operation]) -> bool:
    """Return True if the history has more than three commits and at least one abort.

    With fewer, the absence of anomalies would prove little.
    """
    ended = Counter((operation.kind, operation.outcome) for operation in history)
    return ended[Kind.COMMIT, Outcome.OK] > 3 and ended[Kind.ABORT, Outcome.OK] > 0


def _is_empty_range(consumer: Consumer, tp: TopicPartition, start: int, end: int) -> bool:
    return start >= end or not any(piece.num_rows for piece in consumer.fetch_range(tp, start, end))


def copied_once(load: Load, history: list[Operation]) -> int:
    """Check that each record of `inward` is once in `outward`. Return the number of records."""
    last = [item for operation in history if operation.process == "last" for item in operation.items]
    sources = [item.value for item in last if item.topic == load.inward]
    copied = [item.value.split(b">")[0] for item in last if item.topic == load.outward]
    assert len(set(copied)) == len(copied), "copied twice"
    assert set(copied) == set(sources)
    return len(sources)
