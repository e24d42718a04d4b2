"""Decides which of a consumer's commits is sent next, and handles the result of a commit. No I/O.

There are two kinds of commits:

    add_requested   a commit of the application, which waits for its result
    add_automatic   an automatic commit: by time (auto.commit.interval.ms), at a close, or of
                    partitions that are no longer read

One commit is in flight at a time. `next` returns the next commit to send:

1. The application's commits, in the order of the calls. Each is a separate request, and is repeated while
   its errors are transient.
2. All automatic commits as one request, with the latest position of each partition.

    later call      its effect on earlier commits
    add_requested   automatic positions of the same partitions are dropped when the commit is sent
    add_automatic   automatic positions of the same partitions are replaced
    withdraw        the application no longer waits: its commit is not sent again
    release         other members may own these partitions: no commit of them is sent
    lose            other members may own all partitions: no commit is sent

If an automatic commit fails with a final error, or its time limit has passed, its positions are dropped.
Newer positions of the same partitions stay. While a member keeps its partitions through a rebalance, two
errors are transient: ILLEGAL_GENERATION and REBALANCE_IN_PROGRESS. The next generation will accept the same
commit. But a commit that the application has requested fails with REBALANCE_IN_PROGRESS. If the outcome of a
commit is unknown, the same or a newer commit follows, and never an older one.

Source: Kafka's CommitRequestManager and ConsumerCoordinator. Unlike these two classes, this queue repeats
an automatic commit that was due by time and has failed, with the newest positions. The cases are in
tests/tables/commit_queue.txt.
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
    """A commit to send: either one that the application requested, or all automatic positions."""

    offsets: Offsets
    is_requested: bool = False
    # The automatic positions of the same partitions at the time of the application's call.
    older: Offsets = field(default_factory=dict)
    # The error to raise instead of sending the commit; None to send it.
    refusal: OncelogError | None = None
    # The error of the last attempt.
    error: Exception | None = None


class CommitQueue:
    """The requested commits, and the positions to commit automatically."""

    def __init__(self) -> None:
        self._requested: deque[Commit] = deque()
        self._automatic: dict[TopicPartition, OffsetAndMetadata] = {}
        self._automatic_until_ms = 0.0

    @property
    def automatic(self) -> Offsets:
        """The positions to commit automatically."""
        return self._automatic

    def add_requested(self, offsets: Offsets) -> Commit:
        """Add a commit of the application, and return it."""
        older = {tp: self._automatic[tp] for tp in offsets if tp in self._automatic}
        self._requested.append(commit := Commit(offsets, True, older))
        return commit

    def withdraw(self, commit: Commit) -> None:
        """Remove a commit of the application, unless it has ended already."""
        if commit in self._requested:
            self._requested.remove(commit)

    def add_automatic(self, positions: Offsets, until_ms: float, *, is_by_time: bool = False) -> None:
        """Add positions to commit automatically, and to retry until `until_ms`.

        A commit by time (auto.commit.interval.ms) does not extend the retries of earlier positions.
        """
        if not (is_by_time and self._automatic):
            self._automatic_until_ms = until_ms
        self._automatic.update(positions)

    def next(self) -> Commit | None:
        """Return the commit to send now; None if there is none.

        If it is a commit of the application, drop the older automatic positions of the same partitions.
        """
        if not self._requested:
            return Commit(dict(self._automatic)) if self._automatic else None
        commit = self._requested[0]
        for tp, older in commit.older.items():
            if self._automatic.get(tp) is older:
                del self._automatic[tp]
        return commit

    def on_result(
        self, commit: Commit, error: Exception | None, now_ms: float, *, is_kept: bool = False
    ) -> bool:
        """Process the result of a commit; return False if it must be sent again.

        `is_kept` is True if the sender is a member and keeps these partitions through a rebalance.
        """
        if _is_transient(commit, error, is_kept=is_kept) and (
            commit.is_requested or now_ms < self._automatic_until_ms
        ):
            commit.error = error
            return False
        if commit.is_requested:
            self.withdraw(commit)
            return True
        for tp, position in commit.offsets.items():
            if self._automatic.get(tp) == position:
                del self._automatic[tp]
        return True

    def release(self, partitions: Collection[TopicPartition], error: OncelogError) -> None:
        """Drop positions of these partitions, and fail the application's commits of them with `error`."""
        for tp in partitions:
            self._automatic.pop(tp, None)
        released = frozenset(partitions)
        self._refuse([commit for commit in self._requested if not released.isdisjoint(commit.offsets)], error)

    def lose(self, error: OncelogError) -> None:
        """Drop all automatic positions, and fail all of the application's commits with `error`."""
        self._automatic.clear()
        self._refuse(self._requested, error)

    def _refuse(self, commits: Iterable[Commit], error: OncelogError) -> None:
        for commit in commits:
            commit.refusal = commit.refusal or error


def _is_transient(commit: Commit, error: Exception | None, *, is_kept: bool) -> bool:
    """Return True if a retry of the same commit may succeed."""
    if not isinstance(error, OncelogError):
        return False
    match next_after(error, GroupRequest.COMMIT):
        case GroupAction.RETRY | GroupAction.FIND:
            return True
        case GroupAction.LOST:
            return is_kept
        case GroupAction.JOIN:
            return is_kept and not commit.is_requested
    return False
