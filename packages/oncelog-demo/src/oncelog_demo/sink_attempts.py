"""What the proxy saw of the sink's transactions, told lane by lane. Pure: events in, attempts out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from oncelog.testing.proxy.events import Direction, WireEvent
from oncelog.testing.proxy.txn_messages import TxnRequest

Writer = tuple[int, int]
"""(producer id, epoch): a lane gets a new epoch for each attempt."""


class Ended(StrEnum):
    """How a lane's attempt at a micro-batch ended."""

    COMMITTED = "committed"
    ABORTED = "lost its driver, aborted"
    SKIPPED = "was committed before, skipped"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One lane at one micro-batch. Times count from the proxy's start; `end_ms` None: no commit was answered.

    `rows` are those on the log.
    """

    lane: int
    batch: int
    writer: Writer
    begin_ms: float
    end_ms: float | None
    ended: Ended
    rows: int = 0


def tell_lanes(events: Iterable[WireEvent], killed_at_ms: float) -> list[Attempt]:
    """Every attempt, in the order in which they began. `killed_at_ms`: when the driver was.

    The wire tells no batch ids of what is not committed; but a lane with rows in every batch, as here,
    commits them one after another.
    """
    told = _Told()
    for event in events:
        told.see(event)
    committed: Counter[int] = Counter()
    attempts = []
    for writer, (lane, begin_ms) in told.begun.items():
        batch, end_ms = committed[lane], told.committed.get(writer)
        if end_ms is not None:
            ended = Ended.COMMITTED
            committed[lane] += 1
        elif writer in told.wrote or begin_ms < killed_at_ms:
            ended = Ended.ABORTED
        else:
            ended, batch = Ended.SKIPPED, batch - 1
        attempts.append(Attempt(lane, batch, writer, begin_ms, end_ms, ended))
    return attempts


class _Told:
    """What the messages say, by writer. An answer counts although it may not have reached its client."""

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
    """The attempts with what the log holds of them."""
    return [replace(each, rows=rows.get(each.writer, 0)) for each in attempts]


def rows_that(attempts: Iterable[Attempt], ended: Ended) -> int:
    """Rows on the log of attempts that ended so."""
    return sum(each.rows for each in attempts if each.ended is ended)
