"""The broker's clock."""

from __future__ import annotations

from oncelog.runtime import system


class Clock:
    """A clock of milliseconds since 1970 that never goes back.

    It follows the wall clock forward. If the wall clock is set back, this clock continues at its own pace
    until the wall clock has caught up, so that no deadline or expiry is delayed. Subtract `lead_ms` before
    comparing with times from elsewhere, such as those of records or tokens.
    """

    __slots__ = ("_anchor_ns", "_monotonic_ns", "_wall_ns")

    def __init__(self) -> None:
        runtime = system.current()
        self._wall_ns, self._monotonic_ns = runtime.wall_ns, runtime.monotonic_ns
        self._anchor_ns = self._wall_ns() - self._monotonic_ns()

    def now_ms(self) -> int:
        """Return the time in milliseconds since 1970."""
        monotonic_ns = self._monotonic_ns()
        ahead_ns = self._wall_ns() - monotonic_ns
        if ahead_ns > self._anchor_ns:
            self._anchor_ns = ahead_ns
        return (monotonic_ns + self._anchor_ns) // 1_000_000

    def lead_ms(self) -> int:
        """Return how far `now_ms` is ahead of the wall clock, because that was set back."""
        return max(self._anchor_ns + self._monotonic_ns() - self._wall_ns(), 0) // 1_000_000
