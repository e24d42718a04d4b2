"""Sequence numbers: 0..2147483647, then 0 again. The only place that adds to a sequence.

Source: row I5; Kafka's DefaultRecordBatch.incrementSequence and decrementSequence.
"""

from __future__ import annotations

SEQUENCE_MAX = 2**31 - 1


def advance(sequence: int, count: int) -> int:
    """The sequence `count` records later (or earlier, when negative)."""
    return (sequence + count) & SEQUENCE_MAX


def last_sequence(base_sequence: int, count: int) -> int:
    """Sequence of the last of `count` records, `count` being at least 1."""
    return (base_sequence + count - 1) & SEQUENCE_MAX


def first_sequence(last: int, offset_delta: int) -> int:
    """Sequence of the first record of a batch whose last one is `offset_delta` further (row I6)."""
    return (last - offset_delta) & SEQUENCE_MAX


def is_next(last: int | None, base_sequence: int) -> bool:
    """Whether a batch starting at `base_sequence` follows `last`; after None (no batch) only 0 does."""
    return base_sequence == (0 if last is None else (last + 1) & SEQUENCE_MAX)
