"""The log on the real disk while system calls fail, between kills, stops and power losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.log.faulty_log import LogUnderFaults


@pytest.mark.parametrize("seed", [5, 9, 13, 38, 109, 234])
def test_random_operations_while_system_calls_fail(tmp_path: Path, seed: int) -> None:
    """Seeds 5, 9 and 38 fail if R613 is reintroduced.

    Likewise seed 13 fails with R610, and seed 234 with R614.
    """
    LogUnderFaults(tmp_path / "data", seed).run()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 1400, 20))
def test_many_random_operations_while_system_calls_fail(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 20):
        LogUnderFaults(tmp_path / str(seed), seed).run()
