"""Tests of the benchmark framework: pairs and ratios, the order of the two sides, page sections, and
targets.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from oncelog_bench.framework import NAMES, Metric, Target, compare, figure, interleaved, load, plan_with
from oncelog_bench.page import markdown_table, put_section, targets_text

from oncelog.errors import ConfigError

METRIC = Metric("speed", "MB/s", True)


def sample(repeat: int, side: str, speed: float | None, size: int = 1) -> dict[str, Any]:
    return {"repeat": repeat, "side": side, "speed": speed, "size": size}


def rows_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return compare(samples, by=["size"], side="side", base="b", metrics=[METRIC])


def test_ratio_is_the_median_of_the_pairs_of_one_repeat() -> None:
    a = [sample(i, "a", speed) for i, speed in enumerate((20.0, 20.0, 20.0))]
    b = [sample(i, "b", speed) for i, speed in enumerate((10.0, 20.0, 40.0))]
    rows = rows_of([*reversed(a), *b])
    assert [(row["side"], row["speed"]) for row in rows] == [("a", 20.0), ("b", 20.0), ("a / b", 1.0)]


def test_groups_are_compared_apart_and_without_the_base_there_is_no_ratio() -> None:
    rows = rows_of([sample(0, "a", 6.0, 1), sample(0, "b", 3.0, 1), sample(0, "a", 5.0, 2)])
    assert figure({"medians": rows}, "speed", size=1, side="a / b") == 2.0
    assert figure({"medians": rows}, "speed", size=2, side="a") == 5.0
    assert figure({"medians": rows}, "speed", size=2, side="a / b") is None


def test_a_figure_that_was_not_measured_is_left_out() -> None:
    rows = rows_of([sample(0, "a", None), sample(0, "b", 3.0)])
    assert [row.get("speed") for row in rows] == [None, 3.0, None]
    assert "| 1 | a | - |" in markdown_table(rows, by={"size": "bytes"}, side="side", metrics=[METRIC])


def test_a_case_takes_its_sides_right_after_each_other_and_the_first_side_rotates() -> None:
    order = list(interleaved([1, 2], ("off", "on"), 2))
    assert order[:4] == [(0, 1, "off"), (0, 1, "on"), (0, 2, "off"), (0, 2, "on")]
    assert order[4:6] == [(1, 1, "on"), (1, 1, "off")]


def test_a_section_is_replaced_in_its_place_and_what_people_wrote_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    put_section(page, NAMES[-1], "last")
    page.write_text(page.read_text() + "\nA note by hand.\n")
    put_section(page, "targets", "first")
    put_section(page, NAMES[-1], "again")
    text = page.read_text()
    assert text.index("first") < text.index("again") < text.index("A note by hand.")
    assert "last" not in text and text.count(f"<!-- begin {NAMES[-1]} -->") == 1


@pytest.mark.parametrize(
    ("is_minimum", "figure", "met"),
    [(True, 2.0, True), (True, 1.9, False), (False, 2.1, False), (False, 2.0, True)],
)
def test_a_target_is_a_floor_or_a_ceiling(is_minimum: bool, figure: float, met: bool) -> None:
    assert Target("t", 2.0, "times", is_minimum, lambda _: figure).is_met(figure) is met


def test_targets_are_counted() -> None:
    verdicts = [True, True, False, None]
    rows = [
        {"target": "t", "wanted": "w", "measured": "1", "met": met, "measurement": "m"} for met in verdicts
    ]
    assert "Of 4 targets 2 are met, 1 missed, 1 not measured." in targets_text(rows)


@dataclass(frozen=True)
class Sizes:
    repeats: int = 5
    seconds: float = 1.0
    partitions: tuple[int, ...] = (1, 3)


def test_sizes_are_read_as_their_defaults_types() -> None:
    plan = plan_with(Sizes(), {"seconds": "2", "partitions": "1, 50"})
    assert plan == Sizes(5, 2.0, (1, 50))
    with pytest.raises(ConfigError, match="choose one of repeats, seconds, partitions"):
        plan_with(Sizes(), {"nosuch": "1"})


@pytest.mark.parametrize("name", NAMES)
def test_every_measurement_implements_the_protocol(name: str) -> None:
    assert importlib.util.find_spec(f"oncelog_bench.{name}")
    measurement = load(name)
    assert name == measurement.NAME and measurement.SUMMARY.endswith(".")
    assert measurement.Plan().repeats >= 5 and measurement.Plan().samples_count > 0
    assert type(measurement.QUICK) is measurement.Plan
