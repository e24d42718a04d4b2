"""The example pipelines under the supervisor, killed midway: nothing is lost or written twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.pipeline.pipelines import CASES, EXAMPLES, PER_BATCH, Supervised

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]
MAX_LINES = 95


def run_through_kills(it: Supervised) -> None:
    """Kill the query's process, then its JVM, and then stop it. Each time, data is waiting to be
    processed.
    """
    it.start()
    it.wait_for_batch(1)
    it.kill(is_jvm=False)
    it.wait_for_batch(2, run=2)
    stop_midway(it)
    it.start()
    it.wait_for_batch(4)
    it.kill(is_jvm=True)
    it.wait_for_rest()
    assert "Spark's JVM has died" in it.log
    if it.case.name == "windows":  # The last record closes windows, which one more batch writes.
        it.wait_for(lambda now: len(it.result()) >= len(it.case.expected()))
    assert it.stop() == 0, it.log[-4000:]
    assert it.result() == it.case.expected()


def stop_midway(it: Supervised) -> int:
    """Stop the query by SIGTERM. Return the id of the batch that it finished last."""
    assert it.stop() == 0, it.log[-4000:]
    ended = int(it.status["batch"]["batch_id"])
    assert it.status["state"] == "stopped" and ended in it.entries("commits")
    # Besides the last completed batch, at most one more was planned.
    assert it.entries("offsets")[-1] <= ended + 1
    return ended


@pytest.mark.behaviour("P2")
def test_a_stop_midway_leaves_whole_batches(ours: str, tmp_path: Path) -> None:
    with Supervised(CASES["enrich"], ours, tmp_path) as it:
        it.start()
        it.wait_for_batch(1)
        ended = stop_midway(it)
        written, expected = it.result(), it.case.expected()
    assert all(row in expected for row in written)
    assert len({row["id"] for row in written}) == len(written) >= PER_BATCH * (ended + 1)
    for field in ("rows_in=30", "rows_out=30", "bytes_out=", "commit_seconds=", "lanes=2", "lag="):
        assert field in it.log


@pytest.mark.soak
@pytest.mark.parametrize(
    "name",
    [
        "enrich",
        "windows",
        "upserts",
        pytest.param("to_delta", marks=pytest.mark.behaviour("P9")),
        pytest.param("to_iceberg", marks=pytest.mark.behaviour("P9")),
        pytest.param("to_postgresql", marks=pytest.mark.behaviour("P9")),
    ],
)
def test_kills_lose_and_double_nothing(
    name: str, ours: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if name == "to_iceberg":
        pytest.importorskip("pyiceberg", reason="needs the package pyiceberg")
    if name == "to_postgresql":
        server = request.getfixturevalue("postgresql")
        (tmp_path / "database").write_text(server.url)
        (tmp_path / "schema").write_text(server.new_schema())
    with Supervised(CASES[name], ours, tmp_path) as it:
        run_through_kills(it)


@pytest.mark.soak
def test_kills_on_apache_kafka_lose_and_double_nothing(apache_kafka: ApacheKafka, tmp_path: Path) -> None:
    with Supervised(CASES["enrich"], apache_kafka.bootstrap_servers, tmp_path) as it:
        run_through_kills(it)


def test_the_examples_import_nothing_of_oncelog() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.stem for file in files] == sorted(CASES)
    for file in files:
        assert "import oncelog" not in (text := file.read_text()) and "from oncelog" not in text
        assert len(text.splitlines()) <= MAX_LINES
