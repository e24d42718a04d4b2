"""Builds ListOffsets requests, and reads their responses. Source: KIP-79, KIP-734."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from oncelog.errors import BrokerError, MisuseError, error_for_code
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.messages import ListOffsetsRequest, ListOffsetsResponse

OffsetSpec = Literal["earliest", "latest", "max-timestamp"] | int
"""The offset to look up. A number is a time in milliseconds since the epoch."""

_TIMESTAMP_OF: dict[str, int] = {"latest": -1, "earliest": -2, "max-timestamp": -3}
_MAX_TIMESTAMP_VERSION = 7


@dataclass(frozen=True, slots=True)
class OffsetAt:
    """The result of an offset lookup. `offset` is None if no record has the requested time or a later one.

    `timestamp_ms` is the timestamp of the record at `offset`; None for "earliest" and "latest".
    """

    offset: int | None
    timestamp_ms: int | None
    leader_epoch: int | None


def timestamp_of(spec: OffsetSpec) -> int:
    """Return the timestamp of a ListOffsets request for `spec`. Raises MisuseError for an invalid `spec`."""
    if isinstance(spec, int) and spec >= 0:
        return spec
    if isinstance(spec, str) and spec in _TIMESTAMP_OF:
        return _TIMESTAMP_OF[spec]
    raise MisuseError(
        f"{spec!r} is not an offset to look up: use earliest, latest, max-timestamp or a timestamp in ms >= 0"
    )


def min_version_for(specs: Mapping[TopicPartition, OffsetSpec]) -> int | None:
    """Return the minimum version of ListOffsets that supports all of `specs`; None if every version does."""
    return _MAX_TIMESTAMP_VERSION if "max-timestamp" in specs.values() else None


def list_offsets_request(
    specs: Mapping[TopicPartition, OffsetSpec], isolation: Isolation, timeout_ms: int
) -> ListOffsetsRequest:
    """Return one request for all partitions of `specs`. They must have the same leader."""
    topics: dict[str, list[ListOffsetsRequest.ListOffsetsPartition]] = {}
    for tp, spec in specs.items():
        partition = ListOffsetsRequest.ListOffsetsPartition(
            partition_index=tp.partition, timestamp=timestamp_of(spec)
        )
        topics.setdefault(tp.topic, []).append(partition)
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=int(isolation),
        topics=[
            ListOffsetsRequest.ListOffsetsTopic(name=name, partitions=partitions)
            for name, partitions in topics.items()
        ],
        timeout_ms=timeout_ms,
    )


def offsets_of(response: ListOffsetsResponse) -> Iterator[tuple[TopicPartition, OffsetAt | BrokerError]]:
    """Yield the offset or error of each partition in a response."""
    for topic in response.topics:
        for partition in topic.partitions:
            tp = TopicPartition(topic.name, partition.partition_index)
            if partition.error_code:
                yield tp, error_for_code(partition.error_code, f"looking up offsets of {tp}")
            else:
                yield (
                    tp,
                    OffsetAt(
                        offset=partition.offset if partition.offset >= 0 else None,
                        timestamp_ms=partition.timestamp if partition.timestamp >= 0 else None,
                        leader_epoch=partition.leader_epoch if partition.leader_epoch >= 0 else None,
                    ),
                )
