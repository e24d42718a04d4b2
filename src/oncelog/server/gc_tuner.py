"""Limits the pauses of Python's cyclic garbage collector in a broker process.

Ten thousand partitions are a quarter of a million objects that live as long as the broker. A full collection
that visits all of them takes 60 ms. The tuner freezes such objects, so that later collections skip them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

LONG_SECONDS = 0.02
"""If a full collection took longer than this, the surviving objects are frozen (`gc.freeze`)."""


class GcTuner:
    """A callback for `gc.callbacks` that freezes the surviving objects after a slow full collection.

    Reference cycles among frozen objects are never freed. There are few such cycles, and they are small.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = 0.0

    def install(self) -> None:
        """Freeze all objects that exist now, and add this callback to `gc.callbacks`."""
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
