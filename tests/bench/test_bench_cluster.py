"""The measurements of clusters at a tiny size, and the linear model of a micro-batch's costs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from oncelog_bench import cluster, cluster_memory
from oncelog_bench.cluster_model import Costs, Shape, fit
from oncelog_bench.framework import figure
from oncelog_bench.page import write_page

SHAPES = [Shape(tasks, each) for tasks in (2, 8, 32) for each in (1, 10)]


def test_the_model_finds_the_costs_that_made_the_figures() -> None:
    costs = Costs(once=40.0, per_task=3.0, per_partition=0.5)
    assert fit([(shape, costs.of(shape)) for shape in SHAPES]) == pytest.approx(costs)
    assert costs.of(Shape(1_000, 100)) == 40 + 1_000 * (3 + 50)


def test_a_large_shape_does_not_decide_alone() -> None:
    costs = Costs(once=40.0, per_task=3.0, per_partition=0.5)
    figures = [(shape, costs.of(shape)) for shape in SHAPES]
    figures[-1] = (SHAPES[-1], 1.1 * figures[-1][1])
    assert fit(figures).of(SHAPES[0]) == pytest.approx(costs.of(SHAPES[0]), rel=0.1)


def test_shapes_that_do_not_determine_the_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        fit([(Shape(2, 1), 1.0), (Shape(4, 1), 2.0), (Shape(8, 1), 4.0)])


@pytest.fixture(scope="module")
def results(kafka_class_path: str) -> dict[str, dict[str, Any]]:
    taken = {}
    for measurement in (cluster, cluster_memory):
        done: list[int] = []
        taken[measurement.NAME] = measurement.measure(measurement.QUICK, done.append)
        assert done == list(range(1, measurement.QUICK.samples_count + 1))
    copied: dict[str, dict[str, Any]] = json.loads(json.dumps(taken))
    return copied


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_micro_batch_has_a_transaction_for_each_task_and_a_marker_for_each_of_its_partitions(
    results: dict[str, dict[str, Any]],
) -> None:
    for sample in results["cluster"]["samples"]:
        tasks, each = sample["tasks"], sample["partitions_each"]
        assert sample["batches"] > 0
        # The readings may cut a micro-batch. The driver commits one transaction of its own for each, and the
        # group's partition gets a marker too.
        assert tasks <= sample["transactions"] <= tasks + 3
        assert 0.5 * tasks * (each + 1) <= sample["markers"] <= 2 * (tasks * (each + 1) + 3)
        assert 0 <= sample["open_p50_ms"] <= sample["open_max_ms"]


@pytest.mark.spark
def test_each_kind_takes_memory(results: dict[str, dict[str, Any]]) -> None:
    for what, counts in cluster_memory.QUICK.counts().items():
        few, many = (
            figure(results["cluster_memory"], "kilobytes", what=what, count=count)
            for count in (counts[0], counts[-1])
        )
        assert few is not None and many is not None and few < many, what


@pytest.mark.spark
def test_the_pages_and_pictures_are_rendered(results: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    write_page(tmp_path / "page.md", tmp_path)
    text = (tmp_path / "page.md").read_text()
    assert text.count("What this shows.") == 2 and "| 3 | 2 | model |" in text
    for measurement in (cluster, cluster_memory):
        picture = measurement.picture(results[measurement.NAME])
        assert ElementTree.fromstring(picture).tag.endswith("svg")
