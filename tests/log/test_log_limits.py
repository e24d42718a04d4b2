"""Run the state machine of support.log.state_machine: one partition with very small limits.

docs/internals/limits.md lists the faults that were reintroduced to see this test fail.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from support.log.state_machine import LogMachine


def machine(max_examples: int, *, is_drawn_anew: bool) -> type:
    """Return the machine as a test case. It runs new random examples each time, or always the same ones if
    `is_drawn_anew` is False.
    """
    case = type("LogMachineCase", (LogMachine,), {}).TestCase
    case.settings = settings(
        max_examples=max_examples, stateful_step_count=40, deadline=None, derandomize=not is_drawn_anew
    )
    return pytest.mark.behaviour("I6", "I7", "I14", "I17", "I20")(case)  # type: ignore[no-any-return]


TestLogMachine = machine(150, is_drawn_anew=False)
TestLogMachineForLong = pytest.mark.soak(machine(5_000, is_drawn_anew=True))
