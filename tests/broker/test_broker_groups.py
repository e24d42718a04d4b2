"""A request that one group member pipelined must not interleave with the rebalance of the whole group."""

from __future__ import annotations

from support.broker import RawClient, wait_until

from oncelog.server.embedded import Broker
from oncelog.wire.messages import (
    DescribeGroupsRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)

JOIN, SYNC, LEAVE = 3, 3, 3


def _join(member_id: str) -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id="g",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        member_id=member_id,
        protocol_type="consumer",
        protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")],
    )


def _sync(joined: JoinGroupResponse, member_ids: list[str]) -> SyncGroupRequest:
    shares = [
        SyncGroupRequest.SyncGroupRequestAssignment(member_id=member_id, assignment=member_id.encode())
        for member_id in member_ids
    ]
    return SyncGroupRequest(
        group_id="g",
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        group_instance_id=None,
        assignments=shares,
    )


def test_a_member_may_leave_right_behind_its_sync(broker: Broker) -> None:
    """Regression (simulator, seed 287 with 50 faults): the member left while the coordinator was still
    sending the responses of the other members.
    """
    clients = [RawClient(broker.bootstrap_servers) for _ in range(3)]
    first = clients[0].ask(_join(""), JOIN)
    for client in clients[1:]:
        client.send(_join(""), JOIN)
    with RawClient(broker.bootstrap_servers) as onlooker:
        wait_until(lambda: len(onlooker.ask(DescribeGroupsRequest(groups=["g"]), 0).groups[0].members) == 3)
    clients[0].send(_join(first.member_id), JOIN)
    joined = [client.receive(JoinGroupResponse, JOIN)[1] for client in clients]
    for client, answer in list(zip(clients, joined, strict=True))[1:]:
        client.send(_sync(answer, []), SYNC)
        client.send(LeaveGroupRequest(group_id="g", member_id=answer.member_id), LEAVE)
    members = [each.member_id for each in joined]
    leader = clients[0].ask(_sync(joined[0], members), SYNC)
    assert (leader.error_code, bytes(leader.assignment)) == (0, members[0].encode())
    for client, member_id in list(zip(clients, members, strict=True))[1:]:
        synced = client.receive(SyncGroupResponse, SYNC)[1]
        assert (synced.error_code, bytes(synced.assignment)) == (0, member_id.encode())
        assert client.receive(LeaveGroupResponse, LEAVE)[1].error_code == 0
    for client in clients:
        client.socket.close()
