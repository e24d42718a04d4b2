"""The files and the output of `oncelog bench` at a tiny size, not the figures."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner
from oncelog_bench.cli import command
from oncelog_bench.framework import NAMES
from oncelog_bench.idempotence import METRICS, available_clients
from oncelog_bench.page import write_page

ROOT = Path(__file__).parents[2]


@pytest.mark.behaviour("I24")
def test_measures_off_and_on_and_writes_table_and_picture(tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "docs" / "benchmarks.md"
    arguments = ["idempotence", "--quick", "-X", "records=2000", "-o", "json"]
    arguments += [f"--results={results}", f"--page={page}"]
    run = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    printed = json.loads(run.stdout)
    clients = available_clients()
    assert [(row["client"], row["idempotence"]) for row in printed] == [
        (client, mode) for client in clients for mode in ("off", "on", "on / off")
    ]
    assert all(row[metric.name] > 0 for row in printed for metric in METRICS)
    kept = json.loads((results / "idempotence.json").read_text())
    assert kept["plan"]["records"] == 2000 and kept["plan"]["partitions"] == 3
    assert {"processor", "cores", "memory_bytes", "system", "python", "packages"} <= set(kept["machine"])
    assert len(kept["samples"]) == 2 * len(clients)
    text = page.read_text()
    assert "<!-- begin targets -->" in text and "<!-- begin idempotence -->" in text
    assert ElementTree.parse(tmp_path / "docs" / "benchmarks-idempotence.svg").getroot().tag.endswith("svg")


def test_results_that_could_not_be_kept_are_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(command, ["start", f"--results={tmp_path / 'file' / 'results'}"])
    assert refused.exit_code == 2 and "--results" in refused.output


@pytest.mark.parametrize("text", ["nosuch=1", "records=many"])
def test_a_size_the_plan_does_not_have_is_refused_with_what_is_known(text: str, tmp_path: Path) -> None:
    arguments = ["idempotence", "-X", text, f"--results={tmp_path / 'r'}", f"--page={tmp_path / 'p.md'}"]
    run = CliRunner().invoke(command, arguments)
    assert run.exit_code != 0 and text.partition("=")[0] in str(run.exception)
    assert not (tmp_path / "p.md").exists()


def test_every_measurement_is_a_command() -> None:
    listed = CliRunner().invoke(command, ["--help"]).output
    assert all(name in listed for name in (*NAMES, "all", "targets"))


def test_targets_prints_every_target_and_measures_nothing(tmp_path: Path) -> None:
    arguments = ["targets", "-o", "json", f"--results={tmp_path / 'none'}", f"--page={tmp_path / 'p.md'}"]
    run = CliRunner().invoke(command, arguments, catch_exceptions=False)
    rows = json.loads(run.stdout)
    assert rows and all(row["met"] is None and row["measured"] is None for row in rows)
    assert f"{len(rows)} not measured" in (tmp_path / "p.md").read_text()


def test_committed_page_comes_from_the_committed_samples(tmp_path: Path) -> None:
    docs, results = tmp_path / "docs", tmp_path / "bench" / "results"
    docs.mkdir()
    shutil.copy(ROOT / "docs" / "benchmarks.md", docs)
    shutil.copytree(ROOT / "bench" / "results", results)
    write_page(docs / "benchmarks.md", results)
    for written in docs.iterdir():
        assert written.read_text() == (ROOT / "docs" / written.name).read_text(), "run: oncelog bench targets"
