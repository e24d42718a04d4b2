"""Find contradictions in what clients of a transactional log sent and read.

A history has only the operations that the clients noted. `check` uses no log file and no broker. It returns
the operations that contradict each other. If it returns none, read_committed and exactly-once held as far as
these clients could see. Each value is sent once in a history.

    AbortedRead      a record of an aborted transaction was read
    EarlyRead        a record was read before its send or its commit was called
    UnsentRead       a record was read that no client sent
    OffsetConflict   two values are at one offset of a partition
    Duplicate        one value is at two offsets
    LostWrite        no client read a committed record at or below the highest offset read
    PollSkip         a reader passed a committed record without reading it
    PollReorder      a reader went back without a seek
    SendReorder      a producer's records of one partition are not in the order of sending
    Cycle            transactions must each be before the next (history/cycles.py)

A transaction of unknown outcome counts as committed if any of its records is read. Its other records may then
be LostWrites.

Source: the invariants of Jepsen's analyses of Kafka-like systems.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from oncelog_simulator.history.cycles import ALL_KINDS, Dependency, cycles
from oncelog_simulator.history.index import (
    History,
    Item,
    Kind,
    Noted,
    Operation,
    Outcome,
    Partition,
    index,
)

__all__ = ["ALL_KINDS", "Item", "Kind", "Operation", "Outcome", "check"]


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A contradiction between operations. `item` is the record that it is about, None for a cycle.

    The docstring of each subclass lists its `operations`.
    """

    operations: tuple[Operation, ...]
    item: Item | None = None

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.item or ''}: {'; '.join(map(str, self.operations))}"


class AbortedRead(Anomaly):
    """A record of an aborted transaction was read.

    Operations: the poll, the send, and the operations that ended the transaction.
    """


class EarlyRead(Anomaly):
    """A record was read before its send or its commit was called.

    Operations: the poll, and the commit or send that began after the poll ended.
    """


class UnsentRead(Anomaly):
    """A record was read that no client sent. Operations: the poll."""


class OffsetConflict(Anomaly):
    """Two values are at one offset of a partition.

    Operations: the one with another value at the offset of `item`, and the one with `item`.
    """


class Duplicate(Anomaly):
    """One value is at two offsets.

    Operations: the one that first saw the value at another offset, and the one with `item`.
    """


class LostWrite(Anomaly):
    """A committed record was not read, although a higher offset of its partition was.

    Operations: the send, and the poll of the partition's highest offset.
    """


class PollSkip(Anomaly):
    """A reader passed a committed record without reading it.

    Operations: the polls before and after `item` (possibly the same), and one that read or sent `item`.
    """


class PollReorder(Anomaly):
    """A reader went back without a seek.

    Operations: the poll of an offset, and a later poll of `item`, whose offset is not higher.
    """


class SendReorder(Anomaly):
    """A producer's records of one partition are not in the order of sending.

    Operations: the send of a record, and a later send of `item`, which has a lower offset.
    """


@dataclass(frozen=True, slots=True)
class Cycle(Anomaly):
    """Transactions must each be before the next.

    Operations: the two operations of each dependency, in the order of the cycle.
    """

    dependencies: tuple[Dependency, ...] = ()

    @property
    def kinds(self) -> str:
        """The kinds of the dependencies, such as "ww wr", with the rarest kind first."""
        return " ".join(sorted((dependency.kind for dependency in self.dependencies), key=ALL_KINDS.index))


def check(operations: Iterable[Operation], *, dependencies: Iterable[str] = ALL_KINDS) -> list[Anomaly]:
    """Return all anomalies. `dependencies` has the kinds whose cycles count.

    Kafka promises that `wr` alone makes no cycle. history/cycles.py says what `ww` and `rw` need.
    """
    history = index(operations)
    anomalies: list[Anomaly] = [
        *_conflicts(history),
        *_wrong_reads(history),
        *_lost(history),
        *_poll_order(history),
        *_send_order(history),
    ]
    for cycle in cycles(history, frozenset(dependencies)):
        noted = tuple(
            operation for dependency in cycle for operation in (dependency.first, dependency.second)
        )
        anomalies.append(Cycle(noted, None, tuple(cycle)))
    return anomalies


def _conflicts(history: History) -> Iterator[Anomaly]:
    """Check that each value has one offset, and each offset one value."""
    checked: set[Item] = set()
    for operation in history.operations:
        for item in operation.items:
            if item.offset is None or item in checked:
                continue
            checked.add(item)
            there, other = history.log[item.topic, item.partition][item.offset]
            if other.value != item.value:
                yield OffsetConflict((there, operation), item)
            first, same = history.offsets[item.value]
            if same != item:
                yield Duplicate((first, operation), item)


def _wrong_reads(history: History) -> Iterator[Anomaly]:
    """Check that readers see only committed records, and only after their commit was requested."""
    for poll, item in history.polls:
        if item.value not in history.sends:
            yield UnsentRead((poll,), item)
            continue
        send, _ = history.sends[item.value]
        ends = history.ends.get(send.unit, [])
        if history.outcome(send) is Outcome.FAIL:
            yield AbortedRead((poll, send, *ends), item)
            continue
        commits = [end for end in ends if end.kind is Kind.COMMIT]
        decided = min(commits, key=lambda commit: commit.begin, default=send)
        if poll.end < decided.begin:
            yield EarlyRead((poll, decided), item)


def _lost(history: History) -> Iterator[Anomaly]:
    """Find committed records that no reader saw, at or below the highest offset read in the partition.

    If a record's offset is unknown, the offset of the next record of its session is an upper bound.
    """
    highest: dict[Partition, tuple[int, Operation]] = {}
    for poll, (topic, partition, offset, _) in history.polls:
        if offset is not None and offset > highest.get((topic, partition), (-1, poll))[0]:
            highest[topic, partition] = (offset, poll)
    for sent in _by_session((send, history.known(item)) for send, item in history.sends.values()).values():
        # An upper bound of the record's offset; None if no later record of the session has a known offset.
        below: int | None = None
        for send, item in reversed(sent):
            below = below if item.offset is None else item.offset
            top, poll = highest.get((item.topic, item.partition), (-1, send))
            is_due = send.unit in history.committed and send.outcome is not Outcome.FAIL
            if is_due and below is not None and below <= top and item.value not in history.read:
                yield LostWrite((send, poll), item)


def _poll_order(history: History) -> Iterator[Anomaly]:
    """Check that each session reads each partition in order and skips no visible record."""
    visible = {
        partition: sorted(offset for offset, (_, item) in log.items() if history.is_visible(item.value))
        for partition, log in history.log.items()
    }
    for polled in _by_session(history.polls).values():
        for (before, first), (after, second) in pairwise(polled):
            assert first.offset is not None and second.offset is not None
            partition = (second.topic, second.partition)
            if second.offset <= first.offset:
                yield PollReorder((before, after), second)
                continue
            offsets = visible[partition]
            for offset in offsets[bisect_right(offsets, first.offset) : bisect_left(offsets, second.offset)]:
                witness, missed = history.log[partition][offset]
                yield PollSkip((before, after, witness), missed)


def _send_order(history: History) -> Iterator[Anomaly]:
    """Check that each session's records of a partition are in the order of sending."""
    sends = [(send, history.known(item)) for send, item in history.sends.values()]
    for sent in _by_session((send, item) for send, item in sends if item.offset is not None).values():
        for (before, first), (after, second) in pairwise(sent):
            assert first.offset is not None and second.offset is not None
            if second.offset < first.offset:
                yield SendReorder((before, after), second)


def _by_session(noted: Iterable[Noted]) -> dict[Hashable, list[Noted]]:
    """Return the pairs grouped by session and partition, in their order."""
    by_session: dict[Hashable, list[Noted]] = {}
    for operation, item in noted:
        key = (operation.process, operation.session, item.topic, item.partition)
        by_session.setdefault(key, []).append((operation, item))
    return by_session
