"""Tuning of Spark's Python worker processes, which run tasks and plan writes."""

from __future__ import annotations

import gc
import os
import sys

_REUSES_WORKERS = "SPARK_REUSE_WORKER"
"""The environment variable that Spark sets for Python workers that run several tasks (the default)."""
_FEW_MODULES = 20
_frozen_module_count = 0


def freeze_modules() -> None:
    """Exempt all existing objects from garbage collection, if this process is one of Spark's Python workers.

    Spark calls gc.collect() after each task of a Python worker. With the modules of Spark, pyarrow and
    Oncelog loaded, a collection takes 25 ms of processor time, several times as much as the rest of a small
    task. Objects without cycles are still freed immediately. Guard:
    test_a_worker_collects_only_what_came_after_its_modules.
    """
    global _frozen_module_count
    if _REUSES_WORKERS not in os.environ or len(sys.modules) < _frozen_module_count + _FEW_MODULES:
        return
    _frozen_module_count = len(sys.modules)
    # First collect existing garbage. Otherwise it would be exempt too, and never be freed.
    gc.collect()
    gc.freeze()
