"""Run Apache Kafka itself, as the reference for Oncelog: one KRaft node or several, from Maven's jars.

Maven downloads the jars once into a cache. Only Java and Maven are needed, no Docker.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from oncelog.client.admin.blocking import Admin
from oncelog.errors import OncelogError, TimedOut
from oncelog.testing.process import READY_TIMEOUT_S, NodeProcess, are_free, dying_with_parent, free_ports

VERSION = "4.3.0"
"""The version of Apache Kafka to run if none is named."""

CACHE_ROOT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oncelog"
_LOG_LEVEL = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
_CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qg"
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>oncelog</groupId><artifactId>referee</artifactId><version>1</version><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>VERSION</version></dependency>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>VERSION</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
</dependencies></project>
"""


class MissingDependency(OncelogError):
    """A tool or jar that Apache Kafka or Spark's connector needs is missing and could not be fetched."""


def fetch_jars(version: str = VERSION) -> str:
    """Return the class path of Apache Kafka's server and tools. Raises MissingDependency."""
    cache = CACHE_ROOT / f"apache-kafka-{version}"
    return str(fetch_pom(_POM.replace("VERSION", version), cache, f"Apache Kafka {version}") / "*")


def fetch_pom(pom: str, cache: Path, purpose: str) -> Path:
    """Return the directory with the jars of a Maven project. Maven downloads the jars into `cache` once.

    Raises MissingDependency.
    """
    for tool in ("java", "mvn"):
        if not shutil.which(tool):
            raise MissingDependency(f"{purpose} needs {tool}, which is not installed")
    complete = cache / "complete"
    if not complete.exists() or complete.read_text() != pom:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "pom.xml").write_text(pom)
        # All jars in the directory are on the class path, so jars of an earlier POM must be removed.
        shutil.rmtree(cache / "jars", ignore_errors=True)
        # With --strict-checksums a wrong checksum is an error. Maven's default is a warning.
        command = ["mvn", "-q", "-B", "--strict-checksums", "dependency:copy-dependencies"]
        command += ["-DoutputDirectory=jars", "-DincludeScope=runtime"]
        try:
            done = subprocess.run(command, cwd=cache, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            raise MissingDependency(f"{purpose}: Maven did not fetch the jars within 300 s") from None
        if done.returncode:
            raise MissingDependency(f"{purpose}: Maven could not fetch the jars: {done.stdout[-300:]}")
        complete.write_text(pom)
    return cache / "jars"


def run_tool(
    main_class: str,
    *arguments: str,
    text: str = "",
    timeout_s: float = 120.0,
    class_path: str | None = None,
) -> str:
    """Run one of Kafka's command-line tools by its main class, and return the tool's standard output.

    `text` becomes the tool's standard input. Raises MissingDependency. If the tool fails, raises OncelogError
    with the tool's output.
    """
    jars = class_path or fetch_jars()
    command = ["java", "-Xmx256m", _LOG_LEVEL, "-cp", jars, main_class, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise OncelogError(
            f"{main_class} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


class KafkaNode(NodeProcess):
    """One process that is both broker and controller."""

    def __init__(self, node_id: int, port: int, directory: Path, command: list[str]) -> None:
        super().__init__(node_id, port, directory / "server.log", command, mark=command[-1])
        self.directory, self.data_dir = directory, directory / "data"
        self.ports: dict[str, int] = {"PLAINTEXT": port}
        """Listener port by security protocol."""


def kafka_node(
    node_id: int,
    port: int,
    home: Path,
    *,
    heap_mb: int = 512,
    outlive_parent: bool = False,
    jars: str | None = None,
) -> KafkaNode:
    """Return the node whose `server.properties` is in `home`, without starting it.

    `jars` is the class path of the Kafka version to run; None means that of VERSION.
    """
    # A killed JVM leaves its unpacked native libraries behind. If they are in `home`, `stop` removes them.
    temporary = f"-Djava.io.tmpdir={home}"
    command = ["java", f"-Xmx{heap_mb}m", _LOG_LEVEL, temporary, "-cp", jars or fetch_jars(), "kafka.Kafka"]
    prefix = [] if outlive_parent else dying_with_parent()
    return KafkaNode(node_id, port, home, [*prefix, *command, str(home / "server.properties")])


class ApacheKafka:
    """A running cluster. `properties` go into every node's server.properties.

    Without `directory` the cluster uses a temporary directory, which `stop()` removes. If the start fails,
    the directory stays, for its logs. With three nodes or more, the internal topics have three replicas, two
    of which must be in sync.

    Where `setpriv` exists (Linux), the nodes die with the thread that launched them, unless `outlive_parent`
    is set. `also_listen` names the security protocols of further listeners. `ports` are the nodes' ports if
    all of them are free; otherwise free ports are chosen. `version` is the version of Apache Kafka. Raises
    MissingDependency, TimedOut.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        nodes: int = 1,
        properties: Mapping[str, object] | None = None,
        heap_mb: int = 512,
        outlive_parent: bool = False,
        also_listen: Sequence[str] = (),
        ports: Sequence[int] = (),
        version: str = VERSION,
    ) -> None:
        self.class_path = fetch_jars(version)
        self._is_temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="oncelog-apache-kafka-"))
        free = free_ports(2 * nodes)
        served = ports if len(ports) == nodes and are_free(ports) else free[:nodes]
        listeners = list(zip(range(1, nodes + 1), served, free[nodes:], strict=True))
        voters = ",".join(f"{node_id}@127.0.0.1:{port}" for node_id, _, port in listeners)
        self.nodes: list[KafkaNode] = []
        for node_id, port, controller_port in listeners:
            home = self.directory / f"node-{node_id}"
            home.mkdir(parents=True, exist_ok=True)
            more = dict(zip(also_listen, free_ports(len(also_listen)), strict=True))
            listeners_text = "".join(f",{name}://127.0.0.1:{number}" for name, number in more.items())
            listed = {
                "node.id": node_id,
                "controller.quorum.voters": voters,
                "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}{listeners_text}",
                "log.dirs": home / "data",
                "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,"
                + ",".join(f"{name}:{name}" for name in ("PLAINTEXT", *also_listen)),
                **_common_properties(nodes),
                **(properties or {}),
            }
            file = home / "server.properties"
            file.write_text("".join(f"{key}={value}\n" for key, value in listed.items()))
            node = kafka_node(
                node_id, port, home, heap_mb=heap_mb, outlive_parent=outlive_parent, jars=self.class_path
            )
            node.ports |= more
            self.nodes.append(node)

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def pid(self) -> int:
        """Return the process id of the first node."""
        return self.nodes[0].pid

    def start(self) -> None:
        """Format new data directories and start every node.

        Wait until all nodes have joined the cluster and respond.
        """
        try:
            with ThreadPoolExecutor(len(self.nodes)) as pool:
                list(pool.map(self._format, self.nodes))
            for node in self.nodes:
                node.launch()
            for node in self.nodes:
                node.wait_until_ready()
            self._wait_until_formed()
        except BaseException:  # Also after Ctrl-C, leave no process behind.
            for node in self.nodes:
                node.kill()
            raise

    def _format(self, node: KafkaNode) -> None:
        file = str(node.directory / "server.properties")
        self.run_tool(
            "kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", _CLUSTER_ID, "-c", file
        )

    def _wait_until_formed(self) -> None:
        """Wait until Metadata lists every node.

        A node accepts connections shortly before it can be a leader. Metadata lists only nodes that can be
        leaders.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        with Admin({"bootstrap.servers": self.bootstrap_servers}) as admin:
            while len(admin.describe_cluster().brokers) < len(self.nodes):
                if time.monotonic() > deadline:
                    raise TimedOut(
                        "not all nodes joined the cluster; their logs are in "
                        f"{self.directory}/node-*/server.log"
                    )
                time.sleep(0.05)

    def stop(self) -> None:
        """Kill the processes that this object started, and remove a temporary directory."""
        for node in self.nodes:
            node.kill()
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def run_tool(self, main_class: str, *arguments: str, timeout_s: float = 120.0) -> str:
        """Run one of Kafka's command-line tools in the cluster's version, as the function `run_tool` does."""
        return run_tool(main_class, *arguments, timeout_s=timeout_s, class_path=self.class_path)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _common_properties(nodes: int) -> dict[str, object]:
    replicas = min(nodes, 3)
    return {
        "process.roles": "broker,controller",
        "controller.listener.names": "CONTROLLER",
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": max(replicas - 1, 1),
        "group.initial.rebalance.delay.ms": 0,
    }
