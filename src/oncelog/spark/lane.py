"""What a task of the sink does: write its lane in one transaction, or find it written.

What may be written is decided in rules/lane.py; here is the asking and sending.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from oncelog.edge.admin import Admin
from oncelog.edge.producer import Delivery, Producer
from oncelog.errors import MessageTooLarge, MisuseError, OncelogError
from oncelog.rules.lane import (
    Compare,
    Finished,
    LaneMarker,
    Refuse,
    RowRefused,
    RowSum,
    SinkError,
    Write,
    decide_finish,
    decide_lane,
    decide_repeated,
    may_be_repeated,
)
from oncelog.spark.remedies import failure_text
from oncelog.spark.sink_options import SinkSettings
from oncelog.spark.sink_rows import LaneRows, Part
from oncelog.types import OffsetAndMetadata, TopicPartition


@dataclass(frozen=True, slots=True)
class LaneReport:
    """What a lane did. `was_there`: nothing was written, the batch was there already.

    `size_bytes`: of keys and values; `commit_seconds`: from the last row handed over to the commit's answer.
    """

    lane: int
    sum: RowSum
    was_there: bool
    size_bytes: int = 0
    commit_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Sink:
    """One sink (a streaming query, or a batch write) and where its markers are kept."""

    name: str
    settings: SinkSettings

    @property
    def marker_at(self) -> TopicPartition:
        """Offsets need a partition that exists; this one does not move, whatever the rows are."""
        return TopicPartition(self.settings.marker_topic, 0)

    @property
    def group(self) -> str:
        """Keeps what the driver has seen finished."""
        return f"{self.settings.prefix}-{self.name}"

    def lane_id(self, lane: int) -> str:
        """The lane's transactional id, and the group that keeps its marker."""
        return f"{self.group}-{lane}"

    def marker(self, admin: Admin) -> LaneMarker | None:
        """The last batch that was committed as one transaction (`write_atomic`)."""
        return LaneMarker.decode(self.group, self._kept(admin, self.group))

    def lane_marker(self, admin: Admin, lane: int) -> LaneMarker | None:
        """The last batch the lane committed."""
        return LaneMarker.decode(self.lane_id(lane), self._kept(admin, self.lane_id(lane)))

    def lanes(self, admin: Admin) -> list[int]:
        """All lanes that ever committed and are not forgotten; asks every broker."""
        numbers = [each.group_id.removeprefix(f"{self.group}-") for each in admin.list_groups()]
        return [int(number) for number in numbers if number.isdecimal()]

    def finished(self, admin: Admin) -> Finished | None:
        """The last batch of which all lanes were committed."""
        return Finished.decode(self.group, self._kept(admin, self.group))

    def _kept(self, admin: Admin, group: str) -> OffsetAndMetadata | None:
        return admin.group_offsets(group, [self.marker_at]).get(self.marker_at)


def write_lane(sink: Sink, batch_id: int, lane: int, batches: Iterable[pa.RecordBatch]) -> LaneReport:
    """Write the rows once, in a transaction of their own. Raises SinkError."""
    rows = LaneRows(sink.settings.topic, sink.settings.max_row_bytes)
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    try:
        if first is None:
            return _without_rows(sink, batch_id, lane)
        return _write(sink, batch_id, lane, rows, _chain(first, filled))
    except OncelogError as error:
        kind = type(error) if isinstance(error, SinkError) else SinkError
        raise kind(
            failure_text(error, f"lane {lane} of batch {batch_id}", sink.settings, rows.largest)
        ) from error


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _without_rows(sink: Sink, batch_id: int, lane: int) -> LaneReport:
    """No transaction for nothing; but the lane must have had no rows the first time either."""
    with Admin(sink.settings.admin) as admin:
        marker = sink.lane_marker(admin, lane)
    if marker is not None and marker.batch_id == batch_id:
        _agree(batch_id, lane, marker.sum, RowSum())
    return LaneReport(lane, RowSum(), was_there=False)


def _write(
    sink: Sink, batch_id: int, lane: int, rows: LaneRows, batches: Iterator[pa.RecordBatch]
) -> LaneReport:
    settings = {**sink.settings.producer, "transactional.id": sink.lane_id(lane)}
    with Producer(settings) as producer:
        # From here on no earlier attempt can write, and what it left is finished or aborted.
        producer.init_transactions()
        with Admin(sink.settings.admin) as admin:
            marker, finished = sink.lane_marker(admin, lane), sink.finished(admin)
        first = sink.settings.first_batch_id
        match decide_lane(batch_id, lane, marker, finished, first_batch_id=first):
            case Refuse() as refusal:
                raise refusal.error(batch_id, lane)
            case Compare(expected):
                for batch in batches:
                    rows.take(batch)
                _agree(batch_id, lane, expected, rows.sum)
                return LaneReport(lane, rows.sum, True, rows.size_bytes)
            case Write():
                with producer.transaction():
                    for batch in batches:
                        for part in rows.parts(rows.take(batch)):
                            send_part(producer, part)
                    sent_at = time.monotonic()
                    kept = {sink.marker_at: LaneMarker(batch_id, rows.sum).encode()}
                    producer.send_offsets_to_transaction(kept, sink.lane_id(lane))
                return LaneReport(lane, rows.sum, False, rows.size_bytes, time.monotonic() - sent_at)


def send_part(producer: Producer, part: Part) -> Delivery:
    """Hand rows to the producer. Raises RowRefused."""
    try:
        return producer.send_table(part.topic, part.rows, partition=part.partition)
    except (MisuseError, MessageTooLarge) as error:
        raise RowRefused(
            f"row {part.first_row} (or one soon after) for topic {part.topic!r}: {error}"
        ) from error


def _agree(batch_id: int, lane: int, expected: RowSum, now: RowSum) -> None:
    refusal = decide_repeated(expected, now)
    if refusal is not None:
        raise refusal.error(batch_id, lane)


def finish(sink: Sink, batch_id: int, reports: Iterable[LaneReport], run_id: str | None = None) -> None:
    """Note on the driver that every lane of the batch is committed. May be repeated. Raises SinkError.

    `run_id`: the start of the query; without it every batch is looked at as one that may be repeated.
    """
    lanes = [report.lane for report in reports]
    try:
        _finish(sink, batch_id, lanes, run_id)
    except OncelogError as error:
        kind = type(error) if isinstance(error, SinkError) else SinkError
        raise kind(failure_text(error, f"batch {batch_id}", sink.settings, None)) from error


def _finish(sink: Sink, batch_id: int, lanes: list[int], run_id: str | None) -> None:
    with Admin(sink.settings.admin) as admin:
        before = sink.finished(admin)
        beyond: dict[int, LaneMarker | None] = {}
        if may_be_repeated(before, run_id):
            others = (lane for lane in sink.lanes(admin) if lane >= len(lanes))
            beyond = {lane: sink.lane_marker(admin, lane) for lane in others}
        decided = decide_finish(batch_id, lanes, before, beyond, run_id)
        if isinstance(decided, Refuse):
            raise decided.error(batch_id)
        if decided != before:
            admin.alter_group_offsets(sink.group, {sink.marker_at: decided.encode()})
