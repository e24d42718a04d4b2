"""AlterConfigs (key 33), versions 0-2: replace the whole set of a resource's own settings.

Errors: 3 unknown topic, 40 unknown key or bad value, 42 anything that is not a topic, a null, or a topic
or key named twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from oncelog.broker.request import Request
from oncelog.broker.settings.alter_configs import alter, check_each_once, check_has_value
from oncelog.broker.state import BrokerState
from oncelog.wire.messages import AlterConfigsRequest, AlterConfigsResponse

KEY = 33


_Asked = AlterConfigsRequest.AlterConfigsResource


def handle(state: BrokerState, request: Request, now_ms: int) -> AlterConfigsResponse:
    message: AlterConfigsRequest = request.message
    changes = [(asked, partial(_replaced, asked)) for asked in message.resources]
    outcomes = alter(state, request, changes, message.validate_only)
    return AlterConfigsResponse(
        responses=[
            AlterConfigsResponse.AlterConfigsResourceResponse(
                error_code=code,
                error_message=text,
                resource_type=asked.resource_type,
                resource_name=asked.resource_name,
            )
            for asked, (code, text) in zip(message.resources, outcomes, strict=True)
        ]
    )


def _replaced(asked: _Asked, _: Mapping[str, str]) -> Mapping[str, str | None]:
    check_each_once(asked.configs)
    for config in asked.configs:
        check_has_value(config)
    return {config.name: config.value for config in asked.configs}
