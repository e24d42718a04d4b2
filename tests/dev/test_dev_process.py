"""The node processes of a development cluster: when one is ready, and Ctrl-C while they are running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oncelog.testing.process import NodeProcess, free_ports

SLEEPING = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_an_interrupt_during_the_start_leaves_no_unknown_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def start_and_interrupt(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_interrupt)
    node = NodeProcess("one", 1, tmp_path / "log", SLEEPING, mark="time.sleep(60)")
    with pytest.raises(KeyboardInterrupt):
        node.launch()
    pid = node.pid
    node.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_interrupted_stop_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeProcess("one", 1, tmp_path / "log", SLEEPING, mark="time.sleep(60)")
    node.launch()
    pid = node.pid
    with monkeypatch.context() as patched:

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(subprocess.Popen, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            node.stop()
    assert node.pid == pid
    node.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


OPENING = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += self.path == "/ready"
        self.send_response(503 if Handler.asked < 3 else 200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_node_that_answers_503_is_not_ready(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", OPENING, str(port)]
    node = NodeProcess("one", port, tmp_path / "log", command, mark="HTTPServer", ready_path="/ready")
    node.start()
    try:
        answers = node.log_file.read_text()
    finally:
        node.kill()
    assert [answers.count(f'"GET /ready HTTP/1.1" {status}') for status in (503, 200)] == [2, 1]
