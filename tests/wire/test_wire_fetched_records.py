"""The C code for fetched batches (wire/_fetched_records.c) gives the same results as the Python code.

It leaves unusual data to the Python code.
"""

from __future__ import annotations

import gc
import tracemalloc
from types import ModuleType
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.row_loops import c_module
from support.wire import NOW_MS, RECORDS, records_strategy

from oncelog.errors import InvalidRecord, OncelogError
from oncelog.types import Compression, Record, TimestampType, TopicPartition
from oncelog.wire import columns, fetched_records
from oncelog.wire.batch import HEADER_BYTES, BatchHeader, build_batch, iter_batches, read_header
from oncelog.wire.columns import batches_to_arrow
from oncelog.wire.control import encode_end_marker
from oncelog.wire.fetched_records import append_plain_batches, append_whole_batches, iter_rows, read_rows
from oncelog.wire.header import write_crc
from oncelog.wire.records import NewRecord, payload_of

TP = TopicPartition("t", 3)
BYTES = st.sampled_from([0, 1, 2, 3, 126, 127, 128, 129, 254, 255])


class Listed(NamedTuple):
    position: int
    header: BatchHeader
    verdict: str


@pytest.fixture(scope="module")
def c() -> ModuleType:
    module: ModuleType = c_module("oncelog.wire._fetched_records")
    return module


def both_forms(c: ModuleType, call: Any) -> tuple[Any, Any]:
    """Return the results of `call` with the C code and without it. An exception counts as a result."""
    results = []
    for form in (c, None):
        with pytest.MonkeyPatch.context() as patch:
            for module in (fetched_records, columns):
                patch.setattr(module, "_c", form)
            try:
                results.append(call())
            except OncelogError as error:
                results.append((type(error), str(error)))
    return results[0], results[1]


def listed(data: Any) -> list[Listed]:
    return [Listed(position, header, "deliver") for position, header in iter_batches(data)]


def rows_at_once(data: Any, start_offset: int, max_records: int, *, verify: bool = True) -> tuple[Any, ...]:
    """Call `append_whole_batches`. Return the rows that it appends, the next index and offset, and the size
    of the values.
    """
    rows: list[Record] = []
    index, offset, size = append_whole_batches(
        rows, data, listed(data), 0, tp=TP, start_offset=start_offset, max_records=max_records,
        verdict="deliver", verify=verify,
    )  # fmt: skip
    return rows, index, offset, size


def rows_one_by_one(data: Any, start_offset: int, batches_count: int) -> list[Record]:
    rows = []
    for position, header, _ in listed(data)[:batches_count]:
        rows += read_rows(payload_of(data, position, header, True), header, TP, start_offset)
    return rows


batches_strategy = st.lists(
    st.tuples(records_strategy, st.sampled_from(Compression), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=4,
)


def built(batches: Any) -> bytes:
    data, offset = b"", 5
    for records, codec, is_log_time, gap in batches:
        time_type = TimestampType(is_log_time)
        data += build_batch(records, compression=codec, base_offset=offset, timestamp_type=time_type)
        offset += len(records) + gap
    return data


@given(batches=batches_strategy, start_offset=st.integers(0, 12))
def test_rows_of_a_batch_are_the_same_in_c(c: ModuleType, batches: Any, start_offset: int) -> None:
    data = built(batches)
    fast, slow = both_forms(c, lambda: rows_one_by_one(data, start_offset, 9))
    assert fast == slow
    assert [type(row) for row in fast] == [Record] * len(fast)
    assert [type(row.timestamp_type) for row in fast] == [TimestampType] * len(fast)


@given(batches=batches_strategy, start_offset=st.integers(0, 12), max_records=st.integers(0, 12))
def test_batches_that_are_read_at_once_give_the_rows_of_single_ones(
    c: ModuleType, batches: Any, start_offset: int, max_records: int
) -> None:
    data = built(batches)
    fast, slow = both_forms(c, lambda: rows_at_once(data, start_offset, max_records))
    rows, index, offset, size = fast
    assert slow == ([], 0, start_offset, 0), "without C every batch is left to the caller"
    assert len(rows) <= max_records
    assert rows == rows_one_by_one(data, start_offset, index)
    assert size == sum(len(row.value or b"") for row in rows)
    assert offset == max([start_offset, *(entry.header.last_offset + 1 for entry in listed(data)[:index])])
    if index < len(batches):
        header = listed(data)[index].header
        is_old = header.last_offset < start_offset
        assert header.compression or is_old or len(rows) + header.records_count > max_records


def test_a_batch_with_another_verdict_is_left_to_the_caller(c: ModuleType) -> None:
    data = b"".join(build_batch(RECORDS[:1], base_offset=offset) for offset in range(3))
    batches = listed(data)
    batches[1] = batches[1]._replace(verdict="aborted")
    rows: list[Record] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetched_records, "_c", c)
        index, offset, _ = append_whole_batches(
            rows, data, batches, 0, tp=TP, start_offset=0, max_records=9, verdict="deliver", verify=True
        )
    assert (index, offset, [row.offset for row in rows]) == (1, 1, [0])


@given(
    batches=batches_strategy,
    place=st.integers(0, 10**6),
    byte=BYTES,
    cut=st.integers(0, 3),
    verify=st.booleans(),
    reseal=st.booleans(),
)
def test_damaged_batches_give_the_same_rows_and_the_same_errors(
    c: ModuleType, batches: Any, place: int, byte: int, cut: int, verify: bool, reseal: bool
) -> None:
    data = bytearray(built(batches))
    # Keep the lengths of the batches, so that the damage is in the records or in a header's other fields.
    position, header, _ = listed(data)[place % len(batches)]
    data[position + 16 + place % (header.size_bytes - 16)] = byte
    if reseal:
        write_crc(data, position, header.size_bytes)
    damaged = bytes(data[: len(data) - cut])

    def rows() -> Any:
        result = []
        for position, header in iter_batches(damaged):
            result += read_rows(payload_of(damaged, position, header, verify), header, TP, 6)
        return result

    def parts() -> Any:
        result = []
        for position, header in iter_batches(damaged):
            payload = payload_of(damaged, position, header, verify)
            result += list(iter_rows(payload, header, TP, 6, 2))
        return result

    def table() -> Any:
        batch = batches_to_arrow(damaged, topic="t", partition=3, start_offset=6, end_offset=14,
                                 include_headers=True, verify=verify)  # fmt: skip
        batch.validate(full=True)
        return batch

    for call in (rows, parts, table):
        fast, slow = both_forms(c, call)
        assert fast == slow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetched_records, "_c", c)
        try:
            at_once, index, next_offset, _ = rows_at_once(damaged, 6, 10**6, verify=verify)
        except OncelogError:  # `listed` raises this error, before either form reads records
            return
        patch.setattr(fetched_records, "_c", None)
        expected, offset = [], 6
        for position, header, _ in listed(damaged)[:index]:
            rows_of_batch = read_rows(payload_of(damaged, position, header, verify), header, TP, offset)
            expected += rows_of_batch
            offset = max(offset, header.last_offset + 1, *(row.offset + 1 for row in rows_of_batch[-1:]))
        assert (at_once, next_offset) == (expected, offset)


@given(data=st.lists(BYTES, max_size=40).map(bytes), count=st.integers(0, 9), first=st.integers(-2, 9))
def test_bytes_that_are_no_records_give_the_same_in_c(
    c: ModuleType, data: bytes, count: int, first: int
) -> None:
    header = BatchHeader(first, 0, 0, 2, 0, 0, count - 1, NOW_MS, NOW_MS, None, None, None, count)
    fast, slow = both_forms(c, lambda: read_rows(data, header, TP, 1))
    assert fast == slow
    batch = bytearray(HEADER_BYTES) + data
    batch[:HEADER_BYTES] = build_batch(RECORDS)[:HEADER_BYTES]
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    batch[57:61] = count.to_bytes(4, "big")
    write_crc(batch, 0, len(batch))
    arguments = {"topic": "t", "partition": 0, "include_headers": True}
    fast, slow = both_forms(c, lambda: batches_to_arrow(bytes(batch), **arguments))
    assert fast == slow


@given(
    batches=batches_strategy,
    bounds=st.tuples(st.none() | st.integers(-1, 20), st.none() | st.integers(-1, 20)),
    include_headers=st.booleans(),
)
def test_columns_are_the_same_in_c(
    c: ModuleType, batches: Any, bounds: tuple[int | None, int | None], include_headers: bool
) -> None:
    data = built(batches)

    def table() -> pa.RecordBatch:
        return batches_to_arrow(
            data, topic="t", partition=3, start_offset=bounds[0], end_offset=bounds[1],
            include_headers=include_headers,
        )  # fmt: skip

    fast, slow = both_forms(c, table)
    fast.validate(full=True)
    assert fast == slow
    assert fast.schema == slow.schema


def test_timestamps_at_the_limits_of_columns_are_the_same_in_c(c: ModuleType) -> None:
    limit = (2**63 - 1) // 1000
    times = [limit, limit + 1, -limit, -limit - 1, 0, 2**62, -(2**62)]
    data = build_batch([NewRecord(time, None, b"x") for time in times])
    fast, slow = both_forms(c, lambda: batches_to_arrow(data, topic="t", partition=0))
    assert fast == slow
    assert fast.column("timestamp").null_count == 4


@pytest.mark.parametrize("size", [2, 3, 40])
def test_damaged_headers_give_the_same_error_in_c(c: ModuleType, size: int) -> None:
    """R1241: without C, a damaged size made the headers of one record continue in the next record."""
    data = build_batch([NewRecord(NOW_MS, None, b"x", (("n", b"v"),)) for _ in range(2)])
    place = bytes(data).index(b"\x02n\x02v") + 2
    data[place] = 2 * size  # the size of the first record's header value; the record has only one byte left
    write_crc(data, 0, len(data))
    arguments: dict[str, Any] = {"topic": "t", "partition": 0, "include_headers": True}
    fast, slow = both_forms(c, lambda: batches_to_arrow(bytes(data), **arguments))
    assert fast == slow
    assert fast[0] is InvalidRecord


def test_batches_are_listed_up_to_the_first_that_python_must_judge(c: ModuleType) -> None:
    plain = build_batch(RECORDS, producer_id=7, producer_epoch=0, base_sequence=3, is_transactional=True)
    plain += build_batch(RECORDS[:1], base_offset=9)
    marker = encode_end_marker(7, 0, True, 0, NOW_MS)
    old = bytearray(plain)
    old[16] = 1
    backwards = bytearray(plain)
    backwards[23:27] = (-1).to_bytes(4, "big", signed=True)
    for tail in (b"", marker, bytes(old), bytes(backwards), plain[:-1], plain[:60], b"\xff" * 200):
        data, batches = bytes(plain) + bytes(tail), list[Listed]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fetched_records, "_c", c)
            position = append_plain_batches(data, batches, Listed, "deliver")
        expected = listed(data) if tail in (b"", plain[:-1], plain[:60]) else listed(plain)
        assert batches == expected
        assert position == sum(entry.header.size_bytes for entry in expected)
        assert [type(entry.header) for entry in batches] == [BatchHeader] * len(batches)


def test_a_record_count_reserves_no_memory(c: ModuleType) -> None:
    data = bytearray(build_batch(RECORDS))
    data[57:61] = (2**31 - 1).to_bytes(4, "big")
    write_crc(data, 0, len(data))
    header = read_header(data)
    tracemalloc.start()
    try:
        assert c.columns(data, [(0, header)], None, 0, 2**63 - 1, None) is None
        rows: list[Record] = []
        assert rows_of(c, data, header, rows) == (0, 0, 0)
        assert rows == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def rows_of(c: ModuleType, data: Any, header: BatchHeader, rows: list[Record]) -> Any:
    types = tuple(TimestampType)
    return c.batch_rows(
        data, [(0, header, 1)], 0, rows, 2**62, 0, 1, None, Record, "t", 3, types, "replace"
    )  # fmt: skip


def test_a_damaged_batch_leaves_no_rows_of_itself(c: ModuleType) -> None:
    data = bytearray(build_batch(RECORDS))
    data[-1] ^= 1
    rows = [Record("t", 0, 0, 0, TimestampType.CREATE_TIME, None, None, ())]
    before = list(rows)
    assert rows_of(c, data, read_header(data), rows) == (0, 0, 0)
    assert rows == before


def test_rows_and_headers_are_in_no_cycle_and_the_collector_does_not_visit_them(c: ModuleType) -> None:
    data = build_batch(RECORDS)
    rows: list[Record] = []
    batches: list[Listed] = []
    assert rows_of(c, data, read_header(data), rows)[0] == 1
    c.plain_batches(data, 0, batches, BatchHeader, Listed, "deliver")
    assert not any(gc.is_tracked(value) for value in (*rows, *batches, batches[0].header))


@pytest.mark.parametrize("position", [-1, 1, 10**6])
def test_a_position_outside_the_data_is_left_to_python(c: ModuleType, position: int) -> None:
    data = build_batch(RECORDS)
    header = read_header(data)
    assert c.columns(data, [(position, header)], None, 0, 9, None) is None
    assert c.plain_batches(data, position, [], BatchHeader, Listed, 1) == position
    arguments = (0, 0, None, 0, Record, "t", 3, TimestampType.CREATE_TIME, "replace")
    assert c.rows(data, 10**6 * position, 1, *arguments) is None


def test_arguments_of_other_types_raise(c: ModuleType) -> None:
    data = build_batch(RECORDS)
    header = read_header(data)
    for batches in ([[0, header]], [()], [(0,)], [0], [(None, header)]):
        with pytest.raises(TypeError):
            c.columns(data, batches, None, 0, 9, None)
    with pytest.raises(TypeError):
        c.columns(data, [(0, header)], [], 0, 9, None)
    with pytest.raises(TypeError):
        c.plain_batches(data, 0, [], dict, Listed, 1)
    with pytest.raises(ZeroDivisionError):
        c.columns(data, [(0, header)], None, 0, 9, lambda view: 1 // 0)
