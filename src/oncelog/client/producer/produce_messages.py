"""Batches to a Produce request, and its answer by partition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from oncelog.client.producer.batch import ProducerBatch
from oncelog.errors import MisuseError
from oncelog.types import TopicPartition
from oncelog.wire.messages import ProduceRequest

MAX_PRODUCE_VERSION = 12
"""Later versions name topics by id."""
REQUEST_OVERHEAD_BYTES = 512
"""Room kept for a request's own fields below max.request.size."""


class ProduceCall(NamedTuple):
    """One request to send to one broker now. Without `is_answered` (acks=0) success is having sent it."""

    node_id: int
    message: ProduceRequest
    batches: list[ProducerBatch]
    is_answered: bool


def produce_request(
    batches: Iterable[ProducerBatch], acks: int, timeout_ms: int, transactional_id: str | None = None
) -> ProduceRequest:
    """One request for encoded batches, at most one per partition. Raises MisuseError."""
    topics: dict[str, list[ProduceRequest.PartitionProduceData]] = {}
    for batch in batches:
        if batch.data is None:
            raise MisuseError(f"a batch of {batch.tp} was not encoded before it was sent")
        data = ProduceRequest.PartitionProduceData(index=batch.tp.partition, records=batch.data)
        topics.setdefault(batch.tp.topic, []).append(data)
    return ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=timeout_ms,
        topic_data=[
            ProduceRequest.TopicProduceData(name=topic, partition_data=partitions)
            for topic, partitions in topics.items()
        ],
    )


def answers_by_partition(response: Any) -> dict[TopicPartition, Any]:
    """A Produce answer's rows by topic and partition."""
    return {
        TopicPartition(topic.name, row.index): row
        for topic in response.responses
        for row in topic.partition_responses
    }
