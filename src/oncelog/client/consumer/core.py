"""The consumer without I/O: positions, what to fetch next, and the delivery of fetched records.

In each partition, every visible record from the position on is delivered once, in offset order. The position
is the offset of the next record to deliver. It also moves past records that the isolation level hides.
`prepare_records` fills `delivery`, and the application takes records from there. The position moves past a
visible record only when the application takes the record.

A partition is in at most one fetch. Its data is fetched before the application asks for it, until
max.partition.fetch.bytes are undelivered. A broker has at most FETCH_CONNECTIONS_PER_BROKER fetches in
flight, each on a separate connection. So a partition that needs records does not wait behind the long poll of
other partitions. A seek replaces the partition's `generation`. Then the results of earlier fetches and
lookups are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from oncelog.client.arguments import offset_of
from oncelog.client.consumer.completed_fetch import CompletedFetch, TakenRecords
from oncelog.client.consumer.consumer_metrics import ConsumerMetrics
from oncelog.client.consumer.delivery_buffer import Columns, DeliveryBuffer
from oncelog.client.consumer.fetch_messages import (
    FetchedPartition,
    FetchOptions,
    decode_headers,
    end_offset,
    fetch_request,
    fetched_partitions,
)
from oncelog.client.consumer.list_offsets import OffsetAt
from oncelog.errors import (
    BrokerError,
    FencedLeaderEpoch,
    InconsistentTopicId,
    KafkaStorageError,
    LeaderNotAvailable,
    MisuseError,
    NotLeaderOrFollower,
    OffsetNotAvailable,
    OffsetOutOfRange,
    OncelogError,
    ReplicaNotAvailable,
    UnknownLeaderEpoch,
    UnknownServerError,
    UnknownTopicId,
    UnknownTopicOrPartition,
    error_for_code,
)
from oncelog.settings import Settings
from oncelog.types import Isolation, Record, TopicPartition
from oncelog.wire.messages import FetchRequest, FetchResponse

_STALE_LEADER = {
    error.code
    for error in (
        NotLeaderOrFollower,
        LeaderNotAvailable,
        ReplicaNotAvailable,
        UnknownTopicOrPartition,
        FencedLeaderEpoch,
        UnknownLeaderEpoch,
        KafkaStorageError,
        OffsetNotAvailable,
        UnknownTopicId,
        InconsistentTopicId,
    )
}
"""Error codes after which the leader must be looked up again. Source: Kafka's FetchCollector."""

FETCH_CONNECTIONS_PER_BROKER = 2
"""The maximum number of fetches in flight to one broker."""


Reset = Literal["earliest", "latest", "committed"]
"""The way to look up a position.

"committed" is the group's committed offset; if there is none, auto.offset.reset decides.
"""


@dataclass(slots=True)
class PartitionState:
    """The state of an assigned partition.

    `position` and `fetch_offset` are None until the lookup that `reset` names has ended. A seek replaces
    `generation`, and later responses to calls of an older generation are ignored. `generation` is an object
    and not a number. So if a partition is unassigned and assigned again, responses to its earlier calls are
    ignored too.
    """

    position: int | None = None
    fetch_offset: int | None = None
    reset: Reset | None = None
    generation: object = field(default_factory=object)
    is_paused: bool = False
    is_resetting: bool = False
    # True if the broker has no record at `fetch_offset`, and earlier records are still undelivered. After
    # their delivery the partition is fetched again.
    is_out_of_range: bool = False
    # The time in ms since which every fetch has failed with UNKNOWN_SERVER_ERROR.
    failing_since_ms: float | None = None
    completed_fetches: deque[CompletedFetch] = field(default_factory=deque)
    high_watermark: int | None = None
    last_stable_offset: int | None = None

    def invalidate(self) -> None:
        """Drop all fetched data, and ignore the responses to calls in flight."""
        self.generation = object()
        self.is_resetting = self.is_out_of_range = False
        self.completed_fetches.clear()

    def move_to(self, offset: int) -> None:
        """Set the position, and drop all fetched data."""
        self.invalidate()
        self.position = self.fetch_offset = offset
        self.reset = None

    def undelivered_bytes(self) -> int:
        """Return the size of the fetched batches that were not delivered yet."""
        return sum(completed.size_bytes for completed in self.completed_fetches)


@dataclass(frozen=True, slots=True)
class FetchCall:
    """A fetch. The caller sends it, and passes it to `on_response` together with the response.

    `expected` has the fetch offset and the generation of each partition.
    """

    node_id: int
    connection: int
    request: FetchRequest
    expected: dict[TopicPartition, tuple[int, object]]


@dataclass(frozen=True, slots=True)
class ResetCall:
    """A lookup of a position. The caller sends it, and passes it with the result to `on_reset`, or to
    `on_committed` if `to` is "committed".
    """

    tp: TopicPartition
    to: Reset
    generation: object


class _PendingError(NamedTuple):
    """An error for the next poll to raise.

    If it concerns a position, `tp` and `generation` identify that position.
    """

    error: Exception
    tp: TopicPartition | None
    generation: object


class ConsumerCore:
    """Positions and buffers of the assigned partitions. Times are in milliseconds, all of the same clock."""

    def __init__(self, settings: Settings) -> None:
        self.options = FetchOptions.from_settings(settings)
        self.metrics = ConsumerMetrics()
        self.delivery = DeliveryBuffer()
        self._reset_policy: Literal["earliest", "latest", "none"] = settings["auto.offset.reset"]
        self._request_timeout_ms: int = settings["request.timeout.ms"]
        self._states: dict[TopicPartition, PartitionState] = {}
        # Fetches in flight by broker id and connection number.
        self._in_flight: dict[tuple[int, int], FetchCall] = {}
        self._errors: deque[_PendingError] = deque()
        # The number of calls of `_ready_partitions`. Each call starts its list with another partition.
        self._rotation = 0

    # Assignment and positions

    def assign(self, partitions: Iterable[TopicPartition], *, from_committed: bool = False) -> None:
        """Read exactly these partitions. Partitions that are already assigned keep their positions.

        With `from_committed`, new partitions start at the group's committed offset, if there is one.
        """
        assigned = dict.fromkeys(TopicPartition(*tp) for tp in partitions)
        self._states = {tp: self._states.get(tp) or PartitionState() for tp in assigned}
        self.delivery.keep_only(self._states)
        for state in self._states.values():
            if state.position is None and state.reset is None:
                state.reset = "committed" if from_committed else self._reset_by_policy

    @property
    def _reset_by_policy(self) -> Reset | None:
        return None if self._reset_policy == "none" else self._reset_policy

    def assignment(self) -> list[TopicPartition]:
        """Return the assigned partitions."""
        return list(self._states)

    def _state(self, tp: TopicPartition) -> PartitionState:
        state = self._states.get(tp)
        if state is None:
            raise MisuseError(f"partition {tp} is not assigned; call assign() first")
        return state

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Read next from `offset`. Raises MisuseError for an unassigned partition or an invalid offset."""
        self._state(tp).move_to(offset_of(tp, offset))
        self.delivery.drop(tp)

    def seek_to(self, partitions: Collection[TopicPartition], to: Reset) -> None:
        """Let `resets` return lookups of these partitions (none given: of all assigned ones)."""
        for tp in partitions or list(self._states):
            self._look_up(self._state(tp), to)
            self.delivery.drop(tp)

    def _look_up(self, state: PartitionState, to: Reset) -> None:
        state.invalidate()
        state.position = state.fetch_offset = None
        state.reset = to

    def reset(self, partitions: Collection[TopicPartition]) -> None:
        """Let `resets` return lookups of these partitions as auto.offset.reset says.

        Raises MisuseError if auto.offset.reset is `none`.
        """
        if self._reset_policy == "none":
            raise self._no_position(next(iter(partitions)))
        self.seek_to(partitions, self._reset_policy)

    def position(self, tp: TopicPartition) -> int | None:
        """Return the offset of the next record to deliver; None until it is looked up.

        Raises MisuseError if there is no position and auto.offset.reset=none.
        """
        state = self._state(tp)
        if state.position is None and state.reset is None:
            raise self._no_position(tp)
        undelivered = self.delivery.position(tp)
        return state.position if undelivered is None else undelivered

    def _no_position(self, tp: TopicPartition) -> MisuseError:
        return MisuseError(f"{tp} has no position and auto.offset.reset=none: call seek() first")

    def set_paused(self, partitions: Iterable[TopicPartition], paused: bool) -> None:
        """Pause or resume partitions.

        Paused partitions keep their positions. They are neither fetched nor delivered.
        """
        for tp in partitions:
            self._state(tp).is_paused = paused
            self.delivery.set_paused(tp, paused)

    def paused(self) -> list[TopicPartition]:
        """Return the paused partitions."""
        return [tp for tp, state in self._states.items() if state.is_paused]

    def lag(self, tp: TopicPartition) -> int | None:
        """Return the end offset for this isolation level minus the position; None if one of them is
        unknown.
        """
        state = self._state(tp)
        is_committed = self.options.isolation is Isolation.READ_COMMITTED
        end = state.last_stable_offset if is_committed else state.high_watermark
        position = self.delivery.position(tp)
        position = state.position if position is None else position
        return None if end is None or position is None else max(end - position, 0)

    # Looking up positions

    def resets(self) -> list[ResetCall]:
        """Return the positions to look up now.

        A position whose lookup is in progress is not returned again.
        """
        calls = []
        for tp, state in self._states.items():
            if state.reset and not state.is_resetting:
                state.is_resetting = True
                calls.append(ResetCall(tp, state.reset, state.generation))
        return calls

    def on_reset(self, call: ResetCall, result: OffsetAt) -> None:
        """Set a position that was looked up, unless a seek has invalidated the lookup.

        If the lookup found no offset, let `resets` return the lookup again.
        """
        state = self._current(call.tp, call.generation)
        if state and result.offset is not None:
            state.move_to(result.offset)
        elif state:
            self.on_reset_failed(call)

    def on_committed(self, call: ResetCall, offset: int | None) -> None:
        """Set a position to the group's committed offset, unless a seek has invalidated the lookup.

        With `offset` None (no offset was committed), auto.offset.reset decides the next lookup.
        """
        if state := self._current(call.tp, call.generation):
            if offset is not None:
                state.move_to(offset)
            else:
                state.reset = self._reset_by_policy

    def on_reset_failed(self, call: ResetCall, error: OncelogError | None = None) -> None:
        """Let `resets` return a failed lookup again. The next poll raises `error`, if there is one."""
        if state := self._current(call.tp, call.generation):
            state.is_resetting = False
            if error:
                self._errors.append(_PendingError(error, call.tp, call.generation))

    def is_awaited(self, call: ResetCall) -> bool:
        """Return True unless a seek or a new assignment has made the lookup useless."""
        return self._current(call.tp, call.generation) is not None

    def end_resets(self, calls: Iterable[ResetCall]) -> None:
        """Let `resets` return these lookups again if they have set no position.

        Call it after every lookup, even a cancelled one.
        """
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
        """Return the fetches to send now, and the partitions whose leader must be looked up first."""
        in_flight = {
            tp for call in self._in_flight.values() for tp in call.expected if self._is_expected(call, tp)
        }
        by_node: dict[int, list[TopicPartition]] = {}
        leaderless: list[TopicPartition] = []
        for tp in self._ready_partitions():
            if tp in in_flight or not self._has_room(tp):
                continue
            if (node_id := leader_of(tp)) is None:
                leaderless.append(tp)
            else:
                by_node.setdefault(node_id, []).append(tp)
        return [call for node_id, tps in by_node.items() if (call := self._fetch(node_id, tps))], leaderless

    def _has_room(self, tp: TopicPartition) -> bool:
        state = self._states[tp]
        if state.is_out_of_range:
            # Do not fetch until the application has taken the earlier records: the broker would answer each
            # fetch immediately with the same error.
            if self._has_undelivered(tp, state):
                return False
            state.is_out_of_range = False
        return state.undelivered_bytes() < max(self.options.partition_max_bytes, 1)

    def _has_undelivered(self, tp: TopicPartition, state: PartitionState) -> bool:
        return bool(state.completed_fetches) or self.delivery.position(tp) is not None

    def _is_expected(self, call: FetchCall, tp: TopicPartition) -> bool:
        """Return True unless a seek has invalidated this partition's data in a fetch in flight."""
        return self._current(tp, call.expected[tp][1]) is not None

    def _ready_partitions(self) -> list[TopicPartition]:
        """Return the partitions that may be fetched or delivered.

        Each call starts with another partition, so that no partition is starved.
        """
        ready = [tp for tp, s in self._states.items() if s.fetch_offset is not None and not s.is_paused]
        self._rotation += 1
        start = self._rotation % len(ready) if ready else 0
        return ready[start:] + ready[:start]

    def _fetch(self, node_id: int, partitions: list[TopicPartition]) -> FetchCall | None:
        connections = range(FETCH_CONNECTIONS_PER_BROKER)
        connection = next((c for c in connections if (node_id, c) not in self._in_flight), None)
        if connection is None:
            return None
        states = self._states
        expected = {tp: (states[tp].fetch_offset or 0, states[tp].generation) for tp in partitions}
        positions = [(tp, offset) for tp, (offset, _) in expected.items()]
        call = FetchCall(node_id, connection, fetch_request(positions, self.options), expected)
        self._in_flight[node_id, connection] = call
        return call

    def on_response(
        self, call: FetchCall, response: FetchResponse, latency_ms: float, now_ms: float
    ) -> list[TopicPartition]:
        """Process a response; return the partitions whose leader must be looked up again."""
        self._in_flight.pop((call.node_id, call.connection), None)
        if response.error_code:
            return self._on_refused(call, response.error_code, now_ms)
        stale, size_bytes = [], 0
        for fetched in fetched_partitions(response):
            fetch_offset, generation = call.expected.get(fetched.tp, (0, None))
            state = self._current(fetched.tp, generation)
            if state is None:
                continue
            size_bytes += len(fetched.records)
            if self._take(fetched, state, fetch_offset, now_ms):
                stale.append(fetched.tp)
        self.metrics.on_fetch(latency_ms, size_bytes, now_ms)
        return stale

    def _on_refused(self, call: FetchCall, code: int, now_ms: float) -> list[TopicPartition]:
        """Process the error of a whole fetch; return the partitions whose leader must be looked up again."""
        states = {tp: self._states[tp] for tp in call.expected if self._is_expected(call, tp)}
        if all([self._is_repeated(state, code, now_ms) for state in states.values()]):
            return list(states)
        self.note_error(error_for_code(code, f"fetch from broker {call.node_id}"))
        return []

    def _is_repeated(self, state: PartitionState, code: int, now_ms: float) -> bool:
        """Return True if a fetch with this error is repeated, instead of raising the error.

        UNKNOWN_SERVER_ERROR is repeated for request.timeout.ms: the broker may have failed to read a segment
        from remote storage. Java repeats it without a limit. Guard:
        test_an_unknown_error_of_the_broker_is_raised_only_if_it_lasts.
        """
        if code != UnknownServerError.code:
            return code in _STALE_LEADER
        if state.failing_since_ms is None:
            state.failing_since_ms = now_ms
        if now_ms - state.failing_since_ms < self._request_timeout_ms:
            return True
        state.failing_since_ms = None
        return False

    def on_failure(self, call: FetchCall) -> list[TopicPartition]:
        """Process a fetch that failed; return the partitions whose leader must be looked up again."""
        self._in_flight.pop((call.node_id, call.connection), None)
        return [tp for tp in call.expected if tp in self._states]

    def end_fetch(self, call: FetchCall) -> None:
        """Free the connection of a fetch that has ended or was cancelled. Further calls do nothing."""
        if self._in_flight.get((call.node_id, call.connection)) is call:
            del self._in_flight[call.node_id, call.connection]

    def _take(
        self, fetched: FetchedPartition, state: PartitionState, fetch_offset: int, now_ms: float
    ) -> bool:
        """Buffer a partition's fetched data or its error; return True if its leader must be looked up
        again.
        """
        if self._is_repeated(state, fetched.error_code, now_ms):
            return True
        state.failing_since_ms = None
        if fetched.error_code:
            self._take_error(fetched, state, fetch_offset)
            return False
        state.high_watermark = fetched.high_watermark
        state.last_stable_offset = fetched.last_stable_offset if fetched.last_stable_offset >= 0 else None
        try:
            batches = decode_headers(fetched, fetch_offset, self.options.isolation)
        except OncelogError as error:
            self._errors.append(_PendingError(error, fetched.tp, state.generation))
            return False
        if batches:
            state.fetch_offset = end = end_offset(batches, fetch_offset, fetched.high_watermark)
            completed = CompletedFetch(fetched.tp, fetched.records, batches, end)
            state.completed_fetches.append(completed)
        return False

    def _take_error(self, fetched: FetchedPartition, state: PartitionState, fetch_offset: int) -> None:
        if fetched.error_code == OffsetOutOfRange.code and self._has_undelivered(fetched.tp, state):
            state.is_out_of_range = True
        elif fetched.error_code != OffsetOutOfRange.code or self._reset_policy == "none":
            error = self._error_of(fetched, fetch_offset)
            self._errors.append(_PendingError(error, fetched.tp, state.generation))
        else:
            self._look_up(state, self._reset_policy)

    def _error_of(self, fetched: FetchedPartition, fetch_offset: int) -> BrokerError:
        detail = f"fetching {fetched.tp} at offset {fetch_offset}"
        if fetched.error_code == OffsetOutOfRange.code:
            detail += (
                "; auto.offset.reset=none: seek to an offset in the log, or set "
                "auto.offset.reset to earliest or latest"
            )
        return error_for_code(fetched.error_code, detail)

    # Delivery

    def note_error(self, error: Exception) -> None:
        """Let the next poll raise this error."""
        self._errors.append(_PendingError(error, None, None))

    @property
    def has_error(self) -> bool:
        """True if an error waits for the next poll.

        Errors that concern a position are dropped if that position has changed. Source: Kafka's
        FetchCollector.
        """
        # Guard: test_an_error_is_forgotten_once_its_position_is_left.
        while self._errors and self._is_stale(self._errors[0]):
            self._errors.popleft()
        return bool(self._errors)

    def _is_stale(self, pending: _PendingError) -> bool:
        return pending.tp is not None and self._current(pending.tp, pending.generation) is None

    def raise_error(self) -> None:
        """Raise the oldest error that waits for a poll.

        If there is none, and auto.offset.reset=none, raise MisuseError for a partition without a position.
        """
        if self.has_error:
            raise self._errors.popleft().error
        for tp, state in self._states.items():
            if state.position is None and state.reset is None:
                raise self._no_position(tp)

    def prepare_records(self, max_records: int, now_ms: float) -> bool:
        """Put up to `max_records` fetched records into `delivery`, unless it already has records.

        Return False if `delivery` stays empty. Raises CorruptMessage or InvalidRecord for a batch that cannot
        be decoded. The position stays before that batch.
        """
        if self.delivery.has_columns:
            self._fetch_undelivered_again()
        if self.delivery.has_records:
            return True
        by_partition: dict[TopicPartition, list[Record]] = {}
        count = size_bytes = 0
        for tp in self._with_fetched_data():
            state, records = self._states[tp], list[Record]()
            fetches = state.completed_fetches
            try:
                while fetches and count + len(records) < max_records and state.position is not None:
                    taken = self._take_records(state, max_records - count - len(records))
                    size_bytes += taken.value_bytes
                    if records:
                        records += taken.records
                    else:
                        records = taken.records
            except OncelogError as error:
                if not by_partition and not records:
                    raise
                self._errors.append(_PendingError(error, tp, state.generation))
            if records:
                by_partition[tp] = records
                count += len(records)
        self.metrics.on_records(count, size_bytes, now_ms)
        self.delivery.put(by_partition)
        return bool(by_partition)

    def take(self, max_records: int, now_ms: float) -> list[Record]:
        """Return up to `max_records` fetched records, from several partitions if necessary.

        Raises CorruptMessage or InvalidRecord for a batch that cannot be decoded. The position stays before
        that batch.
        """
        self.prepare_records(max_records, now_ms)
        return self.delivery.take(max_records)

    def _fetch_undelivered_again(self) -> None:
        """Fetch undelivered data again: the application has switched between `poll` and `poll_arrow`."""
        for tp in self.delivery.partitions():
            if (position := self.delivery.position(tp)) is not None and not self._states[tp].is_paused:
                self.seek(tp, position)

    def _with_fetched_data(self) -> list[TopicPartition]:
        return [tp for tp in self._ready_partitions() if self._states[tp].completed_fetches]

    def _take_records(self, state: PartitionState, max_records: int) -> TakenRecords:
        assert state.position is not None
        completed = state.completed_fetches[0]
        try:
            taken = completed.take_records(state.position, max_records, check_crcs=self.options.check_crcs)
        except OncelogError:
            self._fetch_again(state)
            raise
        state.position = taken.position
        if completed.is_empty:
            state.completed_fetches.popleft()
        return taken

    def _fetch_again(self, state: PartitionState) -> None:
        # Fetch the data again, because it may have been damaged in transit.
        if state.position is not None:
            state.move_to(state.position)

    def prepare_columns(self, now_ms: float, *, include_headers: bool = False) -> bool:
        """Put the records of one fetch of one partition into `delivery`, unless it has a RecordBatch already.

        Return False if the fetched data has no visible record.

        Raises CorruptMessage or InvalidRecord for a batch that cannot be decoded. The position stays before
        that batch.
        """
        if self.delivery.has_records:
            self._fetch_undelivered_again()
        if self.delivery.has_columns:
            return True
        if (held := self.delivery.held_columns) is not None:
            # The buffer can contain only one RecordBatch, and the current RecordBatch belongs to a paused
            # partition. Drop it, and fetch its data again after `resume`.
            self.seek(held.tp, held.position)
        for tp in self._with_fetched_data():
            state = self._states[tp]
            while state.completed_fetches and state.position is not None:
                completed = state.completed_fetches[0]
                try:
                    batch = completed.take_arrow(
                        state.position, check_crcs=self.options.check_crcs, include_headers=include_headers
                    )
                except OncelogError:
                    self._fetch_again(state)
                    raise
                state.completed_fetches.popleft()
                position, state.position = state.position, completed.end_offset
                if batch.num_rows:
                    self.metrics.on_records(batch.num_rows, batch.nbytes, now_ms)
                    self.delivery.put_columns(Columns(tp, position, batch))
                    return True
        return False

    def take_arrow(self, now_ms: float, *, include_headers: bool = False) -> Any | None:
        """Return the records of one fetch of one partition as a pyarrow.RecordBatch, or None."""
        self.prepare_columns(now_ms, include_headers=include_headers)
        return self.delivery.take_columns()

    def metric_values(self, now_ms: float) -> dict[str, float]:
        """Return metrics under Kafka's names. records-lag-max is the maximum over all assigned partitions."""
        lags = [lag for tp in self._states if (lag := self.lag(tp)) is not None]
        return self.metrics.values(now_ms) | {"records-lag-max": float(max(lags, default=0))}
