"""Consume, transform, produce as transactions, killed with SIGKILL at every step of a transaction (row T5).

Who dies: the broker, the program that copies (consumer and producer in one), a reader of what it writes.
When: a request of the step reaches the broker, or its answer leaves it. What must be: the output of a run
without faults, record for record.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.kill.processes import World
from support.wait import pause

from oncelog.testing.proxy.rules import Action, Rule

CLASSIC, EPOCHS = 0, 2
"""Versions of transactions: partitions announced first; the epoch raised by every end (KIP-890)."""
_STARTING = ("FindCoordinator", "InitProducerId")
STEPS = {
    EPOCHS: (*_STARTING, "Produce", "TxnOffsetCommit", "EndTxn"),
    CLASSIC: (
        *_STARTING,
        "AddPartitionsToTxn",
        "Produce",
        "AddOffsetsToTxn",
        "TxnOffsetCommit",
        "EndTxn",
    ),
}
VERSIONS = pytest.mark.parametrize(
    "version", [EPOCHS, pytest.param(CLASSIC, marks=pytest.mark.soak)], ids=["epochs", "classic"]
)
RANDOM_KILLS = 300
_SOAK = pytest.mark.soak
pytestmark = pytest.mark.timeout(400)  # dozens of processes are started, on a machine that may be busy


def reach(world: World, api: str, side: str) -> None:
    """Until a message of the step is held in the network."""
    mark = world.hold(api, side)
    if api in _STARTING:
        world.copier.restart()
    world.feed()
    world.wait_held(mark)


@pytest.mark.behaviour("T6", "T11")
@pytest.mark.parametrize(
    ("side", "victims"),
    [
        ("response", "broker"),
        pytest.param("request", "broker", marks=_SOAK),
        pytest.param("request", "copier", marks=_SOAK),
        pytest.param("response", "copier", marks=_SOAK),
        pytest.param("request", "broker copier reader", marks=_SOAK),
        pytest.param("response", "broker copier reader", marks=_SOAK),
    ],
)
@VERSIONS
def test_a_copier_killed_at_every_step_copies_every_record_once(
    tmp_path: Path, version: int, side: str, victims: str
) -> None:
    """What is held when they die never arrives."""
    with World(tmp_path, oncelog_transaction_version=version) as world:
        for api in STEPS[version]:
            reach(world, api, side)
            world.kill(*victims.split())
            world.let_go(lose=True)
            world.revive()
        world.check()


@pytest.mark.behaviour("T3", "T6", "T11")
@VERSIONS
def test_a_late_request_of_a_killed_copier_changes_nothing(tmp_path: Path, version: int) -> None:
    """The copier is killed; when its successor has gone on, the broker gets what the network had kept."""
    with World(tmp_path, oncelog_transaction_version=version) as world:
        for api in STEPS[version]:
            reach(world, api, "request")
            world.proxy.clear()
            world.copier.restart()
            world.wait_copied()
            world.let_go(lose=False)
            world.feed()
        world.check()


@pytest.mark.behaviour("T6", "T11")
@VERSIONS
def test_a_decided_transaction_completes_after_the_broker_is_killed(tmp_path: Path, version: int) -> None:
    """At every marker, and once more while it makes up for that."""
    with World(tmp_path, oncelog_transaction_version=version) as world:
        world.feed()
        world.wait_copied()
        for plan in ("0 complete", "1 2", "2 1", "complete 0"):
            world.broker.plan.write_text(plan)
            world.feed()
            world.wait(lambda: not world.broker.is_alive(), "the broker's death")
            assert world.broker.revive() == 1
            assert not world.broker.plan.read_text()
        world.check()


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.behaviour("T6", "T11")
@VERSIONS
def test_copiers_killed_at_random_copy_every_record_once(tmp_path: Path, version: int) -> None:
    """Who dies and when is left to chance; connections are cut, and requests arrive late, by chance too."""
    chance = random.Random(version)
    with World(tmp_path, oncelog_transaction_version=version) as world:
        world.proxy.add(Rule(action=Action.CUT, probability=0.01))
        for api in STEPS[version]:
            world.proxy.add(Rule(action=Action.HOLD, api=api, probability=0.02, delay_ms=700))
        kills = 0
        while kills < RANDOM_KILLS:
            if chance.random() < 0.8:  # otherwise they die on their way up
                world.feed(100)
                world.wait_ended(chance.randrange(10))
            pause(chance.uniform(0, 0.1))
            victims = chance.sample(["broker", "copier", "reader"], chance.choice([1, 1, 1, 2, 3]))
            world.kill(*victims)
            kills += len(victims)
            world.revive()
        world.proxy.clear()
        world.check()
