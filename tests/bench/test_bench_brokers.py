"""Run every broker benchmark at a tiny size, and check the recorded fields and the generated page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from oncelog_bench import brokers
from oncelog_bench.brokers import kept, running
from oncelog_bench.framework import COMPILED, KAFKA, OURS, figure, load, targets_of
from oncelog_bench.page import write_page
from oncelog_bench.throughput import read_perf_test
from oncelog_devtools.apache_kafka import MissingDependency

from oncelog import compiled
from oncelog.errors import MisuseError, OncelogError

FIELDS = {
    "throughput": {"mb_per_s", "p50_ms", "p99_ms", "p999_ms", "cpu_s_per_gb", "rss_mb"},
    "single_records": {"requests_per_s", "requests_per_cpu_s", "p99_ms"},
    "batch_cost": {"cpu_us_per_batch"},
    "latency": {"p50_ms", "p99_ms", "p999_ms"},
    "durable": {"requests_per_s", "p99_ms"},
    "transactions": {"commits_per_s", "p50_ms", "p99_ms"},
    "transactional": {"records_per_s", "mb_per_s"},
    "read_committed": {"p50_ms", "p99_ms", "commit_p50_ms", "commit_p99_ms"},
    "groups": {"join_ms", "leave_ms", "broker_cpu_ms", "generator_cpu_ms"},
    "fetch": {"mb_per_s", "cpu_s_per_gb", "p99_ms"},
    "hostile": {"p50_ms", "p99_ms", "rss_mb", "cpu_us_per_send"},
    "longest_wait": {"longest_wait_ms"},
    "start": {"first_acknowledgement_s", "idle_rss_mb"},
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Run all measurements of this file one after the other on one broker, and return their results."""
    taken = {}
    with kept():
        for name in FIELDS:
            done: list[int] = []
            measurement = load(name)
            taken[name] = measurement.measure(measurement.QUICK, done.append)
            assert done == list(range(1, measurement.QUICK.samples_count + 1)), name
    copied: dict[str, dict[str, Any]] = json.loads(json.dumps(taken))
    return copied


@pytest.mark.parametrize("name", FIELDS)
def test_samples_and_medians_hold_every_figure(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert result["measurement"] == name and result["left_out"] == {}
    assert len(result["samples"]) == load(name).QUICK.samples_count
    for row in (*result["samples"], *result["medians"]):
        if not row.get("generator", "raw").startswith("confluent"):
            assert all(row[field] > 0 for field in FIELDS[name]), row


@pytest.mark.parametrize("name", FIELDS)
def test_the_page_has_a_section_a_picture_and_a_sentence(
    name: str, results: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    kept_in = tmp_path / "results"
    kept_in.mkdir()
    (kept_in / f"{name}.json").write_text(json.dumps(results[name]))
    write_page(tmp_path / "page.md", kept_in)
    text = (tmp_path / "page.md").read_text()
    section = text[text.index(f"<!-- begin {name} -->") : text.index(f"<!-- end {name} -->")]
    assert "\n## " in section and "**What this shows.**" in section and "Measured on" in section
    picture = tmp_path / f"benchmarks-{name}.svg"
    assert picture.name in section
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_idempotence_is_compared_with_its_absence_for_each_size(results: dict[str, dict[str, Any]]) -> None:
    for count in load("batch_cost").QUICK.batch_records:
        ratio = figure(results["batch_cost"], "cpu_us_per_batch", idempotence="on / off", batch_records=count)
        assert ratio is not None and ratio > 0


def test_targets_against_apache_kafka_are_not_measured_without_it(results: dict[str, dict[str, Any]]) -> None:
    measured = {t.what: t.measured(results[name]) for name in FIELDS for t in targets_of(load(name))}
    assert {what for what, value in measured.items() if value is None} == {
        what for what in measured if "Kafka" in what or "while pages" in what
    }
    assert any(value is not None for value in measured.values())


def test_apache_kafka_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise MissingDependency("no java here")

    monkeypatch.setattr(brokers, "ApacheKafka", missing)
    monkeypatch.setattr(brokers, "_warmed", lambda side, _: side)
    with running((OURS, KAFKA), warm_up_seconds=0.0) as sides:
        assert sides.names == [OURS] and sides.left_out == {KAFKA: "no java here"}
        with pytest.raises(MisuseError, match="Apache Kafka"):
            sides.run_tool("org.apache.kafka.tools.ProducerPerformance")


def test_kept_brokers_serve_the_next_measurement_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "_warmed", lambda side, _: side)
    with kept():
        with running((OURS,), warm_up_seconds=0.0) as first:
            pid = first[OURS].pid
        with running((OURS,), warm_up_seconds=0.0) as second:
            assert second[OURS].pid == pid
    with running((OURS,), warm_up_seconds=0.0) as third:
        assert third[OURS].pid != pid


def test_the_last_line_of_kafkas_own_generator_is_read() -> None:
    printed = (
        "20001 records sent, 4000.2 records/sec (3.91 MB/sec), 900.1 ms avg latency, 1200.0 ms max latency.\n"
        "50000 records sent, 40950.040950 records/sec (39.99 MB/sec), 379.42 ms avg latency, "
        "505.00 ms max latency, 379 ms 50th, 480 ms 95th, 496 ms 99th, 505 ms 99.9th.\n"
    )
    figures = read_perf_test(printed, 1_000)
    assert figures == {
        "mb_per_s": pytest.approx(40.95004), "p50_ms": 379.0, "p99_ms": 496.0, "p999_ms": 505.0
    }  # fmt: skip
    with pytest.raises(OncelogError, match="did not print its summary line"):
        read_perf_test("Exception in thread main", 1_000)


@pytest.mark.parametrize(
    ("usable", "reason"),
    [
        (None, "nothing is compiled; run `make compile`"),
        ("a has changed", "a has changed; run `make compile`"),
    ],
)
def test_the_compiled_broker_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, usable: str | None, reason: str
) -> None:
    monkeypatch.setattr(compiled, "read_usable", lambda part: usable)
    monkeypatch.setattr(brokers, "_warmed", lambda side, _: side)
    with running((OURS, COMPILED), warm_up_seconds=0.0) as sides:
        assert sides.names == [OURS] and sides.left_out == {COMPILED: reason}
