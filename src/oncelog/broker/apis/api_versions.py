"""ApiVersions (key 18), versions 0-4: what this broker speaks.

An unknown version is answered with a version 0 body, UNSUPPORTED_VERSION and the range of
ApiVersions itself: clients start high and come down (Java and kafka-python to the top of the
range, librdkafka to 0). Response header always version 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.errors import UnsupportedVersion
from oncelog.wire.messages import API_BY_KEY, Api, ApiVersionsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 18


def handle(node: Node, request: Request, now_ms: int) -> ApiVersionsResponse:
    return ApiVersionsResponse(api_keys=[_range(api) for api in node.offered.values()])


def unsupported() -> ApiVersionsResponse:
    """To be encoded as version 0 whatever version was asked."""
    return ApiVersionsResponse(error_code=UnsupportedVersion.code, api_keys=[_range(API_BY_KEY[KEY])])


def _range(api: Api) -> ApiVersionsResponse.ApiVersion:
    return ApiVersionsResponse.ApiVersion(
        api_key=api.key, min_version=api.min_version, max_version=api.max_version
    )
