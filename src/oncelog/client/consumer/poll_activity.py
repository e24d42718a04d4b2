"""Measures how long the application has not polled, for max.poll.interval.ms."""

from __future__ import annotations


class PollActivity:
    """The number of polls that are waiting, and the time at which the last poll stopped waiting.

    A waiting poll counts as activity, however long it waits: a member without partitions, or with paused
    partitions, is alive. A callback inside a poll does not count, because it may hang like any other code of
    the application.
    """

    __slots__ = ("_left_ms", "_waiting")

    def __init__(self, now_ms: float) -> None:
        self._waiting = 0
        self._left_ms = now_ms

    def enter(self) -> None:
        """Record that a poll starts to wait. `leave` must follow, even after a cancellation."""
        self._waiting += 1

    def leave(self, now_ms: float) -> None:
        """Record that a poll has stopped waiting."""
        self._waiting -= 1
        self._left_ms = now_ms

    def idle_ms(self, now_ms: float) -> float:
        """Return the time since the last poll stopped waiting, in ms; 0 while a poll waits."""
        return 0.0 if self._waiting else now_ms - self._left_ms
