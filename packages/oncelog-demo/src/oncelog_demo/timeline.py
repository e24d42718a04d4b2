"""Derive the history of each batch, as marks and counts, from the messages that the proxy saw. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from oncelog.testing.proxy.events import BatchSummary, Direction, Fate, Outcome, WireEvent

OUT_OF_ORDER = 45


class BatchEvent(StrEnum):
    """The outcome of one attempt to send a batch to the broker."""

    STORED = "stored and acknowledged"
    ACK_LOST = "stored, acknowledgement lost"
    REQUEST_LOST = "request lost"
    DUPLICATE = "retry recognised, not stored again"
    REJECTED = "out of order, rejected"
    UNANSWERED = "sent, never acknowledged"


@dataclass(frozen=True, slots=True)
class Mark:
    """One attempt to send a batch.

    `sequence` is the batch's base sequence. `time_ms` counts from the proxy's start. `late` is True if the
    proxy held the request back.
    """

    time_ms: float
    partition: int
    sequence: int
    records: int
    event: BatchEvent
    late: bool
    offset: int | None


_LOST = {Fate.DROPPED, Fate.CUT, Fate.LOST}


def list_marks(events: Iterable[WireEvent]) -> list[Mark]:
    """Return the marks of all batches with sequence numbers, in the order of their requests.

    If a batch is acknowledged with an offset that the partition had already assigned, the broker recognised a
    duplicate.
    """
    requests: dict[tuple[int, int], WireEvent] = {}
    late: set[tuple[int, int]] = set()
    responses: dict[tuple[int, int], WireEvent] = {}
    for event in events:
        journey = (event.connection, event.correlation_id)
        if event.api != "Produce":
            continue
        if event.direction == Direction.REQUEST:
            requests.setdefault(journey, event)
            if event.fate in (Fate.HELD, Fate.RELEASED):
                late.add(journey)
        elif event.direction == Direction.RESPONSE:
            responses[journey] = event
    return _marks_of(requests, responses, late)


def _marks_of(
    requests: dict[tuple[int, int], WireEvent],
    responses: dict[tuple[int, int], WireEvent],
    late: set[tuple[int, int]],
) -> list[Mark]:
    stored: set[tuple[int, int, int]] = set()
    marks = []
    # Sort by response time, because the broker decided in that order.
    last = float("inf")
    ordered = sorted(
        requests, key=lambda j: (responses[j].time_ms if j in responses else last, requests[j].time_ms)
    )
    for journey in ordered:
        request, response = requests[journey], responses.get(journey)
        for batch in request.batches:
            if batch.base_sequence is None:
                continue
            outcome = _outcome_of(batch, response)
            kind = _verdict(request, response, outcome)
            if outcome is not None and outcome.error_code == 0 and outcome.base_offset is not None:
                position = (batch.partition, batch.producer_epoch or 0, outcome.base_offset)
                if position in stored and kind is BatchEvent.STORED:
                    kind = BatchEvent.DUPLICATE
                stored.add(position)
            offset = outcome.base_offset if outcome else None
            marks.append(
                Mark(
                    request.time_ms,
                    batch.partition,
                    batch.base_sequence,
                    batch.records_count,
                    kind,
                    journey in late,
                    offset,
                )
            )
    return sorted(marks, key=lambda mark: mark.time_ms)


def _outcome_of(batch: BatchSummary, response: WireEvent | None) -> Outcome | None:
    outcomes: Sequence[Outcome] = response.outcomes if response else ()
    return next((o for o in outcomes if (o.topic, o.partition) == (batch.topic, batch.partition)), None)


def _verdict(request: WireEvent, response: WireEvent | None, outcome: Outcome | None) -> BatchEvent:
    if response is None or outcome is None:
        return BatchEvent.REQUEST_LOST if request.fate in _LOST else BatchEvent.UNANSWERED
    if outcome.error_code == OUT_OF_ORDER:
        return BatchEvent.REJECTED
    if outcome.error_code != 0:
        return BatchEvent.UNANSWERED
    return BatchEvent.ACK_LOST if response.fate in _LOST else BatchEvent.STORED


@dataclass(frozen=True, slots=True)
class FaultCounts:
    """The faults of one load, counted in messages, and the broker's decisions, counted in batches."""

    produce_requests: int
    requests_lost: int
    acknowledgements_lost: int
    requests_late: int
    duplicates_recognised: int
    out_of_order_rejected: int


def count_faults(events: Sequence[WireEvent], marks: Sequence[Mark]) -> FaultCounts:
    """Count the faults and the outcomes of one load."""
    kinds: Counter[tuple[Direction, Fate]] = Counter(
        (event.direction, event.fate) for event in events if event.api == "Produce"
    )
    counts = Counter(mark.event for mark in marks)
    journeys = {
        (event.connection, event.correlation_id)
        for event in events
        if event.api == "Produce" and event.direction == Direction.REQUEST
    }
    return FaultCounts(
        produce_requests=len(journeys),
        requests_lost=sum(kinds[Direction.REQUEST, fate] for fate in _LOST),
        acknowledgements_lost=sum(kinds[Direction.RESPONSE, fate] for fate in _LOST),
        requests_late=kinds[Direction.REQUEST, Fate.HELD],
        duplicates_recognised=counts[BatchEvent.DUPLICATE],
        out_of_order_rejected=counts[BatchEvent.REJECTED],
    )


def first_lost_acknowledgement(marks: Sequence[Mark]) -> list[Mark]:
    """Return all attempts to send the first batch whose acknowledgement was lost; none if none was lost."""
    lost = next((mark for mark in marks if mark.event is BatchEvent.ACK_LOST), None)
    if lost is None:
        return []
    return [m for m in marks if (m.partition, m.sequence) == (lost.partition, lost.sequence)]
