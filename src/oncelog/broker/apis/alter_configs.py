"""AlterConfigs (key 33), versions 0-2: replace the whole set of a topic's own settings.

Errors: 3 unknown topic, 40 unknown key or bad value, 42 anything that is not a topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from oncelog.broker.altering import alter
from oncelog.wire.messages import AlterConfigsRequest, AlterConfigsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 33


def handle(node: Node, request: Request, now_ms: int) -> AlterConfigsResponse:
    message: AlterConfigsRequest = request.message
    return AlterConfigsResponse(
        responses=[_alter(node, asked, message.validate_only) for asked in message.resources]
    )


def _alter(
    node: Node, asked: AlterConfigsRequest.AlterConfigsResource, validate_only: bool
) -> AlterConfigsResponse.AlterConfigsResourceResponse:
    def replaced(_: Mapping[str, str]) -> Mapping[str, str | None]:
        return {config.name: config.value for config in asked.configs}

    code, text = alter(node, asked.resource_type, asked.resource_name, replaced, validate_only)
    return AlterConfigsResponse.AlterConfigsResourceResponse(
        error_code=code,
        error_message=text,
        resource_type=asked.resource_type,
        resource_name=asked.resource_name,
    )
