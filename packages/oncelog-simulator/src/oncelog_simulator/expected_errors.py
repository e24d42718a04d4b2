"""Which errors of clients the faults of a seed explain. Without faults no call may fail.

A call that ends while faults last, or soon after the last one, may raise an error that a careful application
handles: a time-out, a lost connection, an unknown outcome, a partition without a leader, or the end of a
membership. Anything else is a violation: clients try again themselves after any other retriable error of the
broker. So is any error before the first fault or after that time.
"""

from __future__ import annotations

from collections.abc import Collection

from oncelog.errors import (
    DisconnectedError,
    FencedMemberEpoch,
    IllegalGeneration,
    InvalidTimestamp,
    LeaderNotAvailable,
    OncelogError,
    OutcomeUnknown,
    RebalanceInProgress,
    StaleMemberEpoch,
    TimedOut,
    UnknownMemberId,
)

AFTERMATH_SECONDS = 60.0
"""So long after the last fault a call may still fail: it may have begun before, with a long time-out."""
LASTING_SECONDS = AFTERMATH_SECONDS + 15.0
"""So long after the last fault clients live that live through all of them."""
MEMBERSHIP = (IllegalGeneration, UnknownMemberId, RebalanceInProgress, FencedMemberEpoch, StaleMemberEpoch)


class Excuses:
    """The times of a seed's faults. `spans_us`: when each begins and ends; none without faults.

    `paused_s`: how long processes stand still. `sets_clock`: a host's clock may be ahead, so that its records
    are refused. `is_lasting`: clients live through all faults and must then work again by themselves.
    """

    def __init__(
        self,
        spans_us: Collection[tuple[int, int]] = (),
        *,
        paused_s: float = 0.0,
        sets_clock: bool = False,
        is_lasting: bool = False,
    ) -> None:
        self._spans_us = spans_us
        self._sets_clock = sets_clock
        self.paused_s = paused_s
        self.is_lasting = is_lasting
        self.fault_count = len(spans_us)
        self.end_us = max((end for _, end in spans_us), default=0)

    def __bool__(self) -> bool:
        return bool(self._spans_us)

    @property
    def lasting_us(self) -> float:
        """Return when the clients end that live through all faults; 0 where none do."""
        return self.end_us + LASTING_SECONDS * 1e6 if self.is_lasting else 0.0

    def is_disturbed(self, begin_us: int, end_us: int) -> bool:
        """Return True when a fault lasted at some time between the two."""
        return any(begin <= end_us and begin_us <= end for begin, end in self._spans_us)

    def explains(self, error: OncelogError, now_us: int) -> bool:
        """Return True for an error that a call may raise now."""
        begin_us = min((begin for begin, _ in self._spans_us), default=0)
        if not self or not begin_us <= now_us <= self.end_us + AFTERMATH_SECONDS * 1e6:
            return False
        if isinstance(error, InvalidTimestamp):
            return self._sets_clock
        return isinstance(
            error, (TimedOut, DisconnectedError, OutcomeUnknown, LeaderNotAvailable, *MEMBERSHIP)
        )
