"""Limits the pauses of Python's cyclic garbage collector in a broker process.

Ten thousand partitions are a quarter of a million objects that live as long as the broker. A full collection
that visits all of them takes 60 ms. The tuner freezes such objects, so that later collections skip them.

Collections never free frozen objects. Objects of requests in progress are frozen, too, and may become garbage
with reference cycles. So the tuner unfreezes all objects whenever their number has doubled. The next full
collection then visits them all.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

LONG_SECONDS = 0.02
"""If a full collection took longer than this, the surviving objects are frozen (`gc.freeze`)."""


class GcTuner:
    """A callback for `gc.callbacks` that freezes the surviving objects after a slow full collection."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = 0.0
        self._is_complete = True
        """True if no object was frozen at the start of the current collection, so that it visits them all."""
        self._needed_count = 0
        """The number of frozen objects after the last complete collection."""

    def install(self) -> None:
        """Freeze all objects that exist now, and add this callback to `gc.callbacks`."""
        gc.collect()
        gc.freeze()
        self._needed_count = gc.get_freeze_count()
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began, self._is_complete = self._clock(), not gc.get_freeze_count()
        elif self._clock() - self._began > LONG_SECONDS:
            gc.freeze()
            frozen_count = gc.get_freeze_count()
            if self._is_complete:
                self._needed_count = frozen_count
            elif frozen_count > 2 * self._needed_count:
                gc.unfreeze()
