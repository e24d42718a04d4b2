"""The pipelines that people copy, under the supervisor, killed midway: nothing lost, nothing doubled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_pipeline import CASES, EXAMPLES, Supervised

import oncelog
from oncelog.dev.apache_kafka import ApacheKafka

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]
MAX_LINES = 80


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with oncelog.Broker() as broker:
        yield broker.bootstrap_servers


def run_through_kills(name: str, servers: str, directory: Path) -> Supervised:
    """The query's process and its JVM are killed between batches or in them, as it happens."""
    it = Supervised(CASES[name], servers, directory)
    it.start()
    it.wait_for_batch(1)
    it.kill(is_jvm=False)
    it.wait_for_batch(3, run=2)
    it.kill(is_jvm=True)
    it.wait_for_rest()
    return it


@pytest.mark.behaviour("P2")
def test_killed_midway_and_stopped_by_sigterm(servers: str, tmp_path: Path) -> None:
    it = Supervised(CASES["enrich"], servers, tmp_path)
    it.start()
    it.wait_for_batch(1)
    it.kill(is_jvm=True)
    it.wait_for_batch(3, run=2)
    assert it.stop() == 0, it.log[-4000:]
    ended = it.status["batch"]["batch_id"]
    assert it.status["state"] == "stopped" and ended in it.entries("commits")
    assert it.entries("offsets")[-1] <= ended + 1  # at most one had been planned since
    it.start()
    it.wait_for_rest()
    assert it.stop() == 0, it.log[-4000:]
    assert it.result() == CASES["enrich"].expected()
    for field in ("rows_in=", "rows_out=", "bytes_out=", "commit_seconds=", "lanes=2", "lag=0"):
        assert field in it.log


@pytest.mark.soak
@pytest.mark.parametrize("name", ["windows", "upserts"])
def test_through_kills(name: str, servers: str, tmp_path: Path) -> None:
    it = run_through_kills(name, servers, tmp_path)
    if name == "windows":  # what the last record closes is written by a batch without rows
        it.wait_for(lambda now: len(it.result()) >= len(CASES[name].expected()))
    assert it.stop() == 0, it.log[-4000:]
    assert it.result() == CASES[name].expected()


@pytest.mark.soak
def test_through_kills_on_apache_kafka(apache_kafka: ApacheKafka, tmp_path: Path) -> None:
    it = run_through_kills("enrich", apache_kafka.bootstrap_servers, tmp_path)
    assert it.stop() == 0, it.log[-4000:]
    assert it.result() == CASES["enrich"].expected()


def test_they_know_nothing_of_the_supervisor() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.stem for file in files] == sorted(CASES)
    for file in files:
        assert "import oncelog" not in (text := file.read_text()) and "from oncelog" not in text
        assert len(text.splitlines()) <= MAX_LINES
