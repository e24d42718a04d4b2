"""The README's commands and code, run as they stand there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncelog.dev.process import free_ports

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMAND = ".venv/bin/oncelog"


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_example_runs() -> None:
    (example,) = [block for block in code_blocks("python") if "import oncelog" in block]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "payments 0 0" in done.stdout
    assert "[b'42.00']" in done.stdout


@pytest.fixture
def served(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a shell in which the README's broker runs."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    serve = [
        sys.executable,
        "-m",
        "oncelog.cli.main",
        "serve",
        "--data-dir",
        str(tmp_path),
        "--listen",
        address,
    ]
    broker = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    assert broker.stdout is not None
    assert broker.stdout.readline() == f"listening on {address}\n"
    yield {**os.environ, "ONCELOG_BOOTSTRAP_SERVER": address}
    broker.send_signal(signal.SIGTERM)
    assert broker.wait(timeout=200) == 0
    broker.stdout.close()


def test_five_minutes_run_from_top_to_bottom(served: dict[str, str]) -> None:
    (console,) = [block for block in code_blocks("console") if "topics create" in block]
    lines = [line[2:] for line in console.splitlines() if line.startswith("$ ") and COMMAND in line]
    commands = [line for line in lines if " serve " not in line]
    assert len(commands) >= 5
    printed = ""
    for line in commands:
        shell = line.replace(COMMAND, f"{sys.executable} -m oncelog.cli.main")
        done = subprocess.run(shell, shell=True, env=served, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        printed += done.stdout
    for expected in ("hello", "world", "PRODUCER ID", "It ended as told."):
        assert expected in printed
