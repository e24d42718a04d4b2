"""Words for events: one line each, shared by the proxy's table and the diagrams."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from oncelog.testing.proxy.events import BatchSummary, Direction, Fate, Outcome, WireEvent

_FATE_WORDS = {
    Fate.PASSED: "",
    Fate.DROPPED: "LOST",
    Fate.CUT: "LOST, connection cut",
    Fate.HELD: "held back",
    Fate.RELEASED: "let go",
    Fate.COPY: "second copy",
    Fate.SWALLOWED: "nobody waits for it",
    Fate.QUEUED: "waits its turn",
    Fate.LOST: "LOST",
    Fate.FORGED: "by the proxy",
}


def sequence_text(batch: BatchSummary) -> str:
    """`seq 3-5`, `seq 3` for one record."""
    if batch.base_sequence == batch.last_sequence:
        return f"seq {batch.base_sequence}"
    return f"seq {batch.base_sequence}–{batch.last_sequence}"


class Where(Enum):
    """How a message's partition is named: not, by its number, or with its topic."""

    NOWHERE = 0
    PARTITION = 1
    TOPIC_PARTITION = 2

    def text(self, topic: str, partition: int) -> str:
        """The name, followed by two spaces unless it is empty."""
        return {0: "", 1: f"partition {partition}  ", 2: f"{topic}-{partition}  "}[self.value]


def batch_text(batch: BatchSummary, where: Where = Where.TOPIC_PARTITION) -> str:
    """Where it goes, who numbered it, and how."""
    place = where.text(batch.topic, batch.partition)
    if batch.producer_id is None:
        return f"{place}{batch.records_count} records, unnumbered"
    return f"{place}pid {batch.producer_id} epoch {batch.producer_epoch}  {sequence_text(batch)}"


def outcome_text(outcome: Outcome, where: Where = Where.TOPIC_PARTITION) -> str:
    """The error's name, or the offset."""
    place = where.text(outcome.topic, outcome.partition)
    if outcome.error_code:
        return f"{place}{outcome.error_name}"
    return f"{place}ok" + ("" if outcome.base_offset is None else f"  offset {outcome.base_offset}")


def label(event: WireEvent, where: Where = Where.TOPIC_PARTITION) -> str:
    """What a message says, without its fate."""
    if event.direction is Direction.NOTE:
        return event.detail
    name = event.api + (" answer" if event.direction is Direction.RESPONSE else "")
    parts: Sequence[str] = [
        *(batch_text(batch, where) for batch in event.batches),
        *(outcome_text(outcome, where) for outcome in event.outcomes),
    ]
    if event.said:
        parts = [event.said]
    if event.producer is not None:
        parts = [f"pid {event.producer[0]} epoch {event.producer[1]}"]
    if event.direction is Direction.REQUEST and event.acks == 0:
        parts = [*parts, "acks=0"]
    return "  ".join([name, "; ".join(parts)]).rstrip() if parts else name


def fate_text(event: WireEvent) -> str:
    """What became of a message; empty when it simply passed."""
    return "; ".join(text for text in (_FATE_WORDS[event.fate], event.detail) if text)


def event_line(event: WireEvent) -> str:
    """One line of the proxy's table."""
    if event.direction is Direction.NOTE:
        return f"{event.number:>6} {event.time_ms:>10.1f}  # {event.detail}"
    arrow = "→" if event.direction is Direction.REQUEST else "←"
    error = f"  error {event.error_code}" if event.error_code else ""
    fate = f"  [{fate_text(event)}]" if fate_text(event) else ""
    head = (
        f"{event.number:>6} {event.time_ms:>10.1f}  {event.connection:>3} {event.correlation_id:>5} {arrow}"
    )
    return f"{head} {label(event)}{error}{fate}"
