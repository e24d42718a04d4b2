"""Formats an event as one line of text, for the proxy's table and for diagrams."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from oncelog.testing.proxy.events import BatchSummary, Direction, Fate, Outcome, WireEvent

_FATE_TEXTS = {
    Fate.PASSED: "",
    Fate.DROPPED: "LOST",
    Fate.CUT: "LOST, connection cut",
    Fate.HELD: "held back",
    Fate.RELEASED: "released",
    Fate.COPY: "second copy",
    Fate.UNEXPECTED: "no request waits for it",
    Fate.QUEUED: "waits its turn",
    Fate.LOST: "LOST",
    Fate.FORGED: "by the proxy",
}


class PartitionLabel(Enum):
    """The form of a partition's name: no name, its number, or topic and number."""

    NONE = 0
    PARTITION = 1
    TOPIC_PARTITION = 2

    def text(self, topic: str, partition: int) -> str:
        """Return the partition's name, followed by two spaces; "" for NONE."""
        return {0: "", 1: f"partition {partition}  ", 2: f"{topic}-{partition}  "}[self.value]


def format_sequence(batch: BatchSummary) -> str:
    """Return `seq 3–5`, or `seq 3` for one record."""
    if batch.base_sequence == batch.last_sequence:
        return f"seq {batch.base_sequence}"
    return f"seq {batch.base_sequence}–{batch.last_sequence}"


def format_batch(batch: BatchSummary, label: PartitionLabel = PartitionLabel.TOPIC_PARTITION) -> str:
    """Return the partition of a batch, its producer id and epoch, and its sequence numbers."""
    partition = label.text(batch.topic, batch.partition)
    if batch.producer_id is None:
        return f"{partition}{batch.records_count} records, unnumbered"
    return f"{partition}pid {batch.producer_id} epoch {batch.producer_epoch}  {format_sequence(batch)}"


def format_outcome(outcome: Outcome, label: PartitionLabel = PartitionLabel.TOPIC_PARTITION) -> str:
    """Return the partition of an outcome, and its error or offset."""
    partition = label.text(outcome.topic, outcome.partition)
    if outcome.error_code:
        return f"{partition}{outcome.error_name}"
    return f"{partition}ok" + ("" if outcome.base_offset is None else f"  offset {outcome.base_offset}")


def format_event(event: WireEvent, label: PartitionLabel = PartitionLabel.TOPIC_PARTITION) -> str:
    """Return the API and the content of a message, without its fate."""
    if event.direction is Direction.NOTE:
        return event.detail
    name = event.api + (" answer" if event.direction is Direction.RESPONSE else "")
    parts: Sequence[str] = [
        *(format_batch(batch, label) for batch in event.batches),
        *(format_outcome(outcome, label) for outcome in event.outcomes),
    ]
    if event.said:
        parts = [event.said]
    if event.producer is not None:
        parts = [f"pid {event.producer[0]} epoch {event.producer[1]}"]
    if event.direction is Direction.REQUEST and event.acks == 0:
        parts = [*parts, "acks=0"]
    return "  ".join([name, "; ".join(parts)]).rstrip() if parts else name


def format_fate(event: WireEvent) -> str:
    """Return the fate of a message with its remark; "" if the message was forwarded without a remark."""
    return "; ".join(text for text in (_FATE_TEXTS[event.fate], event.detail) if text)


def format_line(event: WireEvent) -> str:
    """Return the line for an event in the proxy's table."""
    if event.direction is Direction.NOTE:
        return f"{event.number:>6} {event.time_ms:>10.1f}  # {event.detail}"
    arrow = "→" if event.direction is Direction.REQUEST else "←"
    error = f"  error {event.error_code}" if event.error_code else ""
    fate = f"  [{format_fate(event)}]" if format_fate(event) else ""
    head = (
        f"{event.number:>6} {event.time_ms:>10.1f}  {event.connection:>3} {event.correlation_id:>5} {arrow}"
    )
    return f"{head} {format_event(event)}{error}{fate}"
