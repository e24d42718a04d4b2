"""DescribeConfigs (key 32), versions 1-4: settings of topics (type 2) and of this broker (type 4).

Sources: 1 the topic's own, 4 the broker's configuration, 5 default; synonyms from v1, types and
documentation from v3. A broker's name is its id; broker settings are read-only. Errors: 3 unknown
topic, 42 another type or another broker's id.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from oncelog.broker.config_text import ConfigEntry, ResourceType, broker_entries, topic_entries
from oncelog.broker.names import check_topic_name
from oncelog.errors import BrokerError, InvalidRequest, UnknownTopicOrPartition
from oncelog.rules.authorization import ResourceType as acl
from oncelog.wire.messages import DescribeConfigsRequest, DescribeConfigsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 32

_Asked = DescribeConfigsRequest.DescribeConfigsResource


def handle(node: Node, request: Request, now_ms: int) -> DescribeConfigsResponse:
    message: DescribeConfigsRequest = request.message
    results = []
    for asked in _once(message.resources):
        result = DescribeConfigsResponse.DescribeConfigsResult(
            resource_type=asked.resource_type, resource_name=asked.resource_name, error_message=None
        )
        try:
            wanted = set(asked.configuration_keys or ())
            result.configs = [
                _config(entry, asked.resource_type == ResourceType.BROKER, message)
                for entry in _entries(node, request, asked)
                if not wanted or entry.name in wanted
            ]
        except BrokerError as error:
            result.error_code, result.error_message = error.code, error.message
        results.append(result)
    return DescribeConfigsResponse(results=results)


def _once(resources: list[_Asked]) -> Iterable[_Asked]:
    """Return each resource once, with all the keys that it was asked for.

    A broker has more than a hundred settings: a small request would else get an answer of gigabytes.
    """
    asked: dict[tuple[int, str], _Asked] = {}
    for resource in resources:
        first = asked.setdefault((resource.resource_type, resource.resource_name), resource)
        if first is resource:
            continue
        if first.configuration_keys and resource.configuration_keys:
            first.configuration_keys += resource.configuration_keys
        else:
            first.configuration_keys = None
    return asked.values()


def _entries(
    node: Node, request: Request, asked: DescribeConfigsRequest.DescribeConfigsResource
) -> Iterable[ConfigEntry]:
    if asked.resource_type == ResourceType.TOPIC:
        request.check(acl.TOPIC, asked.resource_name)
        check_topic_name(asked.resource_name)
        topic = node.topics.get(asked.resource_name)
        if topic is None:
            raise UnknownTopicOrPartition()
        return topic_entries(node.settings, topic.overrides)
    if asked.resource_type == ResourceType.BROKER:
        request.check(acl.CLUSTER)
        if asked.resource_name not in ("", str(node.node_id)):
            raise InvalidRequest(f"this is broker {node.node_id}, not {asked.resource_name!r}")
        return broker_entries(node.settings)
    raise InvalidRequest(f"resource type {asked.resource_type} is not served; 2 is a topic, 4 a broker")


def _config(
    entry: ConfigEntry, is_read_only: bool, message: DescribeConfigsRequest
) -> DescribeConfigsResponse.DescribeConfigsResourceResult:
    synonyms = entry.synonyms if message.include_synonyms else ()
    return DescribeConfigsResponse.DescribeConfigsResourceResult(
        name=entry.name,
        value=entry.value,
        read_only=is_read_only,
        config_source=entry.source,
        is_sensitive=entry.is_sensitive,
        synonyms=[
            DescribeConfigsResponse.DescribeConfigsSynonym(name=s.name, value=s.value, source=s.source)
            for s in synonyms
        ],
        config_type=entry.wire_type,
        documentation=entry.doc if message.include_documentation else None,
    )
