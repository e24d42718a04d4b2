"""Reads the bytes of all rows of a binary Arrow column, four bytes of each row at a time.

A computation over the bytes then takes a few NumPy calls per four bytes of the longest row, and creates no
Python object for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Words = np.ndarray[tuple[int], np.dtype[np.uint32]]


class RowBytes:
    """The bytes of a column's rows that are not null, longest row first."""

    def __init__(self, column: Any) -> None:
        _, offsets, data = column.buffers() if len(column) else (None, None, None)
        bounds = np.frombuffer(offsets or bytes(4), np.int32)[column.offset :][: len(column) + 1]
        sizes = np.diff(bounds).astype(np.int64)
        rows = np.arange(len(column))
        if column.null_count:
            rows = rows[column.is_valid().to_numpy(zero_copy_only=False)]
        self._is_even = len(rows) == len(column) and bool(np.all(sizes == sizes[:1]))
        if not self._is_even:
            rows = rows[np.argsort(-sizes[rows], kind="stable")]
        self.rows: Ints = rows
        """Row numbers in the column; if rows differ in length or some are null, sorted by descending length.
        """
        self.sizes: Ints = sizes[rows]
        self._starts: Ints = bounds[rows].astype(np.int64)
        self._data = np.frombuffer(data or b"", np.uint8)

    def words(self) -> Iterator[Words]:
        """Yield the first four bytes of each row as a little-endian number, then the next four, and so on.

        Each array has one number for each row that has four more bytes. `rows` begins with these rows, in the
        same order.
        """
        longest = int(self.sizes[0]) if len(self.rows) else 0
        for at in range(0, longest - 3, 4):
            if self._is_even:
                first = int(self._starts[0]) + at
                yield np.ndarray((len(self.rows),), "<u4", self._data, first, (longest,))
            else:
                count = int(np.searchsorted(-self.sizes, -at - 4, "right"))
                at_any_byte = np.ndarray((len(self._data) - 3,), "<u4", self._data, 0, (1,))
                yield at_any_byte[self._starts[:count] + at]

    def tails(self) -> Iterator[tuple[Ints, Words]]:
        """Yield the bytes of each row that are left after its last whole word.

        The first item has one byte of each row that has such bytes, the second item the next byte, and so on.
        An item is (indexes into `rows`, one byte per index).
        """
        whole, rest = self._starts + (self.sizes & ~3), self.sizes & 3
        for number in range(3):
            at = np.flatnonzero(rest > number)
            yield at, self._data[whole[at] + number].astype(np.uint32)
