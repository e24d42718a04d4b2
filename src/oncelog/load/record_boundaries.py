"""Finds the boundaries of records in the bytes of a file.

The boundaries depend only on the bytes. Therefore a position in a checkpoint has the same meaning in every
run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Buffer = bytes | memoryview
_NEWLINE, _RETURN, _QUOTE = 0x0A, 0x0D, 0x22


def line_ends(data: Buffer) -> Any:
    """Return the position after each newline."""
    return np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1


def csv_record_ends(data: Buffer, *, delimiter: str, is_end: bool) -> Any:
    """Return the position after each line end that ends a record for Arrow's CSV reader.

    `data` begins with a record. `is_end`: True if `data` ends with the file. A line ends with \\n, \\r\\n or
    \\r.
    """
    column = np.frombuffer(data, np.uint8)
    is_end_byte = column == _NEWLINE
    returns = np.flatnonzero(column == _RETURN)
    if len(returns):
        # Unless the file ends here, leave out a \r at the very end: it may be the first half of \r\n.
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
    """Return two arrays: the starts of the runs of quotes, and a boolean for the text between the runs.

    Element n of the second array is True if the text after the first n runs is in a quoted field.

    At the start of a field, Arrow takes a quote as the start of a quoted field. In the middle of an unquoted
    field, a quote is text. Inside a quoted field, two quotes mean one quote, and a single quote ends the
    quoting. Therefore an even run changes nothing. An odd run at the start of a field toggles the state.
    After any other odd run the text is outside, because this run ended the quoting or is text.
    """
    is_first = np.diff(quotes, prepend=-2) != 1
    starts = quotes[is_first]
    indexes = np.flatnonzero(is_first)
    is_odd = np.diff(indexes, append=len(quotes)) % 2 == 1
    before = column[np.maximum(starts - 1, 0)]
    is_field_start = (starts == 0) | (before == delimiter) | (before == _NEWLINE) | (before == _RETURN)
    toggles = np.cumsum(is_odd & is_field_start)
    # Count only the toggles after the last odd run that is not at the start of a field.
    at_reset = np.maximum.accumulate(np.where(is_odd & ~is_field_start, toggles, 0))
    is_quoted = (toggles - at_reset) % 2 == 1
    return starts, np.concatenate(([False], is_quoted))


def chunk_ends(ends: Any, size_bytes: int, *, max_records: int, is_end: bool) -> list[int]:
    """Return the end positions of chunks of whole records, each with at most `max_records` records.

    `ends`: the end positions of the records in the data. `size_bytes`: the length of the data. Bytes after
    the last result are an incomplete record. `is_end`: True if the data ends with the file; the last record
    then also ends there.
    """
    if is_end and size_bytes and (not len(ends) or ends[-1] < size_bytes):
        ends = np.append(ends, size_bytes)
    chosen: list[int] = ends[max_records - 1 :: max_records].tolist()
    if len(ends) % max_records:
        chosen.append(int(ends[-1]))
    return chosen
