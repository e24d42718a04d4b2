"""Topics for tests over raw connections. A topic is ready for use when all its partitions have leaders."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any

from oncelog.errors import NotLeaderOrFollower, UnknownLeaderEpoch, UnknownTopicId, UnknownTopicOrPartition
from oncelog.wire.messages import API_BY_NAME
from support.broker import RawClient
from support.scenarios.values import build
from support.wait import attempts

STEP_S = 0.02
"""Pause in seconds between two attempts at a request."""
NO_LEADER = {
    error.code for error in (UnknownTopicOrPartition, NotLeaderOrFollower, UnknownTopicId, UnknownLeaderEpoch)
}
"""Codes of the errors that a partition answers until it has a leader."""

_numbers = itertools.count()


def unused_name() -> str:
    """Return a name that no topic, group or transactional id of this process has."""
    return f"conformance-{next(_numbers)}"


class TopicPool:
    """Unused topics, by their options. One CreateTopics request creates many of them, to save time."""

    def __init__(self) -> None:
        self._unused: defaultdict[tuple[str, ...], deque[tuple[str, bytes]]] = defaultdict(deque)

    def take(self, client: RawClient, options: tuple[str, ...], count: int) -> tuple[str, bytes]:
        """Return the name and id of an unused topic. If none is left, create `count` topics first."""
        unused = self._unused[options]
        if not unused:
            unused.extend(create_topics(client, [unused_name() for _ in range(count)], options))
        return unused.popleft()


def create_topics(client: RawClient, names: list[str], options: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Create topics, wait for their leaders, and return each topic's name and id.

    `options` are words `key=value`: `partitions=2`, or a topic setting such as `cleanup.policy=compact`.
    """
    settings = dict(option.split("=", 1) for option in options)
    partitions = int(settings.pop("partitions", 1))
    configs = [{"name": key, "value": value} for key, value in settings.items()]
    topic = {"num_partitions": partitions, "replication_factor": 1, "configs": configs}
    body = {"topics": [{"name": name, **topic} for name in names], "timeout_ms": 10_000}
    created = client.ask(build(API_BY_NAME["CreateTopics"].request, body), 7).topics
    assert [result.error_code for result in created] == [0] * len(names), created
    wait_until_led(client, {result.topic_id: partitions for result in created})
    return [(result.name, result.topic_id) for result in created]


def wait_until_led(client: RawClient, partition_counts: dict[bytes, int], min_epoch: int = -1) -> None:
    """Return when every partition of these topics (topic id -> count) has a leader that answers Fetch.

    Topics are requested by id: after a deletion and a second creation, the name may still lead to the first
    topic. Fetch carries `min_epoch` as the current leader epoch, so a leader of an older epoch answers
    UNKNOWN_LEADER_EPOCH. With -1, any leader will do.
    """
    topics = [
        {
            "topic_id": topic_id,
            "partitions": [{"partition": i, "current_leader_epoch": min_epoch} for i in range(count)],
        }
        for topic_id, count in partition_counts.items()
    ]
    request = build(API_BY_NAME["Fetch"].request, {"topics": topics})
    responses: list[Any] = []
    for _ in attempts(lambda: f"a partition has no leader: {responses[-1]}", step_s=STEP_S):
        response = client.ask(request, 13)
        responses.append(response)
        if not NO_LEADER & {part.error_code for topic in response.responses for part in topic.partitions}:
            return
