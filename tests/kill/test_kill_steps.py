"""A consume-transform-produce program, killed by SIGKILL at every step of its transactions (behaviour T5).

The victims are the broker, the copier (consumer and producer in one) and a reader of the output. A step is a
request that reaches the broker or a response that leaves it. The output must equal that of a run without
faults.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.kill.processes import STARTING, CopyUnderKills
from support.wait import pause

from oncelog.testing.proxy.rules import Action, Rule

CLASSIC, EPOCHS = 0, 2
"""Transaction versions.

With CLASSIC, a client first sends AddPartitionsToTxn. With EPOCHS, the epoch rises at each end of a
transaction (KIP-890).
"""
STEPS = {
    EPOCHS: (*STARTING, "Produce", "TxnOffsetCommit", "EndTxn"),
    CLASSIC: (
        *STARTING,
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
pytestmark = pytest.mark.timeout(400)  # the tests start dozens of processes, perhaps on a busy machine


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
    """Kill processes while the proxy holds a message. The held message never arrives."""
    with CopyUnderKills(tmp_path, oncelog_transaction_version=version) as run:
        for api in STEPS[version]:
            run.reach(api, side)
            run.kill(*victims.split())
            run.let_go(lose=True)
            run.revive()
        run.check()


@pytest.mark.behaviour("T3", "T6", "T11")
@VERSIONS
def test_a_late_request_of_a_killed_copier_changes_nothing(tmp_path: Path, version: int) -> None:
    """Kill the copier, and deliver the held message after its successor has continued."""
    with CopyUnderKills(tmp_path, oncelog_transaction_version=version) as run:
        for api in STEPS[version]:
            run.reach(api, "request")
            run.proxy.clear()
            run.copier.restart()
            run.wait_copied()
            run.let_go(lose=False)
            run.feed()
        run.check()


@pytest.mark.behaviour("T6", "T11")
@VERSIONS
def test_a_decided_transaction_completes_after_the_broker_is_killed(tmp_path: Path, version: int) -> None:
    """Kill the broker at each marker of the transaction, and once more while its next start writes the
    missing markers.
    """
    with CopyUnderKills(tmp_path, oncelog_transaction_version=version) as run:
        run.feed()
        run.wait_copied()
        for plan in ("0 complete", "1 2", "2 1", "complete 0"):
            run.broker.plan.write_text(plan)
            run.feed()
            run.wait(lambda: not run.broker.is_alive(), "the broker's death")
            assert run.broker.revive() == 1
            assert not run.broker.plan.read_text()
        run.check()


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.behaviour("T6", "T11")
@VERSIONS
def test_copiers_killed_at_random_copy_every_record_once(tmp_path: Path, version: int) -> None:
    """Choose victims and times at random. Also cut connections and delay requests at random."""
    chance = random.Random(version)
    with CopyUnderKills(tmp_path, oncelog_transaction_version=version) as run:
        run.proxy.add(Rule(action=Action.CUT, probability=0.01))
        for api in STEPS[version]:
            run.proxy.add(Rule(action=Action.HOLD, api=api, probability=0.02, delay_ms=700))
        kills = 0
        while kills < RANDOM_KILLS:
            if chance.random() < 0.8:  # in the other cases, processes are killed while they start
                run.feed(100)
                run.wait_ended(chance.randrange(10))
            pause(chance.uniform(0, 0.1))
            victims = chance.sample(["broker", "copier", "reader"], chance.choice([1, 1, 1, 2, 3]))
            run.kill(*victims)
            kills += len(victims)
            run.revive()
        run.proxy.clear()
        run.check()
