"""Shuffle files are lost during a write on a real cluster. Rows that Spark computes again are not doubled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from oncelog_devtools.spark_cluster import SparkCluster
from support import TESTS
from support.broker import wait_until
from support.spark.enrich_cluster import SUBMIT, create_topics, read_values
from support.spark.shuffle_program import GO_ON, MAP_TASKS, PATIENCE_S, ROWS, TASKS
from support.spark.worker_python import spark_python

from oncelog import Broker

pytestmark = [pytest.mark.soak, pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster(workers=2, memory_mb=512) as cluster:
        yield cluster


def write(master: str, servers: str, plan: str, directory: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": spark_python(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": f"--master {master} {SUBMIT}",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    program = [sys.executable, "-m", "support.spark.shuffle_program"]
    command = [*program, master, servers, "rows", str(directory), plan]
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def named(directory: Path, begin: str) -> int:
    return len(list(directory.glob(f"{begin}-*")))


@pytest.mark.behaviour("P2")
@pytest.mark.parametrize("plan", ["number", "chance", "chance-by-id"])
def test_rows_are_stored_once_when_an_executor_is_killed_after_the_shuffle(
    cluster: SparkCluster, tmp_path: Path, plan: str
) -> None:
    """Two tasks have committed their rows when the executor is killed. The other tasks then lack half of the
    shuffle files.

    Spark computes the lost files again. If rows are distributed at random, the new files have other
    checksums, and Spark ends the job.
    """
    log = tmp_path / "log"
    with Broker() as broker:
        servers = broker.bootstrap_servers
        create_topics(servers, "rows")
        with write(cluster.master_url, servers, plan, tmp_path) as program:
            wait_until(lambda: named(tmp_path, "begun") == 4 or program.poll() is not None, PATIENCE_S)
            assert program.poll() is None, log.read_text()[-6000:]
            committed = read_values(servers, "rows")
            assert 0 < committed.total() < ROWS
            cluster.workers[0].kill()
            (tmp_path / GO_ON).touch()
            code = program.wait(PATIENCE_S)
        stored = read_values(servers, "rows")
        assert stored.most_common(1)[0][1] == 1
        assert committed.keys() <= stored.keys()
        assert named(tmp_path, "dealt") > MAP_TASKS, "no shuffle file was lost"
        if plan == "number":
            assert (code, stored.total(), named(tmp_path, "begun")) == (0, ROWS, TASKS)
            return
        assert code != 0 and stored.total() < ROWS
        with write("local[2]", servers, plan, tmp_path) as program:
            assert program.wait(PATIENCE_S) != 0
        assert "a repeated batch must have the same rows in the same partitions" in log.read_text()
        assert read_values(servers, "rows") == stored
