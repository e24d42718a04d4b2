"""The events of a proxy: one per message, in order, with fields for programs. Readable from any thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from oncelog.testing.proxy.apis import error_name
from oncelog.testing.proxy.txn_messages import TxnRequest, describe_request, describe_response


class Direction(StrEnum):
    """The direction of a message. A NOTE is a remark of the program that runs the proxy."""

    REQUEST = "request"
    RESPONSE = "response"
    NOTE = "note"


class Fate(StrEnum):
    """The result of the proxy's rules for one message.

    PASSED      forwarded
    DROPPED     lost alone; the connection stays open and silent behind it
    CUT         lost together with its connection
    HELD        kept in the network until it is released
    RELEASED    forwarded after it was held
    COPY        a second copy of a request, given to the broker
    UNEXPECTED  the response to a copy, which no client expects
    QUEUED      a response that waits for an earlier one
    LOST        not chosen by a rule, but its connection was gone or silent
    FORGED      replaced by an error: the broker never got the request, or its response was overwritten
    """

    PASSED = "passed"
    DROPPED = "dropped"
    CUT = "cut"
    HELD = "held"
    RELEASED = "released"
    COPY = "copy"
    UNEXPECTED = "swallowed"
    SWALLOWED = "swallowed"  # the deprecated name
    QUEUED = "queued"
    LOST = "lost"
    FORGED = "forged"


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The header of a record batch in a Produce request.

    Producer fields are None for a batch without them.
    """

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
    """The result of a Produce request for one partition.

    `base_offset` is None if the broker returned none.
    """

    topic: str
    partition: int
    error_code: int
    base_offset: int | None

    @property
    def error_name(self) -> str:
        """Kafka's name of the error; "" for success."""
        return error_name(self.error_code)


@dataclass(frozen=True, slots=True)
class WireEvent:
    """One message as the proxy saw it, and its fate."""

    direction: Direction
    api: str
    api_version: int = 0
    correlation_id: int = 0
    connection: int = 0
    """Number of the client connection, from 1; 0 for notes."""
    node: str = ""
    """HOST:PORT of the broker."""
    client_id: str | None = None
    size_bytes: int = 0
    batches: tuple[BatchSummary, ...] = ()
    """Of a Produce request."""
    outcomes: tuple[Outcome, ...] = ()
    """Of a Produce response."""
    error_code: int = 0
    """The response's top-level error code."""
    acks: int | None = None
    """Of a Produce request."""
    producer: tuple[int, int] | None = None
    """(producer id, epoch) that a response to InitProducerId or EndTxn assigned."""
    txn: TxnRequest | None = None
    """Fields of a transaction's request. Its response carries them too."""
    txn_error_code: int | None = None
    """First error code in the response to a transaction's request; 0 if there is none."""
    decode_error: str = ""
    """Reason for which the proxy could not decode the request; it is forwarded unchanged."""
    fate: Fate = Fate.PASSED
    detail: str = ""
    """A remark on the fate, or the text of a note."""
    number: int = 0
    """Number of the event, from 1, in the order in which fates were decided."""
    time_ms: float = 0.0
    """Milliseconds since the proxy started."""

    @property
    def said(self) -> str:
        """Text of a transaction's message, for tables and diagrams.

        Programs use `txn` and `txn_error_code`.
        """
        if self.direction is Direction.RESPONSE:
            return "" if self.txn_error_code is None else describe_response(self.txn_error_code)
        return self.decode_error or ("" if self.txn is None else describe_request(self.api, self.txn))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the names of the error codes beside their numbers."""
        row = asdict(self)
        row["said"] = self.said
        row["time_ms"] = round(self.time_ms, 3)
        row["error_name"] = error_name(self.error_code)
        for outcome in row["outcomes"]:
            outcome["error_name"] = error_name(outcome["error_code"])
        return row


class EventLog:
    """The events of one proxy. It keeps the newest `max_events`; `on_event` is called with each one."""

    def __init__(
        self, max_events: int = 200_000, on_event: Callable[[WireEvent], None] | None = None
    ) -> None:
        self._events: deque[WireEvent] = deque(maxlen=max_events)
        self._changed = threading.Condition()
        self._count = 0
        self._started = time.monotonic()
        self._on_event = on_event

    def record(self, event: WireEvent, fate: Fate, detail: str = "") -> WireEvent:
        """Append `event` with its fate, a number and the time. Wakes `wait_until`."""
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
        """Append a remark."""
        self.record(WireEvent(Direction.NOTE, ""), Fate.PASSED, text)

    def snapshot(self) -> list[WireEvent]:
        """Return a copy of all events so far."""
        with self._changed:
            return list(self._events)

    def wait_until(self, predicate: Callable[[Sequence[WireEvent]], bool], timeout: float) -> bool:
        """Block until `predicate(events)` is true, at most `timeout` seconds. Return its last value."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self._events), timeout)
