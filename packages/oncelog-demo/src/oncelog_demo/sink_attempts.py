"""Derive the sink's attempts at transactions, per task, from the messages that the proxy saw. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from oncelog.testing.proxy.events import Direction, WireEvent
from oncelog.testing.proxy.txn_messages import TxnRequest

Writer = tuple[int, int]
"""(producer id, epoch). Each attempt of a task has a new epoch."""


class AttemptResult(StrEnum):
    """The outcome of a task's attempt at a micro-batch."""

    COMMITTED = "committed"
    ABORTED = "aborted, because its driver was killed"
    SKIPPED = "skipped, because an earlier attempt had committed"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a task at a micro-batch. Times are in milliseconds since the proxy started.

    `end_ms` is None if no commit got a response. `rows` is the number of the attempt's rows in the log.
    """

    task: int
    batch: int
    writer: Writer
    begin_ms: float
    end_ms: float | None
    result: AttemptResult
    rows: int = 0


def list_attempts(events: Iterable[WireEvent], killed_at_ms: float) -> list[Attempt]:
    """Return every attempt, in the order in which the attempts began.

    `killed_at_ms` is the time at which the driver was killed. An uncommitted transaction shows no batch id on
    the wire. But in the demonstration each task has rows in every batch, so the task's n-th commit, counted
    from 0, belongs to batch n.
    """
    log = _TransactionLog()
    for event in events:
        log.see(event)
    committed: Counter[int] = Counter()
    attempts = []
    for writer, (task, begin_ms) in log.begun.items():
        batch, end_ms = committed[task], log.committed.get(writer)
        if end_ms is not None:
            result = AttemptResult.COMMITTED
            committed[task] += 1
        elif writer in log.wrote or begin_ms < killed_at_ms:
            result = AttemptResult.ABORTED
        else:
            result, batch = AttemptResult.SKIPPED, batch - 1
        attempts.append(Attempt(task, batch, writer, begin_ms, end_ms, result))
    return attempts


class _TransactionLog:
    """Each writer's transaction as the proxy's messages show it: begun, written to, committed.

    A response of the broker counts even if the proxy kept it from the client.
    """

    def __init__(self) -> None:
        self.begun: dict[Writer, tuple[int, float]] = {}
        self.wrote: set[Writer] = set()
        self.committed: dict[Writer, float] = {}
        self._requests: dict[tuple[int, int], TxnRequest] = {}

    def see(self, event: WireEvent) -> None:
        journey = (event.connection, event.correlation_id)
        if event.direction is Direction.REQUEST:
            if event.api in ("InitProducerId", "EndTxn") and event.txn is not None:
                self._requests[journey] = event.txn
            self.wrote.update((b.producer_id or 0, b.producer_epoch or 0) for b in event.batches)
        elif event.error_code == 0 and journey in self._requests:
            self._complete(event, self._requests.pop(journey))

    def _complete(self, response: WireEvent, request: TxnRequest) -> None:
        if request.is_commit and request.producer_id is not None and request.producer_epoch is not None:
            self.committed.setdefault((request.producer_id, request.producer_epoch), response.time_ms)
        elif response.api == "InitProducerId" and response.producer and request.transactional_id:
            # The sink's transactional ids end with a slash and the number of the Spark task.
            task = request.transactional_id.rpartition("/")[2]
            if task.isdecimal():
                self.begun.setdefault(response.producer, (int(task), response.time_ms))


def with_rows(attempts: Iterable[Attempt], rows: Mapping[Writer, int]) -> list[Attempt]:
    """Return the attempts with `rows` set to the number of their rows in the log."""
    return [replace(attempt, rows=rows.get(attempt.writer, 0)) for attempt in attempts]


def rows_with_result(attempts: Iterable[Attempt], result: AttemptResult) -> int:
    """Count the rows in the log that belong to attempts with this result."""
    return sum(attempt.rows for attempt in attempts if attempt.result is result)
