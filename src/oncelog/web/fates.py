"""Decides the fate of each stored batch: committed, aborted, open, or not part of a transaction. No I/O.

    batch                                                        fate
    a marker, or not transactional                               PLAIN
    below the last stable offset, in an aborted transaction      ABORTED
    below the last stable offset, otherwise                      COMMITTED
    at or above it, and its producer's next marker is COMMIT     COMMITTED (held back from readers)
    at or above it, and its producer's next marker is ABORT      ABORTED
    at or above it, and no marker follows                        OPEN

Source: Kafka's CompletedFetch for the part below the last stable offset. Above it a fetch response lists no
aborted transactions, so the markers decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple


class Fate(Enum):
    """The fate of a batch's records. The records are OPEN if their transaction has not ended, and PLAIN if
    they belong to no transaction. Markers are PLAIN, too.
    """

    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"
    PLAIN = "plain"


class StoredBatch(NamedTuple):
    """A batch as the pages show it.

    `producer_id`, `producer_epoch` and `base_sequence` are None for a batch without idempotence. `marker` is
    "COMMIT" or "ABORT" for a transaction marker, and "control" for another control batch. `is_aborted` is the
    verdict of a read_committed fetch; None for a control batch, and above the last stable offset.
    """

    base_offset: int
    last_offset: int
    timestamp_ms: int
    producer_id: int | None
    producer_epoch: int | None
    base_sequence: int | None
    record_count: int
    size_bytes: int
    is_transactional: bool
    marker: str | None = None
    is_aborted: bool | None = None

    @property
    def last_sequence(self) -> int | None:
        """Return the sequence of the last record; None for a batch without idempotence."""
        if self.base_sequence is None:
            return None
        return (self.base_sequence + self.last_offset - self.base_offset) % (1 << 31)

    def sequence_of(self, offset: int) -> int | None:
        """Return the sequence of the record at an offset of the batch."""
        return (
            None
            if self.base_sequence is None
            else (self.base_sequence + offset - self.base_offset) % (1 << 31)
        )


def fates(batches: Sequence[StoredBatch]) -> list[Fate]:
    """Return the fate of each batch. `batches` are in offset order, with all markers that follow them."""
    ends: dict[int, list[tuple[int, Fate]]] = defaultdict(list)
    for batch in batches:
        if batch.marker in ("COMMIT", "ABORT") and batch.producer_id is not None:
            fate = Fate.COMMITTED if batch.marker == "COMMIT" else Fate.ABORTED
            ends[batch.producer_id].append((batch.base_offset, fate))
    return [_fate(batch, ends.get(batch.producer_id or 0, [])) for batch in batches]


def _fate(batch: StoredBatch, ends: Sequence[tuple[int, Fate]]) -> Fate:
    if not batch.is_transactional or batch.marker is not None or batch.producer_id is None:
        return Fate.PLAIN
    if batch.is_aborted is not None:
        return Fate.ABORTED if batch.is_aborted else Fate.COMMITTED
    index = bisect_right(ends, batch.base_offset, key=lambda end: end[0])
    return ends[index][1] if index < len(ends) else Fate.OPEN


REMEMBERED = 5
"""Number of batches that a partition remembers per producer id. Source: Kafka's ProducerStateEntry."""


def remembered(batches: Iterable[StoredBatch]) -> dict[int, list[StoredBatch]]:
    """Return the last five batches of each producer id's newest epoch, oldest first.

    A broker recognises a repeat of these batches. Once a batch or marker has a higher epoch, the batches of
    lower epochs are dropped.
    """
    kept: dict[int, list[StoredBatch]] = {}
    epochs: dict[int, int] = {}
    for batch in batches:
        producer_id, epoch = batch.producer_id, batch.producer_epoch
        if producer_id is None or epoch is None or epoch < epochs.get(producer_id, epoch):
            continue
        own = kept.setdefault(producer_id, [])
        if epoch > epochs.setdefault(producer_id, epoch):
            own.clear()
            epochs[producer_id] = epoch
        if batch.base_sequence is not None and batch.marker is None:
            own.append(batch)
            del own[:-REMEMBERED]
    return kept
