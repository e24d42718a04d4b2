"""Creates topics for scenarios, and waits until all partitions of a topic have leaders."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from oncelog.conform.deadline import Deadline
from oncelog.conform.values import ERROR_NAMES, Mismatch, build
from oncelog.errors import NotLeaderOrFollower, UnknownLeaderEpoch, UnknownTopicId, UnknownTopicOrPartition
from oncelog.wire.messages import API_BY_NAME, NO_ID, Message

NO_LEADER = {
    error.code for error in (UnknownTopicOrPartition, NotLeaderOrFollower, UnknownTopicId, UnknownLeaderEpoch)
}
"""Error codes that Fetch returns for a partition that has no leader yet."""
CREATE_TIMEOUT_MS = 10_000
FIRST_FETCH_BY_ID = 13
"""First version of Fetch that identifies topics by id instead of name."""
WAIT_S = 60.0

_numbers = itertools.count()


class Client(Protocol):
    """A connection that sends requests as given."""

    def ask(self, message: Message, version: int) -> Any: ...


class Names:
    """A generator of names that no topic, group or transactional id of the cluster has."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def unused(self) -> str:
        return f"{self.prefix}-{next(_numbers)}"


class Topic(NamedTuple):
    name: str
    topic_id: bytes
    """The topic's id; NO_ID if the broker's topics have no ids."""


class Creation(NamedTuple):
    """The API versions and the node with which topics are created on a broker."""

    version: int
    """Version of CreateTopics."""
    fetch_version: int
    node_id: int | None = None
    """The node that gets all partitions. If None, the controller chooses the nodes."""


class TopicPool:
    """A pool of unused topics, grouped by their options. One CreateTopics request creates several topics, to
    save time.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._unused: defaultdict[tuple[str, ...], deque[Topic]] = defaultdict(deque)
        self.taken: list[str] = []
        """Names of the topics that scenarios took since the last clean-up. During a creation also the names
        of the new topics.
        """

    def take(
        self, client: Client, how: Creation, options: tuple[str, ...], count: int, deadline: Deadline
    ) -> Topic:
        """Return an unused topic. If there is none, create `count` topics first."""
        unused = self._unused[options]
        if not unused:
            names = [self._names.unused() for _ in range(count)]
            self.taken += names  # before the creation, so that the topics are deleted even if it fails
            topics = create_topics(client, names, options, how, deadline)
            self.taken = self.taken[: -len(names)]
            unused.extend(topics)
        topic = unused.popleft()
        self.taken.append(topic.name)
        return topic

    def take_all_unused(self) -> list[str]:
        """Remove all unused topics from the pool, and return their names."""
        names = [topic.name for topics in self._unused.values() for topic in topics]
        self._unused.clear()
        return names


def create_topics(
    client: Client, names: list[str], options: tuple[str, ...], how: Creation, deadline: Deadline
) -> list[Topic]:
    """Create topics, and wait for their leaders.

    `options` are words `key=value`: `partitions=2`, or a topic setting such as `cleanup.policy=compact`.
    Raises Mismatch if the broker refuses to create one, or a partition has no leader at the deadline.
    """
    settings = dict(option.split("=", 1) for option in options)
    partitions = int(settings.pop("partitions", 1))
    configs = [{"name": key, "value": value} for key, value in settings.items()]
    topic: dict[str, Any] = {"num_partitions": partitions, "replication_factor": -1, "configs": configs}
    if how.node_id is not None:
        assignments = [{"partition_index": i, "broker_ids": [how.node_id]} for i in range(partitions)]
        configs.append({"name": "min.insync.replicas", "value": "1"})
        topic |= {"num_partitions": -1, "assignments": assignments}
    body = {"topics": [{"name": name, **topic} for name in names], "timeout_ms": CREATE_TIMEOUT_MS}
    created = client.ask(build(API_BY_NAME["CreateTopics"].request, body), how.version).topics
    refused = [row for row in created if row.error_code]
    if refused or len(created) != len(names):
        text = f"{ERROR_NAMES[refused[0].error_code]}: {refused[0].error_message}" if refused else "no answer"
        raise Mismatch(f"the broker did not create topics: {text}")
    topics = [Topic(row.name, row.topic_id) for row in created]
    if how.fetch_version >= FIRST_FETCH_BY_ID and topics[0].topic_id != NO_ID:
        wait_until_led(client, {topic.topic_id: partitions for topic in topics}, deadline=deadline)
    else:
        _wait_until_names_led(client, topics, partitions, min(how.fetch_version, 12), deadline)
    return topics


def wait_until_led(
    client: Client,
    partition_counts: Mapping[bytes, int],
    min_epoch: int = -1,
    deadline: Deadline | None = None,
) -> None:
    """Return when every partition of these topics (topic id -> count) has a leader that answers Fetch.

    Fetch identifies the topics by id: if a topic was deleted and created again, the name may still refer to
    the first topic. Fetch carries `min_epoch` as the current leader epoch, so a leader of an older epoch
    answers UNKNOWN_LEADER_EPOCH. With -1, any leader will do.
    """
    if not partition_counts:
        return
    topics = [
        {
            "topic_id": topic_id,
            "partitions": [{"partition": i, "current_leader_epoch": min_epoch} for i in range(count)],
        }
        for topic_id, count in partition_counts.items()
    ]
    request = build(API_BY_NAME["Fetch"].request, {"topics": topics})
    _wait(lambda: client.ask(request, FIRST_FETCH_BY_ID), deadline or Deadline(WAIT_S))


def _wait_until_names_led(
    client: Client, topics: list[Topic], partitions: int, version: int, deadline: Deadline
) -> None:
    parts = [{"partition": i} for i in range(partitions)]
    body = {"topics": [{"topic": topic.name, "partitions": parts} for topic in topics]}
    request = build(API_BY_NAME["Fetch"].request, body)
    _wait(lambda: client.ask(request, version), deadline)


def _wait(fetch: Callable[[], Any], deadline: Deadline) -> None:
    responses: list[Any] = []
    for _ in deadline.attempts(lambda: Mismatch(f"a partition has no leader: {responses[-1]}")):
        response = fetch()
        responses[:] = [response]
        codes = {part.error_code for topic in response.responses for part in topic.partitions}
        if codes and not NO_LEADER & codes:
            return
