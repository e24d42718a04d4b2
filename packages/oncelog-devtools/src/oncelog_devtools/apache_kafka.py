"""Apache Kafka itself, one KRaft node or several from its Maven jars, as the referee beside our broker.

The jars are fetched once into a cache by Maven. Nothing but Java and Maven is needed; no Docker.
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

CACHE_ROOT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oncelog"
_CACHE = CACHE_ROOT / f"apache-kafka-{VERSION}"
_LOG_LEVEL = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
_CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qg"
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>oncelog</groupId><artifactId>referee</artifactId><version>1</version><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>{VERSION}</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
</dependencies></project>
"""


class PartMissing(OncelogError):
    """Something that Apache Kafka needs is not on this machine and could not be fetched."""


def fetch_jars() -> str:
    """The class path of Apache Kafka's server and tools. Raises PartMissing."""
    return str(fetch_pom(_POM, _CACHE, "Apache Kafka as referee") / "*")


def fetch_pom(pom: str, cache: Path, purpose: str) -> Path:
    """The directory with the jars of a Maven project, fetched into `cache` once. Raises PartMissing."""
    for tool in ("java", "mvn"):
        if not shutil.which(tool):
            raise PartMissing(f"{purpose} needs {tool}, which is not installed")
    complete = cache / "complete"
    if not complete.exists() or complete.read_text() != pom:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "pom.xml").write_text(pom)
        # Jars of an earlier POM would stay on the class path, which is the whole directory.
        shutil.rmtree(cache / "jars", ignore_errors=True)
        # --strict-checksums: a jar that does not fit its checksum is an error, not a warning.
        command = ["mvn", "-q", "-B", "--strict-checksums", "dependency:copy-dependencies"]
        command += ["-DoutputDirectory=jars", "-DincludeScope=runtime"]
        try:
            done = subprocess.run(command, cwd=cache, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            raise PartMissing(f"{purpose}: its jars could not be fetched within 300 s") from None
        if done.returncode:
            raise PartMissing(f"{purpose}: its jars could not be fetched: {done.stdout[-300:]}")
        complete.write_text(pom)
    return cache / "jars"


def run_tool(main_class: str, *arguments: str, text: str = "", timeout_s: float = 120.0) -> str:
    """Run one of Kafka's own command-line tools by its main class; its standard output.

    `text` goes to its standard input. Raises PartMissing, and OncelogError with what the tool printed when it
    fails.
    """
    command = ["java", "-Xmx256m", _LOG_LEVEL, "-cp", fetch_jars(), main_class, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise OncelogError(f"{main_class} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


class KafkaNode(NodeProcess):
    """Broker and controller in one."""

    def __init__(self, node_id: int, port: int, directory: Path, command: list[str]) -> None:
        super().__init__(node_id, port, directory / "server.log", command, mark=command[-1])
        self.directory, self.data_dir = directory, directory / "data"
        self.ports: dict[str, int] = {"PLAINTEXT": port}
        """Security protocol -> port of its listener."""


def kafka_node(
    node_id: int, port: int, home: Path, *, heap_mb: int = 512, outlive_parent: bool = False
) -> KafkaNode:
    """Return the node whose `server.properties` is in `home`, not started yet."""
    # A node ends by SIGKILL, and so leaves the native libraries that it unpacks: `stop` removes `home`.
    temporary = f"-Djava.io.tmpdir={home}"
    command = ["java", f"-Xmx{heap_mb}m", _LOG_LEVEL, temporary, "-cp", fetch_jars(), "kafka.Kafka"]
    prefix = [] if outlive_parent else dying_with_parent()
    return KafkaNode(node_id, port, home, [*prefix, *command, str(home / "server.properties")])


class ApacheKafka:
    """A running cluster. `properties` go into every node's server.properties.

    Without a `directory` a temporary one is used and removed by `stop()`; after a failed start it stays, for
    its logs. With three nodes or more the internal topics have three replicas, two of which must be in sync.
    The nodes die with the thread that launched them, where `setpriv` exists (Linux), unless they are to
    `outlive_parent`. `also_listen`: security protocols of further listeners. `ports`: of the nodes, if all
    are free; else free ones are taken. Raises PartMissing, TimedOut.
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
    ) -> None:
        self.class_path = fetch_jars()
        self._is_temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="oncelog-apache-kafka-"))
        found = free_ports(2 * nodes)
        served = ports if len(ports) == nodes and are_free(ports) else found[:nodes]
        listeners = list(zip(range(1, nodes + 1), served, found[nodes:], strict=True))
        voters = ",".join(f"{node_id}@127.0.0.1:{port}" for node_id, _, port in listeners)
        self.nodes: list[KafkaNode] = []
        for node_id, port, controller_port in listeners:
            home = self.directory / f"node-{node_id}"
            home.mkdir(parents=True, exist_ok=True)
            more = dict(zip(also_listen, free_ports(len(also_listen)), strict=True))
            listeners_text = "".join(f",{name}://127.0.0.1:{each}" for name, each in more.items())
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
            node = kafka_node(node_id, port, home, heap_mb=heap_mb, outlive_parent=outlive_parent)
            node.ports |= more
            self.nodes.append(node)

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def pid(self) -> int:
        """Process id of the first node."""
        return self.nodes[0].pid

    def start(self) -> None:
        """Format what is not formatted, start every node, wait until all serve and know each other."""
        try:
            with ThreadPoolExecutor(len(self.nodes)) as pool:
                list(pool.map(self._format, self.nodes))
            for node in self.nodes:
                node.launch()
            for node in self.nodes:
                node.wait_until_ready()
            self._wait_until_formed()
        except BaseException:  # Ctrl-C too: nothing stays behind
            for node in self.nodes:
                node.kill()
            raise

    def _format(self, node: KafkaNode) -> None:
        file = str(node.directory / "server.properties")
        self.run_tool(
            "kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", _CLUSTER_ID, "-c", file
        )

    def _wait_until_formed(self) -> None:
        """A node takes connections shortly before it may lead; Metadata lists it from then on."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        with Admin({"bootstrap.servers": self.bootstrap_servers}) as admin:
            while len(admin.describe_cluster().brokers) < len(self.nodes):
                if time.monotonic() > deadline:
                    raise TimedOut(
                        f"not all nodes joined; their logs are in {self.directory}/node-*/server.log"
                    )
                time.sleep(0.05)

    def stop(self) -> None:
        """End the processes this started; a temporary directory goes with them."""
        for node in self.nodes:
            node.kill()
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def run_tool(self, main_class: str, *arguments: str, timeout_s: float = 120.0) -> str:
        """`run_tool` of this module."""
        return run_tool(main_class, *arguments, timeout_s=timeout_s)

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
