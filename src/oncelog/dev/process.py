"""Ending a child process."""

from __future__ import annotations

import signal
import subprocess

STOP_TIMEOUT_S = 30.0


def end_process(process: subprocess.Popen[bytes] | None, signal_number: signal.Signals) -> None:
    """Signal it and wait; killed after STOP_TIMEOUT_S all the same. None: there is none."""
    if process is None:
        return
    process.send_signal(signal_number)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
