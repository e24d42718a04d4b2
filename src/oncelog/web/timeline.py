"""The past transactions of one transactional id, from the records of `__transaction_state`. No I/O.

Each record has the whole state of the transactional id at that time. Compaction keeps at least the newest
record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from oncelog.rules.transactions.entry import EPOCH_PER_TRANSACTION, TransactionEntry, TransactionState
from oncelog.types import TopicPartition

_COMMITS = (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)
_ABORTS = (TransactionState.PREPARE_ABORT, TransactionState.COMPLETE_ABORT)


@dataclass(slots=True)
class PastTransaction:
    """One transaction. Times are in ms since the epoch, and None for a step that no record shows.

    `outcome` is "commit" or "abort", and None while the transaction is open. `is_fenced` is True if the
    records prove that the coordinator fenced the producer to abort the transaction: see `_proves_fencing`.
    """

    producer_id: int
    producer_epoch: int
    start_ms: int
    added: list[tuple[int, TopicPartition]] = field(default_factory=list)
    """The time at which each partition joined the transaction, and the partition."""
    decided_ms: int | None = None
    complete_ms: int | None = None
    outcome: str | None = None
    is_fenced: bool = False

    @property
    def last_ms(self) -> int:
        """Return the time of the last step."""
        added_ms = self.added[-1][0] if self.added else self.start_ms
        return self.complete_ms or self.decided_ms or added_ms


def past_transactions(entries: Iterable[TransactionEntry]) -> list[PastTransaction]:
    """Return the transactions that a transactional id's records show, oldest first."""
    found: list[PastTransaction] = []
    current: PastTransaction | None = None
    for entry in entries:
        if entry.state is TransactionState.EMPTY:
            current = None
            continue
        if current is None or current.complete_ms is not None or current.start_ms != entry.start_ms:
            current = PastTransaction(entry.producer_id, entry.producer_epoch, entry.start_ms)
            found.append(current)
        if entry.state is TransactionState.ONGOING:
            known = {tp for _, tp in current.added}
            current.added += [(entry.last_update_ms, tp) for tp in sorted(entry.partitions - known)]
        elif entry.state in _COMMITS or entry.state in _ABORTS:
            current.outcome = "commit" if entry.state in _COMMITS else "abort"
            current.is_fenced = current.is_fenced or _proves_fencing(current, entry)
            if entry.state.is_prepared:
                current.decided_ms = entry.last_update_ms
            else:
                current.complete_ms = entry.last_update_ms
    return found


def _proves_fencing(txn: PastTransaction, entry: TransactionEntry) -> bool:
    """Return True if the record of the end can only come from a coordinator that fenced the producer, because
    of a timeout, of a new instance or of an operator.

    Such an abort raises the epoch, and a client's own abort does not. With an epoch per transaction
    (`transaction.version` 2, KIP-890), both raise it, and the records do not tell one from the other.
    """
    return (
        entry.state in _ABORTS
        and entry.client_version < EPOCH_PER_TRANSACTION
        and entry.producer_id == txn.producer_id
        and entry.producer_epoch > txn.producer_epoch
    )


def newest_init(entries: Sequence[TransactionEntry]) -> TransactionEntry | None:
    """Return the record of the newest InitProducerId that raised the epoch, which fenced every producer with
    an earlier one. Return None if no record shows one.
    """
    inits = [entry for entry in entries if entry.state is TransactionState.EMPTY]
    return inits[-1] if inits and inits[-1].producer_epoch > 0 else None
