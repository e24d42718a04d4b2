"""The clock that the broker lives by."""

from __future__ import annotations

import time


class Clock:
    """Milliseconds since the epoch that never go back.

    Follows the wall clock when it is set forward; when it is set back, time goes on from where it
    was until the wall clock has caught up, so that deadlines and expiry are not stretched.
    """

    __slots__ = ("_anchor_ns",)

    def __init__(self) -> None:
        self._anchor_ns = time.time_ns() - time.monotonic_ns()

    def now_ms(self) -> int:
        monotonic_ns = time.monotonic_ns()
        ahead_ns = time.time_ns() - monotonic_ns
        if ahead_ns > self._anchor_ns:
            self._anchor_ns = ahead_ns
        return (monotonic_ns + self._anchor_ns) // 1_000_000
