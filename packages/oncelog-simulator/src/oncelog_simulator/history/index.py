"""The operations that clients noted, and indexes by value, offset and transaction for `history/check.py`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias


class Kind(Enum):
    """The kind of a client's call."""

    SEND = "send"
    POLL = "poll"
    COMMIT = "commit"
    ABORT = "abort"


class Outcome(Enum):
    """The outcome of a call.

    FAIL: the call certainly had no effect. UNKNOWN: the call may have had an effect, or may have one later.
    """

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Item(NamedTuple):
    """One record. `offset` is None if the client never learned the offset."""

    topic: str
    partition: int
    offset: int | None
    value: Hashable

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}={self.value!r}"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One call of a client. A history has the calls of each process in the order in which they were made.

    `process` is a thread, which makes one call at a time. `session` is a producer, or a reader between two
    seeks or rebalances. `begin` and `end` are the times of the call and of its return. All times are from one
    clock, in any unit. `transaction` identifies a transaction of the process; it is None for a call outside
    transactions.
    """

    process: str
    session: Hashable
    kind: Kind
    outcome: Outcome
    begin: int
    end: int
    items: tuple[Item, ...] = ()
    transaction: Hashable | None = None

    @property
    def unit(self) -> Unit:
        """The operations that take effect together: the transaction, or this operation alone."""
        return self if self.transaction is None else (self.process, self.transaction)

    def __str__(self) -> str:
        what = f"{self.process} {self.kind.value} {self.outcome.value} {self.begin}-{self.end}"
        return what if self.transaction is None else f"{what} in {self.transaction}"


Unit: TypeAlias = "tuple[str, Hashable] | Operation"
Partition: TypeAlias = tuple[str, int]
Noted: TypeAlias = tuple[Operation, Item]
"""A record, and an operation that sent or read it."""


@dataclass(slots=True)
class History:
    """Operations with indexes.

    `sends` has the send of each value. `offsets` has the first operation that learned a value's offset.
    `read` has the values that were read. `log` has records by partition and offset, as a reader saw them, or
    as their producer learned the offset. `ends` has commits and aborts. `committed` has the transactions and
    sends that must be visible as a whole.
    """

    operations: Sequence[Operation]
    sends: dict[Hashable, Noted] = field(default_factory=dict)
    polls: list[Noted] = field(default_factory=list)
    read: set[Hashable] = field(default_factory=set)
    offsets: dict[Hashable, Noted] = field(default_factory=dict)
    log: dict[Partition, dict[int, Noted]] = field(default_factory=dict)
    ends: dict[Unit, list[Operation]] = field(default_factory=dict)
    committed: set[Unit] = field(default_factory=set)

    def outcome(self, send: Operation) -> Outcome:
        """Return the outcome of a send. In a transaction, this is the transaction's outcome, unless the send
        itself failed.

        A transaction that no client tried to commit counts as failed.
        """
        if send.outcome is Outcome.FAIL or send.transaction is None:
            return send.outcome
        ends = self.ends.get(send.unit, ())
        commits = {end.outcome for end in ends if end.kind is Kind.COMMIT}
        return next(
            (outcome for outcome in (Outcome.OK, Outcome.UNKNOWN) if outcome in commits), Outcome.FAIL
        )

    def is_visible(self, value: Hashable) -> bool:
        """Return True if a reader of the record's offset must see it: its transaction is committed."""
        return value not in self.sends or self.sends[value][0].unit in self.committed

    def known(self, item: Item) -> Item:
        """Return the item with its offset if any operation learned the offset."""
        return self.offsets[item.value][1] if item.offset is None and item.value in self.offsets else item


def index(operations: Iterable[Operation]) -> History:
    """Return the operations with their indexes."""
    history = History(list(operations))
    for operation in history.operations:
        if operation.kind in (Kind.COMMIT, Kind.ABORT):
            history.ends.setdefault(operation.unit, []).append(operation)
        for item in operation.items:
            _note(history, operation, item)
    for send, item in history.sends.values():
        outcome = history.outcome(send)
        # A transaction of unknown outcome counts as committed if one of its records was read.
        if outcome is Outcome.OK or (outcome is Outcome.UNKNOWN and item.value in history.read):
            history.committed.add(send.unit)
    return history


def _note(history: History, operation: Operation, item: Item) -> None:
    is_read = operation.kind is Kind.POLL
    if is_read:
        history.polls.append((operation, item))
        history.read.add(item.value)
    else:
        history.sends[item.value] = (operation, item)
    if item.offset is None:
        return
    history.offsets.setdefault(item.value, (operation, item))
    log = history.log.setdefault((item.topic, item.partition), {})
    if item.offset not in log or (is_read and log[item.offset][0].kind is Kind.SEND):
        log[item.offset] = (operation, item)
