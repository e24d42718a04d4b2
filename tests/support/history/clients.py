"""The client threads of `support.history.load`. Each records its operations."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from oncelog_simulator.history.check import Item, Kind, Operation, Outcome

from oncelog import Consumer, Producer, Record, TopicPartition
from oncelog.errors import MisuseError, OncelogError, TimedOut

if TYPE_CHECKING:
    from support.history.load import Load

PATIENCE_S = 240.0
_QUICK = {"retry_backoff_ms": 10, "retry_backoff_max_ms": 100, "request_timeout_ms": 700}


class Client(threading.Thread):
    """A thread that records its operations.

    The checker relies on the order of operations only within a session. So `session` gets a new number
    whenever a position is reset.
    """

    def __init__(self, load: Load, name: str, number: int) -> None:
        super().__init__(name=name, daemon=True)
        self.load, self.number = load, number
        self.chance = random.Random(f"{load.seed}/{name}")
        self.operations: list[Operation] = []
        self.session, self.transaction, self.values = 0, 0, 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
            self.clean_up()
        except BaseException as error:
            self.error = error

    def work(self) -> None:
        raise NotImplementedError

    def clean_up(self) -> None:
        """Do nothing. Subclasses end the transactions that they left open."""

    def note(
        self,
        kind: Kind,
        outcome: Outcome,
        begin: int,
        items: list[Item] | None = None,
        *,
        session: Any = None,
        transaction: int | None = None,
    ) -> None:
        end = time.monotonic_ns()
        session = self.session if session is None else session
        self.operations.append(
            Operation(self.name, session, kind, outcome, begin, end, tuple(items or ()), transaction)
        )


class Transactor(Client):
    """A client with a transactional producer. After a fatal error, a new producer replaces the old one."""

    def __init__(self, load: Load, name: str, number: int) -> None:
        super().__init__(load, name, number)
        self.incarnation = 0
        self.sent: list[tuple[int, str, int, bytes, Future[Any]]] = []

    def new_producer(self) -> Producer:
        """Return an initialized producer, which fences the previous one. Retry for at most PATIENCE_S."""
        self.incarnation += 1
        producer = Producer(
            {"bootstrap.servers": self.load.servers, "transactional.id": f"{self.load.run}-{self.name}"},
            linger_ms=0,
            max_block_ms=3000,
            delivery_timeout_ms=6000,
            **_QUICK,
        )
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                producer.init_transactions()
                return producer
            except OncelogError:
                if time.monotonic() > deadline:
                    raise

    def clean_up(self) -> None:
        """Abort an open transaction, on which readers would wait until it times out."""
        self.new_producer().close()

    def send(self, producer: Producer, topic: str, partition: int, value: bytes) -> None:
        begin = time.monotonic_ns()
        self.sent.append((begin, topic, partition, value, producer.send(topic, value, partition=partition)))

    def note_sends(self) -> None:
        """Record the transaction's sends: OK if the producer got an acknowledgement, else UNKNOWN."""
        for begin, topic, partition, value, future in self.sent:
            is_acked = future.done() and not future.cancelled() and future.exception() is None
            item = Item(topic, partition, future.result().offset if is_acked else None, value)
            outcome = Outcome.OK if is_acked else Outcome.UNKNOWN
            self.note(
                Kind.SEND,
                outcome,
                begin,
                [item],
                session=("p", self.incarnation),
                transaction=self.transaction,
            )
        self.sent.clear()
        self.transaction += 1

    def commit(self, producer: Producer) -> bool:
        """Commit, retrying if necessary. Return True if the transaction was committed, and False if it was
        aborted.

        Raises OncelogError if the outcome is unknown. The caller must then replace the producer.
        """
        while True:
            begin = time.monotonic_ns()
            try:
                producer.commit_transaction()
            except TimedOut:
                self.note(Kind.COMMIT, Outcome.UNKNOWN, begin, transaction=self.transaction)
            except OncelogError:
                try:
                    self.abort(producer)
                except OncelogError:
                    self.note(Kind.COMMIT, Outcome.UNKNOWN, begin, transaction=self.transaction)
                    raise
                self.note(Kind.COMMIT, Outcome.FAIL, begin, transaction=self.transaction)
                return False
            else:
                self.note(Kind.COMMIT, Outcome.OK, begin, transaction=self.transaction)
                return True

    def abort(self, producer: Producer) -> None:
        while True:
            begin = time.monotonic_ns()
            try:
                producer.abort_transaction()
            except TimedOut:
                continue
            self.note(Kind.ABORT, Outcome.OK, begin, transaction=self.transaction)
            return


class Writer(Transactor):
    """Writes small transactions. It aborts some, leaves some open, and tries to commit some after it was
    fenced.
    """

    def work(self) -> None:
        while not self.load.stopped.is_set():
            with self.new_producer() as producer:
                try:
                    while not self.load.stopped.is_set():
                        try:
                            if not self.transact(producer):
                                break
                        finally:
                            self.note_sends()
                except OncelogError:
                    continue

    def transact(self, producer: Producer) -> bool:
        """Run one transaction. Return False if the producer must be replaced."""
        how = self.chance.choices(
            ["commit", "block", "abort", "raise", "leave", "zombie"], [8, 8, 3, 3, 1, 1]
        )[0]
        if how in ("block", "raise"):
            return self.transact_in_block(producer, is_kept=how == "block")
        producer.begin_transaction()
        self.send_some(producer)
        if how == "commit":
            self.commit(producer)
        elif how == "abort":
            self.abort(producer)
        elif how == "zombie":
            producer.flush()
            with self.new_producer():
                self.commit_as_a_zombie(producer)
        return how not in ("leave", "zombie")

    def transact_in_block(self, producer: Producer, *, is_kept: bool) -> bool:
        begin = time.monotonic_ns()
        try:
            with producer.transaction():
                self.send_some(producer)
                begin = time.monotonic_ns()
                if not is_kept:
                    raise InterruptedError
        except TimedOut:
            self.note(Kind.COMMIT, Outcome.UNKNOWN, begin, transaction=self.transaction)
            self.commit(producer)
        except (InterruptedError, OncelogError):
            self.abort_if_open(producer, begin)
        else:
            self.note(Kind.COMMIT, Outcome.OK, begin, transaction=self.transaction)
        return True

    def abort_if_open(self, producer: Producer, begin: int) -> None:
        """Abort the transaction unless `transaction()` has done so. Raise OncelogError if the outcome stays
        unknown.
        """
        outcome = Outcome.FAIL
        try:
            self.abort(producer)
        except MisuseError:
            pass  # `transaction()` has already aborted it
        except OncelogError:
            outcome = Outcome.UNKNOWN
            raise
        finally:
            self.note(Kind.COMMIT, outcome, begin, transaction=self.transaction)

    def send_some(self, producer: Producer) -> None:
        for _ in range(self.chance.randint(1, 5)):
            self.values += 1
            partition = self.chance.randrange(self.load.writers) if self.load.shared else self.number
            self.send(producer, self.load.inward, partition, b"%s-%d" % (self.name.encode(), self.values))

    def commit_as_a_zombie(self, producer: Producer) -> None:
        """Commit with a producer that its successor has fenced, and check that the commit fails."""
        begin = time.monotonic_ns()
        try:
            producer.commit_transaction()
        except OncelogError:
            self.note(Kind.COMMIT, Outcome.FAIL, begin, transaction=self.transaction)
        else:
            raise AssertionError("a fenced producer committed")


class Copier(Transactor):
    """A consume-transform-produce client. It commits its offsets in the transaction. If that fails, it seeks
    back.
    """

    def work(self) -> None:
        config = {
            "bootstrap.servers": self.load.servers,
            "group.id": f"{self.load.run}-copiers",
            "auto.offset.reset": "earliest",
        }
        with Consumer(
            config, enable_auto_commit=False, heartbeat_interval_ms=200, session_timeout_ms=6000, **_QUICK
        ) as consumer:
            consumer.subscribe(
                [self.load.inward],
                on_assigned=self.on_change,
                on_revoked=self.on_change,
                on_lost=self.on_change,
            )
            while not self.load.halted.is_set():
                with self.new_producer() as producer:
                    self.go_back(consumer)
                    self.copy(consumer, producer)

    def on_change(self, _: list[TopicPartition]) -> None:
        self.session += 1

    def copy(self, consumer: Consumer, producer: Producer) -> None:
        """Copy records until `load.halted` is set or the producer cannot be used any more."""
        while not self.load.halted.is_set():
            begin = time.monotonic_ns()
            try:
                records = consumer.poll(0.1, max_records=self.chance.randint(1, 20))
            except OncelogError:
                continue
            if not records:
                continue
            self.note(Kind.POLL, Outcome.OK, begin, items_of(records), transaction=self.transaction)
            try:
                is_copied = self.pass_on(consumer, producer, records)
            except OncelogError:
                return
            finally:
                self.note_sends()
            if not is_copied:
                self.go_back(consumer)

    def pass_on(self, consumer: Consumer, producer: Producer, records: list[Record]) -> bool:
        producer.begin_transaction()
        suffix = f">{self.name}.{self.transaction}".encode()
        for record in records:
            partition = record.partition % self.load.copiers if self.load.shared else self.number
            self.send(producer, self.load.outward, partition, (record.value or b"") + suffix)
        ends = {TopicPartition(record.topic, record.partition): record.offset + 1 for record in records}
        try:
            producer.send_offsets_to_transaction(ends, consumer.group_metadata())
        except OncelogError:
            self.abort(producer)
            return False
        if self.chance.random() < 0.15:
            self.abort(producer)
            return False
        return self.commit(producer)

    def go_back(self, consumer: Consumer) -> None:
        """Seek to the committed offsets. Retry for at most PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                consumer.seek_to_committed()
            except OncelogError:
                if time.monotonic() > deadline:
                    raise
            else:
                self.session += 1
                return


class Reader(Client):
    """A client that reads both topics, sometimes again from the beginning."""

    def partitions(self) -> list[TopicPartition]:
        counts = {self.load.inward: self.load.writers, self.load.outward: self.load.copiers}
        return [TopicPartition(topic, index) for topic, count in counts.items() for index in range(count)]

    def work(self) -> None:
        config = {"bootstrap.servers": self.load.servers, "isolation.level": self.load.isolation}
        with Consumer(config, auto_offset_reset="earliest", **_QUICK) as consumer:
            consumer.assign(self.partitions())
            while not self.load.halted.is_set():
                self.poll(consumer)
                if self.chance.random() < 0.01:
                    consumer.seek_to_beginning()
                    self.session += 1

    def poll(self, consumer: Consumer) -> None:
        begin = time.monotonic_ns()
        try:
            records = consumer.poll(0.1, max_records=self.chance.randint(1, 100))
        except OncelogError:
            return
        if records:
            self.note(Kind.POLL, Outcome.OK, begin, items_of(records))

    def read_all(self, servers: str) -> None:
        with Consumer({"bootstrap.servers": servers}) as consumer:
            consumer.assign(self.partitions())
            consumer.seek_to_beginning()
            ends = self.ends_without_open_transactions(servers, consumer)
            while any(consumer.position(tp) < end for tp, end in ends.items()):
                self.poll(consumer)

    def ends_without_open_transactions(self, servers: str, consumer: Consumer) -> dict[TopicPartition, int]:
        """Wait until no transaction is open, and return the end offsets.

        A broker may answer a commit before it has written the markers.
        """
        deadline = time.monotonic() + PATIENCE_S
        with Consumer({"bootstrap.servers": servers, "isolation.level": "read_uncommitted"}) as of_all:
            while (ends := consumer.end_offsets(self.partitions())) != of_all.end_offsets(self.partitions()):
                assert time.monotonic() < deadline, "a transaction stays open"
                time.sleep(0.05)
        return ends


def items_of(records: list[Record]) -> list[Item]:
    return [Item(record.topic, record.partition, record.offset, record.value) for record in records]
