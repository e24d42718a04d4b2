"""What AlterConfigs and IncrementalAlterConfigs share: find the topic, check, store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from oncelog.broker.config_text import ResourceType
from oncelog.broker.topic_config import check_overrides
from oncelog.errors import (
    BrokerError,
    InvalidRequest,
    KafkaStorageError,
    StorageError,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from oncelog.broker.node import Node

Change = Callable[[Mapping[str, str]], Mapping[str, str | None]]
"""From a topic's present overrides to its new ones."""


def alter(
    node: Node, resource_type: int, name: str, change: Change, validate_only: bool
) -> tuple[int, str | None]:
    """Error code and message; (0, None) when the change holds and is on disk."""
    try:
        if resource_type == ResourceType.BROKER:
            raise InvalidRequest("broker settings are fixed at start: use --config or --set and restart")
        if resource_type != ResourceType.TOPIC:
            raise InvalidRequest(f"resource type {resource_type} is not served; 2 is a topic")
        topic = node.topics.get(name)
        if topic is None:
            raise UnknownTopicOrPartition()
        overrides = check_overrides(node.settings, change(topic.overrides))
        if not validate_only:
            node.topics.alter(topic, overrides)
    except BrokerError as error:
        return error.code, str(error)
    except StorageError as error:
        return KafkaStorageError.code, str(error)
    return 0, None
