"""The rows of `send_many`, for the blocking and the asyncio producer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from oncelog.client.producer.appender import first_unusual
from oncelog.client.producer.core import ProducerCore
from oncelog.client.producer.rows import Row, make_row, row_size_bytes
from oncelog.errors import MisuseError
from oncelog.types import Header

CHUNK_ROWS = 2048
"""Maximum number of rows that `send_many` appends before it releases the lock."""


class Columns(NamedTuple):
    """Values, keys and timestamps as lists, and the headers of each record.

    `keys` and a list of timestamps may be shorter than `values`.
    """

    values: Sequence[Any]
    keys: Sequence[Any] | None
    times_ms: list[int] | int
    headers: tuple[Header, ...]

    def row(self, number: int, now_ms: int, wall_ns: Callable[[], int]) -> Row:
        """Return one row, checked. `now_ms` is the time of rows without a timestamp. Raises MisuseError."""
        key = self.keys[number] if self.keys is not None and number < len(self.keys) else None
        stamps = self.times_ms[number : number + 1] if isinstance(self.times_ms, list) else [self.times_ms]
        return make_row(self.values[number], key, stamps[0] if stamps else now_ms, self.headers, wall_ns)


def check_arguments(values: object, keys: object, timestamps_ms: object) -> None:
    """Raise MisuseError for str or bytes instead of a collection of values or keys, and for a timestamp of a
    wrong type.
    """
    # Refuse a numpy.int64 or a datetime, which would be treated as a missing timestamp. Guard:
    # test_send_many_refuses_a_time_that_is_no_int.
    if timestamps_ms is not None and not isinstance(timestamps_ms, (int, Iterable)):
        raise MisuseError(f"timestamps_ms={timestamps_ms!r} must be whole milliseconds since 1970, or many")
    for name, items in (("values", values), ("keys", keys)):
        if isinstance(items, (str, bytes, bytearray, memoryview)):
            raise MisuseError(
                f"{name} must be many {name}, not one {type(items).__name__}; put it into a list"
            )


def columns_of(
    values: Iterable[Any],
    keys: Iterable[Any] | None,
    timestamps_ms: Iterable[int] | int | None,
    headers: tuple[Header, ...],
    now_ms: int,
) -> Columns | None:
    """Return the arguments of `send_many` as Columns.

    Return None if `values` or given `keys` are not a list or tuple, or if given timestamps are neither one
    int nor a list.
    """
    if (
        type(values) in (list, tuple)
        and (keys is None or type(keys) in (list, tuple))
        and (timestamps_ms is None or type(timestamps_ms) in (int, list))
    ):
        times = now_ms if timestamps_ms is None else timestamps_ms
        return Columns(values, keys, times, headers)  # type: ignore[arg-type]
    return None


def rows_of(
    values: Iterable[Any],
    keys: Iterable[Any] | None,
    timestamps_ms: Iterable[int] | int | None,
    headers: tuple[Header, ...],
    now_ms: int,
    wall_ns: Callable[[], int],
) -> Iterator[Row]:
    """Yield the rows of any iterables, one at a time. Raises MisuseError for an invalid row."""
    stamps = iter(timestamps_ms) if isinstance(timestamps_ms, Iterable) else None
    fixed = timestamps_ms if isinstance(timestamps_ms, int) else now_ms
    key_iterator = iter(keys) if keys is not None else None
    for value in values:
        key = next(key_iterator, None) if key_iterator else None
        stamp_ms = next(stamps, fixed) if stamps else fixed
        yield make_row(value, key, stamp_ms, headers, wall_ns)


def check_rows(
    core: ProducerCore,
    values: Iterable[Any],
    keys: Iterable[Any] | None,
    headers: tuple[Header, ...],
    max_request_bytes: int,
    wall_ns: Callable[[], int],
) -> None:
    """Raise the error of the first invalid record of a list or tuple, before any record is appended."""
    if not isinstance(values, (list, tuple)):
        return
    listed_keys = keys if isinstance(keys, (list, tuple)) else ()
    max_bytes = max_request_bytes - row_size_bytes(None, None, headers)
    first = first_unusual(values, listed_keys, max_bytes)
    for number in range(first, len(values)):
        key = listed_keys[number] if number < len(listed_keys) else None
        row = make_row(values[number], key, 0, headers, wall_ns)
        core.check_size(row_size_bytes(*row[1:]))
