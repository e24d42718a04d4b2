"""Kills the worker of a standalone Spark cluster on this machine, and starts it again. Only on Linux."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from oncelog.errors import OncelogError, TimedOut
from oncelog.trial.fault_point import SPARK_WORKER

_PROC = Path("/proc")
_END_TIMEOUT_S = 30.0
_POLL_S = 0.01
_DETACHED = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
"""A program that starts another one and ends, so that the trial is not the other one's parent."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of a process, to repeat it. `log` is the file to which it writes, or None if that
    is no file.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    directory: Path
    log: Path | None


def read_launch(pid: int, proc: Path = _PROC) -> Launch:
    """Return how a running process was started. Raises OSError if it does not run, or belongs to others."""
    directory = proc / str(pid)
    words = (directory / "cmdline").read_bytes().split(b"\0")[:-1]
    pairs = (pair.partition(b"=") for pair in (directory / "environ").read_bytes().split(b"\0") if pair)
    output = (directory / "fd" / "1").readlink()
    return Launch(
        command=tuple(map(os.fsdecode, words)),
        environment={os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs},
        directory=(directory / "cwd").readlink(),
        log=output if output.is_file() else None,
    )


def restart_spark_worker(pid: int) -> None:
    """Kill a Spark worker with SIGKILL, and start it again with its command line and environment.

    Raises OncelogError if the process is no Spark worker, or if it cannot be killed or started.
    """
    try:
        launch = read_launch(pid)
        if SPARK_WORKER not in launch.command:
            raise OncelogError(f"process {pid} is not a Spark worker")
        os.kill(pid, signal.SIGKILL)
        _wait_until_ended(pid)
        _start(launch)
    except (OSError, subprocess.CalledProcessError) as error:
        raise OncelogError(f"the Spark worker {pid} cannot be killed and started again: {error}") from error


def _wait_until_ended(pid: int) -> None:
    deadline = time.monotonic() + _END_TIMEOUT_S
    while _command_line(pid):
        if time.monotonic() > deadline:
            raise TimedOut(f"the Spark worker {pid} did not end within {_END_TIMEOUT_S:g} s after SIGKILL")
        time.sleep(_POLL_S)


def _command_line(pid: int) -> bytes:
    """Return the command line of a process; nothing if it has ended, even if its parent does not know it."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def _start(launch: Launch) -> None:
    with (launch.log or Path(os.devnull)).open("ab") as log:
        subprocess.run(
            [sys.executable, "-c", _DETACHED, *launch.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=launch.environment,
            cwd=launch.directory,
            check=True,
        )
