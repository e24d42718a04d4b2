"""Which positions a consumer owes its group's coordinator, and which commit it sends next. No I/O.

Two calls state what must be committed:

    ask    a commit of the application, which waits for its result
    owe    an automatic commit: by time, at a close, or of partitions that are read no more

One commit is under way at a time. `next` is the rule of what follows it:

1. The application's commits, in the order of the calls; each alone, and repeated while its errors pass.
2. All that is owed, in one commit. Of each partition that is the position that was stated last.

    then           what was stated before
    ask            owed positions of the same partitions are superseded as soon as the commit is sent
    owe            owed positions of the same partitions are superseded
    withdraw       the application waits no longer: its commit is not sent again
    release        others may own these partitions: nothing is owed of them, and no commit of them is sent
    lose           the same with all partitions

A commit that was refused for good, or for too long, is owed no more; what was stated meanwhile is. While a
member keeps its partitions through a rebalance, two refusals pass: ILLEGAL_GENERATION, for the next
generation has begun, and REBALANCE_IN_PROGRESS, which the application is told of all the same. A commit
whose outcome is unknown is repeated, or superseded, but never followed by an older one.

Source: Kafka's CommitRequestManager and ConsumerCoordinator. They do not repeat a commit by time; here it is
repeated with the newest positions. tests/tables/commit_queue.txt has the cases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from oncelog.client.group.core import next_after
from oncelog.errors import OncelogError
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest
from oncelog.types import OffsetAndMetadata, TopicPartition

Offsets = Mapping[TopicPartition, OffsetAndMetadata]


@dataclass(eq=False, slots=True)
class Commit:
    """A commit to send: one that the application asked for, or all that is owed."""

    offsets: Offsets
    is_asked: bool = False
    # What was owed of the same partitions when the application asked.
    older: Offsets = field(default_factory=dict)
    # Why it is not sent, or not again.
    refusal: OncelogError | None = None
    # Why it is sent again.
    error: Exception | None = None


class CommitQueue:
    """The commits that were asked for, and the positions that are owed."""

    def __init__(self) -> None:
        self._asked: deque[Commit] = deque()
        self._owed: dict[TopicPartition, OffsetAndMetadata] = {}
        self._owed_until_ms = 0.0

    @property
    def owed(self) -> Offsets:
        return self._owed

    def ask(self, offsets: Offsets) -> Commit:
        """Note a commit of the application."""
        older = {tp: self._owed[tp] for tp in offsets if tp in self._owed}
        self._asked.append(commit := Commit(offsets, True, older))
        return commit

    def withdraw(self, commit: Commit) -> None:
        """Forget a commit that the application asked for; it may have been settled."""
        if commit in self._asked:
            self._asked.remove(commit)

    def owe(self, positions: Offsets, until_ms: float, *, is_by_time: bool = False) -> None:
        """Note positions to commit; they may fail until then. One by time gives no others more time."""
        if not (is_by_time and self._owed):
            self._owed_until_ms = until_ms
        self._owed.update(positions)

    def next(self) -> Commit | None:
        """Return the commit to send now."""
        if not self._asked:
            return Commit(dict(self._owed)) if self._owed else None
        commit = self._asked[0]
        for tp, older in commit.older.items():
            if self._owed.get(tp) is older:
                del self._owed[tp]
        return commit

    def answered(
        self, commit: Commit, error: Exception | None, now_ms: float, *, is_kept: bool = False
    ) -> bool:
        """Note what a commit was answered; False if it is to be sent again.

        `is_kept`: the sender is a member, and keeps these partitions through a rebalance.
        """
        if _passes(commit, error, is_kept=is_kept) and (commit.is_asked or now_ms < self._owed_until_ms):
            commit.error = error
            return False
        if commit.is_asked:
            self.withdraw(commit)
            return True
        for tp, position in commit.offsets.items():
            if self._owed.get(tp) == position:
                del self._owed[tp]
        return True

    def release(self, partitions: Collection[TopicPartition], error: OncelogError) -> None:
        """Others may own these partitions: refuse the application's commits of them with the error."""
        for tp in partitions:
            self._owed.pop(tp, None)
        given = frozenset(partitions)
        self._refuse([commit for commit in self._asked if not given.isdisjoint(commit.offsets)], error)

    def lose(self, error: OncelogError) -> None:
        """Others may own all partitions: refuse the application's commits with the error."""
        self._owed.clear()
        self._refuse(self._asked, error)

    def _refuse(self, commits: Iterable[Commit], error: OncelogError) -> None:
        for commit in commits:
            commit.refusal = commit.refusal or error


def _passes(commit: Commit, error: Exception | None, *, is_kept: bool) -> bool:
    """Return whether the same commit may succeed soon."""
    if not isinstance(error, OncelogError):
        return False
    match next_after(error, GroupRequest.COMMIT):
        case GroupAction.RETRY | GroupAction.FIND:
            return True
        case GroupAction.LOST:
            return is_kept
        case GroupAction.JOIN:
            return is_kept and not commit.is_asked
    return False
