"""Decide which client errors the faults of a seed explain. Without faults no call may fail.

A call that ends during the faults, or soon after the last one, may raise an error that a careful application
handles. These are time-outs, lost connections, unknown outcomes, partitions without a leader, and the end of
a membership. Any other error is a violation, because clients retry other retriable errors themselves. An
error before the first fault, or long after the last one, is a violation too.
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
"""Seconds after the last fault during which a call may still fail.

The call may have begun earlier, with a long time-out.
"""
LASTING_SECONDS = AFTERMATH_SECONDS + 15.0
"""Seconds from the last fault to the end of clients that live through all faults (`is_lasting`)."""
MEMBERSHIP = (IllegalGeneration, UnknownMemberId, RebalanceInProgress, FencedMemberEpoch, StaleMemberEpoch)


class ExpectedErrors:
    """The errors that the faults of one seed explain.

    `spans_us` has the start and end of each fault; it is empty without faults. `paused_s` is the total time
    for which processes are paused. `sets_clock` is True if a host's clock may be ahead, so that its records
    are refused. `is_lasting` is True if clients live through all faults and must then work without a restart.
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
        """The virtual time in microseconds at which long-lived clients end; 0 unless `is_lasting`."""
        return self.end_us + LASTING_SECONDS * 1e6 if self.is_lasting else 0.0

    def is_disturbed(self, begin_us: int, end_us: int) -> bool:
        """Return True if a fault was active at any time from `begin_us` to `end_us`."""
        return any(begin <= end_us and begin_us <= end for begin, end in self._spans_us)

    def explains(self, error: OncelogError, now_us: int) -> bool:
        """Return True if a call may raise this error now."""
        begin_us = min((begin for begin, _ in self._spans_us), default=0)
        if not self or not begin_us <= now_us <= self.end_us + AFTERMATH_SECONDS * 1e6:
            return False
        if isinstance(error, InvalidTimestamp):
            return self._sets_clock
        return isinstance(
            error, (TimedOut, DisconnectedError, OutcomeUnknown, LeaderNotAvailable, *MEMBERSHIP)
        )
