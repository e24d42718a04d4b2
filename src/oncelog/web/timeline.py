"""The past transactions of one transactional id, from the records of `__transaction_state`. No I/O.

Each record has the whole state of the transactional id at that time. Compaction keeps at least the newest
record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from oncelog.rules.transactions.entry import TransactionEntry, TransactionState
from oncelog.types import TopicPartition

_COMMITS = (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)
_ABORTS = (TransactionState.PREPARE_ABORT, TransactionState.COMPLETE_ABORT)


@dataclass(slots=True)
class PastTransaction:
    """One transaction. Times are in ms since the epoch, and None for a step that no record shows.

    `outcome` is "commit" or "abort", and None while the transaction is open.
    """

    producer_id: int
    producer_epoch: int
    start_ms: int
    added: list[tuple[int, TopicPartition]] = field(default_factory=list)
    """The time at which each partition joined the transaction, and the partition."""
    decided_ms: int | None = None
    complete_ms: int | None = None
    outcome: str | None = None

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
            if entry.state.is_prepared:
                current.decided_ms = entry.last_update_ms
            else:
                current.complete_ms = entry.last_update_ms
    return found
