"""The summary of a micro-batch is made from Spark's progress and the sink's metrics. Either of them may be
missing.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from oncelog.pipeline.progress import batch_summary
from oncelog.spark.sink.decisions import RowSum
from oncelog.spark.sink.sink_metrics import FILE_VARIABLE, SinkMetrics, publish
from oncelog.spark.sink.task import TaskReport

REPORTS = [
    TaskReport(0, RowSum(3, 7), False, 30, 0.25),
    TaskReport(1, RowSum(2, 9), True, 20),
    TaskReport(2, RowSum(), False),
]
METRICS = SinkMetrics("q-1", 4, rows=5, size_bytes=50, lanes=3, lanes_skipped=1, commit_seconds=0.25)


def progress(rows_out: int, *sources: dict[str, Any]) -> dict[str, Any]:
    sink = {"description": "PythonTable", "numOutputRows": rows_out}
    return {"batchId": 4, "numInputRows": 6, "batchDuration": 1234, "sources": list(sources), "sink": sink}


def source(end: Any, latest: Any) -> dict[str, Any]:
    return {"startOffset": None, "endOffset": end, "latestOffset": latest}


OURS = source(
    {"t": {"0": 20, "1": 5}, "@ids": {"t": "x"}}, {"t": {"0": 51, "1": 5, "2": 4}, "@ids": {"t": "x"}}
)


@pytest.mark.parametrize(
    ("sources", "lag"),
    [
        ([OURS], 35),
        ([source({"a": {"0": 1}}, {"a": {"0": 2}}), OURS], 36),
        (
            [source({"a": {"0": 9}}, {"a": {"0": 2}})],
            0,
        ),  # the latest offset was requested before the batch was planned, so it may be lower
        ([source({"logOffset": 3}, None), OURS], 35),
        ([source(None, None)], None),
        ([source(5, 9)], None),
        ([], None),
    ],
)
def test_lag_is_the_sum_over_sources_that_report_both_offsets(sources: list[Any], lag: int | None) -> None:
    assert batch_summary(progress(5, *sources), None).get("lag") == lag


@pytest.mark.parametrize(
    ("end", "latest"),
    [
        ({"offset": 3}, {"offset": 9}),
        ({"shard": {"position": "TRIM"}}, {"shard": {"position": "LATEST"}}),
        ({"t": None}, {"t": {"0": 9}}),
        ({"t": {"0": None}}, {"t": {"0": None}}),
    ],
)
def test_a_source_with_offsets_of_another_form_has_no_lag(end: Any, latest: Any) -> None:
    """R1066: such offsets raised an error in Spark's listener, so no micro-batch of the query was
    reported.
    """
    assert "lag" not in batch_summary(progress(5, source(end, latest)), None)
    assert batch_summary(progress(5, source(end, latest), OURS), None)["lag"] == 35


def test_unknown_fields_are_left_out() -> None:
    fields = {"batch_id": 4, "rows_in": 6, "seconds": 1.234}
    assert batch_summary(progress(-1), None) == fields
    assert batch_summary(progress(0), None) == fields | {"rows_out": 0}
    of_sink = {"rows_out": 5, "bytes_out": 50, "commit_seconds": 0.25, "lanes": 3, "lanes_skipped": 1}
    assert batch_summary(progress(5), METRICS) == fields | of_sink


def test_metrics_are_lines_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SinkMetrics.of("q-1", 4, REPORTS) == METRICS
    path = tmp_path / "metrics"
    publish(METRICS)  # no file is configured, so this does nothing
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    publish(METRICS)
    publish(METRICS)
    assert [SinkMetrics.decode(line) for line in path.read_text().splitlines()] == [METRICS, METRICS]
    assert json.loads(path.read_text().splitlines()[0]) == asdict(METRICS)


def test_metrics_that_nobody_reads_delay_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(FILE_VARIABLE, str(pipe))
    publish(METRICS)  # The write must return although no process reads the pipe.
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    for _ in range(1000):  # more metrics than the pipe holds
        publish(METRICS)
    read = os.read(reader, 1 << 20).decode().splitlines()
    os.close(reader)
    assert {SinkMetrics.decode(line) for line in read} == {METRICS}
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "no" / "such"))
    publish(METRICS)
