"""What the proxy saw, told as what happened to each batch. Pure: events in, marks and counts out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from oncelog.testing.proxy.events import BatchSummary, Direction, Fate, Outcome, WireEvent

OUT_OF_ORDER = 45


class Happened(StrEnum):
    """The outcome of one batch on one journey to the broker."""

    STORED = "stored and acknowledged"
    ACK_LOST = "stored, acknowledgement lost"
    REQUEST_LOST = "lost on the way"
    DUPLICATE = "sent again, recognised, not stored again"
    REFUSED = "out of order, refused"
    UNANSWERED = "sent, answer never came"


@dataclass(frozen=True, slots=True)
class Mark:
    """One batch at one moment. `sequence` is its base sequence; `time_ms` counts from the proxy's start."""

    time_ms: float
    partition: int
    sequence: int
    records: int
    happened: Happened
    late: bool
    offset: int | None


_LOST = {Fate.DROPPED, Fate.CUT, Fate.LOST}


def tell(events: Iterable[WireEvent]) -> list[Mark]:
    """The marks of all sequenced batches, in the order of their requests.

    A batch acknowledged with an offset the partition had given it before is a recognised duplicate.
    """
    requests: dict[tuple[int, int], WireEvent] = {}
    late: set[tuple[int, int]] = set()
    answers: dict[tuple[int, int], WireEvent] = {}
    for event in events:
        journey = (event.connection, event.correlation_id)
        if event.api != "Produce":
            continue
        if event.direction == Direction.REQUEST:
            requests.setdefault(journey, event)
            if event.fate in (Fate.HELD, Fate.RELEASED):
                late.add(journey)
        elif event.direction == Direction.RESPONSE:
            answers[journey] = event
    return _judge(requests, answers, late)


def _judge(
    requests: dict[tuple[int, int], WireEvent],
    answers: dict[tuple[int, int], WireEvent],
    late: set[tuple[int, int]],
) -> list[Mark]:
    stored: set[tuple[int, int, int]] = set()
    marks = []
    # In the order of the answers: that is the order in which the broker decided.
    last = float("inf")
    ordered = sorted(
        requests, key=lambda j: (answers[j].time_ms if j in answers else last, requests[j].time_ms)
    )
    for journey in ordered:
        request, answer = requests[journey], answers.get(journey)
        for batch in request.batches:
            if batch.base_sequence is None:
                continue
            outcome = _outcome_of(batch, answer)
            happened = _verdict(request, answer, outcome)
            if outcome is not None and outcome.error_code == 0 and outcome.base_offset is not None:
                place = (batch.partition, batch.producer_epoch or 0, outcome.base_offset)
                if place in stored and happened is Happened.STORED:
                    happened = Happened.DUPLICATE
                stored.add(place)
            offset = outcome.base_offset if outcome else None
            marks.append(
                Mark(
                    request.time_ms,
                    batch.partition,
                    batch.base_sequence,
                    batch.records_count,
                    happened,
                    journey in late,
                    offset,
                )
            )
    return sorted(marks, key=lambda mark: mark.time_ms)


def _outcome_of(batch: BatchSummary, answer: WireEvent | None) -> Outcome | None:
    outcomes: Sequence[Outcome] = answer.outcomes if answer else ()
    return next((o for o in outcomes if (o.topic, o.partition) == (batch.topic, batch.partition)), None)


def _verdict(request: WireEvent, answer: WireEvent | None, outcome: Outcome | None) -> Happened:
    if answer is None or outcome is None:
        return Happened.REQUEST_LOST if request.fate in _LOST else Happened.UNANSWERED
    if outcome.error_code == OUT_OF_ORDER:
        return Happened.REFUSED
    if outcome.error_code != 0:
        return Happened.UNANSWERED
    return Happened.ACK_LOST if answer.fate in _LOST else Happened.STORED


@dataclass(frozen=True, slots=True)
class FaultCounts:
    """What the network did to one load, in messages, and what the broker said to it, in batches."""

    produce_requests: int
    requests_lost: int
    acknowledgements_lost: int
    requests_late: int
    duplicates_recognised: int
    out_of_order_refused: int


def count_faults(events: Sequence[WireEvent], marks: Sequence[Mark]) -> FaultCounts:
    """Totals over one load."""
    kinds: Counter[tuple[Direction, Fate]] = Counter(
        (event.direction, event.fate) for event in events if event.api == "Produce"
    )
    happened = Counter(mark.happened for mark in marks)
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
        duplicates_recognised=happened[Happened.DUPLICATE],
        out_of_order_refused=happened[Happened.REFUSED],
    )


def first_lost_acknowledgement(marks: Sequence[Mark]) -> list[Mark]:
    """The journeys of the first batch whose acknowledgement was lost; empty when none was."""
    lost = next((mark for mark in marks if mark.happened is Happened.ACK_LOST), None)
    if lost is None:
        return []
    return [m for m in marks if (m.partition, m.sequence) == (lost.partition, lost.sequence)]
