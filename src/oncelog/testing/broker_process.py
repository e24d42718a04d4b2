"""Runs `oncelog serve` as a process that a test can kill and restart with the same directory and port."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from oncelog.errors import OncelogError, TimedOut
from oncelog.testing.process import end_process, free_ports

READY_TIMEOUT_S = 120.0
"""Time-out in seconds for the line `listening on HOST:PORT`. Normally it appears in less than a second."""


class BrokerProcess:
    """A broker process on 127.0.0.1, as a context manager. A restarted broker keeps its port and its data
    directory.

    `settings`: broker settings, by Kafka's keys. Standard error is appended to `log_file`, by default
    `data_dir` with `.log` added to its name.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        log_file: Path | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.log_file = log_file or data_dir.with_name(f"{data_dir.name}.log")
        self.settings = dict(settings or {})
        # 0 until the first start, which chooses a port that no outgoing connection takes during a restart.
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap_servers(self) -> str:
        """HOST:PORT of the broker. The port is 0 before the first start."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running broker. Raises OncelogError if the broker is not running."""
        if self._process is None:
            raise OncelogError("the broker process is not running")
        return self._process.pid

    def start(self) -> float:
        """Start the broker and wait until it listens. Return the seconds that this took.

        Raises TimedOut after READY_TIMEOUT_S, or if the broker exits.
        """
        began = time.monotonic()
        if self.port == 0:
            (self.port,) = free_ports(1)
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=subprocess.PIPE, stderr=log)
        self._wait_until_ready()
        return time.monotonic() - began

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "oncelog.cli.main", "serve"]
        command += ["--data-dir", str(self.data_dir), "--listen", self.bootstrap_servers]
        for key, value in self.settings.items():
            command += ["--set", f"{key}={value}"]
        return command

    def _wait_until_ready(self) -> None:
        """Wait for the line `listening on HOST:PORT`. Raises TimedOut."""
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + READY_TIMEOUT_S
        text = b""
        while b"\n" not in text:
            readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(pipe, 4096) if readable else None
            if chunk:
                text += chunk
                continue
            self.kill()
            reason = "did not report that it listens" if chunk is None else "ended at once"
            raise TimedOut(f"the broker {reason}; see {self.log_file}")

    def kill(self) -> None:
        """Kill the process with SIGKILL. The broker cannot write or clean up anything."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the broker with SIGTERM. Kill it if it is still running after STOP_TIMEOUT_S."""
        self._end(signal.SIGTERM)

    def _end(self, signal_number: signal.Signals) -> None:
        process, self._process = self._process, None
        end_process(process, signal_number)

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
