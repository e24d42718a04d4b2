"""`oncelog dev kafka start` in its own process: signals, and the nodes that remain after the process is
killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from oncelog_devtools import apache_kafka, cluster_state
from support.broker import wait_until

from oncelog.errors import MisuseError


def nodes_of(directory: Path) -> list[int]:
    """Return the ids of the processes whose command line names a file in the directory."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.split(None, 1) for line in listed.splitlines())
    return [int(pid) for pid, command in rows if f"kafka.Kafka {directory}" in command]


def test_a_node_has_its_temporary_files_in_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R541: SIGKILL ends a node, so nothing would remove the libraries that it unpacks in another
    directory.
    """
    monkeypatch.setattr(apache_kafka, "fetch_jars", lambda: "jars")
    node = apache_kafka.kafka_node(1, 9092, tmp_path)
    assert f"-Djava.io.tmpdir={tmp_path}" in node._command


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="only Linux has /proc")
def test_a_node_that_others_started_again_is_found_and_stopped(tmp_path: Path) -> None:
    """`oncelog trial` kills a Spark worker and starts it again, so the recorded process id is an old one."""
    properties = str(tmp_path / "spark.properties")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    cluster_state._write(tmp_path, [cluster_state.NodeRecord("worker-1", 1, ended.pid, properties)])
    (node,) = cluster_state.find(tmp_path)
    assert not node.is_running and node.pid == ended.pid
    named = ["bash", "-c", 'exec -a "$0" "$@"']
    words = [sys.executable, "-c", "input()", properties]
    with (
        subprocess.Popen([*named, "editor", *words], stdin=-1) as editor,
        subprocess.Popen([*named, "java", *words], stdin=-1) as again,
    ):
        wait_until(lambda: cluster_state.find(tmp_path)[0].is_running)
        assert [node.pid for node in cluster_state.stop(tmp_path)] == [again.pid]
        assert (again.wait(), editor.poll()) == (-signal.SIGTERM, None)
        editor.kill()


@pytest.fixture
def directory(tmp_path: Path, kafka_class_path: str) -> Iterator[Path]:
    yield tmp_path / "kafka"
    cluster_state.stop(tmp_path / "kafka")


@contextlib.contextmanager
def launched(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "oncelog.cli.main",
        "dev",
        "kafka",
        "start",
        "--directory",
        str(directory),
    ]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_a_signal_stops_the_cluster(directory: Path, number: signal.Signals) -> None:
    with launched(directory, "--foreground") as command:
        assert command.stdout is not None
        address = command.stdout.readline().strip()
        (node,) = cluster_state.find(directory)
        assert address == f"127.0.0.1:{node.port}"
        assert nodes_of(directory) == [node.pid]
        command.send_signal(number)
        assert command.wait(200) == (0 if number is signal.SIGINT else 143)
    assert nodes_of(directory) == []


def test_a_killed_node_is_started_again_and_ports_stay(directory: Path) -> None:
    started = cluster_state.start_kafka(directory, nodes=2, properties={})
    os.kill(started[0].pid, signal.SIGKILL)
    wait_until(lambda: not started[0].is_running)
    with pytest.raises(MisuseError, match="keep their previous settings"):
        cluster_state.start_kafka(directory, nodes=2, properties={"num.partitions": 2})
    again = cluster_state.start_kafka(directory, nodes=2, properties={})
    assert [node.port for node in again] == [node.port for node in started]
    assert again[1] == started[1] and again[0].pid != started[0].pid
    assert sorted(nodes_of(directory)) == sorted(node.pid for node in cluster_state.find(directory))
    with pytest.raises(MisuseError, match="a cluster is running on"):
        cluster_state.start_kafka(directory, nodes=2, properties={})
    cluster_state.stop(directory)
    anew = cluster_state.start_kafka(directory, nodes=2, properties={})
    assert [node.port for node in anew] == [node.port for node in started]


def test_killed_nodes_are_all_launched_before_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four nodes are killed.

    The living node and one restarted node are no majority, so neither becomes ready before the others are
    launched.
    """
    steps: list[str] = []

    class Node:
        def __init__(self, name: int, *_: object, **__: object) -> None:
            # the process is alive but is not a node: its command line names no configuration file
            self.pid = os.getpid()

        def launch(self) -> None:
            steps.append("launch")

        def wait_until_ready(self) -> None:
            steps.append("wait")

    home = str(tmp_path / "node-{}" / "server.properties")
    rows = [(name, 9000 + name, os.getpid(), home.format(name), "") for name in range(1, 5)]
    (tmp_path / cluster_state.FILE_NAME).write_text(json.dumps({"nodes": rows}))
    monkeypatch.setattr(cluster_state, "kafka_node", Node)
    monkeypatch.setattr(cluster_state, "_command_line", lambda _: home.format(4))
    again = cluster_state.start_kafka(tmp_path, nodes=4, properties={})
    assert steps == ["launch"] * 3 + ["wait"] * 3
    assert again == cluster_state.find(tmp_path)


def test_a_start_that_is_broken_off_leaves_no_process(directory: Path) -> None:
    with launched(directory) as command:
        wait_until(lambda: bool(nodes_of(directory)), 200)
        command.send_signal(signal.SIGINT)
        command.wait(200)
    assert nodes_of(directory) == []


@pytest.mark.skipif(not shutil.which("setpriv"), reason="no setpriv: nodes outlive a parent that is killed")
def test_nodes_in_the_foreground_die_with_a_killed_parent(directory: Path) -> None:
    with launched(directory, "--foreground") as command:
        assert command.stdout is not None and command.stdout.readline()
        command.kill()
    wait_until(lambda: nodes_of(directory) == [], 200)
