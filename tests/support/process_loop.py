"""A LoopIO in memory: source partitions, an output log, a group's offsets, and errors at scripted steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from oncelog.client.process.core import ProcessLoop, outputs_of, seeks_to
from oncelog.client.process.loop_plan import LoopOptions, LoopPlan, Sources
from oncelog.errors import OncelogError
from oncelog.rules.transactions.client_session import State
from oncelog.types import OffsetAndMetadata, ProducerRecord, Record, TimestampType, TopicPartition

MAX_CALLS = 5_000
"""A limit of calls that no correct loop reaches. A loop that makes no progress fails the test."""


class Fault:
    """An error that a call raises, and the state of the session after it.

    With `is_done`, the broker has carried out the request, and only its response was lost.
    """

    def __init__(self, error: Exception, state: State | None = None, *, is_done: bool = False) -> None:
        self.error, self.state, self.is_done = error, state, is_done


class MemoryIO:
    """Implements `LoopIO` in memory. `visible` has the committed output records, and `committed` the group's
    committed offsets.

    `faults` has a queue for each method: the Fault of each call, or None. For each poll, `events` has a
    coroutine function that acts as a rebalance, or None.
    """

    def __init__(self, sources: Mapping[TopicPartition, int], transform: Callable[[Record], Any]) -> None:
        self.sources = dict(sources)
        self.assignment = list(sources)
        self.positions: dict[TopicPartition, int] = dict.fromkeys(sources, 0)
        self.committed: dict[TopicPartition, int] = {}
        self.visible: list[ProducerRecord] = []
        self.faults: dict[str, deque[Fault | None]] = defaultdict(deque)
        self.events: deque[Callable[[ProcessLoop], Awaitable[None]] | None] = deque()
        self.state = State.UNINITIALIZED
        self.calls: list[str] = []
        self.pauses: list[float] = []
        self.restored: list[dict[TopicPartition, int]] = []
        self.refuses: Callable[[ProducerRecord], OncelogError | None] = lambda output: None
        self.clock_ms = 0.0
        self.is_closed = self.has_successor = self.may_have_timed_out = False
        self._transform = transform
        self._sent: list[ProducerRecord] = []
        self._offsets: dict[TopicPartition, int] = {}
        self._is_decided = False
        self._loop: ProcessLoop | None = None

    def loop(self, **options: Any) -> ProcessLoop:
        """Return a loop over this object that ends once every source record is processed."""
        chosen = LoopOptions("source", "group", "loop-1", **options)
        return ProcessLoop(LoopPlan(chosen, {}, {}, 60_000, 100, 1_000, 500), self)

    def _reach(self, name: str) -> Fault | None:
        self.calls.append(name)
        assert len(self.calls) < MAX_CALLS, self.calls[-30:]
        faults = self.faults[name]
        return faults.popleft() if faults else None

    def _fail(self, fault: Fault | None) -> None:
        if fault is not None:
            if fault.state is not None:
                self.state = fault.state
            raise fault.error

    def now_ms(self) -> float:
        self.clock_ms += 1
        return self.clock_ms

    async def open_producer(self) -> None:
        fault = self._reach("open_producer")
        if self._is_decided:
            self._make_visible()
        self._drop()
        self.state = State.UNINITIALIZED
        self._fail(fault)
        self.state = State.READY

    async def subscribe(self, sources: Sources, loop: ProcessLoop) -> None:
        self._loop = loop
        await loop.assigned(self.assignment)

    async def poll(self, timeout_s: float, max_records: int) -> list[Record]:
        self._fail(self._reach("poll"))
        assert self._loop is not None
        event = self.events.popleft() if self.events else None
        if event is not None:
            await event(self._loop)
        records: list[Record] = []
        for tp in self.assignment:
            while self.positions[tp] < self.sources[tp] and len(records) < max_records:
                offset = self.positions[tp]
                value = b"%d-%d" % (tp.partition, offset)
                records.append(Record(*tp, offset, 7, TimestampType.CREATE_TIME, b"k", value, ()))
                self.positions[tp] += 1
        self.clock_ms += 0 if records or self.events else timeout_s * 1000
        return records

    async def begin(self) -> None:
        self._fail(self._reach("begin"))
        assert self.state is State.READY, self.state
        self.state = State.IN_TRANSACTION

    async def transform(self, record: Record) -> list[ProducerRecord]:
        return outputs_of(self._transform(record))

    async def restore(self) -> None:
        assert self.state is State.READY, "an open transaction has changes that restore cannot read"
        self.restored.append(dict(self.committed))

    async def send(self, output: ProducerRecord) -> None:
        self._fail(self._reach("send"))
        assert self.state is State.IN_TRANSACTION, self.state
        self._sent.append(output)

    async def send_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._fail(self._reach("send_offsets"))
        assert self.state is State.IN_TRANSACTION, self.state
        assert set(offsets) <= set(self.assignment), "the coordinator refuses offsets of lost partitions"
        self._offsets = dict(offsets)

    async def commit(self) -> None:
        fault = self._reach("commit")
        assert self.state in (State.IN_TRANSACTION, State.COMMITTING), self.state
        errors = [error for output in self._sent if (error := self.refuses(output)) is not None]
        if errors:
            self._fail(Fault(errors[0], State.ABORTABLE_ERROR))
        self._is_decided |= fault is None or fault.is_done
        self._fail(fault)
        self._make_visible()
        self.state = State.READY

    async def abort(self) -> None:
        fault = self._reach("abort")
        assert self.state not in (State.COMMITTING, State.READY), "an abort after an unclear commit"
        self._fail(fault)
        self._drop()
        self.state = State.READY

    def _make_visible(self) -> None:
        self.visible += self._sent
        self.committed |= self._offsets
        self._drop()

    def _drop(self) -> None:
        self._sent, self._offsets, self._is_decided = [], {}, False

    async def is_replaced(self, *, may_have_timed_out: bool) -> bool:
        self.may_have_timed_out = may_have_timed_out
        self._fail(self._reach("is_replaced"))
        return self.has_successor

    async def go_back(self, firsts: Mapping[TopicPartition, int]) -> None:
        self._fail(self._reach("go_back"))
        committed = {
            tp: OffsetAndMetadata(self.committed[tp]) if tp in self.committed else None
            for tp in self.assignment
        }
        self.positions |= seeks_to(committed, firsts)

    def assign(self, partitions: list[TopicPartition]) -> None:
        """Change the assignment as a rebalance does: added partitions begin at their committed offsets."""
        for tp in partitions:
            if tp not in self.assignment:
                self.positions[tp] = self.committed.get(tp, 0)
        self.assignment = list(partitions)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock_ms += seconds * 1000

    async def close(self) -> None:
        if self.state is State.COMMITTING and self._is_decided:
            self._make_visible()
        self._drop()
        self.is_closed = True
