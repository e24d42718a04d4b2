"""The input and the output of an audit: stored batches, findings and totals."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from oncelog.rules.idempotence.sequence import advance


class FindingKind(Enum):
    """The kind of a finding. The values appear in tables and JSON, so they must not change."""

    DUPLICATE_BATCH = "duplicate_batch"
    SEQUENCE_GAP = "sequence_gap"
    OUT_OF_ORDER = "out_of_order"
    OVERLAP = "overlap"
    EPOCH_WENT_BACK = "epoch_went_back"
    OFFSET_OVERLAP = "offset_overlap"
    OFFSET_GAP = "offset_gap"
    CRC_DAMAGE = "crc_damage"
    UNREADABLE = "unreadable"
    RECORD_COUNT = "record_count"
    BAD_RECORDS = "bad_records"
    HALF_NUMBERED = "half_numbered"
    UNKNOWN_MARKER = "unknown_marker"
    TRANSACTION_WITHOUT_OUTCOME = "transaction_without_outcome"
    TWO_OUTCOMES = "two_outcomes"
    MARKER_WITHOUT_TRANSACTION = "marker_without_transaction"
    OUTSIDE_TRANSACTION = "outside_transaction"
    VISIBLE_THOUGH_ABORTED = "visible_though_aborted"
    VISIBLE_THOUGH_OPEN = "visible_though_open"
    HIDDEN_THOUGH_COMMITTED = "hidden_though_committed"
    OPEN_TRANSACTION = "open_transaction"
    TORN_TAIL = "torn_tail"
    LOG_START_MOVED = "log_start_moved"
    UNREADABLE_INDEX = "unreadable_index"

    @property
    def is_violation(self) -> bool:
        """True if this kind of finding violates a guarantee. The other kinds are legal states, such as an
        open transaction.
        """
        return self not in (
            FindingKind.OPEN_TRANSACTION,
            FindingKind.TORN_TAIL,
            FindingKind.LOG_START_MOVED,
            FindingKind.UNREADABLE_INDEX,
        )


class StoredBatch(NamedTuple):
    """One input of the audit: the header of a stored batch, and the content of its marker if it is one.

    A field that the batch does not have is None.

    - `sequence_count`: the number of sequences of the batch. A compacted batch may have fewer records.
    - `crc_ok`: True if the checksum is right, False if it is wrong. None if the bytes are not a batch; then
      `problem` says why, and only the offsets are valid.
    - `is_visible`: True if read_committed readers get the records, False if not, None if unknown.
    - `is_torn`: the log ends within this batch.
    - `records_problem`: how the records differ from the header; None if they match or were not read.
    - `is_removed`: this input is not a batch. It reports that the log start has moved past `last_offset`
      since the audit began.
    - `is_index`: this input is not a batch. It reports that the transaction index of the segment at
      `base_offset` is invalid; `problem` says why.
    """

    base_offset: int
    last_offset: int
    producer_id: int | None
    producer_epoch: int | None
    base_sequence: int | None
    sequence_count: int
    records_count: int
    is_control: bool
    crc_ok: bool | None
    is_transactional: bool = False
    is_commit: bool | None = None
    coordinator_epoch: int | None = None
    is_visible: bool | None = None
    is_torn: bool = False
    problem: str | None = None
    records_problem: str | None = None
    is_removed: bool = False
    is_index: bool = False


class Finding(NamedTuple):
    """One finding of an audit, and its place in the log.

    `first_sequence` and `last_sequence` are the batch's sequences, or the missing sequences of a gap.
    `other_offset` is the base offset of the conflicting batch, or the offset of the transaction's marker;
    None if there is neither.
    """

    kind: FindingKind
    base_offset: int
    last_offset: int
    producer_id: int | None
    producer_epoch: int | None
    first_sequence: int | None
    last_sequence: int | None
    other_offset: int | None
    explanation: str


@dataclass(frozen=True, slots=True)
class PartitionTotals:
    """The totals of an audit of one partition.

    - `unnumbered_batches`, `unnumbered_records`: batches without a producer id, and their records.
    - `unknown_starts`: producers whose first batches were deleted with the beginning of the log.
    - `committed`, `aborted`: transactions that have data in this partition.
    - `empty_markers`: markers of transactions that have no data in this partition.
    - `removed_records`: records that segment files still have below the log start. They are not audited.
    - `findings`: the number of violations, including those beyond `max_findings`.
    """

    batches: int = 0
    records: int = 0
    control_batches: int = 0
    producers: int = 0
    unnumbered_batches: int = 0
    unnumbered_records: int = 0
    unknown_starts: int = 0
    committed: int = 0
    aborted: int = 0
    empty_markers: int = 0
    removed_records: int = 0
    findings: int = 0


class Findings:
    """A collector: it keeps the first `limit` findings, and counts all violations."""

    def __init__(self, limit: int) -> None:
        self.kept: list[Finding] = []
        self.violations = 0
        self._limit = limit

    def add(self, finding: Finding) -> None:
        self.violations += finding.kind.is_violation
        if len(self.kept) < self._limit:
            self.kept.append(finding)

    def report(
        self, kind: FindingKind, batch: StoredBatch, text: str, *, other_offset: int | None = None
    ) -> None:
        """Add a finding about one batch, with the batch's offsets, producer id, epoch and sequences."""
        first = batch.base_sequence
        last = None if first is None else advance(first, batch.sequence_count - 1)
        producer = (batch.producer_id, batch.producer_epoch)
        self.add(
            Finding(kind, batch.base_offset, batch.last_offset, *producer, first, last, other_offset, text)
        )
