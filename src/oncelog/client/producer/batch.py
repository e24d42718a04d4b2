"""A batch of records under way, and the outcome its records share.

A record has no object of its own while it waits: it is a row in its batch. Whoever wants to know what
became of it keeps (outcome, index). When a batch is cut in pieces, its outcome points at theirs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from oncelog.client.producer.rows import Row, row_size_bytes
from oncelog.errors import OncelogError, OutcomeUnknown
from oncelog.rules.idempotence.error_policy import Mark
from oncelog.rules.idempotence.sequencer import NumberedBatch
from oncelog.types import Compression, RecordMetadata, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.header import HEADER_BYTES, assign_producer
from oncelog.wire.primitives import WritableBuffer
from oncelog.wire.records import NewRecord, decode_records

Callback = Callable[[RecordMetadata | None, Exception | None], object]
Listener = Callable[[], object]


class OffsetRange(NamedTuple):
    """Records of one partition that stand together; offsets None: the broker did not tell them."""

    topic: str
    partition: int
    base_offset: int | None
    last_offset: int | None
    record_count: int


class Outcome:
    """What became of a batch's records. Written once, by the core; then `notify` tells everyone."""

    __slots__ = (
        "_listeners",
        "base_offset",
        "callbacks",
        "error",
        "is_done",
        "log_time_ms",
        "pieces",
        "times",
        "tp",
    )

    def __init__(self, tp: TopicPartition) -> None:
        self.tp = tp
        self.is_done = False
        self.error: Exception | None = None
        self.base_offset: int | None = None
        self.log_time_ms: int | None = None
        self.times: Sequence[int] | int = 0
        self.callbacks: dict[int, Callback] = {}
        """By the index of their records. An entry is set without a call: no signal comes behind it."""
        self.pieces: tuple[list[int], list[Outcome]] | None = None
        self._listeners: list[Listener] = []

    def settle(self, base_offset: int | None, log_time_ms: int | None, error: Exception | None) -> None:
        """Set the outcome. `log_time_ms` None: the records keep the producer's timestamps."""
        self.base_offset, self.log_time_ms, self.error = base_offset, log_time_ms, error
        self.is_done = True

    def listen(self, listener: Listener) -> None:
        """Call `listener` once done, at once if it is.

        Call no listener of other threads: an interrupt of this one would lose them, and they would wait
        without end.
        """
        self._listeners.append(listener)
        if self.is_done:
            try:
                self._listeners.remove(listener)
            except ValueError:  # `notify` calls it
                return
            listener()

    def notify(self) -> Iterator[BaseException]:
        """Run callbacks and listeners of a settled outcome; yields what they raise, and goes on.

        SystemExit and a cancellation, too, are an application's mistake that ends nothing here.
        """
        callbacks, self.callbacks = self.callbacks, {}
        for index, callback in callbacks.items():
            try:
                error = self.error if self.pieces is None else self.error_of(index)
                callback(None if error else self.metadata(index), error)
            except BaseException as raised:
                yield raised
        yield from self._call_listeners()

    def _call_listeners(self) -> Iterator[BaseException]:
        while self._listeners:
            try:
                listener = self._listeners.pop(0)
            except IndexError:  # another thread took the last one
                return
            try:
                listener()
            except BaseException as raised:
                yield raised

    def split(self, starts: list[int], outcomes: list[Outcome]) -> None:
        """The records from `starts[i]` on (to the next start) now belong to `outcomes[i]`."""
        self.pieces = (starts, outcomes)

    def _at(self, index: int) -> tuple[Outcome, int]:
        outcome = self
        while outcome.pieces is not None:
            starts, outcomes = outcome.pieces
            piece = bisect_right(starts, index) - 1
            outcome, index = outcomes[piece], index - starts[piece]
        return outcome, index

    def error_of(self, index: int) -> Exception | None:
        """Why the record failed; None when it was delivered."""
        return self._at(index)[0].error

    def metadata(self, index: int) -> RecordMetadata:
        """Where a delivered record stands."""
        outcome = self
        if self.pieces is not None:
            outcome, index = self._at(index)
        offset = None if outcome.base_offset is None else outcome.base_offset + index
        if outcome.log_time_ms is not None:
            timestamp_ms = outcome.log_time_ms
        else:
            timestamp_ms = outcome.times if isinstance(outcome.times, int) else outcome.times[index]
        topic, partition = outcome.tp
        return tuple.__new__(RecordMetadata, (topic, partition, offset, timestamp_ms))

    def ranges(self, first: int, count: int) -> Iterator[OffsetRange | tuple[int, Exception]]:
        """The fate of records [first, first + count): stretches delivered, and (count, error) else."""
        while count > 0:
            outcome, index = self._at(first)
            part = min(count, self._piece_end(first) - first)
            if outcome.error is not None:
                yield part, outcome.error
            else:
                base = None if outcome.base_offset is None else outcome.base_offset + index
                last = None if base is None else base + part - 1
                yield OffsetRange(outcome.tp.topic, outcome.tp.partition, base, last, part)
            first, count = first + part, count - part

    def _piece_end(self, index: int) -> int:
        end = 1 << 62
        outcome: Outcome = self
        shift = 0
        while outcome.pieces is not None:
            starts, outcomes = outcome.pieces
            piece = bisect_right(starts, index - shift) - 1
            if piece + 1 < len(starts):
                end = min(end, shift + starts[piece + 1])
            shift += starts[piece]
            outcome = outcomes[piece]
        return end


class ProducerBatch(NumberedBatch):
    """Records of one partition, open for more until sealed; then bytes.

    `size_bytes` is an upper bound before compression. Times are the monotonic clock's milliseconds.
    `attempt_count` counts how often it was sent, `last_error` is what came of the last failed attempt.
    `charged_bytes` of buffer.memory are its own. `is_queued`: the present attempt waits for a connection, so
    that no byte of it has left.
    """

    __slots__ = (
        "attempt_count", "charged_bytes", "created_ms", "data", "encoded_identity", "is_queued", "is_settled",
        "last_error", "outcome", "parent", "retry_at_ms", "rows", "sent_ms", "serial", "size_bytes", "tp",
        "unsettled_pieces",
    )  # fmt: skip

    def __init__(self, tp: TopicPartition, created_ms: float, serial: int) -> None:
        super().__init__(0)
        self.tp = tp
        self.created_ms = created_ms
        self.serial = serial
        self.rows: list[Row] = []
        self.size_bytes = HEADER_BYTES
        self.charged_bytes = 0
        self.outcome = Outcome(tp)
        self.attempt_count = 0
        self.retry_at_ms = 0.0
        self.sent_ms: float | None = None
        self.last_error: OncelogError | None = None
        self.data: WritableBuffer | None = None
        self.encoded_identity: Any = None
        self.parent: ProducerBatch | None = None
        self.unsettled_pieces = 0
        self.is_queued = False
        self.is_settled = False

    def seal(self) -> None:
        """No more records: from here on their number is fixed."""
        if self.data is None:
            self.record_count = len(self.rows)
            self.charged_bytes = self.size_bytes - HEADER_BYTES

    def encode(
        self, compression: Compression, level: int | None, is_transactional: bool = False
    ) -> WritableBuffer:
        """The batch's bytes with its present numbers; made once, then only renumbered in place."""
        numbers = (self.identity, self.base_sequence)
        if self.data is None:
            self.outcome.times = [row[0] for row in self.rows]
            self.data = build_batch(
                self.rows,  # type: ignore[arg-type]  # plain tuples in NewRecord's order, for speed
                compression=compression,
                level=level,
                producer_id=self.identity.producer_id if self.identity else None,
                producer_epoch=self.identity.producer_epoch if self.identity else None,
                base_sequence=self.base_sequence,
                is_transactional=is_transactional,
            )
            self.rows = []
        elif self.identity is not None and self.encoded_identity != numbers:
            assign_producer(self.data, *self.identity, self.base_sequence, is_transactional)
        self.encoded_identity = numbers
        return self.data

    def decoded_rows(self) -> list[NewRecord]:
        """The records again, from rows or bytes; for cutting the batch in pieces."""
        if self.data is None:
            return [NewRecord(*row) for row in self.rows]
        return [
            NewRecord(record.timestamp_ms, record.key, record.value, record.headers)
            for record in decode_records(self.data, verify=False)
        ]


def unknown_outcome(batch: ProducerBatch, error: OncelogError) -> OutcomeUnknown:
    """What to tell of a batch that is given up and may be stored; `error`: the last that was heard."""
    unknown = OutcomeUnknown(
        f"{batch.record_count} records for {batch.tp} were given up, and may be stored: {error}", error
    )
    unknown.reaction = Mark.ABORTABLE.value
    return unknown


def cut(batch: ProducerBatch) -> list[ProducerBatch]:
    """Return two pieces, of about as many bytes, that carry the records of `batch` on.

    Futures and callbacks of the records go with them. The batch must hold more than one record.
    """
    rows = batch.decoded_rows()
    # Halves, until they fit: one piece per record took a round trip for each of thousands. See
    # test_a_batch_above_the_topics_limit_is_sent_in_few_requests.
    half = _index_of_half([row_size_bytes(row.key, row.value, row.headers) for row in rows])
    pieces = [_piece(batch, rows[:half]), _piece(batch, rows[half:])]
    batch.outcome.split([0, half], [piece.outcome for piece in pieces])
    for index, callback in batch.outcome.callbacks.items():
        piece, start = (pieces[0], 0) if index < half else (pieces[1], half)
        piece.outcome.callbacks[index - start] = callback
    batch.outcome.callbacks = {}
    batch.unsettled_pieces = len(pieces)
    return pieces


def _index_of_half(sizes: list[int]) -> int:
    """Return where the second half of the bytes begins, with at least one record on each side."""
    sums = list(accumulate(sizes))
    return min(max(bisect_right(sums, sums[-1] // 2), 1), len(sizes) - 1)


def _piece(batch: ProducerBatch, rows: list[NewRecord]) -> ProducerBatch:
    piece = ProducerBatch(batch.tp, batch.created_ms, batch.serial)
    piece.rows = list(rows)
    piece.size_bytes += sum(row_size_bytes(row.key, row.value, row.headers) for row in rows)
    piece.attempt_count = batch.attempt_count - 1  # to be too large is no failure that `retries` counts
    # They have its numbers: if the whole is stored, the broker knows no piece and refuses each: OUT_OF_ORDER.
    piece.may_be_stored = batch.may_be_stored
    piece.parent = batch
    piece.seal()
    return piece
