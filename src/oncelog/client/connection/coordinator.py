"""Finds the broker that coordinates a group or a transactional id (FindCoordinator, KIP-699)."""

from __future__ import annotations

import math

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.errors import BrokerError, error_for_code
from oncelog.wire.messages import FindCoordinatorRequest

GROUP, TRANSACTION = 0, 1


async def find_coordinator(
    cluster: ClusterConnection, kind: int, name: str, deadline_ms: float = math.inf
) -> int:
    """Return the node id of the coordinator. `kind` is GROUP or TRANSACTION.

    `deadline_ms` is a time of `cluster.now_ms`. request.timeout.ms also limits the request to each broker.
    Raises CoordinatorNotAvailable and other retriable errors, and GroupAuthorizationFailed or
    TransactionalIdAuthorizationFailed.
    """
    request = FindCoordinatorRequest(key=name, key_type=kind, coordinator_keys=[name])
    response = await cluster.request(None, request, deadline_ms=deadline_ms)
    # Below version 4 the response is a single coordinator instead of a list.
    coordinator = response.coordinators[0] if response.coordinators else response
    if coordinator.error_code:
        raise _refusal(coordinator.error_code, coordinator.error_message or "", kind, name)
    # The broker may have restarted at another address, and losing the coordinator does not by itself refresh
    # the metadata. So the newer address in this response replaces the one in the metadata. See
    # test_a_coordinator_that_restarted_elsewhere_gets_the_requests_there.
    cluster.metadata.set_address(coordinator.node_id, coordinator.host, coordinator.port)
    return int(coordinator.node_id)


def _refusal(code: int, message: str, kind: int, name: str) -> BrokerError:
    """Return the error of a response. It names the group or transactional id, and repeats no error name."""
    what = f"{'group' if kind == GROUP else 'transactional id'} {name!r}"
    error = error_for_code(code, what)
    if message and not message.startswith(error.kafka_name):
        error = error_for_code(code, f"{what}: {message}")
    return error
