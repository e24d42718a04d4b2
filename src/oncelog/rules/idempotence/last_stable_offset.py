"""The last stable offset of a partition: read_committed consumers see only records below it.

Source: Kafka's ProducerStateManager.firstUnstableOffset and UnifiedLog.lastStableOffset; behaviour T10
(docs/behaviours.md).
"""

from __future__ import annotations

from oncelog.rules.idempotence.markers import CompletedTransaction


def last_stable_offset(
    *,
    log_start_offset: int,
    high_watermark: int,
    open_first_offset: int | None,
    unreplicated_first_offset: int | None = None,
) -> int:
    """Return the last stable offset: below it, every transaction has a visible outcome.

    `open_first_offset` is the first offset of the oldest open transaction; None if none is open.
    `unreplicated_first_offset` is the first offset of the oldest transaction whose marker is at or above the
    high watermark; None if there is none.
    """
    stable = high_watermark
    if open_first_offset is not None:
        stable = min(stable, open_first_offset)
    if unreplicated_first_offset is not None:
        stable = min(stable, unreplicated_first_offset)
    return max(stable, log_start_offset)


def stable_offset_after(completed: CompletedTransaction, open_first_offset: int | None) -> int:
    """Return the partition's last stable offset immediately after the transaction `completed` has ended.

    The transaction index stores this offset. `open_first_offset` is the first offset of the oldest
    transaction that is still open; None if none is open.
    """
    return completed.last_offset + 1 if open_first_offset is None else open_first_offset
