"""`oncelog bench idempotence` on a small scale: the shape of what it writes, not the figures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from oncelog.bench.idempotence import METRICS, Plan, Sample, available_clients, medians
from oncelog.bench.page import put_section
from oncelog.cli.bench import command, write_page

ROOT = Path(__file__).parents[2]


@pytest.mark.behaviour("I24")
def test_measures_off_and_on_and_writes_table_and_picture(tmp_path: Path) -> None:
    results, page = tmp_path / "results" / "i.json", tmp_path / "docs" / "benchmarks.md"
    arguments = ["idempotence", "--repeats=1", "--records=3000", "--paced-seconds=0.2", "-o", "json"]
    arguments += [f"--results={results}", f"--page={page}"]
    run = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    printed = json.loads(run.stdout)
    clients = available_clients()
    assert [(row["client"], row["idempotence"]) for row in printed] == [
        (client, mode) for client in clients for mode in ("off", "on", "on / off")
    ]
    assert all(row[name] > 0 for row in printed for name, _, _ in METRICS)
    kept = json.loads(results.read_text())
    assert kept["plan"]["record_bytes"] == 1024 and kept["plan"]["partitions"] == 3
    assert {"processor", "cores", "memory_bytes", "system", "python", "packages"} <= set(kept["machine"])
    assert len(kept["samples"]) == 2 * len(clients)
    table = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 3 * len(clients)
    assert ElementTree.parse(tmp_path / "docs" / "benchmarks-idempotence.svg").getroot().tag.endswith("svg")


def sample(repeat: int, idempotence: bool, figure: float) -> Sample:
    return Sample(repeat, "c", idempotence, *([figure] * len(METRICS)))


def test_ratio_is_the_median_of_the_pairs() -> None:
    off = [sample(i, False, figure) for i, figure in enumerate((10.0, 20.0, 40.0))]
    on = [sample(i, True, figure) for i, figure in enumerate((20.0, 20.0, 20.0))]
    rows = {row["idempotence"]: row["mb_per_s"] for row in medians([*reversed(off), *on])}
    assert rows == {"off": 20.0, "on": 20.0, "on / off": 1.0}


def test_off_and_on_take_turns_at_being_first() -> None:
    order = [(repeat, mode) for repeat, _, mode in Plan(("c",), repeats=3).samples()]
    assert order == [(0, False), (0, True), (1, True), (1, False), (2, False), (2, True)]


def test_a_section_is_replaced_and_the_rest_of_the_page_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    put_section(page, "one", "first")
    put_section(page, "two", "second")
    put_section(page, "one", "again")
    text = page.read_text()
    assert "first" not in text and text.count("<!-- begin one -->") == 1
    assert text.index("again") < text.index("second")


def test_committed_page_comes_from_the_committed_samples(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "benchmarks.md").write_text((ROOT / "docs" / "benchmarks.md").read_text())
    results = tmp_path / "bench" / "results" / "idempotence.json"
    results.parent.mkdir(parents=True)
    results.write_text((ROOT / "bench" / "results" / "idempotence.json").read_text())
    write_page(docs / "benchmarks.md", results)
    for name in ("benchmarks.md", "benchmarks-idempotence.svg"):
        assert (docs / name).read_text() == (ROOT / "docs" / name).read_text(), "run: make bench"
