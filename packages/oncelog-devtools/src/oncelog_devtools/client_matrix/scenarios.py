"""The scenarios of the matrix: conversations with one client through the proxy, each with its fault."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from oncelog import Admin, Consumer, NewTopic, Producer, TopicPartition
from oncelog.testing.proxy import Direction, Proxy, Rule, WireEvent
from oncelog_devtools.client_matrix.judgements import FAULTS_END, FENCED, FIRST_ENDS, MAX_REMEMBERED_BATCHES
from oncelog_devtools.client_matrix.program import ClientProgram
from oncelog_devtools.client_matrix.recording import Recording, Reply, ReplyKind

PARTITIONS = 2
GIVE_UP_MS = 3_000
FLUSH_S, GIVE_UP_FLUSH_S = 20, 12
FILL_LIMIT_S = 2.0
"""Seconds that a client gets to put batches in flight while the first response is held."""
RESPONSE_DELAY_MS = 50.0
MARKER_LIMIT_S = 3.0


class NotOffered(Exception):
    """The client lacks a feature that the scenario needs. The text is the client program's reason."""


class Conversation:
    """One scenario's client program, proxy and topic, and the replies so far.

    `direct` is the broker's own address, for requests of the harness itself: the proxy sees only the client.
    """

    def __init__(self, program: ClientProgram, proxy: Proxy, direct: str, topic: str) -> None:
        self.program, self.proxy, self.direct, self.topic = program, proxy, direct, topic
        self.replies: dict[str, Reply] = {}

    def ask(self, command: str, label: str = "", *, may_fail: bool = False) -> Reply:
        """Send a command. Keep its reply under `label`. Raises NotOffered, and ProgramFailed for an error."""
        reply = self.program.ask(command) if may_fail else self.program.expect(command)
        if reply.kind is ReplyKind.MISSING:
            raise NotOffered(reply.text)
        if label:
            self.replies[label] = reply
        return reply

    def send(self, *values: str, partition: int = 0) -> None:
        """Let the client send each value as a batch of its own. Errors appear in the results of `flush`."""
        self.ask(f"send {self.topic} {partition} {' '.join(values)}")

    def flush(self, label: str, seconds: int = FLUSH_S) -> None:
        """Wait for the results of all records that have none yet, and keep them under `label`."""
        self.ask(f"flush {seconds}", label)

    def read(
        self, count: int, isolation: str = "default", protocol: str = "classic", instance: str = "-"
    ) -> None:
        """Let the client join a group of its own and read `count` records, and keep them as `read`."""
        group = f"{self.topic}-group"
        self.ask(
            f"consume {self.topic} {group} {count} {isolation} {protocol} {instance}", "read", may_fail=True
        )


def default(c: Conversation) -> None:
    c.ask("producer default")
    c.send("a")
    c.flush("results")


def _start_idempotent(c: Conversation) -> None:
    """Start a producer and let it store one batch: some clients send the first batch of an epoch alone."""
    c.ask("producer idempotent")
    c.send("first")
    c.flush("first")


def in_flight(c: Conversation) -> None:
    _start_idempotent(c)
    before = _produce_count(c.proxy.events)
    c.proxy.add(Rule(action="hold", api="Produce", direction="response", nth=1))
    c.send(*(f"v{number}" for number in range(12)))
    c.proxy.wait_until(lambda events: _produce_count(events) > before + MAX_REMEMBERED_BATCHES, FILL_LIMIT_S)
    c.proxy.release()
    c.flush("results")


def _produce_count(events: Sequence[WireEvent]) -> int:
    return sum(event.direction is Direction.REQUEST and event.api == "Produce" for event in events)


def lost_ack(c: Conversation) -> None:
    _start_idempotent(c)
    c.proxy.lose_ack(nth=2)
    c.send("a", "b", "c", "d")
    c.flush("results")


def order(c: Conversation) -> None:
    _start_idempotent(c)
    c.proxy.delay_acks(RESPONSE_DELAY_MS)
    c.proxy.refuse("NOT_ENOUGH_REPLICAS", nth=2)
    c.send("a", "b", "c", "d", "e", "f")
    c.flush("results")


def unknown_state(c: Conversation) -> None:
    c.ask(f"producer give-up {GIVE_UP_MS}")
    c.send("first")
    c.flush("first")
    rule = c.proxy.add(Rule(action="cut", api="Produce", direction="response"))
    c.send("lost")
    c.flush("lost", GIVE_UP_FLUSH_S)
    c.proxy.remove(rule)
    c.proxy.note(FAULTS_END)
    c.send("later", "last")
    c.flush("later")


def unknown_producer(c: Conversation) -> None:
    _lose_state(c, "UNKNOWN_PRODUCER_ID")


def out_of_order(c: Conversation) -> None:
    _lose_state(c, "OUT_OF_ORDER_SEQUENCE_NUMBER")


def _lose_state(c: Conversation, error: str) -> None:
    _start_idempotent(c)
    c.proxy.refuse(error)
    c.send("refused")
    c.flush("refused")
    c.send("later")
    c.flush("later")


def transactions(c: Conversation) -> None:
    _start_transactional(c)
    c.send("a")
    c.send("b", partition=1)
    c.ask("commit")
    c.proxy.note(FIRST_ENDS)
    c.ask("begin")
    c.send("c")
    c.ask("commit")


def _start_transactional(c: Conversation) -> None:
    c.ask(f"producer transactional {c.topic}-id")
    c.ask("begin")


def group_metadata(c: Conversation) -> None:
    _write(c, "in")
    c.ask(f"producer transactional {c.topic}-id")
    c.read(1)
    c.ask("begin")
    c.send("out", partition=1)
    c.ask(f"offsets {c.topic} 1", "offsets", may_fail=True)
    c.ask("commit", "commit", may_fail=True)


def fenced(c: Conversation) -> None:
    _start_transactional(c)
    c.send("a")
    c.flush("results")
    with Producer({"bootstrap.servers": c.direct, "transactional.id": f"{c.topic}-id"}) as producer:
        producer.init_transactions()
        c.proxy.note(FENCED)
        c.ask("commit", "commit", may_fail=True)
        c.replies["again"] = _another_transaction(c)


def _another_transaction(c: Conversation) -> Reply:
    """Begin, send and commit. Return the first error, or the reply to the commit."""
    for command in ("abort", "begin", f"send {c.topic} 0 again", "commit"):
        reply = c.ask(command, may_fail=True)
        if reply.kind is ReplyKind.ERROR and command != "abort":
            return reply
    return reply


def lost_end(c: Conversation) -> None:
    _start_transactional(c)
    c.send("a")
    c.flush("results")
    c.proxy.lose_commit_ack()
    c.ask("commit", "commit", may_fail=True)


def read_committed(c: Conversation) -> None:
    with Producer({"bootstrap.servers": c.direct, "transactional.id": f"{c.topic}-writer"}) as producer:
        producer.init_transactions()
        for value, commits in (("committed", True), ("aborted", False), ("last", True)):
            producer.begin_transaction()
            producer.send(c.topic, value.encode(), partition=0)
            producer.flush()
            producer.commit_transaction() if commits else producer.abort_transaction()
    c.read(2, isolation="read_committed")


def consumer_protocol(c: Conversation) -> None:
    _write(c, "a", "b")
    c.read(2, protocol="consumer")


def static_member(c: Conversation) -> None:
    _write(c, "a")
    c.read(1, instance=f"{c.topic}-instance")
    c.ask("close")


def _write(c: Conversation, *values: str) -> None:
    with Producer({"bootstrap.servers": c.direct}) as producer:
        for value in values:
            producer.send(c.topic, value.encode(), partition=0)


SCENARIOS: dict[str, Callable[[Conversation], None]] = {
    scenario.__name__: scenario
    for scenario in (
        default, in_flight, lost_ack, order, unknown_state, unknown_producer, out_of_order, transactions,
        group_metadata, fenced, lost_end, read_committed, consumer_protocol, static_member,
    )
}  # fmt: skip
"""The scenarios by their names, which the rows of the matrix use."""


def record(scenario: str, command: Sequence[str], bootstrap_servers: str) -> Recording:
    """Run one scenario with the client program `command`, and return its recording.

    Raises NotOffered, ProgramFailed, and the errors of this project's own clients.
    """
    topic = f"matrix-{scenario.replace('_', '-')}-{uuid4().hex[:8]}"
    with Admin({"bootstrap.servers": bootstrap_servers}) as admin:
        admin.create_topics(NewTopic(topic, PARTITIONS, 1))
    with (
        tempfile.TemporaryDirectory() as directory,
        Proxy(bootstrap_servers) as proxy,
        ClientProgram(command, proxy.bootstrap_servers, Path(directory) / "client.log") as program,
    ):
        conversation = Conversation(program, proxy, bootstrap_servers, topic)
        SCENARIOS[scenario](conversation)
        events = tuple(proxy.events)
    return with_stored(Recording(events, conversation.replies), bootstrap_servers, topic)


def with_stored(recording: Recording, bootstrap_servers: str, topic: str) -> Recording:
    """Return the recording with the stored records.

    Apache Kafka responds to a commit before its markers are written, so wait for acknowledged records.
    """
    deadline = time.monotonic() + MARKER_LIMIT_S
    while True:
        stored = stored_values(bootstrap_servers, topic)
        if set(recording.acknowledged) <= set(stored) or time.monotonic() > deadline:
            return replace(recording, stored=stored)


def stored_values(bootstrap_servers: str, topic: str) -> tuple[str, ...]:
    """Return the values that a read_committed reader gets now, by partition and offset, without padding."""
    settings = {"bootstrap.servers": bootstrap_servers, "isolation.level": "read_committed"}
    partitions = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    found: list[tuple[int, int, str]] = []
    with Consumer(settings) as consumer:
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        ends = consumer.end_offsets(partitions)
        while any(consumer.position(tp) < ends[tp] for tp in partitions):
            for row in consumer.poll(0.2):
                found.append((row.partition, row.offset, (row.value or b"").decode().strip()))
    return tuple(value for _, _, value in sorted(found))
