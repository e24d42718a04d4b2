"""Audit the transactions of one partition: each has one outcome, and readers see exactly that outcome.

    batches of one producer id in one partition                    finding
    data, then a COMMIT or ABORT of its epoch or a higher one      -
    a marker without data: nothing was written here, or the        - (counted)
        coordinator wrote the marker again after a restart
    data at the end of the log without a marker                    open_transaction (not a violation)
    data, then data of a higher epoch without a marker between     transaction_without_outcome
    data, then a COMMIT whose epoch is two or more higher, so it   transaction_without_outcome
        belongs to a later transaction
    a COMMIT and an ABORT with the same raised epoch               two_outcomes
    a marker, although all data is non-transactional               marker_without_transaction
    non-transactional data within a transaction, or before one     outside_transaction
    a marker with a lower coordinator epoch than an earlier one    epoch_went_back
    aborted data that read_committed readers get                   visible_though_aborted
    open data below the last stable offset that readers get        visible_though_open
    committed data that read_committed readers do not get          hidden_though_committed

Fencing a producer raises its epoch by one. With transaction.version 2, every end of a transaction also raises
the epoch. A producer gets a new epoch only after every marker was written, so a new epoch proves that every
earlier transaction has ended. Before transaction.version 2, all transactions of a producer share one epoch. A
COMMIT and then an ABORT are then two transactions.

A marker without data is legal: a partition may be added to a transaction and never be written, and a
coordinator may write a marker again. Two markers certainly end the same transaction only if they have the
same epoch, and that epoch was raised to end this transaction. See test_legal_histories_are_clean. Source:
behaviours T4, T10 and P5 (docs/behaviours.md); KIP-98, KIP-360, KIP-890.
"""

from __future__ import annotations

from typing import NamedTuple

from oncelog.audit.findings import Finding, FindingKind, Findings, StoredBatch


class BumpedOutcome(NamedTuple):
    """The outcome of a transaction whose marker has an epoch that was raised to end that transaction.

    All partitions must have the same outcome for this producer id and epoch.
    """

    producer_id: int
    marker_epoch: int
    is_commit: bool
    first_offset: int
    marker_offset: int


class _Span:
    """The first and the last offset of the added batches. `first` is None before the first `add`."""

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first: int | None = None
        self.last = -1

    def add(self, batch: StoredBatch) -> None:
        if self.first is None:
            self.first = batch.base_offset
        self.last = batch.last_offset


class _Transaction:
    """An open transaction that has data in this partition."""

    __slots__ = ("data", "epoch", "hidden", "visible")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.data, self.visible, self.hidden = _Span(), _Span(), _Span()

    def add(self, batch: StoredBatch) -> None:
        self.data.add(batch)
        if batch.is_visible is not None:
            (self.visible if batch.is_visible else self.hidden).add(batch)


class _Producer:
    """The state of one producer id.

    - `opened`: the producer's open transaction, or None if there is none.
    - `ended`: the outcome of its last transaction whose marker had a raised epoch; None if there is none.
    - `plain`: the base offset of its latest non-transactional batch; None without one, or if transactional
      data followed.
    """

    __slots__ = ("coordinator_epoch", "ended", "opened", "plain")

    def __init__(self) -> None:
        self.opened: _Transaction | None = None
        self.ended: BumpedOutcome | None = None
        self.plain: int | None = None
        self.coordinator_epoch = -1


class TransactionAudit:
    """The audit of the transactions of one partition, batch by batch."""

    def __init__(self, findings: Findings, *, last_stable_offset: int | None, indexed_to: int | None) -> None:
        self._findings = findings
        self._last_stable_offset = last_stable_offset
        self._indexed_to = indexed_to
        self._producers: dict[int, _Producer] = {}
        self._outcomes: list[BumpedOutcome] = []
        self.committed = self.aborted = self.empty_markers = 0

    def see(self, batch: StoredBatch, producer_id: int, epoch: int) -> None:
        """Audit the next batch. `SequenceAudit` has checked that the batch's epoch is not below an earlier
        one.
        """
        if batch.records_count == 0:
            return  # an empty batch that compaction kept for its sequence and epoch
        producer = self._producers.get(producer_id)
        if producer is None:
            producer = self._producers[producer_id] = _Producer()
        if not batch.is_control:
            self._see_data(batch, producer, producer_id, epoch)
        elif batch.is_commit is not None:
            self._see_marker(batch, producer, producer_id, epoch, batch.is_commit)

    def lose_sight(self, batch: StoredBatch) -> None:
        """Forget the open transactions that a damaged batch may have ended. Otherwise they would be reported
        as open by mistake.

        The batch may be a marker of the producer in its header. If the header is unreadable, the batch may be
        a marker of any producer.
        """
        if batch.crc_ok is None:
            for producer in self._producers.values():
                producer.opened = None
        elif batch.is_control and batch.producer_id in self._producers:
            self._producers[batch.producer_id].opened = None

    def take_outcomes(self) -> list[BumpedOutcome]:
        """Return the outcomes of transactions that ended with a raised epoch since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def finish(self) -> None:
        """Report the transactions that are open at the end of the log."""
        for producer_id, producer in self._producers.items():
            if producer.opened is not None:
                self._report_open(producer_id, producer.opened)

    # Data batches

    def _see_data(self, batch: StoredBatch, producer: _Producer, producer_id: int, epoch: int) -> None:
        opened = producer.opened
        if not batch.is_transactional:
            if opened is None:
                producer.plain = batch.base_offset
            else:
                text = (
                    "not transactional, while the transaction that began at offset "
                    f"{opened.data.first} is open"
                )
                self._findings.report(
                    FindingKind.OUTSIDE_TRANSACTION, batch, text, other_offset=opened.data.first
                )
            return
        if producer.plain is not None:
            text = f"transactional, while earlier data of its producer (offset {producer.plain}) is not"
            self._findings.report(FindingKind.OUTSIDE_TRANSACTION, batch, text, other_offset=producer.plain)
            producer.plain = None
        if opened is not None and epoch > opened.epoch:
            text = (
                f"no marker ended the transaction before its producer's epoch {epoch} begins "
                f"at offset {batch.base_offset}"
            )
            self._report(
                FindingKind.TRANSACTION_WITHOUT_OUTCOME,
                producer_id,
                opened,
                opened.data,
                batch.base_offset,
                text,
            )
            opened = None
        if opened is None:
            opened = producer.opened = _Transaction(epoch)
        opened.add(batch)

    # Markers

    def _see_marker(
        self, batch: StoredBatch, producer: _Producer, producer_id: int, epoch: int, is_commit: bool
    ) -> None:
        self._check_coordinator(batch, producer)
        opened, producer.opened = producer.opened, None
        if opened is None:
            self._see_empty(batch, producer, epoch, is_commit)
            return
        self.committed += is_commit
        self.aborted += not is_commit
        if epoch > opened.epoch:
            assert opened.data.first is not None
            producer.ended = BumpedOutcome(
                producer_id, epoch, is_commit, opened.data.first, batch.base_offset
            )
            self._outcomes.append(producer.ended)
        if is_commit and epoch > opened.epoch + 1:
            text = (
                f"the COMMIT at offset {batch.base_offset} belongs to a later transaction (epoch {epoch - 1})"
            )
            kind = FindingKind.TRANSACTION_WITHOUT_OUTCOME
            self._report(kind, producer_id, opened, opened.data, batch.base_offset, text)
        self._check_visibility(opened, producer_id, batch.base_offset, is_commit)

    def _check_coordinator(self, batch: StoredBatch, producer: _Producer) -> None:
        before, now = producer.coordinator_epoch, batch.coordinator_epoch
        if now is not None and now < before:
            text = f"coordinator epoch {now} after {before}: a fenced coordinator's marker was stored"
            self._findings.report(FindingKind.EPOCH_WENT_BACK, batch, text)
        producer.coordinator_epoch = max(before, -1 if now is None else now)

    def _see_empty(self, batch: StoredBatch, producer: _Producer, epoch: int, is_commit: bool) -> None:
        ended = producer.ended
        if producer.plain is not None:
            text = f"a marker of a producer whose data (offset {producer.plain}) is not transactional"
            kind, other = FindingKind.MARKER_WITHOUT_TRANSACTION, producer.plain
        elif ended is not None and ended.marker_epoch == epoch and ended.is_commit != is_commit:
            text = f"{_word(is_commit)} of a transaction that already ended with {_word(ended.is_commit)}"
            kind, other = FindingKind.TWO_OUTCOMES, ended.marker_offset
        else:
            self.empty_markers += 1
            return
        self._findings.report(kind, batch, text, other_offset=other)

    # Visibility

    def _check_visibility(
        self, ended: _Transaction, producer_id: int, marker_offset: int, is_commit: bool
    ) -> None:
        if self._indexed_to is not None and marker_offset >= self._indexed_to:
            return
        if not is_commit and ended.visible.first is not None:
            text = (
                f"read_committed readers get these records, but the marker at offset {marker_offset} is ABORT"
            )
            kind, span = FindingKind.VISIBLE_THOUGH_ABORTED, ended.visible
        elif is_commit and ended.hidden.first is not None:
            text = (
                "read_committed readers do not get these records, but the marker at offset "
                f"{marker_offset} is COMMIT"
            )
            kind, span = FindingKind.HIDDEN_THOUGH_COMMITTED, ended.hidden
        else:
            return
        self._report(kind, producer_id, ended, span, marker_offset, text)

    def _report_open(self, producer_id: int, opened: _Transaction) -> None:
        stable, first = self._last_stable_offset, opened.data.first
        if stable is not None and first is not None and first < stable and opened.visible.first is not None:
            text = (
                f"no marker follows, but the last stable offset is {stable}: read_committed "
                "readers get these records"
            )
            kind, span = FindingKind.VISIBLE_THOUGH_OPEN, opened.visible
        else:
            text = "no marker up to the end of the log: the transaction is open or hangs"
            kind, span = FindingKind.OPEN_TRANSACTION, opened.data
        self._report(kind, producer_id, opened, span, None, text)

    def _report(
        self,
        kind: FindingKind,
        producer_id: int,
        transaction: _Transaction,
        span: _Span,
        other_offset: int | None,
        text: str,
    ) -> None:
        assert span.first is not None
        producer = (producer_id, transaction.epoch)
        self._findings.add(Finding(kind, span.first, span.last, *producer, None, None, other_offset, text))


def _word(is_commit: bool) -> str:
    return "COMMIT" if is_commit else "ABORT"
