"""ApiVersions (key 18), versions 0-4: what this broker speaks.

An unknown version is answered with a version 0 body, UNSUPPORTED_VERSION and the range of
ApiVersions itself: clients start high and come down (Java and kafka-python to the top of the
range, librdkafka to 0). Response header always version 0. A client name or version that is not letters,
digits, dots and hyphens is 42. The features tell whether transactions raise their epoch (KIP-890).
"""

from __future__ import annotations

import re
from functools import cache

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import InvalidRequest, UnsupportedVersion
from oncelog.wire.messages import API_BY_KEY, Api, ApiVersionsRequest, ApiVersionsResponse

KEY = 18
FIRST_NAMED_VERSION = 3
"""From here on clients say what software they are."""

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")


def handle(state: BrokerState, request: Request, now_ms: int) -> ApiVersionsResponse:
    message: ApiVersionsRequest = request.message
    if request.header.api_version >= FIRST_NAMED_VERSION and not (
        _SOFTWARE.fullmatch(message.client_software_name)
        and _SOFTWARE.fullmatch(message.client_software_version)
    ):
        return ApiVersionsResponse(error_code=InvalidRequest.code, api_keys=[])
    return ApiVersionsResponse(
        api_keys=[_range(api) for api in state.offered.values()],
        supported_features=[_supported(name, top) for name, (_, top) in state.features.items()],
        finalized_features_epoch=0,
        finalized_features=[_finalized(name, level) for name, (level, _) in state.features.items() if level],
    )


def unsupported() -> ApiVersionsResponse:
    """To be encoded as version 0 whatever version was asked."""
    return ApiVersionsResponse(error_code=UnsupportedVersion.code, api_keys=[_range(API_BY_KEY[KEY])])


def _supported(name: str, top: int) -> ApiVersionsResponse.SupportedFeatureKey:
    # Not from 0: clients below version 4 of this API reject it.
    return ApiVersionsResponse.SupportedFeatureKey(name=name, min_version=1, max_version=top)


def _finalized(name: str, level: int) -> ApiVersionsResponse.FinalizedFeatureKey:
    return ApiVersionsResponse.FinalizedFeatureKey(name=name, min_version_level=1, max_version_level=level)


@cache
def _range(api: Api) -> ApiVersionsResponse.ApiVersion:
    return ApiVersionsResponse.ApiVersion(
        api_key=api.key, min_version=api.min_version, max_version=api.max_version
    )
