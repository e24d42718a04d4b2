"""IncrementalAlterConfigs (key 44), versions 0-1: change single settings of a topic, the broker
or a group.

Operations: 0 set, 1 delete (back to the default), 2 append to and 3 subtract from a list
(cleanup.policy, and those of replication). Errors: 3 unknown topic, 40 unknown key, bad value, or a list
operation on what is no list, 42 not a topic, an unknown operation, a null, or a
topic or key named twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from oncelog.broker.request import Request
from oncelog.broker.settings.alter_configs import alter, check_each_once, check_has_value
from oncelog.broker.settings.config_text import ResourceType, to_text
from oncelog.broker.settings.dynamic_config import CLUSTER
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER, TOPIC
from oncelog.errors import InvalidConfig, InvalidRequest
from oncelog.settings import SettingValue
from oncelog.wire.messages import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse

KEY = 44
SET, DELETE, APPEND, SUBTRACT = range(4)
_LISTS: dict[int, frozenset[str]] = {
    resource_type: frozenset(row.key for row in table.settings if row.kind == "list")
    for resource_type, table in ((ResourceType.TOPIC, TOPIC), (ResourceType.BROKER, BROKER))
}
"""Resource type -> settings that are lists."""

_Asked = IncrementalAlterConfigsRequest.AlterConfigsResource
_Config = IncrementalAlterConfigsRequest.AlterableConfig


def handle(state: BrokerState, request: Request, now_ms: int) -> IncrementalAlterConfigsResponse:
    message: IncrementalAlterConfigsRequest = request.message
    changes = [(asked, partial(_changed, state, asked)) for asked in message.resources]
    outcomes = alter(state, request, changes, message.validate_only)
    return IncrementalAlterConfigsResponse(
        responses=[
            IncrementalAlterConfigsResponse.AlterConfigsResourceResponse(
                error_code=code,
                error_message=text,
                resource_type=asked.resource_type,
                resource_name=asked.resource_name,
            )
            for asked, (code, text) in zip(message.resources, outcomes, strict=True)
        ]
    )


def _changed(state: BrokerState, asked: _Asked, present: Mapping[str, str]) -> Mapping[str, str | None]:
    """Apply the operations that are asked for. Raises InvalidRequest, InvalidConfig."""
    check_each_once(asked.configs)
    result: dict[str, str | None] = dict(present)
    effective, is_list = _effective(state, asked), _LISTS.get(asked.resource_type, frozenset())
    # Like Kafka, report any null before an operation that is wrong.
    for config in asked.configs:
        if config.config_operation != DELETE:
            check_has_value(config)
    for config in asked.configs:
        if config.config_operation in (APPEND, SUBTRACT) and config.name not in is_list:
            raise InvalidConfig(f"{config.name} is not a list; set it instead")
        _apply(result, config, to_text(effective.get(config.name)) or "")
    return result


def _effective(state: BrokerState, asked: _Asked) -> Mapping[str, SettingValue]:
    """Return the current value that APPEND and SUBTRACT start from."""
    if asked.resource_type == ResourceType.TOPIC:
        return state.topics.settings_of(asked.resource_name)
    if asked.resource_type == ResourceType.BROKER and asked.resource_name != CLUSTER:
        return state.settings
    return state.dynamic.of_broker(asked.resource_name)


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
        raise InvalidRequest(f"operation {operation} is not known; 0 to 3 are")
