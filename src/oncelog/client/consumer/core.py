"""The consumer without I/O: positions, what to fetch next, and handing out what arrived.

Law: per partition, records leave in offset order, from the position on, each once; a position is
the offset of the next record to hand out, and moves past what the reader may not see. `prepare_rows` puts
records into `delivery`, from which the application takes them: a position counts only what was taken there.
A partition is in at most one fetch, and is fetched ahead until `max.partition.fetch.bytes` of it wait to be
handed out. A broker has at most LANES fetches in flight, each on its own connection, so that a
partition that wants records need not wait behind the long poll of others. A seek makes everything
fetched or looked up before it void (`generation`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple

from oncelog.client.arguments import offset_of
from oncelog.client.consumer.completed_fetch import Piece
from oncelog.client.consumer.consumer_metrics import ConsumerMetrics
from oncelog.client.consumer.delivery_buffer import Columns, DeliveryBuffer
from oncelog.client.consumer.fetch_messages import (
    FetchedPartition,
    FetchOptions,
    end_offset,
    fetch_request,
    fetched_partitions,
    place_batches,
)
from oncelog.client.consumer.list_offsets import OffsetAt
from oncelog.client.consumer.state import FetchCall, PartitionState, Reset, ResetCall
from oncelog.errors import (
    BrokerError,
    FencedLeaderEpoch,
    KafkaStorageError,
    LeaderNotAvailable,
    MisuseError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    OncelogError,
    ReplicaNotAvailable,
    UnknownLeaderEpoch,
    UnknownTopicOrPartition,
    error_for_code,
)
from oncelog.settings import Settings
from oncelog.types import Isolation, Record, TopicPartition
from oncelog.wire.messages import FetchResponse

_ASK_FOR_LEADER = {
    error.code
    for error in (
        NotLeaderOrFollower,
        LeaderNotAvailable,
        ReplicaNotAvailable,
        UnknownTopicOrPartition,
        FencedLeaderEpoch,
        UnknownLeaderEpoch,
        KafkaStorageError,
    )
}
"""Answers after which the leader is asked for again."""

LANES = 2
"""Most fetches in flight at one broker."""


class _PendingError(NamedTuple):
    """An error for the next poll. `tp` and `generation`: the position that it is of; None: of none."""

    error: Exception
    tp: TopicPartition | None
    generation: object


class ConsumerCore:
    """Positions and buffers of the assigned partitions. Times are milliseconds of any one clock."""

    def __init__(self, settings: Settings) -> None:
        self.options = FetchOptions.from_settings(settings)
        self.metrics = ConsumerMetrics()
        self.delivery = DeliveryBuffer()
        self._reset_policy: Literal["earliest", "latest", "none"] = settings["auto.offset.reset"]
        self._states: dict[TopicPartition, PartitionState] = {}
        self._in_flight: dict[tuple[int, int], FetchCall] = {}
        self._errors: deque[_PendingError] = deque()
        self._turn = 0

    # Assignment and positions

    def assign(self, partitions: Iterable[TopicPartition], *, from_committed: bool = False) -> None:
        """Read these partitions and no others; those assigned before keep their positions.

        `from_committed`: new ones begin at the group's committed offset, if it has one.
        """
        wanted = [TopicPartition(*tp) for tp in partitions]
        self._states = {tp: self._states.get(tp) or PartitionState() for tp in dict.fromkeys(wanted)}
        self.delivery.keep_only(self._states)
        for state in self._states.values():
            if state.position is None and state.reset is None:
                state.reset = "committed" if from_committed else self._reset_by_policy

    @property
    def _reset_by_policy(self) -> Reset | None:
        return None if self._reset_policy == "none" else self._reset_policy

    def assignment(self) -> list[TopicPartition]:
        return list(self._states)

    def _state(self, tp: TopicPartition) -> PartitionState:
        state = self._states.get(tp)
        if state is None:
            raise MisuseError(f"partition {tp} is not assigned; call assign() with it first")
        return state

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on at `offset`. Raises MisuseError for a partition not assigned or no offset of a log."""
        self._state(tp).move_to(offset_of(tp, offset))
        self.delivery.drop(tp)

    def seek_to(self, partitions: Collection[TopicPartition], to: Reset) -> None:
        """Go on at the first or behind the last record, looked up when needed; none named means all."""
        for tp in partitions or list(self._states):
            self._look_up(self._state(tp), to)
            self.delivery.drop(tp)

    def _look_up(self, state: PartitionState, to: Reset) -> None:
        state.void()
        state.position = state.fetch_offset = None
        state.reset = to

    def reset(self, partitions: Collection[TopicPartition]) -> None:
        """Go on where auto.offset.reset says. Raises MisuseError when it says nothing."""
        if self._reset_policy == "none":
            raise self._no_position(next(iter(partitions)))
        self.seek_to(partitions, self._reset_policy)

    def position(self, tp: TopicPartition) -> int | None:
        """The offset of the next record to hand out; None until it is looked up.

        Raises MisuseError when there is no position and auto.offset.reset=none forbids to choose one.
        """
        state = self._state(tp)
        if state.position is None and state.reset is None:
            raise self._no_position(tp)
        undelivered = self.delivery.position(tp)
        return state.position if undelivered is None else undelivered

    def _no_position(self, tp: TopicPartition) -> MisuseError:
        return MisuseError(f"{tp} has no position and auto.offset.reset=none: call seek() first")

    def set_paused(self, partitions: Iterable[TopicPartition], paused: bool) -> None:
        """Paused partitions keep their place and are neither fetched nor handed out."""
        for tp in partitions:
            self._state(tp).is_paused = paused
            self.delivery.set_paused(tp, paused)

    def paused(self) -> list[TopicPartition]:
        return [tp for tp, state in self._states.items() if state.is_paused]

    def lag(self, tp: TopicPartition) -> int | None:
        """Records between the position and the end a reader of this isolation may reach; None if unknown."""
        state = self._state(tp)
        committed = self.options.isolation is Isolation.READ_COMMITTED
        end = state.last_stable_offset if committed else state.high_watermark
        position = self.delivery.position(tp)
        position = state.position if position is None else position
        return None if end is None or position is None else max(end - position, 0)

    # Looking up positions

    def resets(self) -> list[ResetCall]:
        """Positions to look up now; each is given out once until `on_reset` or `on_reset_failed`."""
        calls = []
        for tp, state in self._states.items():
            if state.reset and not state.is_resetting:
                state.is_resetting = True
                calls.append(ResetCall(tp, state.reset, state.generation))
        return calls

    def on_reset(self, call: ResetCall, found: OffsetAt) -> None:
        """The offset a reset found; void if the partition was sought elsewhere meanwhile."""
        state = self._current(call.tp, call.generation)
        if state and found.offset is not None:
            state.move_to(found.offset)
        elif state:
            self.on_reset_failed(call)

    def on_committed(self, call: ResetCall, offset: int | None) -> None:
        """The group's committed offset, or None without one; void if the partition was sought meanwhile."""
        if state := self._current(call.tp, call.generation):
            if offset is not None:
                state.move_to(offset)
            else:
                state.reset = self._reset_by_policy

    def on_reset_failed(self, call: ResetCall, error: OncelogError | None = None) -> None:
        """The look-up failed and is due again; `error` (None: nothing to tell) is for the application."""
        if state := self._current(call.tp, call.generation):
            state.is_resetting = False
            if error:
                self._errors.append(_PendingError(error, call.tp, call.generation))

    def is_awaited(self, call: ResetCall) -> bool:
        """True while nobody has sought the partition elsewhere, or given it up, since the look-up began."""
        return self._current(call.tp, call.generation) is not None

    def end_resets(self, calls: Iterable[ResetCall]) -> None:
        """Let these look-ups, which have ended in any way, be made again where they found nothing."""
        for call in calls:
            if state := self._current(call.tp, call.generation):
                state.is_resetting = False

    def _current(self, tp: TopicPartition, generation: object) -> PartitionState | None:
        state = self._states.get(tp)
        return state if state and state.generation is generation else None

    # Fetching

    def plan(
        self, leader_of: Callable[[TopicPartition], int | None]
    ) -> tuple[list[FetchCall], list[TopicPartition]]:
        """The fetches to send now, and partitions whose leader must be found first."""
        under_way = {
            tp for call in self._in_flight.values() for tp in call.expected if self._is_due(call, tp)
        }
        by_node: dict[int, list[TopicPartition]] = {}
        homeless: list[TopicPartition] = []
        for tp in self._in_turn():
            if tp in under_way or not self._has_room(tp):
                continue
            if (node_id := leader_of(tp)) is None:
                homeless.append(tp)
            else:
                by_node.setdefault(node_id, []).append(tp)
        return [call for node_id, tps in by_node.items() if (call := self._fetch(node_id, tps))], homeless

    def _has_room(self, tp: TopicPartition) -> bool:
        state = self._states[tp]
        if state.is_out_of_range:
            # The same answer would come at once, again and again, until the application polls.
            if self._has_waiting(tp, state):
                return False
            state.is_out_of_range = False
        return state.waiting_bytes() < max(self.options.partition_max_bytes, 1)

    def _has_waiting(self, tp: TopicPartition, state: PartitionState) -> bool:
        return bool(state.pieces) or self.delivery.position(tp) is not None

    def _is_due(self, call: FetchCall, tp: TopicPartition) -> bool:
        """Whether what a fetch in flight brings of a partition will be wanted."""
        return self._current(tp, call.expected[tp][1]) is not None

    def _in_turn(self) -> list[TopicPartition]:
        """Partitions that want records, beginning with another one each time, so that none starves."""
        ready = [tp for tp, s in self._states.items() if s.fetch_offset is not None and not s.is_paused]
        self._turn += 1
        start = self._turn % len(ready) if ready else 0
        return ready[start:] + ready[:start]

    def _fetch(self, node_id: int, partitions: list[TopicPartition]) -> FetchCall | None:
        lane = next((lane for lane in range(LANES) if (node_id, lane) not in self._in_flight), None)
        if lane is None:
            return None
        states = self._states
        expected = {tp: (states[tp].fetch_offset or 0, states[tp].generation) for tp in partitions}
        positions = [(tp, offset) for tp, (offset, _) in expected.items()]
        call = FetchCall(node_id, lane, fetch_request(positions, self.options), expected)
        self._in_flight[node_id, lane] = call
        return call

    def on_response(
        self, call: FetchCall, response: FetchResponse, latency_ms: float, now_ms: float
    ) -> list[TopicPartition]:
        """Take an answer; gives the partitions whose leader must be asked for again."""
        self._in_flight.pop((call.node_id, call.lane), None)
        if response.error_code:
            self.note_error(error_for_code(response.error_code, f"fetch from broker {call.node_id}"))
            return []
        stale, size_bytes = [], 0
        for fetched in fetched_partitions(response):
            fetch_offset, generation = call.expected.get(fetched.tp, (0, None))
            state = self._current(fetched.tp, generation)
            if state is None:
                continue
            size_bytes += len(fetched.records)
            if self._take(fetched, state, fetch_offset):
                stale.append(fetched.tp)
        self.metrics.on_fetch(latency_ms, size_bytes, now_ms)
        return stale

    def on_failure(self, call: FetchCall) -> list[TopicPartition]:
        """The fetch got no answer; gives the partitions whose leader must be asked for again."""
        self._in_flight.pop((call.node_id, call.lane), None)
        return [tp for tp in call.expected if tp in self._states]

    def end_fetch(self, call: FetchCall) -> None:
        """Free the lane of a fetch that has ended in any way; further calls do nothing."""
        if self._in_flight.get((call.node_id, call.lane)) is call:
            del self._in_flight[call.node_id, call.lane]

    def _take(self, fetched: FetchedPartition, state: PartitionState, fetch_offset: int) -> bool:
        """Put a partition's answer into its buffer; true when its leader must be asked for again."""
        if fetched.error_code in _ASK_FOR_LEADER:
            return True
        if fetched.error_code:
            self._take_error(fetched, state, fetch_offset)
            return False
        state.high_watermark = fetched.high_watermark
        state.last_stable_offset = fetched.last_stable_offset if fetched.last_stable_offset >= 0 else None
        try:
            placed = place_batches(fetched, fetch_offset, self.options.isolation)
        except OncelogError as error:
            self._errors.append(_PendingError(error, fetched.tp, state.generation))
            return False
        if placed:
            state.fetch_offset = end = end_offset(placed, fetch_offset, fetched.high_watermark)
            state.pieces.append(Piece(fetched.tp, fetched.records, deque(placed), end))
        return False

    def _take_error(self, fetched: FetchedPartition, state: PartitionState, fetch_offset: int) -> None:
        if fetched.error_code == OffsetOutOfRange.code and self._has_waiting(fetched.tp, state):
            state.is_out_of_range = True
        elif fetched.error_code != OffsetOutOfRange.code or self._reset_policy == "none":
            error = self._error_of(fetched, fetch_offset)
            self._errors.append(_PendingError(error, fetched.tp, state.generation))
        else:
            self._look_up(state, self._reset_policy)

    def _error_of(self, fetched: FetchedPartition, fetch_offset: int) -> BrokerError:
        detail = f"fetching {fetched.tp} at offset {fetch_offset}"
        if fetched.error_code == OffsetOutOfRange.code:
            detail += "; auto.offset.reset=none: seek to an offset that exists, or allow earliest or latest"
        return error_for_code(fetched.error_code, detail)

    # Handing out

    def note_error(self, error: Exception) -> None:
        """An error for the application to meet at its next poll."""
        self._errors.append(_PendingError(error, None, None))

    @property
    def has_error(self) -> bool:
        """Whether an error waits for the application.

        One of a position that the application has left since is forgotten:
        test_an_error_of_a_position_that_was_left_is_forgotten. Source: kafka FetchCollector.
        """
        while self._errors and self._is_stale(self._errors[0]):
            self._errors.popleft()
        return bool(self._errors)

    def _is_stale(self, pending: _PendingError) -> bool:
        return pending.tp is not None and self._current(pending.tp, pending.generation) is None

    def raise_error(self) -> None:
        """Raise the oldest error that waits; also when a partition has no position and may not choose one."""
        if self.has_error:
            raise self._errors.popleft().error
        for tp, state in self._states.items():
            if state.position is None and state.reset is None:
                raise self._no_position(tp)

    def prepare_rows(self, max_records: int, now_ms: float) -> bool:
        """Have records ready in `delivery`, at most `max_records` new ones; false when none wait.

        Raises CorruptMessage for a batch that cannot be read; the position stays in front of it.
        """
        if self.delivery.has_columns:
            self._fetch_undelivered_again()
        if self.delivery.has_rows:
            return True
        runs: dict[TopicPartition, list[Record]] = {}
        count = 0
        for tp in self._with_pieces():
            state, run = self._states[tp], list[Record]()
            try:
                while state.pieces and count + len(run) < max_records and state.position is not None:
                    run += self._rows_of(state, max_records - count - len(run))
            except OncelogError as error:
                if not runs and not run:
                    raise
                self._errors.append(_PendingError(error, tp, state.generation))
            if run:
                runs[tp] = run
                count += len(run)
        size_bytes = sum([len(row.value) for run in runs.values() for row in run if row.value])
        self.metrics.on_records(count, size_bytes, now_ms)
        self.delivery.put(runs)
        return bool(runs)

    def take(self, max_records: int, now_ms: float) -> list[Record]:
        """Up to `max_records` records, of several partitions if need be; empty when none wait.

        Raises what `prepare_rows` raises.
        """
        self.prepare_rows(max_records, now_ms)
        return self.delivery.take(max_records)

    def _fetch_undelivered_again(self) -> None:
        """Go back to the positions: the application asks for rows where columns are ready, or conversely."""
        for tp in self.delivery.partitions():
            if (position := self.delivery.position(tp)) is not None and not self._states[tp].is_paused:
                self.seek(tp, position)

    def _with_pieces(self) -> list[TopicPartition]:
        return [tp for tp in self._in_turn() if self._states[tp].pieces]

    def _rows_of(self, state: PartitionState, max_records: int) -> list[Record]:
        assert state.position is not None
        piece = state.pieces[0]
        try:
            rows, state.position = piece.take_rows(
                state.position, max_records, check_crcs=self.options.check_crcs
            )
        except OncelogError:
            self._fetch_again(state)
            raise
        if piece.is_empty:
            state.pieces.popleft()
        return rows

    def _fetch_again(self, state: PartitionState) -> None:
        # The bytes may have been damaged on their way: ask for them once more at the next poll.
        if state.position is not None:
            state.move_to(state.position)

    def prepare_columns(self, now_ms: float, *, include_headers: bool = False) -> bool:
        """Have all that waits of one piece ready in `delivery` as columns; false when nothing waits."""
        if self.delivery.has_rows:
            self._fetch_undelivered_again()
        if self.delivery.has_columns:
            return True
        if (held := self.delivery.held_columns) is not None:
            self.seek(held.tp, held.position)  # its partition is paused; there is room for one RecordBatch
        for tp in self._with_pieces():
            state = self._states[tp]
            while state.pieces and state.position is not None:
                piece = state.pieces[0]
                try:
                    batch = piece.take_arrow(
                        state.position, check_crcs=self.options.check_crcs, include_headers=include_headers
                    )
                except OncelogError:
                    self._fetch_again(state)
                    raise
                state.pieces.popleft()
                position, state.position = state.position, piece.end_offset
                if batch.num_rows:
                    self.metrics.on_records(batch.num_rows, batch.nbytes, now_ms)
                    self.delivery.put_columns(Columns(tp, position, batch))
                    return True
        return False

    def take_arrow(self, now_ms: float, *, include_headers: bool = False) -> Any | None:
        """All that waits of one fetched piece as a pyarrow.RecordBatch; None when nothing waits."""
        self.prepare_columns(now_ms, include_headers=include_headers)
        return self.delivery.take_columns()

    def metric_values(self, now_ms: float) -> dict[str, float]:
        """Metrics under Kafka's names; records-lag-max over the assigned partitions."""
        lags = [lag for tp in self._states if (lag := self.lag(tp)) is not None]
        return self.metrics.values(now_ms) | {"records-lag-max": float(max(lags, default=0))}
