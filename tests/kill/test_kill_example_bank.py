"""Run examples/bank.py from the command line, and check its output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka

pytestmark = pytest.mark.timeout(400)
BANK = Path(__file__).parents[2] / "examples" / "bank.py"


def run(*arguments: str) -> list[str]:
    """Return the lines that the example prints."""
    command = [sys.executable, str(BANK), "--kills", "3", "--transfers-per-kill", "100", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def check(lines: list[str]) -> None:
    assert "300 transfers, the teller killed and restarted 3 times" in lines
    assert any(line.startswith("lost 0, doubled 0;") and line.endswith("the sums [50000]") for line in lines)
    assert lines[-1] == "every balance as without a kill: yes"


@pytest.mark.behaviour("T11")
def test_the_bank_example_runs_on_its_own_broker() -> None:
    check(run())


@pytest.mark.behaviour("T11")
def test_the_bank_example_runs_on_apache_kafka(apache_kafka: ApacheKafka) -> None:
    check(run("-b", apache_kafka.bootstrap_servers))
