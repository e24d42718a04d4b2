"""The supervisor's decisions: a table of every case, the pauses, and the meaning of errors."""

from __future__ import annotations

import pytest
from support.append_notation import rows

from oncelog.pipeline.restart_policy import (
    ExitKind,
    History,
    Limits,
    Restart,
    Stop,
    classify_exit,
    decide_next,
    headline,
)

LIMITS = Limits(backoff_ms=100, backoff_max_ms=1_000, max_failures=4, window_ms=60_000)
NOW_MS = 100_000
CASES = list(rows("supervision.txt"))


def decision_text(kind: ExitKind, history: History) -> str:
    shortest = decide_next(kind, history, LIMITS, now_ms=NOW_MS, jitter=0.0)
    longest = decide_next(kind, history, LIMITS, now_ms=NOW_MS, jitter=1.0)
    if isinstance(shortest, Stop):
        assert shortest == longest
        return f"stop {shortest.exit_code}"
    assert isinstance(longest, Restart) and shortest.failed_at_ms == longest.failed_at_ms
    assert shortest.failed_at_ms[-1] == NOW_MS
    return f"restart {shortest.pause_ms}-{longest.pause_ms} {len(shortest.failed_at_ms)}"


@pytest.mark.parametrize(
    ("kind", "failed_at", "has_run", "stopping", "verdict"),
    [row[1:] for row in CASES],
    ids=[row[0] for row in CASES],
)
def test_each_exit_leads_to_the_decision_of_its_row(
    kind: str, failed_at: str, has_run: str, stopping: str, verdict: str
) -> None:
    times = () if failed_at == "-" else tuple(map(int, failed_at.split()))
    assert decision_text(ExitKind[kind], History(times, has_run == "yes", stopping == "yes")) == verdict


def test_every_kind_of_exit_is_in_the_table() -> None:
    assert {row[1] for row in CASES} == {kind.name for kind in ExitKind}


def test_the_pause_doubles_up_to_its_maximum() -> None:
    limits = Limits(backoff_ms=100, backoff_max_ms=1_000, max_failures=10_000, window_ms=60_000)
    history, pauses = History(has_run=True), []
    for _ in range(40):
        verdict = decide_next(ExitKind.FAILED, history, limits, now_ms=NOW_MS, jitter=1.0)
        assert isinstance(verdict, Restart)
        history = History(verdict.failed_at_ms, has_run=True)
        pauses.append(verdict.pause_ms)
    assert pauses[:6] == [100, 200, 400, 800, 1_000, 1_000] and pauses[-1] == 1_000


TASK_FAILED = """[STREAM_FAILED] Query [id = 1] terminated with exception: Traceback (most recent call last):
  File "sink.py", line 84, in write
oncelog.errors.MessageTooLarge: 2000000 bytes

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "lane.py", line 98, in write_task
{error}
\tat org.apache.spark.api.python.BasePythonRunner
oncelog is named here: to no effect"""


@pytest.mark.parametrize(
    ("types", "error", "is_started", "kind"),
    [
        (
            "StreamingQueryException",
            "oncelog.spark.sink.decisions.SinkRefused: batch 7 was ...",
            True,
            "REFUSED",
        ),
        ("StreamingQueryException", "oncelog.spark.sink.decisions.RowRefused: row 3 ...", True, "REFUSED"),
        (
            "StreamingQueryException",
            "oncelog.spark.source.offset_ranges.DataLossError: t-0: offset",
            True,
            "REFUSED",
        ),
        ("StreamingQueryException", "oncelog.errors.ConfigError: unknown option", True, "REFUSED"),
        (
            "StreamingQueryException",
            "oncelog.spark.sink.decisions.SinkError: lane 0: cannot connect",
            True,
            "FAILED",
        ),
        ("StreamingQueryException", "the sink said SinkRefused", True, "FAILED"),
        ("ConfigError ValueError", "-", True, "REFUSED"),  # the checkpoint belongs to a query with another id
        ("KeyError LookupError", "-", True, "FAILED"),  # an error in a function for foreachBatch
        ("KeyError LookupError", "-", False, "SETUP"),
        ("ParseException AnalysisException", "-", False, "SETUP"),
        ("AnalysisException", "oncelog.errors.ConfigError: unknown option", False, "SETUP"),
        ("ModuleNotFoundError ImportError", "-", False, "SETUP"),
        ("Py4JNetworkError Py4JError", "-", False, "FAILED"),
        ("ConnectionRefusedError OSError", "-", False, "FAILED"),
    ],
)
def test_errors_are_classified_by_their_names(types: str, error: str, is_started: bool, kind: str) -> None:
    classified = classify_exit(
        [*types.split(), "Exception"], TASK_FAILED.format(error=error), is_started=is_started
    )
    assert classified is ExitKind[kind]


def test_the_headline_is_the_last_exception_or_the_first_line() -> None:
    text = TASK_FAILED.format(error="oncelog.spark.sink.decisions.SinkRefused: batch 7 was committed")
    assert headline(text) == "SinkRefused: batch 7 was committed"
    assert headline(TASK_FAILED.format(error="KeyError: 'x'")) == "KeyError: 'x'"
    assert headline("\n[PATH_NOT_FOUND] no such path\n\nmore") == "[PATH_NOT_FOUND] no such path"
    assert headline("") == ""
