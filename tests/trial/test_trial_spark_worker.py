"""A process that stands for the worker of a Spark cluster is killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.wait import wait_until

from oncelog.errors import OncelogError
from oncelog.trial.fault_point import SPARK_WORKER
from oncelog.trial.spark_worker import read_launch, restart_spark_worker

pytestmark = [
    pytest.mark.behaviour("P7"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux has /proc"),
]
PROGRAM = """
import os, sys
print(os.getpid(), os.environ["NUMBER"], os.getcwd(), sys.argv[2:], flush=True)
for line in open("feed"):
    pass
"""


class StandIn:
    """A process that prints how it was started, and runs until `end`."""

    def __init__(self, directory: Path, main_class: str) -> None:
        self.log = directory / "log"
        # A process that opens this pipe to read waits until it is opened to write.
        os.mkfifo(directory / "feed")
        command = [sys.executable, "-c", PROGRAM, main_class, "--port", "x y"]
        with self.log.open("ab") as log:
            environment = {**os.environ, "NUMBER": "7"}
            self._process = subprocess.Popen(command, cwd=directory, stdout=log, env=environment)
        self.pid = self._process.pid

    def lines(self, count: int) -> list[str]:
        wait_until(lambda: self.log.read_text().count("\n") >= count)
        return self.log.read_text().splitlines()

    def end(self) -> None:
        for line in self.log.read_text().splitlines():
            pid = int(line.split()[0])
            if _is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _is_running(pid: int) -> bool:
    try:
        return bool(Path("/proc", str(pid), "cmdline").read_bytes())
    except OSError:
        return False


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[StandIn]:
    stand_in = StandIn(tmp_path, SPARK_WORKER)
    yield stand_in
    stand_in.end()


def test_a_worker_starts_again_as_it_was_started(worker: StandIn, tmp_path: Path) -> None:
    (first,) = worker.lines(1)
    restart_spark_worker(worker.pid)
    _, second = worker.lines(2)
    assert first.split()[0] == str(worker.pid) != second.split()[0]
    assert first.split()[1:] == second.split()[1:] == ["7", str(tmp_path), "['--port',", "'x", "y']"]


def test_a_process_that_is_no_worker_is_not_killed(tmp_path: Path) -> None:
    other = StandIn(tmp_path, "org.apache.spark.deploy.master.Master")
    try:
        other.lines(1)
        with pytest.raises(OncelogError, match="is not a Spark worker"):
            restart_spark_worker(other.pid)
        assert _is_running(other.pid)
    finally:
        other.end()
    with pytest.raises(OncelogError, match="cannot be killed and started again"):
        restart_spark_worker(other.pid)


def test_output_that_is_no_file_is_not_kept() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=-1) as process:
        wait_until(lambda: _is_running(process.pid))
        assert read_launch(process.pid).log is None
        process.kill()
