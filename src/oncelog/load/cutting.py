"""Where records end in bytes: decided on the bytes alone, so that a position means the same in every run."""

from __future__ import annotations

from typing import Any

import numpy as np

Buffer = bytes | memoryview
_NEWLINE, _QUOTE = 0x0A, 0x22


def record_ends(data: Buffer, *, is_quoted: bool) -> Any:
    """The position behind every newline; `is_quoted`: but not of those between double quotes (CSV)."""
    column = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(column == _NEWLINE) + 1
    if is_quoted:
        quotes = np.flatnonzero(column == _QUOTE)
        if len(quotes):
            ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return ends


def cuts(data: Buffer, *, is_quoted: bool, max_records: int, is_end: bool) -> list[int]:
    """Where to cut `data` into pieces of whole records, at most so many each; what is behind the last
    position is no whole record yet. `is_end`: the file ends with `data`, and so does its last record.
    """
    ends = record_ends(data, is_quoted=is_quoted)
    if is_end and data and (not len(ends) or ends[-1] < len(data)):
        ends = np.append(ends, len(data))
    chosen: list[int] = ends[max_records - 1 :: max_records].tolist()
    if len(ends) % max_records:
        chosen.append(int(ends[-1]))
    return chosen
