"""The addresses of brokers, by the names that parametrized fixtures use."""

from __future__ import annotations

import pytest


def bootstrap_servers(request: pytest.FixtureRequest) -> str:
    """Return the address of the broker that the fixture's parameter names.

    The parameters `ours` and `apache` name the fixtures `ours` and `apache_kafka`. `ours, classic` names the
    fixture `classic`, our broker without an epoch per transaction.
    """
    if request.param == "apache":
        address: str = request.getfixturevalue("apache_kafka").bootstrap_servers
    else:
        address = request.getfixturevalue("classic" if "classic" in request.param else "ours")
    return address
