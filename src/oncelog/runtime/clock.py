"""The clock that the broker lives by."""

from __future__ import annotations

from oncelog.runtime import system


class Clock:
    """Milliseconds since the epoch that never go back.

    Follows the wall clock when it is set forward; when it is set back, time goes on from where it
    was until the wall clock has caught up, so that deadlines and expiry are not stretched. What is compared
    with times of others (records, tokens) subtracts `lead_ms`.
    """

    __slots__ = ("_anchor_ns", "_monotonic_ns", "_wall_ns")

    def __init__(self) -> None:
        runtime = system.current()
        self._wall_ns, self._monotonic_ns = runtime.wall_ns, runtime.monotonic_ns
        self._anchor_ns = self._wall_ns() - self._monotonic_ns()

    def now_ms(self) -> int:
        monotonic_ns = self._monotonic_ns()
        ahead_ns = self._wall_ns() - monotonic_ns
        if ahead_ns > self._anchor_ns:
            self._anchor_ns = ahead_ns
        return (monotonic_ns + self._anchor_ns) // 1_000_000

    def lead_ms(self) -> int:
        """Return how far `now_ms` is ahead of the wall clock, which was set back."""
        return max(self._anchor_ns + self._monotonic_ns() - self._wall_ns(), 0) // 1_000_000
