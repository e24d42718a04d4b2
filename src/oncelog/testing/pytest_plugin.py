"""The pytest fixture `oncelog_broker`: an embedded broker on a free port, which is stopped after the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from oncelog.server.embedded import Broker


@pytest.fixture
def oncelog_broker() -> Iterator[Broker]:
    """Yield a running `oncelog.Broker` with a temporary data directory."""
    # pytest loads this plug-in in every run, but few runs use the broker. Import it only when needed.
    from oncelog.server.embedded import Broker

    with Broker() as broker:
        yield broker
