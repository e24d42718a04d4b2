"""franz-go against our broker: produce, consume by partition, admin calls, and through faults."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers_foreign import (
    CACHE,
    INTEROP,
    Command,
    load_past_a_kill,
    load_past_a_lost_acknowledgement,
    prepare,
    run,
    state_of,
)

from oncelog import Broker

SOURCES = INTEROP / "go"
pytestmark = pytest.mark.timeout(400)  # the first run fetches and compiles


@pytest.fixture(scope="module")
def franz_go() -> Command:
    """The program, built once per state of its sources."""
    if not shutil.which("go"):
        pytest.skip("franz-go needs Go, which is not installed")
    program = CACHE / f"franz-go-{state_of(*SOURCES.iterdir())}" / "check"
    if not program.exists():
        # A Go of 1.21 or later fetches the one that franz-go asks for.
        command = ["go", "build", "-buildvcs=false", "-o", str(program), "."]
        prepare(command, "franz-go", SOURCES, GOTOOLCHAIN="auto")
    return lambda *arguments: [str(program), *arguments]


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
