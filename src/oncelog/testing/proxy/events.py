"""The events of a proxy: one for each fate of a message, in order. Any thread may read them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from oncelog.testing.proxy.apis import error_name
from oncelog.testing.proxy.group_messages import MemberRequest
from oncelog.testing.proxy.txn_messages import TxnRequest, describe_request, describe_response


class Direction(StrEnum):
    """The direction of a message. NOTE marks a remark by the proxy, or by the program that runs it."""

    REQUEST = "request"
    RESPONSE = "response"
    NOTE = "note"


class Fate(StrEnum):
    """The fate of a message in the proxy.

    PASSED      forwarded
    DROPPED     lost; its connection stays open, but nothing more is forwarded to the client
    CUT         lost together with its connection
    HELD        kept by the proxy until it is released
    RELEASED    forwarded after it was held
    COPY        a second copy of a request, sent to the broker
    UNEXPECTED  the response to a copy, or to a request released after its connection ended; no client
                expects it
    QUEUED      a response that waits for an earlier response
    LOST        could no longer be delivered, was lost while held, or was replaced by a FORGED response
    FORGED      a request that the proxy answered with an error, or a response that it replaced by an error
    """

    PASSED = "passed"
    DROPPED = "dropped"
    CUT = "cut"
    HELD = "held"
    RELEASED = "released"
    COPY = "copy"
    UNEXPECTED = "swallowed"
    # The deprecated name of UNEXPECTED.
    SWALLOWED = "swallowed"
    QUEUED = "queued"
    LOST = "lost"
    FORGED = "forged"


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The header of a record batch in a Produce request.

    Producer id, epoch and sequence are None if the batch has none.
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
    """The result of a Produce request for one partition. `base_offset` is None if the broker sent none."""

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
    """One message that the proxy saw, and its fate."""

    direction: Direction
    api: str
    api_version: int = 0
    correlation_id: int = 0
    connection: int = 0
    """Number of the client's connection, from 1; 0 for notes."""
    node: str = ""
    """HOST:PORT of the broker."""
    client_id: str | None = None
    size_bytes: int = 0
    batches: tuple[BatchSummary, ...] = ()
    """The batches of a Produce request."""
    outcomes: tuple[Outcome, ...] = ()
    """The results in a Produce response, one per partition."""
    error_code: int = 0
    """The top-level error code of a response."""
    acks: int | None = None
    """The field acks of a Produce request."""
    producer: tuple[int, int] | None = None
    """(producer id, epoch) that a response to InitProducerId or EndTxn assigned."""
    txn: TxnRequest | None = None
    """The fields of a transactional request. The event of its response also has them."""
    txn_error_code: int | None = None
    """First error code in the response to a transactional request; 0 if there is no error."""
    member: MemberRequest | None = None
    """The group member that sent JoinGroup, ConsumerGroupHeartbeat or TxnOffsetCommit."""
    isolation_level: int | None = None
    """The field isolation_level of a Fetch request: 1 for read_committed."""
    decode_error: str = ""
    """The reason why the proxy could not decode the request, which it forwards unchanged."""
    fate: Fate = Fate.PASSED
    detail: str = ""
    """A remark on the fate; for a note, its text."""
    number: int = 0
    """Number of the event, from 1, in the order in which the fates were decided."""
    time_ms: float = 0.0
    """Milliseconds since the proxy object was created."""

    @property
    def partitions(self) -> tuple[BatchSummary | Outcome, ...]:
        """The batches of a Produce request, or the outcomes of its response."""
        return self.batches or self.outcomes

    @property
    def said(self) -> str:
        """The content of a transactional message as text, for tables and diagrams.

        Programs should use `txn` and `txn_error_code`.
        """
        if self.direction is Direction.RESPONSE:
            return "" if self.txn_error_code is None else describe_response(self.txn_error_code)
        return self.decode_error or ("" if self.txn is None else describe_request(self.api, self.txn))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON. Error codes come with their names."""
        row = asdict(self)
        row["said"] = self.said
        row["time_ms"] = round(self.time_ms, 3)
        row["error_name"] = error_name(self.error_code)
        for outcome in row["outcomes"]:
            outcome["error_name"] = error_name(outcome["error_code"])
        return row


class EventLog:
    """The events of one proxy, at most the newest `max_events`. `on_event` is called with each new event."""

    def __init__(
        self, max_events: int = 200_000, on_event: Callable[[WireEvent], None] | None = None
    ) -> None:
        self._events: deque[WireEvent] = deque(maxlen=max_events)
        self._changed = threading.Condition()
        self._count = 0
        self._started = time.monotonic()
        self._on_event = on_event

    def record(self, event: WireEvent, fate: Fate, detail: str = "") -> WireEvent:
        """Append `event` with its fate, a number and the time. Return the complete event.

        Wakes the callers of `wait_until`.
        """
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
        """Append a note: a remark that belongs to no message."""
        self.record(WireEvent(Direction.NOTE, ""), Fate.PASSED, text)

    def snapshot(self) -> list[WireEvent]:
        """Return a copy of the list of events."""
        with self._changed:
            return list(self._events)

    def wait_until(self, predicate: Callable[[Sequence[WireEvent]], bool], timeout: float) -> bool:
        """Wait until `predicate(events)` is true, at most `timeout` seconds. Return the predicate's last
        result.
        """
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self._events), timeout)
