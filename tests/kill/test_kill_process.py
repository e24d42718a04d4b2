"""The loop `oncelog.process` in a process that is killed by SIGKILL at every step of its transactions.

test_kill_steps.py does the same with a loop that an application wrote itself. The output must equal that of a
run without faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kill.processes import STARTING, CopyUnderKills

pytestmark = pytest.mark.timeout(400)  # the tests start dozens of processes, perhaps on a busy machine
STEPS = (*STARTING, "Produce", "TxnOffsetCommit", "EndTxn")
SOON = {
    "group_consumer_session_timeout_ms": 1_000,
    "group_consumer_min_session_timeout_ms": 1_000,
    "group_consumer_heartbeat_interval_ms": 200,
    "group_consumer_min_heartbeat_interval_ms": 200,
}
"""With these settings, the group soon removes a killed member of the consumer protocol, so its instance id is
free again.
"""
_SOAK = pytest.mark.soak


@pytest.mark.behaviour("T11", "T16")
@pytest.mark.parametrize(
    ("protocol", "side", "victims"),
    [
        ("classic", "response", "copier"),
        ("consumer", "request", "copier"),
        pytest.param("classic", "request", "copier", marks=_SOAK),
        pytest.param("consumer", "response", "copier", marks=_SOAK),
        pytest.param("classic", "response", "broker copier reader", marks=_SOAK),
        pytest.param("consumer", "request", "broker copier reader", marks=_SOAK),
    ],
)
def test_a_loop_killed_at_every_step_processes_every_record_once(
    tmp_path: Path, protocol: str, side: str, victims: str
) -> None:
    """Kill processes while the proxy holds a message. The held message never arrives."""
    with CopyUnderKills(tmp_path, ("loop", protocol), **SOON) as run:
        for api in STEPS:
            run.reach(api, side)
            run.kill(*victims.split())
            run.let_go(lose=True)
            run.revive()
        run.check()


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize(("protocol", "side"), [("classic", "response"), ("consumer", "request")])
def test_a_loop_outlives_the_kills_of_its_broker(tmp_path: Path, protocol: str, side: str) -> None:
    """The loop repeats the interrupted requests, and its process does not end."""
    with CopyUnderKills(tmp_path, ("loop", protocol), **SOON) as run:
        run.feed()
        run.wait_copied()
        failures = run.copier.failures
        for api in STEPS[len(STARTING) :]:
            run.reach(api, side)
            run.kill("broker")
            run.let_go(lose=True)
            run.revive()
        run.check()
        assert run.copier.failures == failures, (tmp_path / "copier.log").read_text()


@pytest.mark.behaviour("T3", "T16")
def test_a_late_request_of_a_killed_loop_changes_nothing(tmp_path: Path) -> None:
    """Kill the loop, and deliver the held message after its successor has continued."""
    with CopyUnderKills(tmp_path, ("loop", "classic")) as run:
        for api in STEPS:
            run.reach(api, "request")
            run.proxy.clear()
            run.copier.restart()
            run.wait_copied()
            run.let_go(lose=False)
            run.feed()
        run.check()
