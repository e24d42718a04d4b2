"""A server of Spark Connect on loopback, and the program that uses it as a client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from oncelog.testing.process import NodeProcess, dying_with_parent, free_ports
from support import TESTS

_CONF = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


class ConnectServer:
    """A server with its files in `directory`. `kill` and `start` restart it on its port."""

    def __init__(self, directory: Path) -> None:
        import pyspark

        (port,) = free_ports(1)
        self.url = f"sc://127.0.0.1:{port}"
        home = Path(pyspark.__file__).parent
        conf = {**_CONF, "spark.connect.grpc.binding.port": f"{port}", "spark.local.dir": f"{directory}"}
        conf["spark.sql.warehouse.dir"] = str(directory / "warehouse")
        command = [*dying_with_parent(), str(home / "bin" / "spark-submit"), "--master", "local[2,4]"]
        command += [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        environment = {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
        self._node = NodeProcess(
            "connect", port, directory / "log", command, mark=f"{port}", environment=environment
        )

    def start(self) -> None:
        self._node.start()

    def kill(self) -> None:
        """Kill the server with SIGKILL, and with it its queries."""
        self._node.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()


def run_client(function: str, **arguments: Any) -> Any:
    """Run a function of `support.spark.connect_program` in a process of its own, and return its result.

    In this process, the functions of PySpark would no longer work with the session of classic Spark.
    """
    command = [sys.executable, "-m", "support.spark.connect_program", function, json.dumps(arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(ended.stdout.splitlines()[-1])
