"""Turns the proxy's events into the arrows and notes of a sequence diagram.

`text` and `svg` draw the diagram.

The broker's decision about a batch is inferred from its response. If the response has an offset that the
broker returned before for the same producer id, epoch and sequences, the broker has recognised a duplicate
and stored nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from oncelog.testing.proxy.event_format import PartitionLabel, format_event
from oncelog.testing.proxy.events import BatchSummary, Direction, Fate, Outcome, WireEvent

_TXN_APIS = {"FindCoordinator", "AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"}
DRAWN_APIS = frozenset({"Produce", "InitProducerId"} | _TXN_APIS)


class Column(IntEnum):
    """The vertical lines of a diagram, from left to right: the two sides and the network between them."""

    PRODUCER = 0
    NETWORK = 1
    BROKER = 2


class Tone(Enum):
    """The kind of an event. The kind determines how the event's arrow looks."""

    PLAIN = "plain"
    GOOD = "good"
    REPEAT = "repeat"
    LOST = "lost"
    REFUSED = "refused"
    HELD = "held"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message between two columns.

    `remark`: text to the right of the diagram. `seconds`: time from the creation of the proxy object to the
    message. `decisions`: the broker's decision about each batch, even if the response was lost: GOOD for a
    stored batch, REPEAT for a recognised duplicate, REFUSED for an error.
    """

    start: Column
    end: Column
    text: str
    tone: Tone
    remark: str
    seconds: float
    decisions: tuple[Tone, ...] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """A line of text across all columns. `times`: how often the same text occurred consecutively."""

    text: str
    times: int = 1

    def __str__(self) -> str:
        return self.text if self.times == 1 else f"{self.text} (×{self.times})"


Step = Arrow | Note

_Journey = tuple[int, int]
_Batch = tuple[str, int, int | None, int | None, int | None, int | None]


def plan(events: Iterable[WireEvent], apis: frozenset[str] = DRAWN_APIS) -> list[Step]:
    """Return the arrows and notes of a diagram, in the order of the events.

    Only requests and responses of `apis` are drawn. If the batches have several partitions, the arrows name
    them.
    """
    events = list(events)
    partitions = {(batch.topic, batch.partition) for event in events for batch in event.batches}
    builder = _ArrowBuilder(_shortest_label(partitions))
    steps: list[Step] = []
    for event in events:
        if event.direction is Direction.NOTE:
            _add_note(steps, event.detail)
        elif event.api in apis:
            steps.append(
                builder.request(event) if event.direction is Direction.REQUEST else builder.response(event)
            )
    return steps


def _shortest_label(partitions: set[tuple[str, int]]) -> PartitionLabel:
    """Return the shortest kind of label that distinguishes these partitions: none, the number, or topic and
    number.
    """
    if len(partitions) <= 1:
        return PartitionLabel.NONE
    return (
        PartitionLabel.PARTITION
        if len({topic for topic, _ in partitions}) == 1
        else PartitionLabel.TOPIC_PARTITION
    )


def _add_note(steps: list[Step], text: str) -> None:
    """Append a note. If the last step is the same note, increase its count instead."""
    last = steps[-1] if steps else None
    if isinstance(last, Note) and last.text == text:
        steps[-1] = Note(text, last.times + 1)
    else:
        steps.append(Note(text))


class _ArrowBuilder:
    """Makes arrows from events.

    It remembers the batches that were sent or stored, in order to recognise retries and duplicates.
    """

    def __init__(self, partition_label: PartitionLabel) -> None:
        self._partition_label = partition_label
        self._requests: dict[_Journey, WireEvent] = {}
        self._sent: set[_Batch] = set()
        self._offsets: dict[_Batch, int] = {}
        self._at_network: set[_Journey] = set()

    def request(self, event: WireEvent) -> Arrow:
        journey = (event.connection, event.correlation_id)
        keys = [_key(batch) for batch in event.batches]
        is_retry = journey not in self._requests and any(key in self._sent for key in keys)
        self._requests[journey] = event
        self._sent.update(key for key in keys if key[2] is not None)
        start, end, tone, remark = _REQUEST_ARROWS[event.fate]
        if is_retry and tone is Tone.PLAIN:
            tone = Tone.REPEAT
        text = self._label(event) + ("  (again)" if is_retry else "")
        return Arrow(start, end, text, tone, _join(remark, event.detail), event.time_ms / 1000)

    def response(self, event: WireEvent) -> Arrow:
        journey = (event.connection, event.correlation_id)
        start, end, tone, remark = _RESPONSE_ARROWS[event.fate]
        if journey in self._at_network:
            start = Column.NETWORK
        if event.fate in (Fate.QUEUED, Fate.HELD):
            self._at_network.add(journey)
        texts: list[str] = []
        tones: list[Tone] = []
        if start is Column.BROKER:
            for text, decision in self._broker_decisions(event, journey):
                texts.append(text)
                tones.append(decision)
        elif any(outcome.error_code for outcome in event.outcomes):
            tones.append(Tone.REFUSED)
        if tone is Tone.PLAIN and tones:
            tone = tones[0]
        remark = _join("; ".join(texts), remark, event.detail)
        return Arrow(start, end, self._label(event), tone, remark, event.time_ms / 1000, tuple(tones))

    def _label(self, event: WireEvent) -> str:
        return format_event(event, self._partition_label)

    def _broker_decisions(self, event: WireEvent, journey: _Journey) -> list[tuple[str, Tone]]:
        request = self._requests.get(journey)
        # Go through the batches and the outcomes only once: a request may have a thousand batches. See
        # test_a_request_of_many_partitions_is_drawn_in_linear_time.
        batches: dict[tuple[str, int], list[BatchSummary]] = {}
        for batch in request.batches if request else ():
            batches.setdefault((batch.topic, batch.partition), []).append(batch)
        return [
            self._batch_decision(batch, outcome)
            for outcome in event.outcomes
            for batch in batches.get((outcome.topic, outcome.partition), ())
        ]

    def _batch_decision(self, batch: BatchSummary, outcome: Outcome) -> tuple[str, Tone]:
        if outcome.error_code:
            return "refused, not stored", Tone.REFUSED
        if outcome.base_offset is None:
            return "stored", Tone.GOOD
        key = _key(batch)
        existing = self._offsets.get(key) if batch.producer_id is not None else None
        if existing == outcome.base_offset:
            return f"duplicate: already stored at {existing}", Tone.REPEAT
        self._offsets[key] = outcome.base_offset
        last = outcome.base_offset + batch.records_count - 1
        return f"stored at {_span(outcome.base_offset, last)}", Tone.GOOD


def _key(batch: BatchSummary) -> _Batch:
    return (
        batch.topic, batch.partition, batch.producer_id, batch.producer_epoch, batch.base_sequence,
        batch.last_sequence,
    )  # fmt: skip


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _join(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


_P, _N, _B = Column.PRODUCER, Column.NETWORK, Column.BROKER
_ArrowStyle = tuple[Column, Column, Tone, str]

_REQUEST_ARROWS: dict[Fate, _ArrowStyle] = {
    Fate.PASSED: (_P, _B, Tone.PLAIN, ""),
    Fate.DROPPED: (_P, _N, Tone.LOST, "lost"),
    Fate.CUT: (_P, _N, Tone.LOST, "lost with the connection"),
    Fate.HELD: (_P, _N, Tone.HELD, "held back"),
    Fate.RELEASED: (_N, _B, Tone.PLAIN, "released"),
    Fate.COPY: (_N, _B, Tone.REPEAT, ""),
    Fate.LOST: (_P, _N, Tone.LOST, ""),
    Fate.FORGED: (_P, _N, Tone.LOST, ""),
}

_RESPONSE_ARROWS: dict[Fate, _ArrowStyle] = {
    Fate.PASSED: (_B, _P, Tone.PLAIN, ""),
    Fate.DROPPED: (_B, _N, Tone.LOST, "answer lost"),
    Fate.CUT: (_B, _N, Tone.LOST, "answer lost, connection cut"),
    Fate.HELD: (_B, _N, Tone.HELD, "answer held back"),
    Fate.QUEUED: (_B, _N, Tone.HELD, "answer waits its turn"),
    Fate.RELEASED: (_N, _P, Tone.PLAIN, ""),
    Fate.UNEXPECTED: (_B, _N, Tone.LOST, "no request waits for this answer"),
    Fate.LOST: (_B, _N, Tone.LOST, "answer lost"),
    Fate.FORGED: (_N, _P, Tone.REFUSED, ""),
}


def hidden_apis(events: Sequence[WireEvent], apis: frozenset[str] = DRAWN_APIS) -> dict[str, int]:
    """Return the number of requests for each API that the diagram does not show."""
    counts: dict[str, int] = {}
    for event in events:
        if event.direction is Direction.REQUEST and event.api not in apis:
            counts[event.api] = counts.get(event.api, 0) + 1
    return counts
