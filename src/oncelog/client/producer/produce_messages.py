"""Builds Produce requests from batches, and reads their responses by partition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from oncelog.client.producer.batch import ProducerBatch
from oncelog.errors import MisuseError
from oncelog.types import TopicPartition
from oncelog.wire.messages import ProduceRequest

MAX_PRODUCE_VERSION = 12
"""The last version of Produce that identifies topics by name; later versions use topic ids."""
REQUEST_OVERHEAD_BYTES = 512
"""The part of max.request.size that is reserved for a request's own fields."""


class ProduceCall(NamedTuple):
    """A request to send to one broker now. With acks=0 it gets no response, and is complete once written."""

    node_id: int
    message: ProduceRequest
    batches: list[ProducerBatch]
    expects_response: bool


def produce_request(
    batches: Iterable[ProducerBatch], acks: int, timeout_ms: int, transactional_id: str | None = None
) -> ProduceRequest:
    """Return a request for encoded batches, at most one per partition.

    Raises MisuseError for a batch that is not encoded.
    """
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


def responses_by_partition(response: Any) -> dict[TopicPartition, Any]:
    """Return the parts of a Produce response by partition."""
    return {
        TopicPartition(topic.name, row.index): row
        for topic in response.responses
        for row in topic.partition_responses
    }
