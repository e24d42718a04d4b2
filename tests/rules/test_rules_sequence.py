"""Arithmetic with sequence numbers, at and around the wrap from 2147483647 to 0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.rules.idempotence.sequence import SEQUENCE_MAX, advance, first_sequence, is_next, last_sequence

SEQUENCES = st.integers(0, SEQUENCE_MAX) | st.integers(SEQUENCE_MAX - 9, SEQUENCE_MAX) | st.integers(0, 9)


@pytest.mark.behaviour("I5")
def test_wraps_from_the_largest_to_zero() -> None:
    assert SEQUENCE_MAX == 2147483647
    assert advance(2147483647, 1) == 0
    assert advance(2147483646, 1) == 2147483647
    assert advance(0, -1) == 2147483647
    assert last_sequence(2147483647, 1) == 2147483647
    assert last_sequence(2147483646, 4) == 1
    assert first_sequence(1, 3) == 2147483646


@pytest.mark.behaviour("I5")
def test_the_next_sequence_follows_the_last_and_wraps() -> None:
    assert is_next(None, 0)
    assert not is_next(None, 1)
    assert is_next(2147483647, 0)
    assert not is_next(2147483646, 0)
    assert not is_next(5, 5)


@given(SEQUENCES, st.integers(1, SEQUENCE_MAX))
def test_first_and_last_undo_each_other(base: int, count: int) -> None:
    last = last_sequence(base, count)
    assert 0 <= last <= SEQUENCE_MAX
    assert first_sequence(last, count - 1) == base
    assert is_next(last, advance(base, count))
