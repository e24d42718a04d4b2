"""ListOffsets as a client asks it: earliest, latest, or the first record at or after a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from oncelog.errors import BrokerError, MisuseError, error_for_code
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.messages import ListOffsetsRequest, ListOffsetsResponse

OffsetSpec = Literal["earliest", "latest", "max-timestamp"] | int
"""Which offset is asked for; a number is milliseconds since the epoch."""

_TIMESTAMP_OF: dict[str, int] = {"latest": -1, "earliest": -2, "max-timestamp": -3}
_MAX_TIMESTAMP_VERSION = 7


@dataclass(frozen=True, slots=True)
class OffsetAt:
    """An offset found; both None when no record is at or after the time asked for.

    `timestamp_ms` is that of the record found, None for earliest and latest.
    """

    offset: int | None
    timestamp_ms: int | None
    leader_epoch: int | None


def timestamp_of(spec: OffsetSpec) -> int:
    """The number that means `spec` in the protocol. Raises MisuseError."""
    if isinstance(spec, int) and spec >= 0:
        return spec
    if isinstance(spec, str) and spec in _TIMESTAMP_OF:
        return _TIMESTAMP_OF[spec]
    raise MisuseError(
        f"{spec!r} is not an offset to look up: give earliest, latest, max-timestamp or ms >= 0"
    )


def min_version_for(specs: Mapping[TopicPartition, OffsetSpec]) -> int | None:
    """The version that knows all of `specs`; None for any."""
    return _MAX_TIMESTAMP_VERSION if "max-timestamp" in specs.values() else None


def list_offsets_request(
    specs: Mapping[TopicPartition, OffsetSpec], isolation: Isolation, timeout_ms: int
) -> ListOffsetsRequest:
    """One request for all partitions of `specs`, which one broker must lead."""
    topics: dict[str, list[ListOffsetsRequest.ListOffsetsPartition]] = {}
    for tp, spec in specs.items():
        row = ListOffsetsRequest.ListOffsetsPartition(
            partition_index=tp.partition, timestamp=timestamp_of(spec)
        )
        topics.setdefault(tp.topic, []).append(row)
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=int(isolation),
        topics=[
            ListOffsetsRequest.ListOffsetsTopic(name=name, partitions=rows) for name, rows in topics.items()
        ],
        timeout_ms=timeout_ms,
    )


def offsets_of(response: ListOffsetsResponse) -> Iterator[tuple[TopicPartition, OffsetAt | BrokerError]]:
    """What the answer says per partition."""
    for topic in response.topics:
        for row in topic.partitions:
            tp = TopicPartition(topic.name, row.partition_index)
            if row.error_code:
                yield tp, error_for_code(row.error_code, f"looking up offsets of {tp}")
            else:
                yield (
                    tp,
                    OffsetAt(
                        offset=row.offset if row.offset >= 0 else None,
                        timestamp_ms=row.timestamp if row.timestamp >= 0 else None,
                        leader_epoch=row.leader_epoch if row.leader_epoch >= 0 else None,
                    ),
                )
