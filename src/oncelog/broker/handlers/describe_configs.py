"""DescribeConfigs (key 32), versions 1-4: settings of topics (type 2), of this broker (4), of groups (32).

Sources: 1 the topic's own, 2 set for this broker while it runs, 3 set for the whole cluster, 4 the broker's
configuration, 5 default, 8 the group's own; synonyms from v1, types and documentation from v3. A broker's
name is its id; an empty name asks for what was set for the whole cluster. Errors: UNKNOWN_TOPIC_OR_PARTITION,
INVALID_REQUEST (another type, another broker's id, a group without a name).
"""

from __future__ import annotations

from collections.abc import Iterable

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
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps
from oncelog.broker.topics.names import check_topic_name
from oncelog.errors import BrokerError, InvalidRequest, UnknownTopicOrPartition
from oncelog.rules.security.authorization import ResourceType as acl
from oncelog.wire.messages import DescribeConfigsRequest, DescribeConfigsResponse

KEY = 32

_Asked = DescribeConfigsRequest.DescribeConfigsResource


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = answer_in_steps(state.slots, _answer(state, request))
    return answer


def _answer(state: BrokerState, request: Request) -> Work[DescribeConfigsResponse]:
    message: DescribeConfigsRequest = request.message
    results, budget = [], StepBudget(state.limits.request_step_elements)
    for asked in _once(message.resources):
        result = DescribeConfigsResponse.DescribeConfigsResult(
            resource_type=asked.resource_type, resource_name=asked.resource_name, error_message=None
        )
        cost = 1
        try:
            wanted = set(asked.configuration_keys or ())
            entries = list(_entries(state, request, asked))
            cost += len(entries)
            result.configs = [
                _config(entry, message) for entry in entries if not wanted or entry.name in wanted
            ]
        except BrokerError as error:
            result.error_code, result.error_message = error.code, error.message
        results.append(result)
        if budget.spend(cost):
            yield None
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
    state: BrokerState, request: Request, asked: DescribeConfigsRequest.DescribeConfigsResource
) -> Iterable[ConfigEntry]:
    if asked.resource_type == ResourceType.TOPIC:
        request.authorize(acl.TOPIC, asked.resource_name)
        check_topic_name(asked.resource_name)
        topic = state.topics.get(asked.resource_name)
        if topic is None:
            raise UnknownTopicOrPartition()
        return topic_entries(state.settings, topic.overrides)
    if asked.resource_type == ResourceType.BROKER:
        request.authorize(acl.CLUSTER)
        state.dynamic.check_broker_name(asked.resource_name)
        if asked.resource_name == CLUSTER:
            return cluster_entries(state.dynamic.of_broker(CLUSTER))
        return broker_entries(state.settings)
    if asked.resource_type == ResourceType.GROUP:
        request.authorize(acl.GROUP, asked.resource_name)
        check_group_name(asked.resource_name)
        return group_entries(state.settings, state.dynamic.of_group(asked.resource_name))
    raise InvalidRequest(f"resource type {asked.resource_type} has no settings here; 2, 4 and 32 have")


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
