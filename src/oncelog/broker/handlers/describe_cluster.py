"""DescribeCluster (key 60), versions 0-2: this broker, which is its own controller.

The response has the address of the listener that received the request. Requests must have endpoint type 1
(brokers). Type 2 (controllers) gets MISMATCHED_ENDPOINT_TYPE, and any other type gets
UNSUPPORTED_ENDPOINT_TYPE. Source: KIP-700, KIP-919.
"""

from __future__ import annotations

from oncelog.broker.handlers.metadata import cluster_bits
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import MismatchedEndpointType, UnsupportedEndpointType
from oncelog.wire.messages import DescribeClusterRequest, DescribeClusterResponse

KEY = 60
BROKERS, CONTROLLERS = 1, 2


def handle(state: BrokerState, request: Request, now_ms: int) -> DescribeClusterResponse:
    message: DescribeClusterRequest = request.message
    if message.endpoint_type != BROKERS:
        mismatch = message.endpoint_type == CONTROLLERS
        return DescribeClusterResponse(
            error_code=(MismatchedEndpointType if mismatch else UnsupportedEndpointType).code,
            error_message="this endpoint is a broker; use endpoint type 1",
            endpoint_type=message.endpoint_type,
            cluster_id=state.cluster_id,
        )
    address = state.address(request)
    broker = DescribeClusterResponse.DescribeClusterBroker(
        broker_id=state.node_id, host=address.host, port=address.port
    )
    answer = DescribeClusterResponse(
        cluster_id=state.cluster_id, controller_id=state.node_id, brokers=[broker]
    )
    if message.include_cluster_authorized_operations:
        answer.cluster_authorized_operations = cluster_bits(request)
    return answer
