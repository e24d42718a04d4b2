"""The choice of Spark for each pipeline of `oncelog bench pipelines`, and its time of a commit."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
from oncelog_bench import pipelines
from oncelog_bench.pipeline_worker import (
    DELTA,
    ICEBERG,
    KINDS,
    MIXED,
    PARQUET,
    TO_DELTA,
    TO_ICEBERG,
    _committed,
)
from oncelog_bench.pipelines import Plan, _environments, _quantile

from oncelog.errors import ConfigError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of PySpark: "own" of this interpreter, and "other" of another one. No jar is fetched."""
    versions = {"own": "4.3.0", "other": "4.1.3"}
    monkeypatch.setattr(importlib.metadata, "version", lambda _: versions["own"])
    monkeypatch.setattr(pipelines, "_spark_version", lambda python: versions[python])
    monkeypatch.setattr(pipelines, "_jars", lambda _: [])
    return versions


def test_a_sink_for_another_spark_is_left_out_with_the_version_that_works(installed: dict[str, str]) -> None:
    (environment,), left_out = _environments(Plan())
    assert environment.pipelines == [TO_DELTA, TO_ICEBERG, PARQUET]
    assert set(left_out) == {DELTA, MIXED, ICEBERG}
    assert "built for Spark 4.2, not 4.3.0" in left_out[DELTA] and "pyspark==4.2.*" in left_out[DELTA]
    assert "-X iceberg_python=PYTHON" in left_out[ICEBERG] and "pyspark==4.1.*" in left_out[ICEBERG]


def test_each_sink_runs_with_its_spark_and_the_control_with_each(installed: dict[str, str]) -> None:
    installed["own"] = "4.2.0"
    plan = Plan(iceberg_python="other")
    (own, other), left_out = _environments(plan)
    assert not left_out
    assert own == (sys.executable, "4.2.0", [name for name in KINDS if name != ICEBERG])
    assert other == ("other", "4.1.3", [ICEBERG, PARQUET])
    assert plan.samples_count == plan.repeats * (len(own.pipelines) + len(other.pipelines))


def test_an_interpreter_without_pyspark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot import pyspark"):
        _environments(Plan((ICEBERG,), iceberg_python=str(tmp_path / "python")))


def test_a_commit_in_the_table_comes_before_that_of_the_checkpoint() -> None:
    durations = {"triggerExecution": 750, "addBatch": 400, "commitOffsets": 250}
    assert _committed({"timestamp": "1970-01-01T00:01:00.250Z", "durationMs": durations}) == 60.75


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (40, 40), (100, 99), (200, 198)])
def test_the_99th_percentile_is_a_value_that_was_measured(count: int, expected: int) -> None:
    assert _quantile([float(n) for n in range(count, 0, -1)], 0.99) == expected
