"""ApiVersions (key 18), versions 0-4: the APIs and versions that this broker supports, and its features.

The response header always has version 0. The feature transaction.version is 2 if every transaction raises its
producer's epoch (KIP-890).

Errors: INVALID_REQUEST unless the client's software name and version consist of letters, digits, dots and
hyphens, and begin and end with a letter or digit. A request of an unsupported version gets
UNSUPPORTED_VERSION in a version 0 response, with the range of ApiVersions alone. Clients then try a lower
version: Java and kafka-python the highest of that range, librdkafka version 0.
Source: KIP-35, KIP-511, KIP-584.
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
"""First version in which clients send the name and version of their software."""

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
        supported_features=[_supported(name, max_level) for name, (_, max_level) in state.features.items()],
        finalized_features_epoch=0,
        finalized_features=[_finalized(name, level) for name, (level, _) in state.features.items() if level],
    )


def unsupported() -> ApiVersionsResponse:
    """Return the response to an unsupported version, which is always encoded as version 0."""
    return ApiVersionsResponse(error_code=UnsupportedVersion.code, api_keys=[_range(API_BY_KEY[KEY])])


def _supported(name: str, max_level: int) -> ApiVersionsResponse.SupportedFeatureKey:
    # Not 0: clients that use this API below version 4 reject a min_version of 0.
    return ApiVersionsResponse.SupportedFeatureKey(name=name, min_version=1, max_version=max_level)


def _finalized(name: str, level: int) -> ApiVersionsResponse.FinalizedFeatureKey:
    return ApiVersionsResponse.FinalizedFeatureKey(name=name, min_version_level=1, max_version_level=level)


@cache
def _range(api: Api) -> ApiVersionsResponse.ApiVersion:
    return ApiVersionsResponse.ApiVersion(
        api_key=api.key, min_version=api.min_version, max_version=api.max_version
    )
