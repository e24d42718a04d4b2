"""The broker's clock, which never goes back."""

from __future__ import annotations

from oncelog.runtime import system


class Clock:
    """A clock of milliseconds since the epoch that never goes back.

    If the wall clock is set forward, this clock follows. If the wall clock is set back, this clock continues
    at normal speed until the wall clock has caught up. So no deadline or expiry is delayed.

    Subtract `lead_ms` before you compare `now_ms` with times from another clock, for example the times of
    records or tokens.
    """

    __slots__ = ("_anchor_ns", "_monotonic_ns", "_wall_ns")

    def __init__(self) -> None:
        runtime = system.current()
        self._wall_ns, self._monotonic_ns = runtime.wall_ns, runtime.monotonic_ns
        self._anchor_ns = self._wall_ns() - self._monotonic_ns()

    def now_ms(self) -> int:
        """Return the time in milliseconds since the epoch."""
        monotonic_ns = self._monotonic_ns()
        ahead_ns = self._wall_ns() - monotonic_ns
        if ahead_ns > self._anchor_ns:
            self._anchor_ns = ahead_ns
        return (monotonic_ns + self._anchor_ns) // 1_000_000

    def lead_ms(self) -> int:
        """Return by how many ms `now_ms` is ahead of the wall clock; 0 unless the wall clock was set back."""
        return max(self._anchor_ns + self._monotonic_ns() - self._wall_ns(), 0) // 1_000_000
