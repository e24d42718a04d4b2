"""`oncelog dev spark`: the example runs on its cluster unchanged, and no process or file is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from oncelog_devtools import cluster_state
from support.broker import wait_until
from support.cli import oncelog
from support.spark.enrich_cluster import create_topics, expected, launch_forward, read_values, send_orders

from oncelog import Broker, Producer

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
ORDERS = 3_000


def processes_of(directory: Path) -> list[str]:
    """Return the command lines of the cluster's processes, which all name a file in the directory."""
    listed = subprocess.run(["ps", "-ww", "-eo", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if f"{directory}/" in line and "java" in line]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "spark"
    cluster_state.stop(tmp_path / "spark")


@pytest.mark.soak
@pytest.mark.behaviour("P3")
def test_the_example_runs_on_a_cluster_of_two_workers(directory: Path, tmp_path: Path) -> None:
    where = ("--directory", str(directory))
    started = oncelog("dev", "spark", "start", "--workers", "2", "--memory-mb", "512", *where)
    assert started.code == 0, started.err
    nodes = json.loads(oncelog("dev", "spark", "status", *where, "-o", "json").out)
    assert [(node["node"], node["state"]) for node in nodes] == [
        (name, "running") for name in ("master", "worker-1", "worker-2")
    ]
    assert started.out.strip() == f"spark://{nodes[0]['address']}" and nodes[0]["page"] in started.err
    again = oncelog("dev", "spark", "start", *where)
    assert again.code == 2 and "oncelog dev spark stop" in again.err

    with Broker() as broker:
        servers = broker.bootstrap_servers
        create_topics(servers, "orders", "enriched")
        for master, numbers in ("local[2]", range(1_000)), (started.out.strip(), range(1_000, ORDERS)):
            with Producer({"bootstrap.servers": servers}) as producer:
                send_orders(producer, "orders", numbers)
            with launch_forward(tmp_path, master, servers, "orders", "enriched") as program:
                assert program.wait(400) == 0, (tmp_path / "log").read_text()
            assert read_values(servers, "enriched") == expected(numbers.stop)
    logs = Path("worker-*", "work", "*", "*", "stderr")  # the logs of the executors
    ran = {path.parts[-5] for path in directory.glob(str(logs))}
    assert ran == {"worker-1", "worker-2"}

    stopped = oncelog("dev", "spark", "stop", *where)
    assert stopped.out == "".join(f"stopped node {node['node']} (pid {node['pid']})\n" for node in nodes)
    # the executors and their Python workers may end a moment later
    wait_until(lambda: processes_of(directory) == [], 30)
    assert oncelog("dev", "spark", "stop", *where).out == ""


def test_a_start_that_is_broken_off_leaves_no_process(directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "oncelog.cli.main",
        "dev",
        "spark",
        "start",
        "--directory",
        str(directory),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: any("worker.Worker" in line for line in processes_of(directory)), 200)
        process.send_signal(signal.SIGINT)
        process.wait(200)
    wait_until(lambda: processes_of(directory) == [], 200)


def test_without_java_the_error_says_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    refused = oncelog("dev", "spark", "start", "--directory", str(directory))
    assert refused.code in (1, 2) and "needs Java 17" in refused.err
