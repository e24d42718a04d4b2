"""`oncelog quotas` against our broker."""

from __future__ import annotations

import json

import pytest
from support.cli import oncelog

from oncelog.server.embedded import Broker


def listed(broker: Broker, *options: str) -> list[list[object]]:
    done = oncelog("quotas", "list", "-o", "json", *options, servers=broker.bootstrap_servers)
    assert done.code == 0, done.err
    return [list(row.values()) for row in json.loads(done.out)]


def test_quotas_are_set_described_and_removed(broker: Broker) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        done = oncelog("quotas", *arguments, servers=broker.bootstrap_servers)
        return done.code, done.out, done.err

    alice = ("--user", "alice")
    rates = ("producer_byte_rate=1048576", "request_percentage=12.5")
    code, out, _ = run("set", *alice, *rates)
    assert code == 0 and "user alice: request_percentage=12.5" in out
    assert run("set", *alice, "--client-id-default", "producer_byte_rate=1000")[0] == 0
    assert run("set", "--ip", "10.0.0.1", "connection_creation_rate=3")[0] == 0
    assert listed(broker, *alice) == [
        ["alice", None, None, "producer_byte_rate", 1048576.0],
        ["alice", None, None, "request_percentage", 12.5],
        ["alice", "<default>", None, "producer_byte_rate", 1000.0],
    ]
    assert listed(broker, "--ip", "10.0.0.1") == [[None, None, "10.0.0.1", "connection_creation_rate", 3.0]]
    assert len(listed(broker)) == 4
    code, out, err = run("remove", *alice, "producer_byte_rate")
    assert (code, out) == (0, "would remove: user alice: producer_byte_rate=1048576\n") and "--yes" in err
    assert run("remove", *alice, "--yes")[0] == 0
    assert listed(broker, *alice) == [["alice", "<default>", None, "producer_byte_rate", 1000.0]]
    assert "no such quota" in run("remove", *alice, "--yes")[2]
    code, _, err = run("set", *alice, "speed=1")
    assert code == 1 and "speed" in err and "producer_byte_rate" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("set", "producer_byte_rate=1"), "--user"),
        (("set", "--user", "alice"), "QUOTA=RATE"),
        (("set", "--user", "alice", "producer_byte_rate=fast"), "fast"),
        (("set", "--user", "alice", "--user-default", "producer_byte_rate=1"), "--user-default"),
        (("remove", "--user", ""), "--user"),
    ],
)
def test_wrong_usage_of_quotas_is_refused(arguments: tuple[str, ...], named: str) -> None:
    done = oncelog("quotas", *arguments)
    assert done.code == 2 and named in done.err
