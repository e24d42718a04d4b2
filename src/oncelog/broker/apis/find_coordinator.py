"""FindCoordinator (key 10), versions 0-6: who coordinates a group or a transactional id.

Groups and transactions are not served yet. Key type 0 (group), 1 (transaction) and 2 (share) are
answered INVALID_REQUEST with a text that says so: clients do not retry it. COORDINATOR_NOT_AVAILABLE
would be retried for ever, and an authorization error would blame access rights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.errors import InvalidRequest
from oncelog.wire.messages import FindCoordinatorRequest, FindCoordinatorResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 10
_REASONS = {
    0: "consumer groups are not served yet; assign partitions instead of subscribing",
    1: "transactions are not served yet; use an idempotent producer without transactional.id",
    2: "share groups are not served",
}


def handle(node: Node, request: Request, now_ms: int) -> FindCoordinatorResponse:
    message: FindCoordinatorRequest = request.message
    reason = _REASONS.get(message.key_type, f"key type {message.key_type} is not known")
    if request.header.api_version >= 4:
        return FindCoordinatorResponse(
            coordinators=[
                FindCoordinatorResponse.Coordinator(
                    key=key, node_id=-1, port=-1, error_code=InvalidRequest.code, error_message=reason
                )
                for key in message.coordinator_keys
            ]
        )
    return FindCoordinatorResponse(error_code=InvalidRequest.code, error_message=reason, node_id=-1, port=-1)
