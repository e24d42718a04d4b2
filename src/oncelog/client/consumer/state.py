"""What the consumer keeps per partition, and what it asks to have fetched or looked up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from oncelog.client.consumer.completed_fetch import Piece
from oncelog.types import TopicPartition
from oncelog.wire.messages import FetchRequest

Reset = Literal["earliest", "latest", "committed"]
"""Where to look up a position; committed: at the group's offset, else where auto.offset.reset says."""


@dataclass(slots=True)
class PartitionState:
    """An assigned partition. `position` and `fetch_offset` are None until looked up as `reset` says.

    `generation` is replaced by a seek; what was asked for under another one is void. A mark of its own
    rather than a number, so that a partition assigned again does not take answers of its earlier life.
    """

    position: int | None = None
    fetch_offset: int | None = None
    reset: Reset | None = None
    generation: object = field(default_factory=object)
    is_paused: bool = False
    is_resetting: bool = False
    # The broker has nothing at `fetch_offset`, and older records wait: ask again when those are delivered.
    is_out_of_range: bool = False
    pieces: deque[Piece] = field(default_factory=deque)
    high_watermark: int | None = None
    last_stable_offset: int | None = None

    def void(self) -> None:
        """Forget everything fetched or under way."""
        self.generation = object()
        self.is_resetting = self.is_out_of_range = False
        self.pieces.clear()

    def move_to(self, offset: int) -> None:
        self.void()
        self.position = self.fetch_offset = offset
        self.reset = None

    def waiting_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class FetchCall:
    """A fetch to send; give it back with the answer. `expected` is (fetch offset, generation)."""

    node_id: int
    lane: int
    request: FetchRequest
    expected: dict[TopicPartition, tuple[int, object]]


@dataclass(frozen=True, slots=True)
class ResetCall:
    """A position to look up; give it back with the offset found."""

    tp: TopicPartition
    to: Reset
    generation: object
