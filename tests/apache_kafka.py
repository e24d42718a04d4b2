"""Apache Kafka itself, one KRaft node from its Maven jars, as the referee beside our broker.

The jars are fetched once into a cache by Maven; a machine without Java or Maven skips with the reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

VERSION = "4.3.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oncelog" / f"apache-kafka-{VERSION}"
READY_SECONDS = 60

_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>oncelog</groupId><artifactId>referee</artifactId><version>1</version><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>{VERSION}</version></dependency>
</dependencies></project>
"""


def fetch_jars() -> str:
    """The class path of Apache Kafka's server and tools; skips the test where it cannot be had."""
    for tool in ("java", "mvn"):
        if not shutil.which(tool):
            pytest.skip(f"Apache Kafka as referee needs {tool}, which is not installed")
    if not (CACHE / "complete").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / "pom.xml").write_text(_POM)
        command = [
            "mvn",
            "-q",
            "-B",
            "dependency:copy-dependencies",
            "-DoutputDirectory=jars",
            "-DincludeScope=runtime",
        ]
        done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"Apache Kafka's jars could not be fetched: {done.stdout[-300:]}")
        (CACHE / "complete").touch()
    return str(CACHE / "jars" / "*")


def free_ports(count: int) -> list[int]:
    """Ports free a moment ago, on loopback."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class ApacheKafka:
    """A running node. `directory` holds its log dirs; `stop()` ends the process this started."""

    def __init__(self) -> None:
        self.class_path = fetch_jars()
        self.directory = Path(tempfile.mkdtemp(prefix="oncelog-apache-kafka-"))
        port, controller_port = free_ports(2)
        self.bootstrap_servers = f"127.0.0.1:{port}"
        properties = self.directory / "server.properties"
        properties.write_text(
            "process.roles=broker,controller\nnode.id=1\n"
            f"controller.quorum.voters=1@127.0.0.1:{controller_port}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}\n"
            "controller.listener.names=CONTROLLER\n"
            f"log.dirs={self.directory / 'data'}\n"
            "offsets.topic.replication.factor=1\ntransaction.state.log.replication.factor=1\n"
            "transaction.state.log.min.isr=1\ngroup.initial.rebalance.delay.ms=0\n"
        )
        self.run_tool(
            "kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", str(properties)
        )
        self.log = (self.directory / "server.log").open("w")
        command = ["java", "-Xmx512m", "-cp", self.class_path, "kafka.Kafka", str(properties)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        self._wait_until_ready(port)

    def run_tool(self, main_class: str, *arguments: str) -> str:
        """Run one of Kafka's own command-line tools by its main class; its standard output."""
        command = ["java", "-Xmx256m", "-cp", self.class_path, main_class, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    def _wait_until_ready(self, port: int) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        text = (self.directory / "server.log").read_text()[-2000:]
        self.stop()
        raise RuntimeError(f"Apache Kafka did not start:\n{text}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.directory, ignore_errors=True)
