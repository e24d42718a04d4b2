"""franz-go with our broker: producing, consuming by partition, admin calls, and faults."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.foreign.clients import (
    CACHE,
    INTEROP,
    Command,
    load_past_a_kill,
    load_past_a_lost_acknowledgement,
    prepare,
    run,
    state_of,
)
from support.foreign.pipes import (
    CLASSIC_STEPS,
    STEPS,
    broker_killed_at_every_step,
    pipe_killed_at_every_step,
    pipe_past_lost_answers,
)

from oncelog import Broker

SOURCES = INTEROP / "go"
OTHER_CLASSIC_STEPS = ("AddPartitionsToTxn", "AddOffsetsToTxn", "EndTxn")
TRANSACTIONS = ["endings", "sessions", "fencing"]
pytestmark = pytest.mark.timeout(400)  # the first run downloads and compiles franz-go


@pytest.fixture(scope="module")
def franz_go() -> Command:
    """Build the Go program if its sources have changed since the last build."""
    if not shutil.which("go"):
        pytest.skip("franz-go needs Go, which is not installed")
    program = CACHE / f"franz-go-{state_of(*SOURCES.iterdir())}" / "check"
    if not program.exists():
        # From version 1.21 on, Go downloads the toolchain version that franz-go requires.
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


@pytest.mark.behaviour("T3", "T4", "T6", "T7", "T10")
@pytest.mark.parametrize("transaction_version", [0, 2])
def test_transactions(franz_go: Command, transaction_version: int) -> None:
    with Broker(config={"oncelog.transaction.version": transaction_version}) as broker:
        assert run(franz_go(broker.bootstrap_servers, "transactions")) == TRANSACTIONS


def test_transactions_on_apache_kafka(franz_go: Command, apache_kafka: ApacheKafka) -> None:
    assert run(franz_go(apache_kafka.bootstrap_servers, "transactions")) == TRANSACTIONS


@pytest.mark.behaviour("T6")
def test_a_commit_whose_response_is_lost_takes_effect_once(franz_go: Command) -> None:
    pipe_past_lost_answers(franz_go, 1_000)


@pytest.mark.behaviour("T6", "T7", "T11")
@pytest.mark.parametrize(("transaction_version", "steps"), [(0, CLASSIC_STEPS), (2, STEPS)])
def test_records_are_copied_once_when_the_program_is_killed_at_every_step(
    franz_go: Command, transaction_version: int, steps: tuple[str, ...]
) -> None:
    pipe_killed_at_every_step(franz_go, steps, transaction_version, 3_000)


@pytest.mark.behaviour("T6", "T7")
@pytest.mark.parametrize(("transaction_version", "steps"), [(0, OTHER_CLASSIC_STEPS), (2, STEPS)])
def test_records_are_copied_once_when_the_broker_is_killed_at_every_step(
    franz_go: Command, tmp_path: Path, transaction_version: int, steps: tuple[str, ...]
) -> None:
    broker_killed_at_every_step(franz_go, steps, tmp_path / "data", transaction_version, 3_000)
