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
        self._needed_count = 0
        """The number of frozen objects after the last complete collection, which visited all objects."""
        self._frozen_count = 0
        """An upper bound of the number of frozen objects. Frozen objects that are freed are not subtracted.

        `gc.get_freeze_count` visits all frozen objects, 0.07 s for 10,000 topics, so it is rarely called. See
        test_frozen_objects_are_not_counted_at_every_collection.
        """

    def install(self) -> None:
        """Freeze all objects that exist now, and add this callback to `gc.callbacks`."""
        gc.collect()
        self._freeze_all()
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = self._clock()
        elif self._clock() - self._began > LONG_SECONDS:
            if self._frozen_count:
                self._freeze_more()
            else:
                self._freeze_all()

    def _freeze_all(self) -> None:
        gc.freeze()
        self._needed_count = self._frozen_count = gc.get_freeze_count()

    def _freeze_more(self) -> None:
        """Freeze the objects that have survived a collection beside frozen ones, or unfreeze all."""
        self._frozen_count += len(gc.get_objects(generation=2))
        gc.freeze()
        if self._frozen_count > 2 * self._needed_count:
            self._frozen_count = gc.get_freeze_count()
        if self._frozen_count > 2 * self._needed_count:
            gc.unfreeze()
            self._frozen_count = 0
