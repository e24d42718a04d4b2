"""Concurrent transactional clients that note what they did, for `oncelog_simulator.history` to judge.

Writers send transactions to the topic `inward`, copiers (one consumer group) take it over to `outward` with
their positions in the same transaction, readers read both. Each is a thread. A copied record is named
`VALUE>PROCESS.TRANSACTION`, so that what two transactions copied has two names.
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
    """Connections that end with a request or an answer, of every API that a transaction needs."""
    apis = ("Produce", "EndTxn", "TxnOffsetCommit", "InitProducerId", "AddPartitionsToTxn", "AddOffsetsToTxn")
    lost = [
        Rule(action="cut", api=api, direction=direction, probability=0.03)
        for api in apis
        for direction in ("request", "response")
    ]
    return [*lost, Rule(action="cut", api="Fetch", probability=0.005)]


def network_faults() -> list[Rule]:
    """And late ones, which survive their connection, and repeated ones."""
    late = [
        Rule(action=action, api=api, probability=0.03, delay_ms=900)
        for api in ("Produce", "EndTxn", "TxnOffsetCommit")
        for action in ("hold", "duplicate")
    ]
    return [*lost_messages(), *late]


@dataclass(slots=True)
class Load:
    """Where the clients work, what they note, and when they stop. `shared`: writers share partitions.
    `isolation`: of the readers.
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
        """All clients at once, disturbed for so long, or until it says something on a slow machine; then the
        copiers catch up."""
        self.clients = [
            *(Writer(self, f"w{number}", number) for number in range(self.writers)),
            *(Copier(self, f"c{number}", number) for number in range(self.copiers)),
            *(Reader(self, f"r{number}", number) for number in range(self.readers)),
        ]
        for client in self.clients:
            client.start()
        try:
            disturb(seconds)
            wait_until(lambda: says_something(self.noted()), PATIENCE_S)
            self.stopped.set()
            self._wait_for("w")
        finally:
            self.stopped.set()

    def noted(self) -> list[Operation]:
        """What all clients noted so far."""
        return [each for client in self.clients for each in list(client.noted)]

    def finish(self, direct: str) -> list[Operation]:
        """Undisturbed: until everything is copied. What all noted, and what a last reader reads."""
        try:
            self._until_copied(direct)
        finally:
            self.halted.set()
            self._wait_for("wcr")
        last = Reader(self, "last", 0)
        last.read_all(direct)
        failed = [client.error for client in self.clients if client.error is not None]
        if failed:
            raise failed[0]
        return [*self.noted(), *last.noted]

    def _wait_for(self, kinds: str) -> None:
        for client in self.clients:
            if client.name[0] in kinds:
                client.join(PATIENCE_S)
                assert not client.is_alive(), f"{client.name} does not end"

    def _until_copied(self, direct: str) -> None:
        partitions = [TopicPartition(self.inward, index) for index in range(self.writers)]
        at: dict[TopicPartition, int] = {}
        with Consumer({"bootstrap.servers": direct, "group.id": f"{self.run}-copiers"}) as consumer:
            ends = consumer.end_offsets(partitions)
            for _ in attempts(lambda: f"the copiers are at {at} of {ends}", PATIENCE_S):
                found = consumer.committed(partitions)
                at.update({each: position.offset if position else 0 for each, position in found.items()})
                # The last record may be followed by markers, which nobody's position passes.
                if all(
                    _nothing_between(consumer, partition, at[partition], ends[partition])
                    for partition in partitions
                ):
                    return
                pause(0.1)


def says_something(history: list[Operation]) -> bool:
    """Whether enough was committed and aborted for a history without anomalies to mean something."""
    ended = Counter((each.kind, each.outcome) for each in history)
    return ended[Kind.COMMIT, Outcome.OK] > 3 and ended[Kind.ABORT, Outcome.OK] > 0


def _nothing_between(consumer: Consumer, at: TopicPartition, start: int, end: int) -> bool:
    return start >= end or not any(piece.num_rows for piece in consumer.fetch_range(at, start, end))


def copied_once(load: Load, history: list[Operation]) -> int:
    """Whether every record that is in the one topic is in the other, once; how many."""
    last = [item for each in history if each.process == "last" for item in each.items]
    there = [item.value for item in last if item.topic == load.inward]
    copied = [item.value.split(b">")[0] for item in last if item.topic == load.outward]
    assert len(set(copied)) == len(copied), "copied twice"
    assert set(copied) == set(there)
    return len(there)
