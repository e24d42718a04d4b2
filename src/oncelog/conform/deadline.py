"""The time limit of a scenario, and waits that end at this limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Self

from oncelog.conform.values import Mismatch

STEP_S = 0.02
"""Pause in seconds between two attempts at a request."""


class Deadline:
    """The time on the monotonic clock at which an unfinished scenario fails."""

    def __init__(self, seconds: float) -> None:
        self._ends_at_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Return the seconds until the deadline; 0 if it has passed."""
        return max(self._ends_at_s - time.monotonic(), 0.0)

    def within(self, seconds: float) -> Self:
        """Return a deadline `seconds` from now, or at the time of this deadline if that is earlier."""
        return type(self)(min(seconds, self.left_s()))

    def attempts(self, what: Callable[[], Mismatch]) -> Iterator[int]:
        """Yield the number of each attempt, from 0, and pause between attempts. The caller leaves the loop
        when an attempt succeeds.

        Once the deadline has passed, raise the error that `what` returns. There is always at least one
        attempt.
        """
        count = 0
        while True:
            yield count
            count += 1
            self.pause(STEP_S)
            if not self.left_s():
                raise what()

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, but not past the deadline."""
        time.sleep(min(seconds, self.left_s()))
