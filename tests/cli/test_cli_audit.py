"""The output of `oncelog audit`, without Spark."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("pyspark")

import oncelog.spark.audit.audit
import oncelog.spark.session
from oncelog.audit.partition import PartitionTotals
from oncelog.cli.main import cli
from oncelog.errors import ConfigError
from oncelog.spark.audit.audit import AuditFinding, AuditResult, Difference, KeyTotals
from oncelog.types import TopicPartition

FINDING = AuditFinding(
    kind="duplicate_batch",
    topic="payments",
    partition=2,
    base_offset=120,
    last_offset=124,
    producer_id=9,
    producer_epoch=0,
    first_sequence=50,
    last_sequence=54,
    other_offset=90,
    key=None,
    explanation="the batch at offset 90 is stored again",
)
SEEN = PartitionTotals(batches=30, records=150, producers=2)


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that the command passes to the audit.

    The audit is replaced: it returns what the test stored under `result`.
    """
    asked: dict[str, Any] = {"result": AuditResult((), {TopicPartition("payments", 2): SEEN}, None)}

    @contextlib.contextmanager
    def no_session(*_: object) -> Iterator[None]:
        yield None

    def audit_topic(_spark: None, bootstrap: str, topics: tuple[str, ...], **options: object) -> AuditResult:
        asked.update(bootstrap=bootstrap, topics=topics, **options)
        return asked["result"]

    monkeypatch.setattr(oncelog.spark.session, "any_session", no_session)

    def audit_files(_spark: None, paths: tuple[str, ...], **options: object) -> AuditResult:
        asked.update(paths=paths, **options)
        return asked["result"]

    monkeypatch.setattr(oncelog.spark.audit.audit, "audit_topic", audit_topic)
    monkeypatch.setattr(oncelog.spark.audit.audit, "audit_files", audit_files)
    return asked


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["audit", *arguments])


def test_options_reach_the_audit(audited: dict[str, Any]) -> None:
    assert run("a", "b", "-b", "h:1", "-X", "fetch.min.bytes=5", "--keys").exit_code == 0
    assert (audited["bootstrap"], audited["topics"], audited["key_check"]) == ("h:1", ("a", "b"), True)
    assert audited["client_config"] == {"fetch.min.bytes": "5"}
    assert run("a", "--key-expr", "upper(key)").exit_code == 0
    assert audited["key_check"] == "upper(key)"


def test_a_finding_is_a_row_and_exit_code_3(audited: dict[str, Any]) -> None:
    totals = PartitionTotals(batches=30, records=150, producers=2, findings=1)
    audited["result"] = AuditResult((FINDING,), {TopicPartition("payments", 2): totals}, None)
    table = run("payments")
    assert table.exit_code == 3
    assert "duplicate_batch  payments          2          120          124" in table.stdout
    assert "verdict: violated (1 findings)" in table.stderr
    rows = json.loads(run("payments", "-o", "json").stdout)
    assert rows == [
        {
            "severity": "violation",
            "kind": "duplicate_batch",
            "topic": "payments",
            "partition": 2,
            "base_offset": 120,
            "last_offset": 124,
            "producer_id": 9,
            "producer_epoch": 0,
            "first_sequence": 50,
            "last_sequence": 54,
            "other_offset": 90,
            "key": None,
            "explanation": "the batch at offset 90 is stored again",
        }
    ]
    assert "PRODUCER ID" in run("payments", "-o", "wide").stdout


def test_truncated_and_unproven_results_are_marked(audited: dict[str, Any]) -> None:
    many = PartitionTotals(batches=9, records=90, unnumbered_records=40, unknown_starts=1, findings=5000)
    audited["result"] = AuditResult((FINDING,), {TopicPartition("payments", 2): many}, None)
    said = run("payments").stderr
    assert "40 records carry no producer id" in said and "--keys" in said
    assert "1 sequences began before the log start" in said
    assert "5000 findings, of which the first 1 are shown" in said
    unproven = PartitionTotals(batches=9, records=90, unnumbered_records=40)
    audited["result"] = AuditResult((), {TopicPartition("payments", 2): unproven}, KeyTotals(90, 90, 0))
    checked = run("payments", "--keys")
    assert checked.exit_code == 0 and "90 different keys, 0 of them more than once" in checked.stderr
    audited["result"] = AuditResult((), {TopicPartition("payments", 2): unproven}, KeyTotals(50, 50, 0, 40))
    checked = run("payments", "--keys")
    assert checked.exit_code == 1 and "40 records without a key were not checked by key" in checked.stderr
    assert "verdict: unproven" in checked.stderr


def test_directories_can_be_audited_instead_of_topics(audited: dict[str, Any]) -> None:
    assert run("--files", "/data", "s3://copies/payments-0", "--compacted", "payments").exit_code == 0
    assert audited["paths"] == ("/data", "s3://copies/payments-0")
    assert audited["compacted_topics"] == ("payments",)
    assert "topics" not in audited
    assert run("--files", "/data", "--key-expr", "key", "--against", "/copy").exit_code == 0
    assert (audited["key_check"], audited["against"]) == ("key", ("/copy",))


def test_a_topic_that_was_once_compacted_is_shown_as_compacted(audited: dict[str, Any]) -> None:
    assert run("a", "--compacted", "a").exit_code == 0
    assert (audited["topics"], audited["compacted_topics"]) == (("a",), ("a",))


def test_a_comparison_with_differences_is_printed_and_exits_with_3(audited: dict[str, Any]) -> None:
    lost = dataclasses.replace(FINDING, kind="lost_key", key="k7")
    partitions = audited["result"].partitions
    audited["result"] = AuditResult((lost,), partitions, None, (), Difference(10, 9, 1, 0, 0, 4))
    said = run("payments", "--against", "orders", "--against", "more")
    assert said.exit_code == 3 and audited["against"] == ("orders", "more")
    assert "9 records with a key, 10 expected; keys lost 1, doubled 0, unexpected 0" in said.stderr
    assert "4 records without a key on either side were not compared" in said.stderr


def test_a_note_is_shown_and_is_no_violation(audited: dict[str, Any]) -> None:
    note = dataclasses.replace(FINDING, kind="open_transaction")
    totals = PartitionTotals(batches=3, records=30, committed=1, aborted=2)
    audited["result"] = AuditResult((), {TopicPartition("payments", 2): totals}, None, (note,))
    said = run("payments", "-o", "json")
    assert said.exit_code == 0 and "verdict: clean" in said.stderr
    assert "1 committed and 2 aborted transactions with data" in said.stderr
    assert [row["severity"] for row in json.loads(said.stdout)] == ["information"]


def test_the_page_needs_no_network_and_contains_all_results(audited: dict[str, Any], tmp_path: Path) -> None:
    totals = PartitionTotals(batches=30, records=150, producers=2, findings=1)
    hostile = dataclasses.replace(FINDING, key="<script>alert(1)</script>")
    note = dataclasses.replace(FINDING, kind="torn_tail")
    audited["result"] = AuditResult((hostile,), {TopicPartition("payments", 2): totals}, None, (note,))
    page = tmp_path / "audit.html"
    assert run("payments", "--html", str(page)).exit_code == 3
    text = page.read_text()
    for part in ("Audit of payments", "violated (1 findings)", "duplicate_batch", "50 to 54", "payments-2"):
        assert part in text
    assert text.index("Violations") < text.index("duplicate_batch") < text.index("Notes")
    assert text.index("Notes") < text.index("torn_tail")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "http" not in text and "src=" not in text


def test_no_findings_are_an_empty_list_in_json_and_nothing_in_a_table(audited: dict[str, Any]) -> None:
    assert json.loads(run("payments", "-o", "json").stdout) == []
    assert run("payments").stdout == ""


def test_a_wrong_setting_is_an_error_before_spark_starts(audited: dict[str, Any]) -> None:
    wrong = run("payments", "-X", "fetch.mn.bytes=5")
    assert isinstance(wrong.exception, ConfigError) and "did you mean fetch.min.bytes" in str(wrong.exception)
    assert "topics" not in audited
    assert run().exit_code == 2
