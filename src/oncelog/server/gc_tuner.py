"""Keeps the cyclic garbage collector from holding up requests in a process that only serves.

Ten thousand partitions are a quarter of a million objects, which live as long as the broker; every full
collection would look at all of them, 60 ms each time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

LONG_SECONDS = 0.02
"""After a full collection that took longer, what survived it is looked at no more."""


class Collector:
    """For `gc.callbacks`. What is set aside and dies later in a cycle is not freed: rare and little."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = 0.0

    def install(self) -> None:
        """From now on, and what is there already is set aside."""
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = self._clock()
        elif self._clock() - self._began > LONG_SECONDS:
            gc.freeze()
