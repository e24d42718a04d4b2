"""What the tests of operations share."""

from __future__ import annotations

import pytest

from oncelog.testing import broker_process


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that starts a hundred times in a row meets a busy machine once."""
    monkeypatch.setattr(broker_process, "READY_TIMEOUT_S", 120.0)
