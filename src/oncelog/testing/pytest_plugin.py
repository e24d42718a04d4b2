"""The pytest fixture `oncelog_broker`: an embedded broker on a free port, stopped after the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from oncelog.server.embedded import Broker


@pytest.fixture
def oncelog_broker() -> Iterator[Broker]:
    """Yield a running `oncelog.Broker` with a temporary data directory."""
    # Imported here, because every pytest run loads this plug-in and few use it.
    from oncelog.server.embedded import Broker

    with Broker() as broker:
        yield broker
