"""Producers of one transactional id share, hand over, take over and end transactions, in a random order.

The model knows only what the documentation of `Producer` says. It knows no roles, epochs and sequences. A
producer that another one has fenced may fail or not, but it changes nothing for the others.

The seeds were chosen. They fail if R1751 (seed 4), R1773 (seed 5), R1801 (seed 9) or R1772 (both seeds of
version 2) is put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.topics import new_topic, producer_of
from support.wait import pass_time, wait_until

from oncelog import Admin, Broker, Consumer, Producer, TopicPartition
from oncelog.errors import MisuseError, OncelogError, TimedOut
from oncelog.testing.proxy import Proxy, Rule
from oncelog.types import TransactionShare

PARTITIONS = 2
STEPS = 60
CONFIG = {
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.num.partitions": 1,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 100,
}
_ENDS = ("EndTxn", "InitProducerId", "DescribeTransactions")


@dataclass(eq=False)
class Transaction:
    """A transaction as its application sees it. `state` is open, committed, aborted or timed out."""

    state: str = "open"
    share: TransactionShare | None = None
    writers: dict[int, Member] = field(default_factory=dict)
    """Partition -> the only producer that may write to it, as `join_transaction` demands."""
    values: list[bytes] = field(default_factory=list)
    """Acknowledged records."""
    pending: list[tuple[bytes, Any]] = field(default_factory=list)
    """Records that may have no acknowledgement yet, with their futures."""
    offset: int | None = None
    """The group's position that the transaction commits."""

    @property
    def is_empty(self) -> bool:
        return not self.values and not self.pending and self.offset is None

    def settle(self) -> None:
        """Wait until all pending records are acknowledged."""
        for value, future in self.pending:
            future.result(60)
            self.values.append(value)
        self.pending = []


@dataclass(eq=False)
class Member:
    """A producer of the transactional id."""

    number: int
    producer: Producer
    generation: int
    part: str = "own"
    """own, joined, taken or handed"""
    transaction: Transaction | None = None
    is_failed: bool = False
    """True if only a new producer can go on, although none has started yet."""

    @property
    def opened(self) -> Transaction:
        assert self.transaction is not None
        return self.transaction


class World:
    """The producers of one transactional id, and what their application knows of its records."""

    def __init__(self, broker: Broker, proxy: Proxy, version: int, seed: int) -> None:
        self.broker, self.proxy, self.version, self.random = broker, proxy, version, random.Random(seed)
        servers = {"bootstrap.servers": broker.bootstrap_servers}
        self.topic = new_topic(broker.bootstrap_servers, PARTITIONS)
        self.tps = [TopicPartition(self.topic, number) for number in range(PARTITIONS)]
        self.admin, self.consumer = Admin(servers), Consumer(servers)
        self.consumer.assign(self.tps)
        self.consumer.seek_to_beginning()
        self.members: list[Member] = []
        self.generation = self.made_count = self.value_count = 0
        """`init_transactions` raises `generation`, and so fences all members of earlier ones."""
        self.committed: list[bytes] = []
        self.visible: list[bytes] = []
        self.offset: int | None = None
        self.story: list[str] = []

    def close(self) -> None:
        self.proxy.clear()
        for closeable in (*(member.producer for member in self.members), self.consumer, self.admin):
            closeable.close()

    # The application's state

    def is_live(self, member: Member) -> bool:
        return member.generation == self.generation and not member.is_failed

    def is_open(self, member: Member) -> bool:
        transaction = member.transaction
        return self.is_live(member) and transaction is not None and transaction.state == "open"

    def is_owner(self, member: Member) -> bool:
        return self.is_open(member) and member.part == "own"

    def may_end(self, member: Member) -> bool:
        return self.is_open(member) and member.part in ("own", "taken")

    def may_begin(self, member: Member) -> bool:
        is_free = member.transaction is None and member.part in ("own", "taken")
        return self.is_live(member) and is_free

    def may_send_own(self, member: Member) -> bool:
        return self.is_owner(member) and bool(self.partitions_of(member))

    def may_send_joined(self, member: Member) -> bool:
        return self.is_open(member) and member.part == "joined" and bool(self.partitions_of(member))

    def may_share(self, member: Member) -> bool:
        return self.is_owner(member) and member.opened.share is None

    def may_be_joined(self, member: Member) -> bool:
        is_shared = self.is_owner(member) and member.opened.share is not None
        joined_count = sum(other.transaction is member.transaction for other in self.members) - 1
        return is_shared and joined_count < 2

    def may_hand_over(self, member: Member) -> bool:
        return self.may_end(member) and member.opened.share is None

    def is_late(self, member: Member) -> bool:
        return member.part == "joined" and member.opened.state != "open"

    def is_zombie(self, member: Member) -> bool:
        return not self.is_live(member) and member.part in ("own", "taken")

    def is_any(self, member: Member) -> bool:
        return True

    def may_time_out(self, member: Member) -> bool:
        return self.may_end(member) and not member.opened.is_empty

    def forbidden(self, member: Member) -> list[str]:
        """Return the calls that raise MisuseError according to their documentation."""
        ends = ["commit_transaction", "abort_transaction", "begin_transaction", "hand_over_transaction"]
        if not self.is_live(member):
            return []
        if member.part == "handed":
            return [*ends, "send"]
        if not self.is_open(member):
            return []
        if member.part == "joined":
            return [*ends, "send_offsets_to_transaction", "share_transaction"]
        if member.part == "taken":
            return ["send", "begin_transaction"]
        return ["begin_transaction", *(["hand_over_transaction"] if member.opened.share else [])]

    def partitions_of(self, member: Member) -> list[int]:
        return [number for number in range(PARTITIONS) if member.opened.writers.get(number, member) is member]

    def next_value(self) -> bytes:
        self.value_count += 1
        return b"%d" % self.value_count

    def new_member(
        self, generation: int, part: str = "own", transaction: Transaction | None = None
    ) -> Member:
        producer = producer_of(self.proxy.bootstrap_servers, transactional_id=f"id-{self.topic}")
        member = Member(self.made_count, producer, generation, part, transaction)
        self.made_count += 1
        self.members.append(member)
        return member

    # Checks

    def check(self) -> None:
        """Check that exactly the records of committed transactions are visible."""

        def is_read() -> bool:
            ends = self.consumer.end_offsets(self.tps)
            while any(self.consumer.position(tp) < end for tp, end in ends.items()):
                self.visible += [
                    record.value for record in self.consumer.poll(0.01) if record.value is not None
                ]
            return len(self.visible) >= len(self.committed)

        wait_until(is_read, what=self.explain)
        assert sorted(self.visible) == sorted(self.committed), self.explain()

    def check_nothing_is_open(self) -> None:
        """Check that no transaction is open, and that the group's position is that of the last commit."""
        wait_until(lambda: not self.admin.list_transactions("Ongoing"), what=self.explain)
        wait_until(lambda: not self.admin.open_transactions(self.topic), what=self.explain)
        found = self.admin.group_offsets(f"group-{self.topic}").get(self.tps[0])
        assert (found and found.offset) == self.offset, self.explain()

    def explain(self) -> str:
        return f"visible {self.visible}, committed {self.committed}\n" + "\n".join(self.story)

    # Actions of the application

    def call(self, call: Callable[..., object], apis: tuple[str, ...]) -> None:
        """Call, sometimes with a lost request or response. After TimedOut, call again."""
        roll, api = self.random.random(), self.random.choice(apis)
        direction = self.random.choice(("request", "response"))
        if roll < 0.6:
            call()
            return
        is_lost_once = roll < 0.8
        self.story.append(f"  the {direction} {api} is lost {'once' if is_lost_once else 'always'}")
        self.proxy.add(Rule(action="cut", api=api, direction=direction, nth=1 if is_lost_once else None))
        if is_lost_once:
            call()
            self.proxy.clear()
            return
        try:
            call(timeout=0.05)
            self.proxy.clear()
        except TimedOut:
            self.proxy.clear()
            call()

    def start(self) -> None:
        member = self.new_member(self.generation + 1)
        self.story.append(f"{member.number} is initialized")
        self.call(member.producer.init_transactions, ("InitProducerId",))
        for other in self.members:
            if self.is_open(other):
                other.opened.state = "aborted"
        self.generation += 1
        self.check_nothing_is_open()

    def begin(self, member: Member) -> None:
        try:
            member.producer.begin_transaction()
            member.part, member.transaction = "own", Transaction()
        except MisuseError:
            assert self.version == 0, self.explain()
            member.is_failed = True

    def send(self, member: Member) -> None:
        transaction, value = member.opened, self.next_value()
        partition = self.random.choice(self.partitions_of(member))
        transaction.writers[partition] = member
        self.story.append(f"  {value!r} to partition {partition}")

        future = member.producer.send(self.topic, value, partition=partition)
        if member.part == "own" and self.random.random() < 0.3:
            transaction.pending.append((value, future))
            return
        future.result(60)
        transaction.values.append(value)

    def send_offsets(self, member: Member) -> None:
        self.value_count += 1
        position = {self.tps[0]: self.value_count}
        member.producer.send_offsets_to_transaction(position, f"group-{self.topic}")
        member.opened.offset = self.value_count

    def share(self, member: Member) -> None:
        try:
            member.opened.share = member.producer.share_transaction()
        except MisuseError:
            # The producer has sent records in an earlier transaction.
            assert self.version == 0, self.explain()

    def join(self, owner: Member) -> None:
        share = owner.opened.share
        assert share is not None
        member = self.new_member(owner.generation, "joined", owner.opened)
        self.story.append(f"  {member.number} joins")
        member.producer.join_transaction(share)

    def hand_over(self, member: Member) -> None:
        share = member.producer.hand_over_transaction()
        other = self.new_member(member.generation, "taken", member.opened)
        other.opened.settle()
        self.story.append(f"  {other.number} takes over")
        other.producer.take_over_transaction(share)
        member.part, member.transaction = "handed", None

    def commit(self, member: Member) -> None:
        self.call(member.producer.commit_transaction, _ENDS)
        transaction, member.transaction = member.opened, None
        transaction.settle()
        transaction.state = "committed"
        self.committed += transaction.values
        self.offset = transaction.offset or self.offset
        self.check_nothing_is_open()

    def abort(self, member: Member) -> None:
        self.call(member.producer.abort_transaction, _ENDS)
        self.on_aborted(member)

    def on_aborted(self, member: Member) -> None:
        member.opened.state, member.transaction = "aborted", None
        self.check_nothing_is_open()

    def close_one(self, member: Member) -> None:
        may_end = self.may_end(member)
        member.producer.close()
        if may_end:
            self.on_aborted(member)
        self.members.remove(member)

    def misuse(self, member: Member) -> None:
        """Make a call that the documentation forbids."""
        call = self.random.choice(self.forbidden(member))
        self.story.append(f"  {call}")
        arguments: dict[str, tuple[Any, ...]] = {
            "send": (self.topic, b"forbidden"),
            "send_offsets_to_transaction": ({self.tps[0]: 1}, f"group-{self.topic}"),
        }
        with pytest.raises(MisuseError):
            getattr(member.producer, call)(*arguments.get(call, ()))

    def send_late(self, member: Member) -> None:
        """Send in a transaction that has ended. The record is visible in no other one."""
        with suppress(OncelogError):
            partition = self.random.randrange(PARTITIONS)
            member.producer.send(self.topic, b"late", partition=partition).result(60)
            assert self.version == 0 and member.opened.state == "committed", self.explain()

    def use_zombie(self, member: Member) -> None:
        """Use a producer that is fenced, or whose transaction has timed out."""
        producer, call = member.producer, self.random.choice(("begin", "send", "commit", "abort"))
        self.story.append(f"  {call}")
        with suppress(OncelogError):
            if call == "begin":
                producer.begin_transaction()
                member.transaction = Transaction()
            elif call == "send":
                producer.send(self.topic, b"zombie", partition=0).result(60)
                member.opened.values.append(b"zombie")
            elif call == "commit":
                producer.commit_transaction()
                assert member.opened.is_empty, self.explain()
                member.transaction = None
            else:
                producer.abort_transaction()
                # The abort of a transaction that has timed out may succeed. Then the producer can go on.
                member.transaction, member.is_failed = None, False

    def time_out(self, member: Member) -> None:
        """Let transaction.timeout.ms pass, so that the coordinator aborts the transaction."""
        transaction = member.opened
        transaction.settle()
        pass_time(self.broker, 61_000)
        self.check_nothing_is_open()
        transaction.state = "timed out"
        for other in self.members:
            other.is_failed |= other.transaction is transaction

    def restart(self) -> None:
        self.story.append("the broker is restarted")
        self.broker.stop()
        self.broker.start()

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
            self.check()
        self.start()
        last = self.members[-1]
        self.begin(last)
        for partition in range(PARTITIONS):
            value = self.next_value()
            last.opened.pending.append((value, last.producer.send(self.topic, value, partition=partition)))
        self.commit(last)
        self.check()

    def step(self) -> None:
        """Do one action that is possible now."""
        eligible = [
            (action, [member for member in self.members if action.is_eligible(self, member)])
            for action in ACTIONS
        ]
        possible = [(action, members) for action, members in eligible if members]
        is_stuck = not any(self.may_begin(member) or self.may_end(member) for member in self.members)
        weights = [50 if is_stuck else 1, 0.3, *(action.weight for action, _ in possible)]
        number = self.random.choices(range(len(weights)), weights)[0]
        if number < 2:
            (self.start if number == 0 or not self.members else self.restart)()
            return
        action, members = possible[number - 2]
        member = self.random.choice(members)
        self.story.append(f"{member.number} ({member.part}): {action.act.__name__}")
        action.act(self, member)


class Action(NamedTuple):
    """An action of a member, the condition under which it is possible, and how often it is chosen."""

    is_eligible: Callable[[World, Member], object]
    act: Callable[[World, Member], None]
    weight: int


ACTIONS = [
    Action(World.may_begin, World.begin, 20),
    Action(World.may_send_joined, World.send, 25),
    Action(World.may_send_own, World.send, 5),
    Action(World.may_end, World.send_offsets, 1),
    Action(World.may_share, World.share, 6),
    Action(World.may_be_joined, World.join, 10),
    Action(World.may_hand_over, World.hand_over, 2),
    Action(World.may_end, World.commit, 4),
    Action(World.may_end, World.abort, 2),
    Action(World.is_any, World.close_one, 1),
    Action(World.forbidden, World.misuse, 1),
    Action(World.is_late, World.send_late, 5),
    Action(World.is_zombie, World.use_zombie, 2),
    Action(World.may_time_out, World.time_out, 1),
]


@pytest.mark.behaviour("T4", "T6")
@pytest.mark.parametrize(("version", "seed"), [(0, 4), (0, 5), (0, 9), (2, 1), (2, 2)])
def test_exactly_the_records_of_committed_transactions_are_visible(
    tmp_path: Path, version: int, seed: int
) -> None:
    config = {**CONFIG, "oncelog.transaction.version": version}
    with Broker(tmp_path, config=config) as broker, Proxy(broker.bootstrap_servers) as proxy:
        world = World(broker, proxy, version, seed)
        try:
            world.run()
        finally:
            world.close()
