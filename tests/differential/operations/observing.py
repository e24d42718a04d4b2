"""Observations that several subjects make at the end of a sequence: what clients and operators can see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from differential.sequence import Step, name, topic, topic_id

WHOLE = 1 << 20


def fetch_body(positions: list[tuple[str, int, Any]], *, isolation: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a Fetch from (topic, partition, offset) that does not wait."""
    topics = [
        {
            "topic": topic(text),
            "topic_id": topic_id(text),
            "partitions": [{"partition": index, "fetch_offset": offset, "partition_max_bytes": WHOLE}],
        }
        for text, index, offset in positions
    ]
    return {"max_wait_ms": 0, "min_bytes": 0, "isolation_level": isolation, "topics": topics} | fields


def list_offsets_body(topics: Mapping[str, Any], timestamp: int, isolation: int = 0) -> dict[str, Any]:
    """Return a ListOffsets request of all partitions."""
    rows = [
        {
            "name": topic(text),
            "partitions": [
                {"partition_index": i, "timestamp": timestamp} for i in range(options["partitions"])
            ],
        }
        for text, options in topics.items()
    ]
    return {"replica_id": -1, "isolation_level": isolation, "topics": rows}


def observe_partitions(topics: Mapping[str, Any]) -> list[Step]:
    """Observe the end offsets, records and producers of every partition, at both isolation levels."""
    places = [(text, index) for text, options in topics.items() for index in range(options["partitions"])]
    asked = [
        {"name": topic(text), "partition_indexes": list(range(options["partitions"]))}
        for text, options in topics.items()
    ]
    steps = [Step("ListOffsets", 7, list_offsets_body(topics, -2))]
    for isolation in (0, 1):
        steps.append(Step("ListOffsets", 7, list_offsets_body(topics, -1, isolation)))
        steps += [
            Step("Fetch", 12, fetch_body([(text, index, 0)], isolation=isolation)) for text, index in places
        ]
    return [*steps, Step("DescribeProducers", 0, {"topics": asked})]


def observe_transactions(ids: list[str]) -> list[Step]:
    """Observe the states of transactional ids."""
    return [Step("DescribeTransactions", 0, {"transactional_ids": [name(text) for text in ids]})]


def observe_offsets(groups: list[str]) -> list[Step]:
    """Observe all committed offsets of groups."""
    return [
        Step(
            "OffsetFetch", 8, {"groups": [{"group_id": name(text), "topics": None}], "require_stable": stable}
        )
        for text in groups
        for stable in (False, True)
    ]
