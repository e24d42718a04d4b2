"""Clusters that outlive the command that started them. Their nodes are stopped by process id.

The running nodes are recorded in `cluster.json` in the cluster's directory. A recorded process id is used
only if the command line of that process names the node's own configuration file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oncelog.errors import MisuseError, OncelogError
from oncelog.testing.process import STOP_TIMEOUT_S, are_free
from oncelog_devtools.apache_kafka import ApacheKafka, KafkaNode, kafka_node
from oncelog_devtools.prometheus import PrometheusServer
from oncelog_devtools.spark_cluster import SparkCluster

FILE_NAME = "cluster.json"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as it was started.

    `properties` is the node's configuration file, and `page` the URL of its web page, if it has one.
    """

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
) -> list[NodeRecord]:
    """Start a cluster on `directory`, with the data in it, and wait until every node responds.

    If some nodes of the cluster are running, start only the others, with their previous settings. Nodes keep
    their ports if these are free.

    Raises MisuseError if all nodes are running, or if the data belongs to another number of nodes. Raises
    MissingDependency, TimedOut.
    """
    existing = find(directory)
    if any(node.is_running for node in existing) and not all(node.is_running for node in existing):
        return _start_rest(directory, existing, properties, outlive_parent=outlive_parent)
    existing = _find_stopped(directory, "kafka")
    if existing and len(existing) != nodes:
        raise MisuseError(
            f"{directory} holds a cluster of {len(existing)} nodes; use another directory for {nodes}"
        )
    cluster = ApacheKafka(
        directory,
        nodes=nodes,
        properties=properties,
        outlive_parent=outlive_parent,
        ports=[node.port for node in existing],
    )
    return _start(directory, cluster)


def start_spark(
    directory: Path, *, workers: int, cores: int, memory_mb: int, outlive_parent: bool = True
) -> list[NodeRecord]:
    """Start a master and workers, and wait until all workers have registered. The first node is the master.

    Raises MisuseError if a cluster runs on `directory`, ConfigError without PySpark or Java, TimedOut.
    """
    _find_stopped(directory, "spark")
    cluster = SparkCluster(
        directory, workers=workers, cores=cores, memory_mb=memory_mb, outlive_parent=outlive_parent
    )
    return _start(directory, cluster)


def start_prometheus(
    directory: Path,
    targets: Sequence[str],
    *,
    interval_s: int,
    token_file: Path | None,
    outlive_parent: bool = True,
) -> list[NodeRecord]:
    """Start Prometheus, and wait until it accepts connections.

    Raises MisuseError if one runs on `directory`, MissingDependency, ConfigError, TimedOut.
    """
    _find_stopped(directory, "prometheus")
    server = PrometheusServer(
        directory, targets, interval_s=interval_s, token_file=token_file, outlive_parent=outlive_parent
    )
    return _start(directory, server)


def _find_stopped(directory: Path, kind: str) -> list[NodeRecord]:
    existing = find(directory)
    if any(node.is_running for node in existing):
        raise MisuseError(f"a cluster is running on {directory}; stop it first: oncelog dev {kind} stop")
    return existing


def _start_rest(
    directory: Path, existing: list[NodeRecord], properties: Mapping[str, object], *, outlive_parent: bool
) -> list[NodeRecord]:
    if properties:
        raise MisuseError(
            "restarted nodes keep their previous settings; omit -X, or stop the cluster first: "
            "oncelog dev kafka stop"
        )
    restarted = list(existing)
    launched: list[KafkaNode] = []
    try:
        # Launch all nodes before waiting for any, because a node responds only when a majority of the
        # controllers runs.
        for index, node in enumerate(existing):
            if not node.is_running:
                home = Path(node.properties).parent
                process = kafka_node(int(node.name), node.port, home, outlive_parent=outlive_parent)
                process.launch()
                launched.append(process)
                restarted[index] = replace(node, pid=process.pid)
        for process in launched:
            process.wait_until_ready()
    except BaseException:  # Also after Ctrl-C, leave no process behind.
        for process in launched:
            process.kill()
        raise
    _write(directory, restarted)
    return restarted


def _start(directory: Path, cluster: ApacheKafka | SparkCluster | PrometheusServer) -> list[NodeRecord]:
    cluster.start()
    nodes = [NodeRecord(node.name, node.port, node.pid, node.mark, node.page) for node in cluster.nodes]
    _write(directory, nodes)
    return nodes


def _write(directory: Path, nodes: list[NodeRecord]) -> None:
    rows = [(node.name, node.port, node.pid, node.properties, node.page) for node in nodes]
    (directory / FILE_NAME).write_text(json.dumps({"nodes": rows}) + "\n")


def find(directory: Path) -> list[NodeRecord]:
    """Return the nodes of the last start on `directory`, running or not; an empty list if there was none.

    A node that was killed and started again by others, such as `oncelog trial`, has its new process id.
    """
    try:
        state = json.loads((directory / FILE_NAME).read_text())
        nodes = [NodeRecord(*row) for row in state["nodes"]]
        return [node if node.is_running else replace(node, pid=_pid_now(node)) for node in nodes]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise OncelogError(f"{directory / FILE_NAME} cannot be read: {error}") from error


def stop(directory: Path) -> list[NodeRecord]:
    """Stop every running node with SIGTERM, and with SIGKILL if it stays alive. Return the nodes that ran."""
    running = [node for node in find(directory) if node.is_running]
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal([node for node in running if node.is_running], number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not all(map(_has_ended, running)) and time.monotonic() < deadline:
            time.sleep(0.1)
    return running


def _has_ended(node: NodeRecord) -> bool:
    """Return True if a node has ended and its port is free.

    When a process ends, its command line disappears before its sockets are closed. A node that is restarted
    between the two would find its port in use, and would get another one.
    """
    return not node.is_running and are_free([node.port])


def _pid_now(node: NodeRecord) -> int:
    """Return the id of the Java process that runs with the node's configuration file; the recorded id if
    there is none.
    """
    for directory in Path("/proc").glob("[0-9]*"):
        words = _command_line(int(directory.name)).split()
        if words and Path(words[0]).name == "java" and node.properties in words:
            return int(directory.name)
    return node.pid


def _signal(nodes: list[NodeRecord], number: signal.Signals) -> None:
    for node in nodes:
        try:
            os.kill(node.pid, number)
        except ProcessLookupError:
            pass  # The process ended after `is_running` was read.


def _command_line(pid: int) -> str:
    """Return a process's command line, or an empty string if it does not exist or is a zombie."""
    if Path("/proc/self").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    ps = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True)
    return ps.stdout
