"""Rounds over all groups or transactional ids that may have expired, in bounded steps.

With 100,000 groups a look at each takes seconds, so requests are served between the steps.
Guarded by tests/broker/test_broker_expiry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing

from oncelog.log.background import BackgroundQueue, BackgroundTask


class ExpiryRounds:
    """Rounds of one kind. Only one round runs at a time."""

    def __init__(self, background: BackgroundQueue, step_entries: int) -> None:
        self._background = background
        self._step_entries = step_entries
        self._is_running = False
        self._is_closed = False

    def begin(self, keys: Iterable[str], look: Callable[[str], BackgroundTask | None]) -> None:
        """Call `look` for each key, a few per step. A key may be gone by then.

        `look` may return a task that takes several steps for its key alone. An error that it raises ends the
        round. Does nothing while an earlier round is running.
        """
        if self._is_running or self._is_closed:
            return
        self._is_running = True
        self._background.add(self._run(list(keys), look))

    def close(self) -> None:
        """End the current round: a broker that is being closed waits for its background tasks."""
        self._is_closed = True

    def _run(self, keys: list[str], look: Callable[[str], BackgroundTask | None]) -> BackgroundTask:
        try:
            for count, key in enumerate(keys, 1):
                if self._is_closed:
                    return
                task = look(key)
                if task is not None:
                    with closing(task):
                        for call in task:
                            yield call
                            if self._is_closed:
                                return
                if count % self._step_entries == 0:
                    yield None
        finally:
            self._is_running = False
