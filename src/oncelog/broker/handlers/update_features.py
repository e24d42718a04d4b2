"""UpdateFeatures (key 57), versions 0-2: accept only the current levels of features.

This broker's settings fix the levels. If a request has another level for a feature, the whole request gets
INVALID_UPDATE_VERSION, and the error text names the first such feature. If all are accepted, versions 0 and 1
return a result for each feature. Source: KIP-584; Kafka's FeatureControlManager.
"""

from __future__ import annotations

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError, ClusterAuthorizationFailed, InvalidUpdateVersion
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import UpdateFeaturesRequest, UpdateFeaturesResponse

KEY = 57
FIRST_TYPED_VERSION = 1
UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3
SETTING_OF = {
    "transaction.version": "oncelog.transaction.version",
    "group.version": "group.coordinator.rebalance.protocols",
}
"""Feature -> the setting that fixes its level."""


def handle(state: BrokerState, request: Request, now_ms: int) -> UpdateFeaturesResponse:
    message: UpdateFeaturesRequest = request.message
    try:
        if not request.is_authorized(ResourceType.CLUSTER):
            raise ClusterAuthorizationFailed()
        for update in message.feature_updates:
            _check(state, update, request.header.api_version)
    except BrokerError as error:
        return UpdateFeaturesResponse(error_code=error.code, error_message=error.message)
    return UpdateFeaturesResponse(
        error_message=None,
        results=[
            UpdateFeaturesResponse.UpdatableFeatureResult(feature=update.feature, error_message=None)
            for update in message.feature_updates
        ],
    )


def _check(state: BrokerState, update: UpdateFeaturesRequest.FeatureUpdateKey, version: int) -> None:
    """Raise InvalidUpdateVersion if the update is invalid, or would change the level of the feature."""
    feature, level = update.feature, update.max_version_level
    if feature not in state.features:
        raise InvalidUpdateVersion(
            f"{feature!r} is not a feature of this broker; use {', '.join(state.features)}"
        )
    is_typed = version >= FIRST_TYPED_VERSION
    if is_typed and update.upgrade_type not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        raise InvalidUpdateVersion(f"{feature}: upgrade type {update.upgrade_type} is unknown; use 1, 2 or 3")
    present, highest = state.features[feature]
    if not 0 <= level <= highest:
        raise InvalidUpdateVersion(f"{feature}: level {level} is not supported; use 0 to {highest}")
    if level != present:
        raise InvalidUpdateVersion(
            f"{feature} is at level {present}; to change it, set {SETTING_OF[feature]} and restart the broker"
        )
