"""AlterConfigs (key 33), versions 0-2: replace all settings that were set for a topic, broker or group.

    UNKNOWN_TOPIC_OR_PARTITION  there is no such topic
    INVALID_CONFIG              an unknown key or bad value of a topic or group
    INVALID_REQUEST             an unknown key or bad value of a broker, a resource type without settings, a
                                null value, a resource or key named twice

Source: Kafka's ConfigurationControlManager.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from oncelog.broker.request import Answer, Request
from oncelog.broker.settings.alter_configs import alter, check_has_value, check_no_duplicates
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.wire.messages import AlterConfigsRequest, AlterConfigsResponse

KEY = 33


_Requested = AlterConfigsRequest.AlterConfigsResource


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    # Finish even if the client has disconnected, so that the stored settings are applied.
    answer: Answer = respond_in_steps(state.slots, _alter(state, request), is_cancellable=False)
    return answer


def _alter(state: BrokerState, request: Request) -> Work[AlterConfigsResponse]:
    message: AlterConfigsRequest = request.message
    changes = [(resource, partial(_replacement, resource)) for resource in message.resources]
    outcomes = yield from alter(state, request, changes, message.validate_only)
    return AlterConfigsResponse(
        responses=[
            AlterConfigsResponse.AlterConfigsResourceResponse(
                error_code=code,
                error_message=text,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource, (code, text) in zip(message.resources, outcomes, strict=True)
        ]
    )


def _replacement(resource: _Requested, _: Mapping[str, str]) -> Mapping[str, str | None]:
    check_no_duplicates(resource.configs)
    for config in resource.configs:
        check_has_value(config)
    return {config.name: config.value for config in resource.configs}
