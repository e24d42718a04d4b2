"""franz-go against our broker: produce, consume by partition, admin calls, and through faults."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers_foreign import CACHE, INTEROP, Command, load_past_a_kill, load_past_a_lost_acknowledgement, run

from oncelog import Broker

SOURCES = INTEROP / "go"


@pytest.fixture(scope="module")
def franz_go() -> Command:
    """The program, built once per state of its sources."""
    if not shutil.which("go"):
        pytest.skip("franz-go needs Go, which is not installed")
    state = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(SOURCES.iterdir()))).hexdigest()
    program = CACHE / f"franz-go-{state[:16]}" / "check"
    if not program.exists():
        command = ["go", "build", "-o", str(program), "."]
        built = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=300)
        if built.returncode:
            pytest.skip(f"franz-go could not be fetched and built: {built.stderr[-500:]}")
    return lambda *arguments: [str(program), *arguments]


@pytest.mark.timeout(400)  # the first run fetches and compiles
def test_producer_consumer_and_admin(franz_go: Command) -> None:
    with Broker() as broker:
        lines = run(franz_go(broker.bootstrap_servers, "everything"))
    assert lines == ["admin", "codecs", "offsets"]


@pytest.mark.behaviour("I1")
def test_a_lost_acknowledgement(franz_go: Command) -> None:
    load_past_a_lost_acknowledgement(franz_go)


@pytest.mark.behaviour("I17")
def test_the_broker_is_killed_in_the_middle(franz_go: Command, tmp_path: Path) -> None:
    load_past_a_kill(franz_go, tmp_path)
