"""A client pipelines requests behind a JoinGroup that waits for other members, and disconnects."""

from __future__ import annotations

from typing import Any

import pytest
from support.broker import RawClient, wait_until
from support.groups.node import join, sync
from support.wait import pass_time

from oncelog.server.embedded import Broker
from oncelog.wire.frames import encode_request
from oncelog.wire.messages import ApiVersionsRequest, DescribeGroupsRequest, LeaveGroupRequest

PATIENT: dict[str, Any] = {"session_timeout_ms": 1_800_000, "rebalance_timeout_ms": 2**31 - 1}


def members(client: RawClient) -> list[str]:
    (group,) = client.ask(DescribeGroupsRequest(groups=["g"]), 5).groups
    return [member.member_id for member in group.members]


def joined(client: RawClient) -> str:
    """Make the client the only member of a stable group; return its member id."""
    first = client.ask(join("g", **PATIENT), 3)
    assert (
        client.ask(sync("g", first.member_id, first.generation_id, {first.member_id: b""}), 3).error_code == 0
    )
    return str(first.member_id)


def wait_for_join(client: RawClient, first: str) -> str:
    """Wait until the group has a second member, whose JoinGroup is pending, and return the second member's
    id.
    """
    wait_until(lambda: len(members(client)) == 2)
    return next(member for member in members(client) if member != first)


@pytest.mark.parametrize("cut", [0, 1], ids=["whole", "cut off"])
def test_a_leave_behind_a_join_is_handled_after_its_client_disconnects(cut: int) -> None:
    """Regression: a member whose client had left stayed in the group until its session timed out.

    librdkafka and kafka-python send LeaveGroup behind a pending JoinGroup and disconnect. If `cut` is not 0,
    the LeaveGroup is incomplete. It must not keep the connection open after the response to the join.
    """
    config = {"group.initial.rebalance.delay.ms": 0}
    with (
        Broker(config=config) as broker,
        RawClient(broker.bootstrap_servers) as client,
        RawClient(broker.bootstrap_servers) as busy,
    ):
        first = joined(busy)
        with RawClient(broker.bootstrap_servers) as leaver:
            leaver.send(join("g", **PATIENT), 3)
            second = wait_for_join(client, first)
            frame = encode_request(LeaveGroupRequest(group_id="g", member_id=second), 1, 2, "raw")
            leaver.socket.sendall(frame[: len(frame) - cut])
        for _ in range(3):  # lets the event loop notice the disconnect
            client.ask(ApiVersionsRequest(), 0)
        assert busy.ask(join("g", first, **PATIENT), 3).error_code == 0
        wait_until(lambda: broker.metrics()["connections"] == 2)
        assert members(client) == ([first, second] if cut else [first])


def test_a_client_that_is_gone_waits_for_its_group_no_longer_than_an_idle_one() -> None:
    config = {"group.initial.rebalance.delay.ms": 0, "connections.max.idle.ms": 600_000}
    with Broker(config=config) as broker:
        with RawClient(broker.bootstrap_servers) as busy, RawClient(broker.bootstrap_servers) as leader:
            first = joined(leader)
            busy.send(join("g", **PATIENT), 3)
            wait_for_join(leader, first)
            generation = leader.ask(join("g", first, **PATIENT), 3).generation_id
            assert leader.ask(sync("g", first, generation, {first: b""}), 3).error_code == 0
            leader.send(join("g", first, **PATIENT), 3)
            leader.send(LeaveGroupRequest(group_id="g", member_id=first), 1)
        wait_until(lambda: broker.metrics()["connections"] == 1)
        pass_time(broker, 601_000)
        wait_until(lambda: broker.metrics()["connections"] == 0)
