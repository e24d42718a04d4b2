"""Which broker coordinates a group or a transactional id."""

from __future__ import annotations

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.errors import raise_for_code
from oncelog.wire.messages import FindCoordinatorRequest

GROUP, TRANSACTION = 0, 1


async def find_coordinator(
    cluster: ClusterConnection, kind: int, name: str, timeout_ms: float | None = None
) -> int:
    """Node id of the coordinator. Raises CoordinatorNotAvailable and the like, which pass by themselves.

    `timeout_ms`: for each broker that is asked; None: request.timeout.ms.
    """
    request = FindCoordinatorRequest(key=name, key_type=kind, coordinator_keys=[name])
    answer = await cluster.request(None, request, timeout_ms=timeout_ms)
    found = answer.coordinators[0] if answer.coordinators else answer
    raise_for_code(found.error_code, found.error_message or "")
    # The answer is newer than the metadata, which are refreshed by age only: a broker may have come back at
    # another address. See test_a_coordinator_that_came_back_elsewhere_is_asked_there.
    cluster.metadata.set_address(found.node_id, found.host, found.port)
    return int(found.node_id)
