"""Consume, transform, produce as transactions, killed with SIGKILL at every step of a transaction (row T5).

Who dies: the broker, the program that copies (consumer and producer in one), a reader of what it writes. When:
a request of the step reaches the broker, or its answer leaves it. What must be: the output of a run without
faults, record for record.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_kill import World

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
VERSIONS = pytest.mark.parametrize("version", [EPOCHS, CLASSIC], ids=["epochs", "classic"])
SIDES = pytest.mark.parametrize("side", ["request", "response"])


def reach(world: World, api: str, side: str) -> None:
    """Until a message of the step is held in the network."""
    mark = world.hold(api, side)
    if api in _STARTING:
        world.copier.restart()
    world.feed()
    world.wait_held(mark)


@pytest.mark.behaviour("T6", "T11")
@VERSIONS
@SIDES
def test_the_broker_is_killed_at_every_step(tmp_path: Path, version: int, side: str) -> None:
    with World(tmp_path, oncelog_transaction_version=version) as world:
        for api in STEPS[version]:
            reach(world, api, side)
            world.broker.kill()
            world.let_go(lose=True)
            world.broker.start()
        world.check()


@pytest.mark.behaviour("T6", "T11")
@VERSIONS
@SIDES
def test_the_copier_is_killed_at_every_step(tmp_path: Path, version: int, side: str) -> None:
    with World(tmp_path, oncelog_transaction_version=version) as world:
        for api in STEPS[version]:
            reach(world, api, side)
            world.copier.kill()
            world.let_go(lose=True)
            world.copier.start()
        world.check()
