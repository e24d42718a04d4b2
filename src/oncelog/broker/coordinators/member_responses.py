"""Sends the responses to a group's members in bounded steps, because thousands of them may be ready at once.

All members of a classic group wait for the end of its rebalance, and then get their responses together.
Building and writing a response takes about 20 µs, so a group of thousands of members would hold up all other
clients. Guarded by tests/broker/test_broker_group_steps.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from oncelog.log.background import BackgroundQueue, BackgroundTask, Kind


class MemberResponses:
    """The responses that are ready, and not sent yet.

    A step sends at most `step_responses` of them. The others follow in the background, in their order.
    """

    def __init__(self, background: BackgroundQueue, step_responses: int) -> None:
        self._background, self._step_responses = background, step_responses
        self._waiting: deque[Callable[[], None]] = deque()
        self._sent_count = 0
        """Number of responses that the current step has sent."""
        self._is_running = False

    def send(self, respond: Callable[[], None]) -> None:
        """Call `respond` now, or in a later step if this step has sent enough responses."""
        if not self._waiting and self._sent_count < self._step_responses:
            self._sent_count += 1
            respond()
            return
        self._waiting.append(respond)
        if not self._is_running:
            self._is_running = True
            self._background.add(self._send_waiting(), Kind.REQUEST)

    def end_step(self) -> None:
        """End the step of a request that has been handled. The next request may again send responses
        immediately.
        """
        self._sent_count = 0

    def _send_waiting(self) -> BackgroundTask:
        try:
            while self._waiting:
                yield None
                for _ in range(min(self._step_responses, len(self._waiting))):
                    self._waiting.popleft()()
        finally:
            self._is_running = False
            self._sent_count = 0
