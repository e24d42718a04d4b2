"""Fixtures of the operations tests."""

from __future__ import annotations

import pytest

from oncelog.testing import broker_process


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more time for a start: in a series of a hundred, one may run while the machine is busy."""
    monkeypatch.setattr(broker_process, "READY_TIMEOUT_S", 120.0)
