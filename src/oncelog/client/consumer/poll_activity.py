"""The time since the application was last inside a poll, which max.poll.interval.ms bounds."""

from __future__ import annotations


class PollActivity:
    """Polls that wait at present, and when the last one stopped waiting.

    A poll that waits is activity, however long: a spare member, or one with paused partitions, is alive.
    A callback that a poll calls is not: it may hang like any other code of the application.
    """

    __slots__ = ("_left_ms", "_waiting")

    def __init__(self, now_ms: float) -> None:
        self._waiting = 0
        self._left_ms = now_ms

    def enter(self) -> None:
        """Note that a poll begins to wait; `leave` must follow, also after a cancellation."""
        self._waiting += 1

    def leave(self, now_ms: float) -> None:
        """Note that a poll has stopped to wait."""
        self._waiting -= 1
        self._left_ms = now_ms

    def idle_ms(self, now_ms: float) -> float:
        """Return for how long no poll has waited; 0 while one does."""
        return 0.0 if self._waiting else now_ms - self._left_ms
