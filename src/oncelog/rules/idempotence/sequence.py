"""Arithmetic of sequence numbers, which run from 0 to 2147483647 and then restart at 0.

All arithmetic of sequences must use this module, because 2147483647 is followed by 0 and not by 2147483648.
See test_wraps_from_the_largest_to_zero. Source: behaviour I5 (docs/behaviours.md); Kafka's
DefaultRecordBatch.incrementSequence and decrementSequence.
"""

from __future__ import annotations

SEQUENCE_MAX = 2**31 - 1


def advance(sequence: int, count: int) -> int:
    """Return the sequence `count` records after `sequence`, or before it if `count` is negative."""
    return (sequence + count) & SEQUENCE_MAX


def last_sequence(base_sequence: int, count: int) -> int:
    """Return the sequence of the last of `count` records; `count` is at least 1."""
    return (base_sequence + count - 1) & SEQUENCE_MAX


def first_sequence(last: int, offset_delta: int) -> int:
    """Return the sequence of the first record of a batch whose last record has the sequence `last`."""
    return (last - offset_delta) & SEQUENCE_MAX


def is_next(last: int | None, base_sequence: int) -> bool:
    """Return True if `base_sequence` follows `last`. If `last` is None (no batch), only 0 follows."""
    return base_sequence == (0 if last is None else (last + 1) & SEQUENCE_MAX)
