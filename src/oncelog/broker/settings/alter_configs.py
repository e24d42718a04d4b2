"""What AlterConfigs and IncrementalAlterConfigs share: find the resource, check, store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from oncelog.broker.coordinators.internal_topic_config import check_internal_settings
from oncelog.broker.request import Request
from oncelog.broker.settings.config_text import ResourceType
from oncelog.broker.settings.dynamic_config import MAX_GROUP_NAME_CHARS, checked_broker
from oncelog.broker.state import BrokerState
from oncelog.broker.topics.names import check_topic_name
from oncelog.broker.topics.topic_config import check_overrides
from oncelog.errors import (
    BrokerError,
    InvalidRequest,
    KafkaStorageError,
    StorageError,
    UnknownTopicOrPartition,
)
from oncelog.rules.security.authorization import ResourceType as acl

if TYPE_CHECKING:
    from oncelog.broker.topics.topics import Topic

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


def _named_twice(resources: Iterable[Resource]) -> Collection[tuple[int, str]]:
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
    state: BrokerState, request: Request, changes: Sequence[tuple[Resource, Change]], validate_only: bool
) -> list[tuple[int, str | None]]:
    """Error code and message of each; (0, None) when the change holds and is on disk."""
    plan = _Plan(state, request)
    repeated = _named_twice(asked for asked, _ in changes)
    refusals: list[BrokerError | None] = []
    for asked, change in changes:
        try:
            if (asked.resource_type, asked.resource_name) in repeated:
                raise InvalidRequest(f"{asked.resource_name!r} is named twice; name each resource once")
            plan.add(asked, change)
        except BrokerError as error:
            refusals.append(error)
        else:
            refusals.append(None)
    failures = {} if validate_only else plan.store()
    return [
        (refusal.code, refusal.message)
        if refusal is not None
        else failures.get(asked.resource_type, (0, None))
        for (asked, _), refusal in zip(changes, refusals, strict=True)
    ]


class _Plan:
    """The changes of one request, checked one by one and stored in one write.

    A file holds every topic, another every group with settings: written for each resource, one request would
    stop the broker for minutes.
    """

    def __init__(self, state: BrokerState, request: Request) -> None:
        self._state, self._request = state, request
        self._topics: list[tuple[Topic, dict[str, str]]] = []
        self._brokers: dict[str, dict[str, str]] = {}
        self._groups: dict[str, dict[str, str]] = {}
        self._new_group_count = 0

    def add(self, asked: Resource, change: Change) -> None:
        """Take a resource's change in. Raises a BrokerError, and leaves it out."""
        name = asked.resource_name
        if asked.resource_type == ResourceType.TOPIC:
            self._request.authorize(acl.TOPIC, name)
            self._add_topic(name, change)
        elif asked.resource_type == ResourceType.GROUP:
            self._request.authorize(acl.GROUP, name)
            check_group_name(name)
            self._add_group(name, change)
        else:
            self._request.authorize(acl.CLUSTER)
            if asked.resource_type != ResourceType.BROKER:
                raise InvalidRequest(
                    f"resource type {asked.resource_type} has no settings here; 2, 4 and 32 have"
                )
            dynamic = self._state.dynamic
            dynamic.check_broker_name(name)
            self._brokers[name] = checked_broker(change(dynamic.of_broker(name)))

    def _add_topic(self, name: str, change: Change) -> None:
        if not name:
            raise InvalidRequest("a topic has a name; there are no settings for all topics")
        topic = self._state.topics.get(name)
        present = {} if topic is None else topic.overrides
        changed = change(present)
        # Like Kafka, report a bad name, then a bad value, even if the topic does not exist.
        check_topic_name(name)
        overrides = check_overrides(self._state.settings, changed, present)
        if topic is None:
            raise UnknownTopicOrPartition()
        check_internal_settings(name, overrides)
        self._topics.append((topic, overrides))

    def _add_group(self, name: str, change: Change) -> None:
        dynamic = self._state.dynamic
        present = dynamic.of_group(name)
        values = dynamic.checked_group(change(present))
        if values and not present:
            if len(name) > MAX_GROUP_NAME_CHARS:
                raise InvalidRequest(
                    f"the name of a group with settings has at most {MAX_GROUP_NAME_CHARS} characters"
                )
            dynamic.check_room(self._new_group_count)
            self._new_group_count += 1
        self._groups[name] = values

    def store(self) -> dict[int, tuple[int, str | None]]:
        """Let everything hold, durably. Return code and message of each type that could not be stored."""
        state = self._state
        failures: dict[int, tuple[int, str | None]] = {}
        try:
            if self._topics:
                state.topics.alter(self._topics)
        except StorageError as error:
            failures[int(ResourceType.TOPIC)] = KafkaStorageError.code, str(error)
        try:
            if self._brokers or self._groups:
                state.dynamic.store(self._brokers, self._groups)
        except StorageError as error:
            failure: tuple[int, str | None] = KafkaStorageError.code, str(error)
            return failures | {int(ResourceType.BROKER): failure, int(ResourceType.GROUP): failure}
        if self._brokers:
            state.topics.reconfigure()
        for name in self._groups:
            state.groups.consumers.reconfigure(name)
        return failures


def check_group_name(name: str) -> None:
    """Raises InvalidRequest: there are no settings of all groups."""
    if not name:
        raise InvalidRequest("a group needs a name; group.consumer.* of the broker hold for the others")
