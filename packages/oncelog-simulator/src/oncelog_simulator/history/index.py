"""What clients noted, as values, and indexed by value, offset and transaction for `history/check.py`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias


class Kind(Enum):
    """What a client was asked to do."""

    SEND = "send"
    POLL = "poll"
    COMMIT = "commit"
    ABORT = "abort"


class Outcome(Enum):
    """What it answered. FAIL: it surely did not happen. UNKNOWN: it may have, or may yet."""

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Item(NamedTuple):
    """One record. `offset` None: the client was not told."""

    topic: str
    partition: int
    offset: int | None
    value: Hashable

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}={self.value!r}"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One call of a client; a history has those of each process in the order of calling.

    `process`: a thread, which does one thing at a time. `session`: a producer, or a reader between two seeks
    or rebalances. `begin`, `end`: when it was called and when it returned, by one clock in any unit.
    `transaction`: which of the process's; None: the call stands for itself.
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
        """What happens at once: its transaction, or the operation alone."""
        return self if self.transaction is None else (self.process, self.transaction)

    def __str__(self) -> str:
        what = f"{self.process} {self.kind.value} {self.outcome.value} {self.begin}-{self.end}"
        return what if self.transaction is None else f"{what} in {self.transaction}"


Unit: TypeAlias = "tuple[str, Hashable] | Operation"
Partition: TypeAlias = tuple[str, int]
Noted: TypeAlias = tuple[Operation, Item]
"""A record and who spoke of it."""


@dataclass(slots=True)
class History:
    """Operations, indexed.

    `sends`, `offsets`: who sent a value, who first told its offset. `read`: the values that were read. `log`:
    by partition and offset, as readers saw it, or as producers were told where no reader was. `ends`: commits
    and aborts. `committed`: what is to be seen as a whole.
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
        """Whether what was sent is to be seen. A transaction that nobody asked to commit is not."""
        if send.outcome is Outcome.FAIL or send.transaction is None:
            return send.outcome
        ends = self.ends.get(send.unit, ())
        commits = {end.outcome for end in ends if end.kind is Kind.COMMIT}
        return next(
            (outcome for outcome in (Outcome.OK, Outcome.UNKNOWN) if outcome in commits), Outcome.FAIL
        )

    def is_visible(self, value: Hashable) -> bool:
        """Whether readers that pass by must see it."""
        return value not in self.sends or self.sends[value][0].unit in self.committed

    def known(self, item: Item) -> Item:
        """The item with its offset, if anybody was told."""
        return self.offsets[item.value][1] if item.offset is None and item.value in self.offsets else item


def index(operations: Iterable[Operation]) -> History:
    """The operations as a History."""
    history = History(list(operations))
    for operation in history.operations:
        if operation.kind in (Kind.COMMIT, Kind.ABORT):
            history.ends.setdefault(operation.unit, []).append(operation)
        for item in operation.items:
            _note(history, operation, item)
    for send, item in history.sends.values():
        outcome = history.outcome(send)
        # What is seen in part must be there as a whole.
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
