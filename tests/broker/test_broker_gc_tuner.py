"""The garbage collector does not visit objects that live as long as the broker."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from oncelog.server.gc_tuner import LONG_SECONDS, GcTuner


@pytest.fixture(autouse=True)
def _restored_collector() -> Iterator[None]:
    callbacks = gc.callbacks[:]
    yield
    gc.callbacks[:] = callbacks
    gc.unfreeze()


@pytest.mark.parametrize(
    ("generation", "seconds", "is_frozen"), [(2, 2.0, True), (2, 0.5, False), (1, 2.0, False)]
)
def test_survivors_of_a_long_full_collection_are_frozen(
    generation: int, seconds: float, is_frozen: bool
) -> None:
    gc.unfreeze()
    times = iter([100.0, 100.0 + seconds * LONG_SECONDS])
    tuner = GcTuner(lambda: next(times))
    tuner("start", {"generation": generation})
    tuner("stop", {"generation": generation})
    assert (gc.get_freeze_count() > 0) == is_frozen


def test_present_objects_are_frozen_at_the_start() -> None:
    kept = [[number] for number in range(1000)]
    GcTuner().install()
    assert gc.get_freeze_count() > len(kept)
    assert isinstance(gc.callbacks[-1], GcTuner)
