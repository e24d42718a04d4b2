"""Tests of the Python processes in which Spark runs Oncelog."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("pyspark")

FREEZE = """
import gc
import oncelog.spark.sink.sink
from oncelog.spark.python_worker import freeze_modules

freeze_modules()
first = gc.get_freeze_count()
later = [[] for _ in range(10_000)]
freeze_modules()
print(first > 50_000, gc.get_freeze_count() - first < 1_000)
"""


def test_a_worker_collects_only_what_came_after_its_modules() -> None:
    assert _run(FREEZE, SPARK_REUSE_WORKER="1") == "True True"


def test_a_process_that_is_no_worker_of_spark_keeps_its_garbage_collection() -> None:
    assert _run(FREEZE) == "False True"


def _run(program: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "SPARK_REUSE_WORKER"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()
