"""The user presses Ctrl-C while the node processes of a development cluster are running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oncelog.testing.process import NodeProcess

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
