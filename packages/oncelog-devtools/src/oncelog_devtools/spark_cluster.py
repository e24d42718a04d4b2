"""Run a Spark standalone cluster from the pip package of PySpark, on the loopback interface.

The package lacks Spark's start scripts for a cluster, but contains everything that the scripts would run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from oncelog.errors import OncelogError, TimedOut
from oncelog.spark.session import check_spark
from oncelog.testing.process import READY_TIMEOUT_S, NodeProcess, dying_with_parent, free_ports

DAEMON_HEAP_MB = 256
"""Heap in MiB of the master and of each worker process. Executors have their own heap."""


class SparkCluster:
    """A running cluster. `memory_mb` and `cores` are each worker's resources for executors.

    `nodes` are the master, then the workers. Without `directory` the cluster uses a temporary directory,
    which `stop()` removes. If the start fails, the directory stays, for its logs.

    Where `setpriv` exists (Linux), the nodes die with the thread that launched them, unless `outlive_parent`
    is set. Executors die with their worker. Raises ConfigError (no PySpark, no Java), OncelogError, TimedOut.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        workers: int = 2,
        cores: int = 1,
        memory_mb: int = 1024,
        outlive_parent: bool = False,
    ) -> None:
        check_spark()
        self._is_temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="oncelog-spark-"))
        ports = free_ports(2 + 2 * workers)
        self.master_url = f"spark://127.0.0.1:{ports[0]}"
        self._launch = [] if outlive_parent else dying_with_parent()
        self.nodes = [self._node("master", "master.Master", ports[:2])]
        for number in range(1, workers + 1):
            name = f"worker-{number}"
            work = self.directory / name / "work"
            # Remove the jars and logs of applications that ran on an earlier cluster in this directory.
            shutil.rmtree(work, ignore_errors=True)
            resources = ["--cores", f"{cores}", "--memory", f"{memory_mb}m", "--work-dir", str(work)]
            node_ports = ports[2 * number : 2 * number + 2]
            self.nodes.append(self._node(name, "worker.Worker", node_ports, *resources, self.master_url))

    def _node(self, name: str, main: str, ports: list[int], *arguments: str) -> NodeProcess:
        import pyspark

        port, page_port = ports
        spark_home, home = Path(pyspark.__file__).parent, self.directory / name
        home.mkdir(parents=True, exist_ok=True)
        properties = home / "spark.properties"
        # Disable the REST server, because it would listen on a fixed port.
        properties.write_text("spark.master.rest.enabled false\n")
        command = [*self._launch, str(spark_home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}"]
        command += ["--host", "127.0.0.1", "--port", f"{port}", "--webui-port", f"{page_port}"]
        command += ["--properties-file", str(properties), *arguments]
        environment = {
            "SPARK_HOME": str(spark_home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(home / "local"),
            "SPARK_DAEMON_MEMORY": f"{DAEMON_HEAP_MB}m",
            # Master and worker have little work, so a small heap and a quick start matter more than speed.
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            # Executors run `python3` by default; it must be the interpreter that has oncelog installed.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }
        return NodeProcess(
            name,
            port,
            home / "server.log",
            command,
            mark=str(properties),
            environment=environment,
            page=f"http://127.0.0.1:{page_port}",
        )

    @property
    def workers(self) -> list[NodeProcess]:
        return self.nodes[1:]

    def start(self) -> None:
        """Start every node and wait until all workers have registered with the master."""
        try:
            self.nodes[0].start()
            for worker in self.workers:
                worker.launch()
            for worker in self.workers:
                worker.wait_until_ready()
            self.wait_until_formed()
        except BaseException:  # Also after Ctrl-C, leave no process behind.
            for node in self.nodes:
                node.kill()
            raise

    def wait_until_formed(self) -> None:
        """Wait until all workers, including restarted ones, have registered with the master.

        Raises TimedOut.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self._alive_workers() < len(self.workers):
            if time.monotonic() > deadline:
                raise TimedOut(f"not all workers joined; their logs are in {self.directory}/*/server.log")
            time.sleep(0.1)

    def _alive_workers(self) -> int:
        page = f"{self.nodes[0].page}/json/"
        try:
            with urllib.request.urlopen(page, timeout=READY_TIMEOUT_S) as response:
                state = json.load(response)
            return sum(worker["state"] == "ALIVE" for worker in state["workers"])
        except OSError:  # The port accepts connections a moment before the page exists.
            return 0
        except (ValueError, KeyError) as error:
            raise OncelogError(f"{page} is not the page of a Spark master: {error}") from error

    def stop(self) -> None:
        """Stop the processes that this object started, and remove a temporary directory."""
        for node in reversed(self.nodes):
            node.stop()
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

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
