"""Clusters that outlive the command that started them; stopped by their process ids.

What runs is written to `cluster.json` in the cluster's directory. A process id is believed only if that
process's command line names the node's own configuration file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from oncelog.errors import MisuseError, OncelogError
from oncelog.testing.process import STOP_TIMEOUT_S, are_free
from oncelog_devtools.apache_kafka import ApacheKafka, KafkaNode, kafka_node
from oncelog_devtools.spark_cluster import SparkCluster

FILE_NAME = "cluster.json"


@dataclass(frozen=True, slots=True)
class StandingNode:
    """A node as it was started. `properties` is its configuration file, `page` its web page, if any."""

    name: int | str
    port: int
    pid: int
    properties: str
    page: str = ""

    @property
    def is_running(self) -> bool:
        return self.properties in _command_line(self.pid)


def start_kafka(
    directory: Path, *, nodes: int, properties: Mapping[str, object], outlive_parent: bool = True
) -> list[StandingNode]:
    """Start a cluster on `directory`, with the data that is in it, and wait until it serves.

    Of a cluster that runs in part, start the nodes that do not run, with the settings they had. Nodes keep
    their ports while these are free. Raises MisuseError when all of one run there or its data belong to
    another number of nodes, PartMissing, TimedOut.
    """
    known = find(directory)
    if any(node.is_running for node in known) and not all(node.is_running for node in known):
        return _start_rest(directory, known, properties, outlive_parent=outlive_parent)
    known = _find_stopped(directory, "kafka")
    if known and len(known) != nodes:
        raise MisuseError(
            f"{directory} holds a cluster of {len(known)} nodes; use another directory for {nodes}"
        )
    cluster = ApacheKafka(
        directory,
        nodes=nodes,
        properties=properties,
        outlive_parent=outlive_parent,
        ports=[node.port for node in known],
    )
    return _start(directory, cluster)


def start_spark(
    directory: Path, *, workers: int, cores: int, memory_mb: int, outlive_parent: bool = True
) -> list[StandingNode]:
    """Start a master and workers and wait until they know each other; the first node is the master.

    Raises MisuseError when a cluster runs on `directory`, ConfigError without PySpark or Java, TimedOut.
    """
    _find_stopped(directory, "spark")
    cluster = SparkCluster(
        directory, workers=workers, cores=cores, memory_mb=memory_mb, outlive_parent=outlive_parent
    )
    return _start(directory, cluster)


def _find_stopped(directory: Path, kind: str) -> list[StandingNode]:
    known = find(directory)
    if any(node.is_running for node in known):
        raise MisuseError(f"a cluster runs on {directory}; stop it first: oncelog dev {kind} stop")
    return known


def _start_rest(
    directory: Path, known: list[StandingNode], properties: Mapping[str, object], *, outlive_parent: bool
) -> list[StandingNode]:
    if properties:
        raise MisuseError(
            "nodes that start again keep the settings they had; leave -X out, or stop the cluster first: "
            "oncelog dev kafka stop"
        )
    again = list(known)
    launched: list[KafkaNode] = []
    try:
        # All of them before any is waited for: a node serves only when most of them run.
        for index, node in enumerate(known):
            if not node.is_running:
                home = Path(node.properties).parent
                process = kafka_node(int(node.name), node.port, home, outlive_parent=outlive_parent)
                process.launch()
                launched.append(process)
                again[index] = replace(node, pid=process.pid)
        for process in launched:
            process.wait_until_ready()
    except BaseException:  # Ctrl-C too: nothing stays behind
        for process in launched:
            process.kill()
        raise
    _write(directory, again)
    return again


def _start(directory: Path, cluster: ApacheKafka | SparkCluster) -> list[StandingNode]:
    cluster.start()
    nodes = [StandingNode(node.name, node.port, node.pid, node.mark, node.page) for node in cluster.nodes]
    _write(directory, nodes)
    return nodes


def _write(directory: Path, nodes: list[StandingNode]) -> None:
    rows = [(node.name, node.port, node.pid, node.properties, node.page) for node in nodes]
    (directory / FILE_NAME).write_text(json.dumps({"nodes": rows}) + "\n")


def find(directory: Path) -> list[StandingNode]:
    """The nodes last started on `directory`, running or not; empty when there were none."""
    try:
        state = json.loads((directory / FILE_NAME).read_text())
        return [StandingNode(*row) for row in state["nodes"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise OncelogError(f"{directory / FILE_NAME} cannot be read: {error}") from error


def stop(directory: Path) -> list[StandingNode]:
    """SIGTERM to every node that runs, SIGKILL to those that do not end; the nodes that ran."""
    running = [node for node in find(directory) if node.is_running]
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal([node for node in running if node.is_running], number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not all(map(_has_ended, running)) and time.monotonic() < deadline:
            time.sleep(0.1)
    return running


def _has_ended(node: StandingNode) -> bool:
    """Return whether a node's port is free, too.

    A process that ends has no command line any more before its sockets are closed; a start would then
    give the node another port.
    """
    return not node.is_running and are_free([node.port])


def _signal(nodes: list[StandingNode], number: signal.Signals) -> None:
    for node in nodes:
        try:
            os.kill(node.pid, number)
        except ProcessLookupError:
            pass  # it ended by itself meanwhile


def _command_line(pid: int) -> str:
    """Empty when there is no such process, or it has ended and nobody has asked for its exit code."""
    if Path("/proc/self").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    asked = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True)
    return asked.stdout
