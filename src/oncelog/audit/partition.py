"""Audit one stored partition: check independently that it keeps the exactly-once guarantees.

The audit reads batch headers and markers in stored order. The only code that it shares with the broker's
append rule is the arithmetic of sequence numbers, so it can prove the append rule wrong.

    batch of (producer id, epoch)                                 finding
    the next sequence of its epoch                                -
    sequence 0 of a higher epoch                                  -
    the first of its producer id, if the log has lost its start   - (counted in `unknown_starts`)
    the first after a gap that no later batch fills               sequence_gap
    fills a gap between earlier batches                           out_of_order
    has exactly the sequences of an earlier batch                 duplicate_batch
    has some sequences of earlier batches                         overlap
    its epoch is below an earlier epoch                           epoch_went_back
    its base offset is at or below the last offset before it      offset_overlap
    offsets are missing before it (not if compacted)              offset_gap
    its checksum is wrong                                         crc_damage
    it has more records than offsets, or fewer (not if compacted) record_count
    its records do not match its header (if they are read)        bad_records
    it has a producer id, but no epoch or no first sequence       half_numbered
        (a coordinator's batch needs no sequence)                 -
    it is transactional or a marker, but has no producer id       half_numbered
    a producer's control batch, neither COMMIT nor ABORT          unknown_marker
    it ends below the log start                                   - (only its records are counted)

    other input                                                   finding
    bytes that are not a batch                                    unreadable
    a torn batch at the end of the log                            torn_tail (not a violation)
    a log that ends below its log start                           offset_gap at its end
    a log start that moves during the audit                       log_start_moved (not a violation)
    a damaged list of aborted transactions                        unreadable_index (not a violation)

`oncelog.audit.transaction_outcomes` audits transactions. Compaction removes batches, so gaps in a compacted
log are not reported. Batches without a producer id are only counted, because nothing can be proven about
them. Source: behaviours I5 to I8, I14, T10 and P5 (docs/behaviours.md).
"""

from __future__ import annotations

from oncelog.audit.findings import Finding, FindingKind, Findings, PartitionTotals, StoredBatch
from oncelog.audit.sequences import SequenceAudit
from oncelog.audit.transaction_outcomes import BumpedOutcome, TransactionAudit

__all__ = [
    "BumpedOutcome",
    "Finding",
    "FindingKind",
    "PartitionAudit",
    "PartitionTotals",
    "StoredBatch",
]


class PartitionAudit:
    """The audit of one partition. `see` takes the batches in stored order; `finish` returns the findings.

    If `log_start_offset` is above 0 or `is_compacted` is true, the first batches of a producer may be
    missing.

    - `log_start_offset`: batches below it are deleted and are not audited.
    - `last_stable_offset`: read_committed readers see only records below it; None if unknown.
    - `indexed_to`: markers at or above this offset may be missing in the transaction index, so visibility is
      not checked for them. None if all markers are indexed.
    - `is_internal`: coordinators wrote the log, so its transactional batches have no sequences.
    - `max_findings`: at most this number of findings is returned. Violations beyond it are still counted.
    """

    def __init__(
        self,
        *,
        log_start_offset: int = 0,
        is_compacted: bool = False,
        last_stable_offset: int | None = None,
        indexed_to: int | None = None,
        is_internal: bool = False,
        max_findings: int = 1000,
    ) -> None:
        self._is_compacted, self._is_internal = is_compacted, is_internal
        self._last_stable_offset, self._indexed_to = last_stable_offset, indexed_to
        self._max_findings = max_findings
        self._has_moved = False
        self._begin(log_start_offset)

    def _begin(self, log_start_offset: int) -> None:
        """Reset the audit to begin at `log_start_offset`."""
        is_compacted = self._is_compacted
        self._log_start_offset = log_start_offset
        self._removed_to: int | None = None
        self._next_offset: int | None = None if log_start_offset > 0 else 0
        self._findings = Findings(self._max_findings)
        self._sequences = SequenceAudit(
            self._findings, beginning_is_gone=log_start_offset > 0 or is_compacted, is_compacted=is_compacted
        )
        self._transactions = TransactionAudit(
            self._findings, last_stable_offset=self._last_stable_offset, indexed_to=self._indexed_to
        )
        self._counts = dict.fromkeys(
            (
                "batches",
                "records",
                "control_batches",
                "unnumbered_batches",
                "unnumbered_records",
                "removed_records",
            ),
            0,
        )

    def see(self, batch: StoredBatch) -> None:
        """Audit the next input: a batch of the log, or a report that is not a batch (`is_removed`,
        `is_index`).
        """
        if batch.is_removed:
            self._move_log_start(batch)
            return
        if batch.is_index:
            text = (
                "an index of aborted transactions cannot be read, so visibility to readers "
                "was not checked up to this offset"
            )
            self._findings.report(FindingKind.UNREADABLE_INDEX, batch, _because(text, batch))
            return
        if 0 <= batch.base_offset <= batch.last_offset < self._log_start_offset:
            self._removed_to = batch.last_offset + 1
            self._counts["removed_records"] += 0 if batch.is_control else max(batch.records_count, 0)
            return
        if batch.is_torn:
            self._findings.report(
                FindingKind.TORN_TAIL, batch, _because("the log ends within a batch", batch)
            )
            return
        self._check_offsets(batch)
        if not batch.crc_ok:
            self._report_damage(batch)
            if batch.crc_ok is None or not self._sequences.is_expected(batch):
                self._transactions.lose_sight(batch)
                return
        else:
            self._check_records(batch)
        self._count(batch)
        if (why := self._why_half_numbered(batch)) is not None:
            self._findings.report(FindingKind.HALF_NUMBERED, batch, why)
            return
        if batch.producer_id is None or batch.producer_epoch is None:
            return
        self._check_marker(batch)
        if self._sequences.see(batch, batch.producer_id, batch.producer_epoch):
            self._transactions.see(batch, batch.producer_id, batch.producer_epoch)

    def take_outcomes(self) -> list[BumpedOutcome]:
        """Return the transaction outcomes found since the last call. The caller compares them with those of
        other partitions.
        """
        return self._transactions.take_outcomes()

    def finish(self) -> tuple[list[Finding], PartitionTotals]:
        """Return the findings, ordered by offset, and the totals. Call it once, after the last batch."""
        self._sequences.finish()
        self._transactions.finish()
        self._check_log_start()
        findings = sorted(self._findings.kept, key=lambda finding: finding.base_offset)
        totals = PartitionTotals(
            **self._counts,
            producers=self._sequences.producers,
            unknown_starts=self._sequences.unknown_starts,
            committed=self._transactions.committed,
            aborted=self._transactions.aborted,
            empty_markers=self._transactions.empty_markers,
            findings=self._findings.violations,
        )
        return findings, totals

    def _move_log_start(self, removed: StoredBatch) -> None:
        """Restart the audit at the new log start, because it moved during the audit. Ignore a report that is
        not above the current log start.

        The batches below the new log start were deleted during the audit. Without the restart, the missing
        offsets would look like lost batches. The rows in
        tests/tables/audit.txt whose names begin with "removed" test this.
        """
        before, now = self._log_start_offset, removed.last_offset + 1
        if now <= before:
            return
        self._begin(now)
        self._has_moved = True
        text = (
            f"the log start moved from {before} to {now} during the audit: only records from "
            f"offset {now} on are checked"
        )
        self._findings.report(FindingKind.LOG_START_MOVED, removed, text)

    def _check_log_start(self) -> None:
        """Report a log whose last batch is below its log start. This happens if the log start checkpoint is
        newer than the segments.
        """
        end, log_start = self._removed_to, self._log_start_offset
        is_whole = self._next_offset is not None or end is None or end >= log_start
        if is_whole or end is None or self._is_compacted or self._has_moved:
            return
        text = f"offsets {end} to {log_start - 1} are missing: the log ends before its log start {log_start}"
        place = (end, log_start - 1, None, None, None, None, None)
        self._findings.add(Finding(FindingKind.OFFSET_GAP, *place, text))

    def _why_half_numbered(self, batch: StoredBatch) -> str | None:
        if batch.producer_id is None:
            if batch.is_commit is not None:
                return "the marker has no producer id, so it ends no transaction"
            return "the batch is in a transaction, but has no producer id" if batch.is_transactional else None
        may_lack_sequence = batch.is_control or (self._is_internal and batch.is_transactional)
        if batch.producer_epoch is None or (batch.base_sequence is None and not may_lack_sequence):
            return "the batch has a producer id, but no epoch or no sequence numbers: it proves nothing"
        return None

    def _check_marker(self, batch: StoredBatch) -> None:
        """Report a producer's control batch that is neither COMMIT nor ABORT. Readers skip such a batch."""
        if batch.is_control and batch.is_commit is None and batch.records_count and batch.crc_ok:
            text = "a producer's control batch is neither COMMIT nor ABORT, so it ends no transaction"
            self._findings.report(FindingKind.UNKNOWN_MARKER, batch, text)

    def _count(self, batch: StoredBatch) -> None:
        counts = self._counts
        counts["batches"] += 1
        if batch.is_control:
            counts["control_batches"] += 1
            return
        counts["records"] += batch.records_count
        if batch.producer_id is None:
            counts["unnumbered_batches"] += 1
            counts["unnumbered_records"] += batch.records_count

    def _check_offsets(self, batch: StoredBatch) -> None:
        expected, self._next_offset = self._next_offset, max(self._next_offset or 0, batch.last_offset + 1)
        if expected is None or batch.base_offset == expected:
            return
        if batch.base_offset < expected:
            text = f"offsets {batch.base_offset} to {batch.last_offset} follow offset {expected - 1}"
            self._findings.report(FindingKind.OFFSET_OVERLAP, batch, text, other_offset=expected - 1)
        elif not self._is_compacted:
            text = f"offsets {expected} to {batch.base_offset - 1} are missing before this batch"
            self._findings.report(FindingKind.OFFSET_GAP, batch, text)

    def _check_records(self, batch: StoredBatch) -> None:
        """Report a batch whose number of records differs from its number of offsets, or whose records do not
        match its header. A compacted batch may have fewer records than offsets.
        """
        missing = batch.sequence_count - batch.records_count
        if missing < 0 or batch.records_count < 0 or (missing and not self._is_compacted):
            text = f"the header says {batch.records_count} records at {batch.sequence_count} offsets"
            self._findings.report(FindingKind.RECORD_COUNT, batch, text)
        if batch.records_problem is not None:
            text = f"the records do not match the header: {batch.records_problem}"
            self._findings.report(FindingKind.BAD_RECORDS, batch, text)

    def _report_damage(self, batch: StoredBatch) -> None:
        if batch.crc_ok is None:
            text = f"no record batch can be read here; nothing up to offset {batch.last_offset} was audited"
            self._findings.report(FindingKind.UNREADABLE, batch, _because(text, batch))
        else:
            text = "the bytes of this batch do not match its CRC-32C"
            self._findings.report(FindingKind.CRC_DAMAGE, batch, text)


def _because(text: str, batch: StoredBatch) -> str:
    return text if batch.problem is None else f"{text}: {batch.problem}"
