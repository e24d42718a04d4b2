"""Conversion of the log's numbers, which are big-endian in its files."""

from __future__ import annotations

import sys
from array import array


def swap_big_endian(numbers: array[int]) -> array[int]:
    """Convert numbers between big-endian and the machine's byte order, in place. Return the same array."""
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
