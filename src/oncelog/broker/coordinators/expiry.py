"""Rounds over every group or transactional id that time concerns, in bounded steps.

With 100,000 groups one look at each takes seconds. Requests are served between two steps.
Guarded by tests/broker/test_broker_expiry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing

from oncelog.log.background import BackgroundQueue, BackgroundTask


class ExpiryRounds:
    """One kind of round; the next one begins when the last one has ended."""

    def __init__(self, background: BackgroundQueue, step_entries: int) -> None:
        self._background = background
        self._step_entries = step_entries
        self._is_running = False
        self._is_closed = False

    def begin(self, keys: Iterable[str], look: Callable[[str], BackgroundTask | None]) -> None:
        """Call `look` for each key, a few in a step. A key may be gone when its turn comes.

        `look` may return work that takes several steps for its key alone. Does nothing while an earlier round
        goes on. `look` raises only what ends the round.
        """
        if self._is_running or self._is_closed:
            return
        self._is_running = True
        self._background.add(self._run(list(keys), look))

    def close(self) -> None:
        """End the round under way: the broker is being closed, and waits for what runs in the background."""
        self._is_closed = True

    def _run(self, keys: list[str], look: Callable[[str], BackgroundTask | None]) -> BackgroundTask:
        try:
            for count, key in enumerate(keys, 1):
                if self._is_closed:
                    return
                work = look(key)
                if work is not None:
                    with closing(work):
                        for call in work:
                            yield call
                            if self._is_closed:
                                return
                if count % self._step_entries == 0:
                    yield None
        finally:
            self._is_running = False
