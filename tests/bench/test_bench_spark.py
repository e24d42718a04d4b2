"""Run the Spark measurements at a tiny size in one session, and check the recorded fields and the page."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from oncelog_bench.brokers import kept
from oncelog_bench.framework import load, targets_of
from oncelog_bench.spark_engine import CONNECTOR, MASTER

from oncelog.spark.session import local_session

FIELDS = {
    "spark_source": {"mb_per_s", "records_per_s", "cpu_s_per_gb"},
    "spark_sink": {"mb_per_s", "records_per_s", "cpu_s_per_gb"},
    "spark_lanes": {"trigger_s", "write_s"},
    "spark_audit": {"gb_per_s", "seconds", "of_reading", "cpu_s_per_gb"},
    "pipelines": {"rows_per_s", "cpu_s_per_gb", "p50_ms", "p99_ms", "write_ms"},
}
pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """The result of each Spark measurement, without Spark's own connector if its jars are missing."""
    taken = {}
    with kept(), local_session("oncelog tests", MASTER):
        for name in FIELDS:
            done: list[int] = []
            measurement = load(name)
            taken[name] = measurement.measure(measurement.QUICK, done.append)
            assert done == list(range(1, len(taken[name]["samples"]) + 1)), name
    return taken


@pytest.mark.parametrize("name", FIELDS)
def test_every_sample_has_every_figure(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert set(result["left_out"]) <= {CONNECTOR}
    assert result["left_out"] or len(result["samples"]) == load(name).QUICK.samples_count
    for row in (*result["samples"], *result["medians"]):
        assert all(isinstance(row[field], float) for field in FIELDS[name]), row


@pytest.mark.parametrize("name", FIELDS)
def test_the_page_and_the_picture_of_a_measurement_are_rendered(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    measurement = load(name)
    text = measurement.section(results[name])
    assert text.startswith("## ") and "What this shows." in text
    assert ElementTree.fromstring(measurement.picture(results[name])).tag.endswith("svg")  # type: ignore[attr-defined]
    for target in targets_of(measurement):
        measured = target.measured(results[name])
        assert measured is None or isinstance(measured, float)
