"""IncrementalAlterConfigs (key 44), versions 0-1: change single settings of a topic, the broker or a group.

Operation 0 sets a value, 1 resets it to the default, 2 appends to a list, and 3 removes elements from a list.
For a topic, only cleanup.policy and the throttled replicas are lists.

    UNKNOWN_TOPIC_OR_PARTITION  there is no such topic
    INVALID_CONFIG              an unknown key or bad value of a topic or group, or a list operation on
                                another type
    INVALID_REQUEST             an unknown key or bad value of a broker, a resource type without settings, an
                                unknown operation, a null value, a resource or key named twice

Source: KIP-339; Kafka's ConfigurationControlManager.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from oncelog.broker.request import Answer, Request
from oncelog.broker.settings.alter_configs import alter, check_has_value, check_no_duplicates
from oncelog.broker.settings.config_text import ResourceType, to_text
from oncelog.broker.settings.dynamic_config import CLUSTER
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.config import BROKER, TOPIC
from oncelog.errors import InvalidConfig, InvalidRequest
from oncelog.settings import SettingValue
from oncelog.wire.messages import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse

KEY = 44
SET, DELETE, APPEND, SUBTRACT = range(4)
_LISTS: dict[int, frozenset[str]] = {
    resource_type: frozenset(setting.key for setting in table.settings if setting.kind == "list")
    for resource_type, table in ((ResourceType.TOPIC, TOPIC), (ResourceType.BROKER, BROKER))
}
"""Resource type -> settings that are lists."""

_Requested = IncrementalAlterConfigsRequest.AlterConfigsResource
_Config = IncrementalAlterConfigsRequest.AlterableConfig


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    # Finish even if the client has disconnected, so that the stored settings are applied.
    answer: Answer = respond_in_steps(state.slots, _alter(state, request), is_cancellable=False)
    return answer


def _alter(state: BrokerState, request: Request) -> Work[IncrementalAlterConfigsResponse]:
    message: IncrementalAlterConfigsRequest = request.message
    changes = [(resource, partial(_apply_operations, state, resource)) for resource in message.resources]
    outcomes = yield from alter(state, request, changes, message.validate_only)
    return IncrementalAlterConfigsResponse(
        responses=[
            IncrementalAlterConfigsResponse.AlterConfigsResourceResponse(
                error_code=code,
                error_message=text,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource, (code, text) in zip(message.resources, outcomes, strict=True)
        ]
    )


def _apply_operations(
    state: BrokerState, resource: _Requested, present: Mapping[str, str]
) -> Mapping[str, str | None]:
    """Return the resource's settings after the requested operations. Raises InvalidRequest, InvalidConfig."""
    check_no_duplicates(resource.configs)
    result: dict[str, str | None] = dict(present)
    effective, is_list = _effective(state, resource), _LISTS.get(resource.resource_type, frozenset())
    # Like Kafka, report a null value before an invalid operation.
    for config in resource.configs:
        if config.config_operation != DELETE:
            check_has_value(config)
    for config in resource.configs:
        if config.config_operation in (APPEND, SUBTRACT) and config.name not in is_list:
            raise InvalidConfig(f"{config.name} is not a list; use SET")
        _apply(result, config, to_text(effective.get(config.name)) or "")
    return result


def _effective(state: BrokerState, resource: _Requested) -> Mapping[str, SettingValue]:
    """Return the effective settings of the resource, not only its own, because APPEND and SUBTRACT change the
    effective value of a list.

    For the whole cluster, these are its dynamic settings, and otherwise those with which the broker was
    started (KIP-339). See test_a_list_of_the_cluster_is_appended_to_its_default.
    """
    name, settings = resource.resource_name, state.settings
    if resource.resource_type == ResourceType.TOPIC:
        return state.topics.settings_of(name)
    if resource.resource_type != ResourceType.BROKER or name != CLUSTER:
        return settings
    lists = {key: settings.configured(key) for key in _LISTS[ResourceType.BROKER]}
    return {**lists, **state.dynamic.of_broker(CLUSTER)}


def _apply(result: dict[str, str | None], config: _Config, effective: str) -> None:
    operation = config.config_operation
    if operation == SET:
        result[config.name] = config.value
    elif operation == DELETE:
        result.pop(config.name, None)
    elif operation in (APPEND, SUBTRACT):
        present = [part for part in effective.split(",") if part]
        named = [part.strip() for part in (config.value or "").split(",") if part.strip()]
        if operation == APPEND:
            kept = present + [part for part in named if part not in present]
        else:
            kept = [part for part in present if part not in named]
        result[config.name] = ",".join(kept)
    else:
        raise InvalidRequest(
            f"operation {operation} is unknown; use 0 (SET), 1 (DELETE), 2 (APPEND) or 3 (SUBTRACT)"
        )
