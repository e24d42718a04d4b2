"""The consumer's state per partition, and the calls that it wants to have made."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from oncelog.client.consumer.completed_fetch import CompletedFetch
from oncelog.types import TopicPartition
from oncelog.wire.messages import FetchRequest

Reset = Literal["earliest", "latest", "committed"]
"""The way to look up a position.

`committed`: the group's offset, or without one what auto.offset.reset says.
"""


@dataclass(slots=True)
class PartitionState:
    """An assigned partition. `position` and `fetch_offset` are None until looked up as `reset` says.

    A seek replaces `generation`, which invalidates all calls made under the old one. It is an object rather
    than a number, so that a partition that is assigned again takes no responses to its earlier calls.
    """

    position: int | None = None
    fetch_offset: int | None = None
    reset: Reset | None = None
    generation: object = field(default_factory=object)
    is_paused: bool = False
    is_resetting: bool = False
    # The broker has no record at `fetch_offset`. Earlier records wait: fetch again after their delivery.
    is_out_of_range: bool = False
    completed_fetches: deque[CompletedFetch] = field(default_factory=deque)
    high_watermark: int | None = None
    last_stable_offset: int | None = None

    def invalidate(self) -> None:
        """Drop everything fetched, and ignore the responses to calls in flight."""
        self.generation = object()
        self.is_resetting = self.is_out_of_range = False
        self.completed_fetches.clear()

    def move_to(self, offset: int) -> None:
        """Set the position."""
        self.invalidate()
        self.position = self.fetch_offset = offset
        self.reset = None

    def undelivered_bytes(self) -> int:
        """Return the size of the fetched batches that were not delivered yet."""
        return sum(completed.size_bytes for completed in self.completed_fetches)


@dataclass(frozen=True, slots=True)
class FetchCall:
    """A fetch to send, and to return with its response.

    `expected`: (fetch offset, generation) per partition.
    """

    node_id: int
    connection: int
    request: FetchRequest
    expected: dict[TopicPartition, tuple[int, object]]


@dataclass(frozen=True, slots=True)
class ResetCall:
    """A position to look up. The caller returns it with the result."""

    tp: TopicPartition
    to: Reset
    generation: object
