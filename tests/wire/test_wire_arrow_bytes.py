"""Vectorized work on the bytes of all rows of a column: partitions by key, and checksums."""

from __future__ import annotations

import crc32c
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oncelog.client.producer.column_partitions import partitions_of_keys
from oncelog.client.producer.partitioner import Partitioner
from oncelog.wire.arrow_bytes import RowBytes
from oncelog.wire.row_hash import checksums_in_step

columns = st.lists(st.none() | st.binary(max_size=40), max_size=60)
even = st.integers(0, 40).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=30))
OTHERWISE, COUNT = 99, 7


def sliced(rows: list[bytes | None], first: int) -> pa.Array:
    """Return the rows as a slice of a longer column, whose other rows must not be read."""
    return pa.array([b"before"] * first + rows + [b"after"], pa.binary()).slice(first, len(rows))


def put_together(rows: RowBytes, count: int) -> list[bytes | None]:
    read: list[bytes | None] = [None] * count
    for number in rows.rows.tolist():
        read[number] = b""
    for word in rows.words():
        for number, part in zip(rows.rows.tolist(), word.tolist(), strict=False):
            read[number] = (read[number] or b"") + part.to_bytes(4, "little")
    for at, byte in rows.tails():
        for number, part in zip(rows.rows[at].tolist(), byte.tolist(), strict=True):
            read[number] = (read[number] or b"") + bytes([part])
    return read


@given(rows=columns | even, first=st.integers(0, 3))
@example(rows=[b"abcd"], first=0)
@example(rows=[None, None], first=1)
@settings(deadline=None)
def test_words_and_tails_of_a_column_are_the_bytes_of_its_rows(rows: list[bytes | None], first: int) -> None:
    assert put_together(RowBytes(sliced(rows, first)), len(rows)) == rows


@given(rows=columns | even, first=st.integers(0, 3))
@settings(deadline=None)
def test_checksums_are_those_of_the_rows(rows: list[bytes | None], first: int) -> None:
    expected = [0 if row is None else crc32c.crc32c(row) for row in rows]
    assert checksums_in_step(sliced(rows, first)).tolist() == expected


@pytest.mark.parametrize("name", ["default", "consistent_random"])
@given(rows=columns | even, first=st.integers(0, 3))
@settings(deadline=None)
def test_a_column_of_keys_gets_the_partition_of_each_key(
    name: str, rows: list[bytes | None], first: int
) -> None:
    partitioner = Partitioner(name, lambda _: 0)
    expected = [
        OTHERWISE if row is None or (not row and name != "default") else partitioner.for_key(row, COUNT)
        for row in rows
    ]
    assert partitions_of_keys(partitioner, sliced(rows, first), COUNT, OTHERWISE).tolist() == expected
