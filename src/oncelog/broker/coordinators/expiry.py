"""Search for expired groups, expired transactional ids and timed-out transactions in the background.

One search is called a round. With 100,000 groups a round takes seconds, so requests are handled between its
bounded steps. Guarded by tests/broker/test_broker_expiry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing

from oncelog.broker.stepwise import name_cost
from oncelog.log.background import BackgroundQueue, BackgroundTask


class ExpiryRounds:
    """The searches over one kind of key, such as group ids. Only one round runs at a time."""

    def __init__(self, background: BackgroundQueue, step_entries: int) -> None:
        self._background = background
        self._step_entries = step_entries
        self._is_running = False
        self._is_closed = False

    def begin(self, keys: Iterable[str], look: Callable[[str], BackgroundTask | None]) -> None:
        """Begin a round: call `look`, which examines one key, for `step_entries` keys per step, fewer if they
        are long. See test_the_length_of_ids_costs_more_of_a_step.

        `keys` must be a copy, because it is iterated over in the steps.
        `look` handles the key if it has expired or timed out; the key may be gone already. If one key needs
        several steps, `look` returns a task for them. An error of `look` or of that task ends the round.
        While an earlier round is running, this does nothing.
        """
        if self._is_running or self._is_closed:
            return
        self._is_running = True
        self._background.add(self._run(keys, look))

    def close(self) -> None:
        """Stop the current round, because a closing broker waits for the end of its background tasks."""
        self._is_closed = True

    def _run(self, keys: Iterable[str], look: Callable[[str], BackgroundTask | None]) -> BackgroundTask:
        cost = 0
        try:
            for key in keys:
                if self._is_closed:
                    return
                task = look(key)
                if task is not None:
                    with closing(task):
                        for call in task:
                            yield call
                            if self._is_closed:
                                return
                cost += name_cost(key)
                if cost >= self._step_entries:
                    cost = 0
                    yield None
        finally:
            self._is_running = False
