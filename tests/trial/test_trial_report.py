"""The result of a trial as rows, as a sentence, and as an HTML page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from oncelog.trial.judgement import Counts
from oncelog.trial.plan import TargetKind, choose_cells
from oncelog.trial.report import COLUMNS, WIDE, driver_lives, render_report, row_of, summary_text, timeline
from oncelog.trial.run import Mark, MarkKind, Outcome

MARKS = [
    Mark(0.1, MarkKind.START, "driver, start 1"),
    Mark(2.0, MarkKind.FEED, "rows 0 to 9 sent to the source"),
    Mark(3.0, MarkKind.COMMIT, "micro-batch 0 committed"),
    Mark(4.0, MarkKind.FAULT, "driver killed <now>"),
    Mark(4.5, MarkKind.END, "driver dead"),
    Mark(5.0, MarkKind.START, "driver, start 2"),
]
CLEAN = Counts(10, 0, 0, 0)
VIOLATED = Counts(14, 1, 5, 0, ("3",), ("1", "2"))


def outcome(
    name: str,
    counts: Counts | None,
    *,
    has_happened: bool = True,
    error: str | None = None,
    is_possible: bool = True,
) -> Outcome:
    detail = "micro-batch 1, writes seen"
    (cell,) = choose_cells([name], TargetKind.TOPIC)
    log = Path("/tmp/d.log")
    return Outcome(cell, has_happened, detail, counts, 2, 8.04, error, MARKS, log, is_possible)


def test_a_row_has_the_columns_of_the_table_and_is_json() -> None:
    row = row_of(outcome("commit-lost", VIOLATED))
    assert {*COLUMNS, *WIDE} <= set(row)
    assert (row["cell"], row["happened"], row["lost"], row["doubled"]) == ("commit-lost", "yes", 1, 5)
    assert (row["verdict"], row["seconds"], row["lost_examples"]) == ("violated", 8.0, ["3"])
    assert json.loads(json.dumps(row)) == row
    impossible = row_of(outcome("driver-at-write", CLEAN, has_happened=False, is_possible=False))
    assert (impossible["happened"], impossible["verdict"]) == ("-", "cannot happen")
    failed = row_of(outcome("task-fails", None, error="it took too long"))
    assert (failed["lost"], failed["verdict"], failed["error"]) == (None, "failed", "it took too long")


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        (
            [outcome("calm", CLEAN), outcome("task-fails", CLEAN)],
            "Each row is in the target once, in all 2 runs",
        ),
        (
            [outcome("calm", CLEAN), outcome("commit-lost", VIOLATED)],
            "1 of 2 runs lost or doubled rows: 1 lost, 5 doubled.",
        ),
        (
            [outcome("calm", CLEAN), outcome("driver-in-commit", CLEAN, has_happened=False)],
            "prove nothing: driver-in-commit.",
        ),
        ([outcome("task-fails", None, error="late")], "prove nothing: task-fails."),
        (
            [
                outcome("calm", CLEAN),
                outcome("driver-at-write", CLEAN, has_happened=False, is_possible=False),
            ],
            "in all 2 runs, and every fault that can happen did so.",
        ),
    ],
)
def test_one_sentence_says_what_was_found(outcomes: list[Outcome], text: str) -> None:
    assert text in summary_text(outcomes)


def test_the_report_is_one_page_without_anything_from_outside() -> None:
    outcomes = [
        outcome("calm", CLEAN),
        outcome("commit-lost", VIOLATED),
        outcome("task-fails", None, error="late <b>"),
    ]
    html = render_report(outcomes, {"pipeline": "mine<.py", "Spark": "4.3.0"})
    for text in (
        "mine&lt;.py",
        "4.3.0",
        "commit-lost: violated",
        "late &lt;b&gt;",
        "5 doubled",
        "class='verdict bad'",
    ):
        assert text in html
    for outside in ("<script", "src=", "href=", "@import", "url("):
        assert outside not in html
    assert html.count("<svg") == 3
    assert "class='verdict good'" in render_report([outcome("calm", CLEAN)], {})


def test_a_timeline_is_valid_svg_with_a_bar_for_each_life_of_the_driver() -> None:
    picture = ElementTree.fromstring(timeline(MARKS, 8.0))
    space = "{http://www.w3.org/2000/svg}"
    bars = [rect for rect in picture.iter(f"{space}rect") if rect.get("rx") == "4"]
    assert len(bars) == 2
    titles = [title.text for title in picture.iter(f"{space}title")]
    assert "4.00 s: driver killed <now>" in titles and len(titles) == 3


def test_the_last_life_of_the_driver_lasts_until_the_end() -> None:
    assert driver_lives(MARKS, 8.0) == [(0.1, 4.5), (5.0, 8.0)]
    assert driver_lives(MARKS[:5], 8.0) == [(0.1, 4.5)]
    assert driver_lives([], 8.0) == []
    assert ElementTree.fromstring(timeline([], 0.0)) is not None
