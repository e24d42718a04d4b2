"""What crossed the wire: one event per message, kept in order and readable from any thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from oncelog.errors import ERROR_BY_CODE


class Direction(StrEnum):
    """Which way a message travels; a NOTE is a remark of whoever runs the proxy."""

    REQUEST = "request"
    RESPONSE = "response"
    NOTE = "note"


class Fate(StrEnum):
    """What became of one message.

    PASSED      went on its way
    DROPPED     lost alone; the connection stays open and silent behind it
    CUT         lost together with its connection
    HELD        kept in the network until released
    RELEASED    a held message went on its way
    COPY        a second copy of a request reached the broker
    SWALLOWED   the answer to a copy, which no client waits for
    QUEUED      an answer that waits for the turn of an earlier one
    LOST        the message itself was not chosen, but its connection was gone or silent
    FORGED      replaced by an error: a request never reached the broker, an answer was overwritten
    """

    PASSED = "passed"
    DROPPED = "dropped"
    CUT = "cut"
    HELD = "held"
    RELEASED = "released"
    COPY = "copy"
    SWALLOWED = "swallowed"
    QUEUED = "queued"
    LOST = "lost"
    FORGED = "forged"


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The header of a record batch inside a Produce request. None: the batch has no producer."""

    topic: str
    partition: int
    producer_id: int | None
    producer_epoch: int | None
    base_sequence: int | None
    last_sequence: int | None
    records_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One partition's line of a Produce response; `base_offset` is None when the broker gave none."""

    topic: str
    partition: int
    error_code: int
    base_offset: int | None

    @property
    def error_name(self) -> str:
        """Kafka's name of the code; empty for success."""
        return error_name(self.error_code)


@dataclass(frozen=True, slots=True)
class WireEvent:
    """One message as the proxy saw it, and its fate.

    `number` counts from 1 in the order of the fates; `time_ms` is milliseconds since the proxy
    started; `connection` numbers client connections from 1 (0 for notes); `node` is the upstream
    address `host:port`. `error_code` is the answer's own code where it has one.
    """

    direction: Direction
    api: str
    api_version: int = 0
    correlation_id: int = 0
    connection: int = 0
    node: str = ""
    client_id: str | None = None
    size_bytes: int = 0
    batches: tuple[BatchSummary, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    error_code: int = 0
    acks: int | None = None
    producer: tuple[int, int] | None = None
    """(producer id, epoch) that an answer handed out, of InitProducerId or EndTxn."""
    said: str = ""
    """What a message of a transaction says, in words."""
    fate: Fate = Fate.PASSED
    detail: str = ""
    number: int = 0
    time_ms: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the names of the error codes beside their numbers."""
        row = asdict(self)
        row["time_ms"] = round(self.time_ms, 3)
        row["error_name"] = error_name(self.error_code)
        for outcome in row["outcomes"]:
            outcome["error_name"] = error_name(outcome["error_code"])
        return row


def error_name(code: int) -> str:
    """Kafka's name of an error code; empty for 0, the number where the code is not known."""
    if code == 0:
        return ""
    known = ERROR_BY_CODE.get(code)
    return known.kafka_name if known else f"error {code}"


class EventLog:
    """The events of one proxy. `max_events` bounds memory: the oldest go first."""

    def __init__(
        self, max_events: int = 200_000, on_event: Callable[[WireEvent], None] | None = None
    ) -> None:
        self._events: deque[WireEvent] = deque(maxlen=max_events)
        self._changed = threading.Condition()
        self._count = 0
        self._started = time.monotonic()
        self._on_event = on_event

    def record(self, event: WireEvent, fate: Fate, detail: str = "") -> WireEvent:
        """Number, date and keep `event` with its fate; wakes whoever waits."""
        with self._changed:
            self._count += 1
            elapsed_ms = (time.monotonic() - self._started) * 1000
            event = replace(event, fate=fate, detail=detail, number=self._count, time_ms=elapsed_ms)
            self._events.append(event)
            self._changed.notify_all()
        if self._on_event:
            self._on_event(event)
        return event

    def note(self, text: str) -> None:
        """Put a remark between the events."""
        self.record(WireEvent(Direction.NOTE, ""), Fate.PASSED, text)

    def snapshot(self) -> list[WireEvent]:
        """A copy of all events so far."""
        with self._changed:
            return list(self._events)

    def wait_until(self, predicate: Callable[[Sequence[WireEvent]], bool], timeout: float) -> bool:
        """Block until `predicate(events)` holds, at most `timeout` seconds; whether it did."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self._events), timeout)
