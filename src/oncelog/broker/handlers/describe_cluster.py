"""DescribeCluster (key 60), versions 0-2: this one broker, at the listener that was asked; it is
its own controller.

Endpoint type 1 (brokers) is served, 2 (controllers) is MISMATCHED_ENDPOINT_TYPE, others
UNSUPPORTED_ENDPOINT_TYPE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.handlers.metadata import cluster_bits
from oncelog.errors import MismatchedEndpointType, UnsupportedEndpointType
from oncelog.wire.messages import DescribeClusterRequest, DescribeClusterResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 60
BROKERS, CONTROLLERS = 1, 2


def handle(node: Node, request: Request, now_ms: int) -> DescribeClusterResponse:
    message: DescribeClusterRequest = request.message
    if message.endpoint_type != BROKERS:
        mismatch = message.endpoint_type == CONTROLLERS
        return DescribeClusterResponse(
            error_code=(MismatchedEndpointType if mismatch else UnsupportedEndpointType).code,
            error_message="this is a broker; ask with endpoint type 1",
            endpoint_type=message.endpoint_type,
            cluster_id=node.cluster_id,
        )
    address = node.address(request)
    broker = DescribeClusterResponse.DescribeClusterBroker(
        broker_id=node.node_id, host=address.host, port=address.port
    )
    answer = DescribeClusterResponse(cluster_id=node.cluster_id, controller_id=node.node_id, brokers=[broker])
    if message.include_cluster_authorized_operations:
        answer.cluster_authorized_operations = cluster_bits(request)
    return answer
