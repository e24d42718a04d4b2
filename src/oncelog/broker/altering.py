"""What AlterConfigs and IncrementalAlterConfigs share: find the resource, check, store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from oncelog.broker.config_text import ResourceType
from oncelog.broker.internal_topics import check_internal_settings
from oncelog.broker.topic_config import check_overrides
from oncelog.errors import (
    BrokerError,
    InvalidRequest,
    KafkaStorageError,
    StorageError,
    UnknownTopicOrPartition,
)
from oncelog.rules.authorization import ResourceType as acl

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

Change = Callable[[Mapping[str, str]], Mapping[str, str | None]]
"""From a resource's own settings to its new ones."""


class Resource(Protocol):
    """What both requests name: a topic or something else, by type and name."""

    resource_type: int
    resource_name: str


class Config(Protocol):
    """A setting that a request names; `value` None: no value is given."""

    name: str
    value: str | None


def named_twice(resources: Iterable[Resource]) -> Collection[tuple[int, str]]:
    """Type and name of the resources that a request names more than once; no change to them holds."""
    counted = Counter((each.resource_type, each.resource_name) for each in resources)
    return {key for key, count in counted.items() if count > 1}


def check_each_once(configs: Iterable[Config]) -> None:
    """Raises InvalidRequest where a setting is named twice."""
    repeated = [name for name, count in Counter(each.name for each in configs).items() if count > 1]
    if repeated:
        raise InvalidRequest(f"named twice: {', '.join(repeated)}; each setting may be changed once")


def check_has_value(config: Config) -> None:
    """Raises InvalidRequest for a null."""
    if config.value is None:
        raise InvalidRequest(f"{config.name} needs a value; null is for deleting it")


def alter(
    node: Node,
    request: Request,
    asked: Resource,
    change: Change,
    validate_only: bool,
    repeated: Collection[tuple[int, str]],
) -> tuple[int, str | None]:
    """Error code and message; (0, None) when the change holds and is on disk.

    `repeated`: as `named_twice` says of the request.
    """
    resource_type, name = asked.resource_type, asked.resource_name
    try:
        if (resource_type, name) in repeated:
            raise InvalidRequest(f"{name!r} is named twice; name each resource once")
        if resource_type == ResourceType.TOPIC:
            request.check(acl.TOPIC, name)
            _alter_topic(node, name, change, validate_only)
        elif resource_type == ResourceType.GROUP:
            request.check(acl.GROUP, name)
            check_group_name(name)
            node.dynamic.set_group(name, change(node.dynamic.of_group(name)), validate_only=validate_only)
            if not validate_only:
                node.groups.consumers.reconfigure(name)
        else:
            request.check(acl.CLUSTER)
            if resource_type != ResourceType.BROKER:
                raise InvalidRequest(f"resource type {resource_type} has no settings here; 2, 4 and 32 have")
            node.dynamic.check_broker_name(name)
            node.dynamic.set_broker(name, change(node.dynamic.of_broker(name)), validate_only=validate_only)
            if not validate_only:
                node.topics.reconfigure()
    except BrokerError as error:
        return error.code, str(error)
    except StorageError as error:
        return KafkaStorageError.code, str(error)
    return 0, None


def check_group_name(name: str) -> None:
    """Raises InvalidRequest: there are no settings of all groups."""
    if not name:
        raise InvalidRequest("a group needs a name; group.consumer.* of the broker hold for the others")


def _alter_topic(node: Node, name: str, change: Change, validate_only: bool) -> None:
    topic = node.topics.get(name)
    # What is wrong with the values is told even if there is no such topic, as by Kafka.
    present = {} if topic is None else topic.overrides
    overrides = check_overrides(node.settings, change(present), present)
    if topic is None:
        raise UnknownTopicOrPartition()
    check_internal_settings(name, overrides)
    if not validate_only:
        node.topics.alter(topic, overrides)
