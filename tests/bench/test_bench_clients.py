"""Measure clients, recovery, producer ids and partitions at a tiny size, and check the recorded fields."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from oncelog_bench.brokers import kept
from oncelog_bench.framework import load, targets_of

FIELDS = {
    "producers": {"records_per_s", "mb_per_s", "cpu_us_per_record", "rss_mb"},
    "consumers": {"records_per_s", "mb_per_s", "cpu_us_per_record", "rss_mb"},
    "recovery": {"listening_s"},
    "coordinator": {"listening_s", "log_mb", "records_written"},
    "producer_ids": {"cpu_us_per_append", "cpu_us_per_known", "longest_pause_ms"},
    "partitions": {"create_s", "start_s", "start_after_kill_s", "rss_mb", "open_files", "metadata_ms"},
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Run each measurement of clients once, and return the results."""
    taken = {}
    with kept():
        for name in FIELDS:
            done: list[int] = []
            measurement = load(name)
            taken[name] = measurement.measure(measurement.QUICK, done.append)
            assert done == list(range(1, measurement.QUICK.samples_count + 1)), name
    return taken


@pytest.mark.parametrize("name", FIELDS)
def test_every_sample_has_every_figure(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert len(result["samples"]) == load(name).QUICK.samples_count
    assert result["left_out"] == {}
    for row in (*result["samples"], *result["medians"]):
        assert all(row[field] > 0 for field in FIELDS[name]), row


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
        assert measured is None or measured >= 0
