"""The row loops in C (wire/_records.c) give the same results as records.py, and leave unusual data to it."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.row_loops import c_module

from oncelog.client.producer.partitioner import _murmur2
from oncelog.wire import records as oracle
from oncelog.wire.header import HEADER_BYTES, BatchHeader
from oncelog.wire.records import LOSSLESS, READING, DecodedRecord, NewRecord

INT64 = st.integers(-(2**63), 2**63 - 1)
TIMES = st.one_of(st.integers(0, 2**41), st.integers(-1, 200), INT64)
DATA = st.one_of(st.none(), st.binary(max_size=70), st.sampled_from([b"x" * 8191, b"y" * 8192]))
NAMES = st.one_of(st.text(max_size=5), st.just("é" * 64))
HEADERS = st.one_of(st.just(()), st.lists(st.tuples(NAMES, DATA), max_size=3).map(tuple))
ROWS = st.builds(NewRecord, TIMES, DATA, DATA, HEADERS)
BYTES = st.sampled_from([0, 1, 2, 3, 126, 127, 128, 129, 254, 255])


@pytest.fixture(scope="module")
def c() -> Any:
    return c_module("oncelog.wire._records")


def header_of(count: int, base_offset: int, base_ms: int, *, is_log_time: bool) -> BatchHeader:
    attributes = 8 if is_log_time else 0
    return BatchHeader(base_offset, 0, 0, 2, 0, attributes, count - 1, base_ms, 77, None, None, None, count)


def parsed_by_python(data: bytes, header: BatchHeader, position: int, name_errors: Any) -> Any:
    """Return the result of `_parse`, or the exception."""
    try:
        return oracle._parse(data, header, position, 0, header.records_count, name_errors)
    except Exception as error:
        return error


def parsed_by_c(c: Any, data: bytes, header: BatchHeader, position: int, name_errors: str) -> Any:
    fixed_ms = header.max_timestamp_ms if header.attributes else None
    return c.parse(
        data, position, header.records_count, header.base_offset, header.base_timestamp_ms, fixed_ms,
        DecodedRecord, name_errors,
    )  # fmt: skip


@given(rows=st.lists(ROWS, max_size=4), base_ms=TIMES, deltas=st.none() | st.lists(INT64, max_size=5))
def test_c_encodes_the_bytes_that_python_encodes(
    c: Any, rows: list[NewRecord], base_ms: int, deltas: list[int] | None
) -> None:
    encoded = c.encode(rows, base_ms, deltas, 3)
    count = len(rows) if deltas is None else len(deltas)
    fits = all(-(2**63) <= row.timestamp_ms - base_ms < 2**63 for row in rows[:count])
    assert (encoded is not None) or not fits
    if encoded is not None:
        assert encoded == bytes(3) + b"".join(oracle.encode_records(rows, base_ms, deltas))


@given(
    rows=st.lists(ROWS, max_size=4),
    base=st.tuples(INT64, INT64),
    is_log_time=st.booleans(),
    name_errors=st.sampled_from(["strict", READING, LOSSLESS]),
)
def test_c_parses_each_record_that_python_encoded(
    c: Any, rows: list[NewRecord], base: tuple[int, int], is_log_time: bool, name_errors: str
) -> None:
    data = b"head" + b"".join(oracle.encode_records(rows, base[1]))
    header = header_of(len(rows), *base, is_log_time=is_log_time)
    expected = parsed_by_python(data, header, 4, name_errors)
    parsed = parsed_by_c(c, data, header, 4, name_errors)
    if parsed is None:  # the sums of base and delta need more than 64 bits
        assert any(
            not -(2**63) <= number < 2**63
            for index, row in enumerate(rows)
            for number in (base[0] + index, row.timestamp_ms - base[1])
        )
    else:
        assert parsed == expected
        assert all(type(record) is DecodedRecord for record in parsed[0])


@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    changes=st.lists(st.tuples(st.integers(0, 60), BYTES), min_size=1, max_size=3),
    cut=st.integers(0, 20),
    count=st.integers(0, 5),
    name_errors=st.sampled_from(["strict", READING, LOSSLESS]),
)
def test_c_never_accepts_a_damaged_record_that_python_refuses(
    c: Any,
    rows: list[NewRecord],
    changes: list[tuple[int, int]],
    cut: int,
    count: int,
    name_errors: str,
) -> None:
    data = bytearray(b"".join(oracle.encode_records(rows, rows[0].timestamp_ms)))
    for position, byte in changes:
        data[position % len(data)] = byte
    damaged = bytes(data[: len(data) - cut % len(data)])
    header = header_of(count, 5, 7, is_log_time=False)
    parsed = parsed_by_c(c, damaged, header, 0, name_errors)
    expected = parsed_by_python(damaged, header, 0, name_errors)
    assert parsed is None or parsed == expected


@pytest.mark.parametrize(
    "rows",
    [
        [(0, b"k", b"v")],
        [[0, b"k", b"v", ()]],
        [("0", b"k", b"v", ())],
        [(2**63, b"k", b"v", ())],
        [(0, "k", b"v", ())],
        [(0, b"k", bytearray(b"v"), ())],
        [(0, b"k", b"v", [])],
        [(0, b"k", b"v", (("name",),))],
        [(0, b"k", b"v", ((b"name", b""),))],
        [(0, b"k", b"v", (("\ud800", b""),))],
        "no rows",
    ],
    ids=str,
)
def test_c_leaves_unusual_arguments_to_python(c: Any, rows: Any) -> None:
    assert c.encode(rows, 0, None, 0) is None


def test_a_count_above_the_records_costs_no_memory(c: Any) -> None:
    data = b"".join(oracle.encode_records([NewRecord(0, None, b"v")], 0))
    header = header_of(2**31 - 1, 0, 0, is_log_time=False)
    # the record claims 2^31 - 1 headers
    headers = bytes([22, 0, 0, 0, 1, 1, 0xFE, 0xFF, 0xFF, 0xFF, 0x0F, 0])
    tracemalloc.start()
    try:
        assert parsed_by_c(c, data, header, 0, "strict") is None
        assert parsed_by_c(c, headers, header, 0, "strict") is None
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


def test_the_row_loops_in_c_leak_no_memory(c: Any) -> None:
    rows = [NewRecord(index, b"key" * 100, b"value" * 100, (("name", b"data"),)) for index in range(100)]
    batch = c.encode(rows, 0, None, 0)
    header = header_of(100, 0, 0, is_log_time=False)
    damaged = bytes(batch[:-1]) + b"\xff"

    def work() -> None:
        for _ in range(20):
            c.encode(rows, 0, None, HEADER_BYTES)
            c.encode([*rows, None], 0, None, HEADER_BYTES)
            parsed_by_c(c, batch, header, 0, "strict")
            parsed_by_c(c, damaged, header, 0, "strict")

    work()
    gc.collect()
    tracemalloc.start()
    growths = []
    try:
        for _ in range(5):  # repeat, because threads of earlier tests may allocate in some rounds
            before, _ = tracemalloc.get_traced_memory()
            work()
            gc.collect()
            growths.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert min(growths) < 5_000, growths


def test_records_of_c_are_not_visited_by_the_garbage_collector(c: Any) -> None:
    data = b"".join(oracle.encode_records([NewRecord(0, b"k", b"v", (("n", None),))], 0))
    header = header_of(1, 0, 0, is_log_time=False)
    records, position = parsed_by_c(c, data, header, 0, "strict")
    assert (records, position) == ([(0, 0, b"k", b"v", (("n", None),))], len(data))
    assert not any(gc.is_tracked(part) for part in (records[0], records[0].headers, records[0].headers[0]))


@given(key=st.binary(max_size=40))
def test_c_hashes_keys_as_python_does(key: bytes) -> None:
    assert c_module("oncelog.client.producer._partitioner").murmur2(key) == _murmur2(key)
