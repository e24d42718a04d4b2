"""ListConfigResources (key 74), versions 0-1: the resources that have settings.

Version 0 lists only client metrics (type 16), which this broker does not have. In version 1 a request without
types means all types that this broker has: topics, this broker, and groups with settings of their own. For
Kafka's other types the result is empty. Errors: UNSUPPORTED_VERSION for an unknown type.
Source: KIP-1142; Kafka's KafkaApis.handleListConfigResources.
"""

from __future__ import annotations

from collections.abc import Iterable

from oncelog.broker.request import Request
from oncelog.broker.settings.config_text import ResourceType
from oncelog.broker.state import BrokerState
from oncelog.errors import ClusterAuthorizationFailed, UnsupportedVersion
from oncelog.rules.security.authorization import ResourceType as acl
from oncelog.wire.messages import ListConfigResourcesRequest, ListConfigResourcesResponse

KEY = 74
FIRST_TYPED_VERSION = 1


def handle(state: BrokerState, request: Request, now_ms: int) -> ListConfigResourcesResponse:
    message: ListConfigResourcesRequest = request.message
    if not request.is_authorized(acl.CLUSTER):
        return ListConfigResourcesResponse(error_code=ClusterAuthorizationFailed.code, config_resources=[])
    types = set(message.resource_types) or set(ResourceType)
    if request.header.api_version < FIRST_TYPED_VERSION:
        types = {ResourceType.CLIENT_METRICS}
    if not types <= set(ResourceType):
        return ListConfigResourcesResponse(error_code=UnsupportedVersion.code, config_resources=[])
    return ListConfigResourcesResponse(
        config_resources=[
            ListConfigResourcesResponse.ConfigResource(resource_name=name, resource_type=resource_type)
            for resource_type in sorted(types)
            for name in _names(state, resource_type)
        ]
    )


def _names(state: BrokerState, resource_type: int) -> Iterable[str]:
    if resource_type == ResourceType.TOPIC:
        return (topic.name for topic in state.topics.all())
    if resource_type == ResourceType.BROKER:
        return (str(state.node_id),)
    if resource_type == ResourceType.GROUP:
        return state.dynamic.groups()
    return ()
