"""The common part of AlterConfigs and IncrementalAlterConfigs: validate changes and store them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from oncelog.broker.coordinators.internal_topic_config import check_internal_settings
from oncelog.broker.request import Request
from oncelog.broker.settings.config_text import ResourceType
from oncelog.broker.settings.dynamic_config import MAX_GROUP_NAME_CHARS, validate_broker_settings
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work
from oncelog.broker.topics.topic_config import check_overrides
from oncelog.broker.topics.topic_names import check_topic_name
from oncelog.broker.topics.topics import Topic
from oncelog.errors import (
    BrokerError,
    InvalidRequest,
    KafkaStorageError,
    StorageError,
    UnknownTopicOrPartition,
    without_traceback,
)
from oncelog.rules.security.authorization import ResourceType as acl
from oncelog.rules.storage.topic_state import TopicState

Change = Callable[[Mapping[str, str]], Mapping[str, str | None]]
"""(the settings that a resource itself has) -> its settings after the change.

The function may raise a BrokerError.
"""


class Resource(Protocol):
    """The type and name of a topic, broker or group, as both requests have them."""

    resource_type: int
    resource_name: str


class Config(Protocol):
    """A setting in a request. `value` is None if the request has null."""

    name: str
    value: str | None


def _named_twice(resources: Iterable[Resource]) -> Collection[tuple[int, str]]:
    """Return the type and name of the resources that a request names more than once."""
    counted = Counter((resource.resource_type, resource.resource_name) for resource in resources)
    return {key for key, count in counted.items() if count > 1}


def check_no_duplicates(configs: Iterable[Config]) -> None:
    """Raise InvalidRequest if a setting is named twice."""
    repeated = [name for name, count in Counter(config.name for config in configs).items() if count > 1]
    if repeated:
        raise InvalidRequest(
            f"these settings occur twice: {', '.join(repeated)}; a request may change each one once"
        )


def check_has_value(config: Config) -> None:
    """Raise InvalidRequest if the setting's value is null."""
    if config.value is None:
        raise InvalidRequest(f"{config.name} needs a value; null is only for DELETE")


def alter(
    state: BrokerState, request: Request, changes: Sequence[tuple[Resource, Change]], validate_only: bool
) -> Work[list[tuple[int, str | None]]]:
    """Change resources durably, in bounded steps. The caller must run all steps.

    Return an error code and message for each resource; (0, None) means success. With `validate_only` the
    changes are only checked. Requests take turns: a change of one setting is computed from all others of its
    resource, which no other request may change until the change is stored. See
    test_two_requests_that_change_settings_take_turns.
    """
    dynamic = state.dynamic
    while dynamic.is_being_altered:
        yield None
    dynamic.is_being_altered = True
    try:
        return (yield from _alter(state, request, changes, validate_only))
    finally:
        dynamic.is_being_altered = False


def _alter(
    state: BrokerState, request: Request, changes: Sequence[tuple[Resource, Change]], validate_only: bool
) -> Work[list[tuple[int, str | None]]]:
    plan, budget = _Plan(state, request), StepBudget(state.limits.partitions_per_step)
    repeated = _named_twice(resource for resource, _ in changes)
    refusals: list[BrokerError | None] = []
    for resource, change in changes:
        try:
            if (resource.resource_type, resource.resource_name) in repeated:
                raise InvalidRequest(
                    f"{resource.resource_name!r} occurs twice; a request may change each resource once"
                )
            plan.add(resource, change)
        except BrokerError as error:
            refusals.append(without_traceback(error))
        else:
            refusals.append(None)
        if budget.spend():
            yield None
    failures = {} if validate_only else (yield from plan.store())
    results = []
    for (resource, _), refusal in zip(changes, refusals, strict=True):
        if refusal is None and not validate_only and plan.is_deleted(resource):
            refusal = UnknownTopicOrPartition()
        failure = failures.get(resource.resource_type, (0, None))
        results.append(failure if refusal is None else (refusal.code, refusal.message))
    return results


class _Plan:
    """The changes of one request, validated one by one and stored together.

    One file has the settings of all topics, and another one those of the broker and of all groups. Each file
    is written once: one write for each resource would take minutes.
    """

    def __init__(self, state: BrokerState, request: Request) -> None:
        self._state, self._request = state, request
        self._topics: dict[str, tuple[Topic, dict[str, str]]] = {}
        self._brokers: dict[str, dict[str, str]] = {}
        self._groups: dict[str, dict[str, str]] = {}
        self._new_group_count = 0

    def add(self, resource: Resource, change: Change) -> None:
        """Add the change of a resource. Raises a BrokerError if the change is invalid or not authorized."""
        name = resource.resource_name
        if resource.resource_type == ResourceType.TOPIC:
            self._request.authorize(acl.TOPIC, name)
            self._add_topic(name, change)
        elif resource.resource_type == ResourceType.GROUP:
            self._request.authorize(acl.GROUP, name)
            check_group_name(name)
            self._add_group(name, change)
        else:
            self._request.authorize(acl.CLUSTER)
            if resource.resource_type != ResourceType.BROKER:
                raise InvalidRequest(
                    f"resource type {resource.resource_type} has no settings; use 2 (topic), "
                    "4 (broker) or 32 (group)"
                )
            dynamic = self._state.dynamic
            dynamic.check_broker_name(name)
            self._brokers[name] = validate_broker_settings(change(dynamic.of_broker(name)))

    def _add_topic(self, name: str, change: Change) -> None:
        if not name:
            raise InvalidRequest(
                "the topic name is empty; settings for all topics are settings of the broker"
            )
        topic = self._state.topics.get(name)
        existing = {} if topic is None else topic.overrides
        changed = change(existing)
        # Like Kafka, report a bad name, then a bad value, even if the topic does not exist.
        check_topic_name(name)
        overrides = check_overrides(self._state.settings, changed, existing)
        if topic is None:
            raise UnknownTopicOrPartition()
        check_internal_settings(name, overrides)
        self._topics[name] = topic, overrides

    def _add_group(self, name: str, change: Change) -> None:
        dynamic = self._state.dynamic
        existing = dynamic.of_group(name)
        values = dynamic.validate_group_settings(change(existing))
        if values and not existing:
            if len(name) > MAX_GROUP_NAME_CHARS:
                raise InvalidRequest(
                    f"the group name has {len(name)} characters; a group with settings has at "
                    f"most {MAX_GROUP_NAME_CHARS}"
                )
            dynamic.check_room(self._new_group_count)
            self._new_group_count += 1
        self._groups[name] = values

    def is_deleted(self, resource: Resource) -> bool:
        """Return True if another request has deleted the topic since its change was validated."""
        planned = self._topics.get(resource.resource_name)
        is_topic = resource.resource_type == ResourceType.TOPIC
        return is_topic and planned is not None and planned[0].state is not TopicState.LIVE

    def store(self) -> Work[dict[int, tuple[int, str | None]]]:
        """Store and apply all changes.

        Return an error code and message for each resource type that failed.
        """
        state = self._state
        failures: dict[int, tuple[int, str | None]] = {}
        try:
            if self._topics:
                yield from state.topics.alter_in_steps(list(self._topics.values()))
        except (StorageError, KafkaStorageError) as error:
            failures[int(ResourceType.TOPIC)] = KafkaStorageError.code, str(error)
        try:
            if self._brokers or self._groups:
                yield from state.dynamic.store(self._brokers, self._groups)
            if self._brokers:
                yield from state.topics.reconfigure()
        except (StorageError, KafkaStorageError) as error:
            failure: tuple[int, str | None] = KafkaStorageError.code, str(error)
            return failures | {int(ResourceType.BROKER): failure, int(ResourceType.GROUP): failure}
        for name in self._groups:
            state.groups.consumers.reconfigure(name)
        return failures


def check_group_name(name: str) -> None:
    """Raise InvalidRequest if the name is empty: there are no settings for all groups."""
    if not name:
        raise InvalidRequest(
            "the group name is empty; to change all groups, set the broker's group.consumer.* settings"
        )
