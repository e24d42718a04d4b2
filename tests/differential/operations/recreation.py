"""Topics that are deleted, and mostly created again, while transactions and groups use them.

The steps are those of `transactions`, with deletions and creations between them. After the creation, requests
by topic id use the id of the new topic, and sometimes still the old id.
"""

from __future__ import annotations

from random import Random
from typing import Any

from differential.operations import admin, transactions
from differential.sequence import SENTINEL, Sequence, Step, Subject, ref, topic, topic_id


def draw(random: Random) -> Sequence:
    """Draw transactions during which one or both topics are deleted."""
    sequence = transactions.draw(random)
    steps: list[Step] = []
    keeps_old_id = random.random() < 0.2
    count = min(random.choice((1, 2, 3)), len(sequence.steps) - 1)
    places = random.sample(range(1, len(sequence.steps)), count)
    for number, step in enumerate(sequence.steps):
        if number in places:
            text = random.choice(sorted(transactions.TOPICS))
            steps.append(_deletion(random, text))
            if random.random() < 0.85:
                steps.append(_creation(text))
        steps.append(step if keeps_old_id else step._replace(body=_by_new_id(step.body)))
    observations = tuple(step._replace(body=_by_new_id(step.body)) for step in sequence.observations)
    topics = {**sequence.topics, SENTINEL: {}}
    return sequence._replace(topics=topics, steps=tuple(steps), observations=observations)


def _deletion(random: Random, text: str) -> Step:
    if random.random() < 0.5:
        return Step("DeleteTopics", 5, {"topic_names": [topic(text)], "timeout_ms": 30_000})
    row = {"name": None, "topic_id": _by_new_id(topic_id(text))}
    return Step("DeleteTopics", 6, {"topics": [row], "timeout_ms": 30_000})


def _creation(text: str) -> Step:
    count = transactions.TOPICS[text]["partitions"]
    row = {"name": topic(text), "num_partitions": count, "replication_factor": 1}
    body = {"topics": [row], "timeout_ms": 30_000}
    return Step("CreateTopics", 7, body, binds={f"{text}.id": "topics.0.topic_id"})


def _by_new_id(value: Any) -> Any:
    """Return the body with the topic's newest id in place of its first id."""
    if isinstance(value, list):
        return [_by_new_id(element) for element in value]
    if not isinstance(value, dict):
        return value
    if "$topic_id" in value:
        return ref(f"{value['$topic_id']}.id", value)
    return {key: _by_new_id(element) for key, element in value.items()}


SUBJECTS = (Subject("recreation", draw, (*transactions.RULES, admin.WHOLE_CLUSTER)),)
