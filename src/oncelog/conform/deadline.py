"""The end of the time that one scenario may take, and waits that end there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Self

from oncelog.conform.values import Mismatch

STEP_S = 0.02
"""Pause in seconds between two attempts at a request."""


class Deadline:
    """A moment of the monotonic clock, after which a scenario has failed."""

    def __init__(self, seconds: float) -> None:
        self._ends_at_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Return the seconds until the end, at least 0."""
        return max(self._ends_at_s - time.monotonic(), 0.0)

    def within(self, seconds: float) -> Self:
        """Return the deadline in `seconds`, or this one if it is earlier."""
        return type(self)(min(seconds, self.left_s()))

    def attempts(self, what: Callable[[], Mismatch]) -> Iterator[int]:
        """Count the rounds of a loop that ends once it has what it waits for, with a pause after each.

        Raises what `what` returns at the end of the time.
        """
        count = 0
        while True:
            yield count
            count += 1
            self.pause(STEP_S)
            if not self.left_s():
                raise what()

    def pause(self, seconds: float) -> None:
        """Wait for this time, or until the end if that is earlier."""
        time.sleep(min(seconds, self.left_s()))
