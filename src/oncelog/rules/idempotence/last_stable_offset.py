"""How far may a read_committed reader see? The last stable offset of a partition.

Source: Kafka's ProducerStateManager.firstUnstableOffset and UnifiedLog.lastStableOffset; row T10.
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
    """Everything below it is decided.

    `open_first_offset`: first offset of the oldest open transaction, None without one.
    `unreplicated_first_offset`: the same for transactions whose marker is not below the high watermark.
    """
    stable = high_watermark
    if open_first_offset is not None:
        stable = min(stable, open_first_offset)
    if unreplicated_first_offset is not None:
        stable = min(stable, unreplicated_first_offset)
    return max(stable, log_start_offset)


def stable_offset_after(completed: CompletedTransaction, open_first_offset: int | None) -> int:
    """The last stable offset once `completed` is done, as an aborted transaction's index entry keeps it.

    `open_first_offset`: that of the oldest transaction still open, without `completed`.
    """
    return completed.last_offset + 1 if open_first_offset is None else open_first_offset
