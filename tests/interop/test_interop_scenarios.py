"""The scenario engine: a wrong expectation fails with the place of the difference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scenarios.run import run_scenario, target_at

import oncelog
from oncelog.conform.scenario_reader import read_scenarios
from oncelog.conform.scenario_run import StepFailed

ASK = "> ListOffsets {topics: [{name: $T, partitions: [{partition_index: 0, timestamp: -1}]}]}\n"


class Embedded:
    epochs_rise = False

    def __init__(self, broker: oncelog.Broker) -> None:
        self.target = target_at(broker.bootstrap_servers, "oncelog")

    def restart(self, *, kill: bool) -> str:
        raise NotImplementedError


@pytest.fixture(scope="module")
def embedded() -> Iterator[Embedded]:
    with oncelog.Broker() as broker:
        yield Embedded(broker)


def run(embedded: Embedded, folder: Path, steps: str, header: str = "") -> None:
    """Write the steps as a scenario file and run the scenario."""
    (folder / "file.md").write_text(f"# File\n\n## Title\n\n{header}\n\n```scenario\ntopic T\n{steps}\n```\n")
    (scenario,) = read_scenarios(folder)
    for version in scenario.cases():
        run_scenario(scenario, version, embedded)


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ("produce T a -> 1", "got 0"),
        ("produce T a -> INVALID_RECORD", "got 0"),
        ("produce T/9 a -> 0", "got UNKNOWN_TOPIC_OR_PARTITION"),
        ("produce T a -> oncelog:1 apache:0", "got 0"),
        ("produce T a -> 0\nfetch T -> nothing", "expected"),
        ("fetch T -> a", "expected"),
        ("fetch T from=5 -> nothing", "got OFFSET_OUT_OF_RANGE"),
        (ASK, "answer is not among the steps"),
        (ASK + "<apache {topics: []}", "answer is not among the steps"),
        (ASK + "< closed", "answered and kept the connection"),
        (ASK + "< {topics: []}", "topics: expected"),
        (ASK + "< {topics: ['_', '_']}", "topics: expected"),
        (ASK + "< {topics: [{partitions: [{offset: 7}]}]}", "offset: expected 7, got 0"),
        (ASK + "< {topics: [{partitions: [{error_code: UNKNOWN_LEADER_EPOCH}]}]}", "got 'NONE'"),
        (ASK + "< {topics: [{partitions: [{ofset: 0}]}]}", "has no {'ofset'}"),
        (ASK + "< {topics: !any [{name: x}]}", "nothing like {'name': 'x'}"),
        (ASK + "< {topics: !has [{name: $T}, {name: $T}]}", "nothing like"),
        (ASK + "< {throttle_time_ms: $x}\n" + ASK + "< {topics: [{name: $x}]}", r"expected '\$x=0'"),
        (ASK + "< {throttle_time_ms: !min 1}", "expected 'at least 1', got 0"),
        ("produce T a -> 0\n> DescribeLogDirs {}\n< {results: [{log_dir: !re '^nowhere$'}]}", "nowhere"),
        ("> frame {api_key: 9999, api_version: 0}\n< {error_code: NONE}", "ended the connection"),
    ],
)  # fmt: skip
def test_a_wrong_expectation_fails(embedded: Embedded, tmp_path: Path, steps: str, complaint: str) -> None:
    with pytest.raises(StepFailed, match=complaint):
        run(embedded, tmp_path, steps)


def test_a_field_that_the_version_lacks_is_passed_over(embedded: Embedded, tmp_path: Path) -> None:
    steps = ASK + "< {topics: [{partitions: [{offset: 0, leader_epoch: 99}]}]}"
    run(embedded, tmp_path, steps, "Versions: ListOffsets 1-3")
    with pytest.raises(StepFailed, match="leader_epoch: expected 99, got 0"):
        run(embedded, tmp_path, steps, "Versions: ListOffsets 4")


def test_steps_may_span_lines_and_have_comments(embedded: Embedded, tmp_path: Path) -> None:
    steps = "# a whole line\nproduce T a b -> 0  # said\n" + ASK.replace("{name", "\n    {name", 1)
    run(embedded, tmp_path, steps + "< {topics: [{name: $T, partitions: [{offset: 2}]}]}")
