"""The ids of the topics that a transaction writes to, which show if one was deleted and created again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from oncelog.client.admin.blocking import Admin
from oncelog.spark.sink.decisions import decide_same_topics
from oncelog.spark.sink.sink_options import SinkSettings


def topic_ids(admin: Admin, topics: Iterable[str]) -> dict[str, str | None]:
    """Return the current id of each topic; None for each topic on a cluster without topic ids."""
    topics = sorted(topics)
    found = admin.describe_topics(topics) if topics else {}
    return {topic: description.topic_id for topic, description in found.items()}


def check_topics(
    admin: Admin, before: Collection[tuple[str, str | None]], batch_id: int, task: int | None = None
) -> None:
    """Raise SinkError if the current id of a topic differs from its id in `before`."""
    refusal = decide_same_topics(before, topic_ids(admin, {topic for topic, _ in before}))
    if refusal is not None:
        raise refusal.error(batch_id, task)


def marker_topic_id(admin: Admin, settings: SinkSettings) -> str | None:
    """Return the current id of the marker topic, or None on a cluster without topic ids."""
    return topic_ids(admin, [settings.marker_topic])[settings.marker_topic]
