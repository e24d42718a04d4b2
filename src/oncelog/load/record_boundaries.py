"""Record boundaries, found in the bytes alone, so that a position means the same in every run."""

from __future__ import annotations

from typing import Any

import numpy as np

Buffer = bytes | memoryview
_NEWLINE, _RETURN, _QUOTE = 0x0A, 0x0D, 0x22


def line_ends(data: Buffer) -> Any:
    """Return the position after each newline."""
    return np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1


def csv_record_ends(data: Buffer, *, delimiter: str, is_end: bool) -> Any:
    """Return the position after each line end that Arrow's CSV reader takes for the end of a record.

    `data` begins with a record, and with `is_end` the file ends with it. A line ends with \\n, \\r\\n or \\r.
    """
    column = np.frombuffer(data, np.uint8)
    is_end_byte = column == _NEWLINE
    returns = np.flatnonzero(column == _RETURN)
    if len(returns):
        # A \r at the very end may be the first half of \r\n: the next bytes will tell.
        returns = returns[: len(returns) - (returns[-1] == len(column) - 1 and not is_end)]
        following = np.minimum(returns + 1, len(column) - 1)
        is_end_byte[returns[(column[following] != _NEWLINE)]] = True
    ends = np.flatnonzero(is_end_byte) + 1
    quotes = np.flatnonzero(column == _QUOTE)
    if len(quotes):
        starts, is_quoted = _quoted_behind_runs(column, quotes, ord(delimiter))
        ends = ends[~is_quoted[np.searchsorted(starts, ends)]]
    return ends


def _quoted_behind_runs(column: Any, quotes: Any, delimiter: int) -> tuple[Any, Any]:
    """Return where runs of quotes begin, and at index n whether the text after n runs is inside a quoted
    field.

    Arrow takes a quote as the start of a quoted field only at the start of a field, and elsewhere as text.
    Inside a field two quotes are one quote, and a single one ends the quoting. So an even run changes
    nothing. An odd run at the start of a field toggles the state. Any other odd run ends the quoting or is
    text, so the text after it is outside.
    """
    is_first = np.diff(quotes, prepend=-2) != 1
    starts = quotes[is_first]
    indexes = np.flatnonzero(is_first)
    is_odd = np.diff(indexes, append=len(quotes)) % 2 == 1
    before = column[np.maximum(starts - 1, 0)]
    is_field_start = (starts == 0) | (before == delimiter) | (before == _NEWLINE) | (before == _RETURN)
    toggles = np.cumsum(is_odd & is_field_start)
    # Toggles count from the last run that ends the quoting in any case.
    at_reset = np.maximum.accumulate(np.where(is_odd & ~is_field_start, toggles, 0))
    is_quoted = (toggles - at_reset) % 2 == 1
    return starts, np.concatenate(([False], is_quoted))


def chunk_ends(ends: Any, size_bytes: int, *, max_records: int, is_end: bool) -> list[int]:
    """Return the end positions of chunks of whole records, each with at most `max_records`.

    `ends` are the end positions of the records in the `size_bytes` at hand. Bytes after the last result are
    no whole record yet. With `is_end` the file ends there, and so does its last record.
    """
    if is_end and size_bytes and (not len(ends) or ends[-1] < size_bytes):
        ends = np.append(ends, size_bytes)
    chosen: list[int] = ends[max_records - 1 :: max_records].tolist()
    if len(ends) % max_records:
        chosen.append(int(ends[-1]))
    return chosen
