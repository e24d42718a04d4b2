"""Runs kfake, franz-go's fake of a Kafka cluster for tests, as a process. It keeps everything in memory."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from oncelog.errors import OncelogError
from oncelog.testing.process import free_ports
from oncelog_devtools.apache_kafka import CACHE_ROOT, MissingDependency

PACKAGE = "github.com/twmb/franz-go/pkg/kfake"
_SOURCES = Path(__file__).parent


def _build() -> Path:
    """Return the program, which is built on first use. Raises MissingDependency."""
    files = [_SOURCES / name for name in ("main.go", "go.mod", "go.sum")]
    state = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    program = CACHE_ROOT / f"kfake-{state}"
    if program.exists():
        return program
    if not shutil.which("go"):
        raise MissingDependency("kfake needs Go: go is not installed")
    command = ["go", "build", "-mod=readonly", "-buildvcs=false", "-o", str(program), "."]
    built = subprocess.run(command, cwd=_SOURCES, capture_output=True, text=True)
    if built.returncode:
        raise MissingDependency(f"kfake cannot be built: {built.stderr.strip()}")
    return program


def version() -> str:
    """Return the version of kfake that go.mod names."""
    words = (_SOURCES / "go.mod").read_text().split()
    return words[words.index(PACKAGE) + 1]


class Kfake:
    """A process of kfake on 127.0.0.1, as a context manager. A restarted process keeps its port, but no
    records.

    `topic` exists from the start, with one partition. Raises MissingDependency without Go.
    """

    def __init__(self, topic: str = "") -> None:
        (port,) = free_ports(1)
        self.bootstrap_servers = f"127.0.0.1:{port}"
        self._command = [str(_build()), "-port", str(port), "-topic", topic]
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Process id. Raises OncelogError if the process is not running."""
        if self._process is None:
            raise OncelogError("kfake is not running")
        return self._process.pid

    def launch(self) -> None:
        """Start the process. It may not accept requests yet. It ends when this process ends."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)

    def stop(self) -> None:
        """Stop the process, and wait for its end."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def __enter__(self) -> Self:
        self.launch()
        assert self._process is not None and self._process.stdout is not None
        if not self._process.stdout.readline():
            self.stop()
            raise OncelogError("kfake did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
