"""DescribeConfigs (key 32), versions 1-4: the settings of topics, of this broker and of groups.

A topic has resource type 2, a broker 4, a group 32. A broker's resource name is its id; the empty name means
the dynamic settings of the whole cluster. Responses have synonyms and, from version 3 on, types and
documentation. Each value has a source:

    1  set for the topic
    2  set dynamically for this broker
    3  set dynamically for the whole cluster
    4  the broker's configuration file
    5  the default
    8  set for the group

Errors: UNKNOWN_TOPIC_OR_PARTITION; INVALID_REQUEST for another resource type, the id of another broker, or a
group without a name.
Source: KIP-133, KIP-226, KIP-569; Kafka's ConfigHelper.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

from oncelog.broker.encoded_response import EncodedInSteps, encode_in_steps
from oncelog.broker.request import Answer, Request
from oncelog.broker.settings.alter_configs import check_group_name
from oncelog.broker.settings.config_text import (
    ConfigEntry,
    ResourceType,
    broker_entries,
    cluster_entries,
    group_entries,
    topic_entries,
)
from oncelog.broker.settings.dynamic_config import CLUSTER
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.broker.topics.topic_names import check_topic_name
from oncelog.errors import BrokerError, InvalidRequest, UnknownTopicOrPartition
from oncelog.rules.security.authorization import ResourceType as acl
from oncelog.wire.messages import DescribeConfigsRequest, DescribeConfigsResponse

KEY = 32

_Requested = DescribeConfigsRequest.DescribeConfigsResource


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _answer(state, request))
    return answer


def _answer(state: BrokerState, request: Request) -> Work[EncodedInSteps]:
    # Each result is encoded as soon as it is made. A topic has thirty settings with synonyms: to encode those
    # of ten thousand topics at once would take a second. See
    # test_settings_of_many_topics_are_described_in_steps.
    results, budget = _Results(state, request), state.step_budget()
    response = DescribeConfigsResponse(results=cast(Any, results))
    version = request.header.api_version
    return (yield from encode_in_steps(response, version, budget, results.take_cost))


class _Results:
    """The results of a request. Each is made when the iteration reaches it."""

    def __init__(self, state: BrokerState, request: Request) -> None:
        self._state, self._request = state, request
        self._message: DescribeConfigsRequest = request.message
        self._resources = _once(self._message.resources)
        self._cost = 0

    def __len__(self) -> int:
        return len(self._resources)

    def __iter__(self) -> Iterator[DescribeConfigsResponse.DescribeConfigsResult]:
        for resource in self._resources:
            yield self._describe(resource)

    def take_cost(self) -> int:
        """Return the cost of the results that were made since the last call, at least 1."""
        cost, self._cost = self._cost, 0
        return max(cost, 1)

    def _describe(self, resource: _Requested) -> DescribeConfigsResponse.DescribeConfigsResult:
        result = DescribeConfigsResponse.DescribeConfigsResult(
            resource_type=resource.resource_type, resource_name=resource.resource_name, error_message=None
        )
        self._cost += 1
        try:
            keys = set(resource.configuration_keys or ())
            entries = list(_entries(self._state, self._request, resource))
            self._cost += len(entries)
            result.configs = [
                _config(entry, self._message) for entry in entries if not keys or entry.name in keys
            ]
        except BrokerError as error:
            result.error_code, result.error_message = error.code, error.message
        return result


def _once(resources: list[_Requested]) -> Collection[_Requested]:
    """Return each resource once, with all its requested keys.

    A broker has more than a hundred settings. If a small request could name the broker thousands of times and
    get all settings each time, the response would have gigabytes.
    """
    unique: dict[tuple[int, str], _Requested] = {}
    for resource in resources:
        first = unique.setdefault((resource.resource_type, resource.resource_name), resource)
        if first is resource:
            continue
        if first.configuration_keys and resource.configuration_keys:
            first.configuration_keys += resource.configuration_keys
        else:
            first.configuration_keys = None
    return unique.values()


def _entries(
    state: BrokerState, request: Request, resource: DescribeConfigsRequest.DescribeConfigsResource
) -> Iterable[ConfigEntry]:
    if resource.resource_type == ResourceType.TOPIC:
        request.authorize(acl.TOPIC, resource.resource_name)
        check_topic_name(resource.resource_name)
        topic = state.topics.get(resource.resource_name)
        if topic is None:
            raise UnknownTopicOrPartition()
        return topic_entries(state.settings, topic.overrides)
    if resource.resource_type == ResourceType.BROKER:
        request.authorize(acl.CLUSTER)
        state.dynamic.check_broker_name(resource.resource_name)
        if resource.resource_name == CLUSTER:
            return cluster_entries(state.dynamic.of_broker(CLUSTER))
        return broker_entries(state.settings)
    if resource.resource_type == ResourceType.GROUP:
        request.authorize(acl.GROUP, resource.resource_name)
        check_group_name(resource.resource_name)
        return group_entries(state.settings, state.dynamic.of_group(resource.resource_name))
    raise InvalidRequest(
        f"resource type {resource.resource_type} has no settings; use 2 (topic), 4 (broker) or 32 (group)"
    )


def _config(
    entry: ConfigEntry, message: DescribeConfigsRequest
) -> DescribeConfigsResponse.DescribeConfigsResourceResult:
    synonyms = entry.synonyms if message.include_synonyms else ()
    return DescribeConfigsResponse.DescribeConfigsResourceResult(
        name=entry.name,
        value=entry.value,
        read_only=entry.is_read_only,
        config_source=entry.source,
        is_sensitive=entry.is_sensitive,
        synonyms=[
            DescribeConfigsResponse.DescribeConfigsSynonym(name=s.name, value=s.value, source=s.source)
            for s in synonyms
        ],
        config_type=entry.wire_type,
        documentation=entry.doc if message.include_documentation else None,
    )
