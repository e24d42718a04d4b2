"""Fixtures of the operations tests."""

from __future__ import annotations

import pytest

from oncelog.testing import broker_process


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more time for starts, because one of a hundred in a row may meet a busy computer."""
    monkeypatch.setattr(broker_process, "READY_TIMEOUT_S", 120.0)
