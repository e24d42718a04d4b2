"""Arrow columns: the column decoder agrees with the row decoder, and the row decoder reads encoded
columns.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wire import NOW_MS, RECORDS, records_strategy

from oncelog.errors import CorruptMessage, InvalidRecord, MisuseError
from oncelog.types import Compression, TimestampType
from oncelog.wire.batch import HEADER_BYTES, build_batch, iter_batches, verify_crc
from oncelog.wire.columns import HEADERS_TYPE, arrow_to_batches, batches_to_arrow, fetch_schema
from oncelog.wire.control import encode_end_marker
from oncelog.wire.header import write_crc
from oncelog.wire.records import NewRecord, decode_records


def columns(buffer: Any, **options: Any) -> pa.RecordBatch:
    return batches_to_arrow(buffer, topic="t", partition=3, include_headers=True, **options)


def as_rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """Return the rows of the columns in the row decoder's form."""
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    headers = [
        tuple((h["key"], h["value"]) for h in row or ()) for row in batch.column("headers").to_pylist()
    ]
    keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
    offsets = batch.column("offset").to_pylist()
    return list(zip(offsets, [time // 1000 for time in times], keys, values, headers, strict=True))


def row_decoder(buffer: bytes) -> list[tuple[Any, ...]]:
    return [tuple(r) for position, _ in iter_batches(buffer) for r in decode_records(buffer, position)]


@given(
    batches=st.lists(st.tuples(records_strategy, st.sampled_from(Compression)), min_size=1, max_size=4),
    log_append_time=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_rows_and_columns_agree(batches: list[Any], log_append_time: bool) -> None:
    time_type = TimestampType(log_append_time)
    data, offset = b"", 5
    for records, codec in batches:
        data += build_batch(records, compression=codec, base_offset=offset, timestamp_type=time_type)
        offset += len(records) + 2
    batch = columns(data)
    assert as_rows(batch) == row_decoder(data)
    assert batch.schema == fetch_schema(include_headers=True)
    assert set(batch.column("timestampType").to_pylist()) == {int(time_type)}
    assert set(batch.column("topic").to_pylist()) == {"t"}
    assert set(batch.column("partition").to_pylist()) == {3}


def test_long_records_and_a_cut_tail_are_read() -> None:
    rng = random.Random(1)
    sizes = [0, 1, 50, 63, 64, 5_000, 8_191, 8_192, 70_000, 1_100_000]
    data, offset = b"", 0
    for size in sizes:
        records = [NewRecord(NOW_MS, rng.randbytes(size // 2), rng.randbytes(size)), RECORDS[1]]
        data += build_batch(records, base_offset=offset)
        offset += 2
    assert as_rows(columns(memoryview(data + data[:70]))) == row_decoder(data)


def test_only_a_range_of_offsets_is_decoded() -> None:
    data = b"".join(build_batch(RECORDS, base_offset=10 * n) for n in range(5))
    every = row_decoder(data)
    for start, end in ((None, 12), (12, None), (12, 33), (15, 20), (0, 100), (44, 45), (50, 60)):
        expected = [r for r in every if (start is None or r[0] >= start) and (end is None or r[0] < end)]
        assert as_rows(columns(data, start_offset=start, end_offset=end)) == expected


def test_markers_and_skipped_batches_are_left_out() -> None:
    data = build_batch(RECORDS, producer_id=1, producer_epoch=0, base_sequence=0, is_transactional=True)
    data += encode_end_marker(1, 0, True, 0, NOW_MS)
    data += build_batch(RECORDS[:1], base_offset=7)
    assert [row[0] for row in as_rows(columns(data))] == [0, 1, 2, 3, 4, 7]
    kept = columns(data, skip=lambda header: header.is_transactional)
    assert [row[0] for row in as_rows(kept)] == [7]


def test_no_records_give_an_empty_table_of_the_right_schema() -> None:
    for include_headers in (False, True):
        batch = batches_to_arrow(b"", topic="t", partition=0, include_headers=include_headers)
        assert batch.num_rows == 0
        assert batch.schema == fetch_schema(include_headers)


def test_records_without_headers_have_null_and_without_the_option_no_column() -> None:
    data = build_batch(RECORDS)
    assert columns(data).column("headers").null_count == 3
    assert "headers" not in batches_to_arrow(data, topic="t", partition=0).schema.names


def test_a_timestamp_beyond_microseconds_is_null() -> None:
    data = build_batch([NewRecord(2**62, None, b"a"), NewRecord(-1, None, b"b")])
    assert columns(data).column("timestamp").cast(pa.int64()).to_pylist() == [None, -1000]


def test_damage_is_refused_unless_verification_is_off() -> None:
    data = build_batch(RECORDS)
    data[-3] ^= 1
    with pytest.raises(CorruptMessage):
        columns(data)
    assert columns(data, verify=False).num_rows == len(RECORDS)


@pytest.mark.parametrize(
    "record",
    [
        b"\x0e\x00\x00\x00\x01\x01\x00\x00",
        b"\x0c\x00\x00\x00\x03\x01\x00",
        b"\x0c\x00\x00\x00\x01\x03\x00",
        b"\x0c\x00\x00\x00\x01\x01\x01",
        b"\x0c\x00\x00\x00\x01\x01\x7e",
        b"\x0c\x00\x00\x00\x7e\x01\x00",
        b"\x0d\x00\x00\x00\x01\x01\x00",
        b"\x81\x80\x00\x00\x00\x01\x01\x00",
        b"\x26\x00" + b"\xff" * 11 + b"\x01" + b"\x00" * 6,
    ],
)
def test_columns_of_records_that_do_not_parse_are_refused(record: bytes) -> None:
    batch = bytearray(build_batch([NewRecord(0, None, None)])[:HEADER_BYTES]) + record
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    write_crc(batch, 0, len(batch))
    with pytest.raises(InvalidRecord):
        columns(batch)


def test_a_count_that_the_bytes_cannot_hold_is_refused_at_once() -> None:
    batch = build_batch(RECORDS)
    batch[57:61] = (2**31 - 1).to_bytes(4, "big")
    write_crc(batch, 0, len(batch))
    with pytest.raises(InvalidRecord, match="2147483647 records"):
        columns(batch)


def test_all_batches_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [NewRecord(NOW_MS, None, bytes(100_000))]
    data = b"".join(build_batch(records, compression=Compression.ZSTD, base_offset=n) for n in range(5))
    assert columns(data).num_rows == 5
    monkeypatch.setattr("oncelog.wire.columns._MAX_TOTAL_BYTES", 400_000)
    with pytest.raises(InvalidRecord, match="larger than"):
        columns(data)


def table(records: list[NewRecord]) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    lists = [[{"key": k, "value": v} for k, v in r.headers] or None for r in records]
    return (
        pa.array([r.key for r in records], pa.binary()),
        pa.array([r.value for r in records], pa.binary()),
        pa.array([r.timestamp_ms for r in records], pa.int64()),
        pa.array(lists, HEADERS_TYPE),
    )


@given(
    records=records_strategy,
    codec=st.sampled_from(Compression),
    limit=st.sampled_from([100, 400, 16_384]),
    with_keys=st.booleans(),
    with_headers=st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_columns_are_encoded_as_batches(
    records: list[NewRecord], codec: Compression, limit: int, with_keys: bool, with_headers: bool
) -> None:
    keys, values, times, headers = table(records)
    batches = arrow_to_batches(
        keys if with_keys else None,
        values,
        times,
        headers=headers if with_headers else None,
        max_batch_bytes=limit,
        compression=codec,
    )
    read = []
    for batch, count in batches:
        assert verify_crc(batch, 0, len(batch))
        rows = decode_records(batch)
        assert [row.offset for row in rows] == list(range(count))
        assert codec or len(batch) <= limit or count == 1
        read += [row[1:] for row in rows]
    expected = [
        (r.timestamp_ms, r.key if with_keys else None, r.value, r.headers if with_headers else ())
        for r in records
    ]
    assert read == expected


def test_columns_and_rows_build_the_same_bytes() -> None:
    """The records include negative deltas, nulls, empty values, and sizes beyond the varint table."""
    keys, values, times, headers = table(RECORDS)
    ((batch, count),) = arrow_to_batches(keys, values, times, headers=headers, max_batch_bytes=1 << 20)
    assert count == len(RECORDS)
    assert batch == build_batch(RECORDS)


def test_columns_may_have_other_arrow_types() -> None:
    values = pa.chunked_array([["a", None], ["c"]])
    times = pa.array([1_500, 2_000, 2_500_000], pa.timestamp("us", tz="UTC"))
    ((batch, _),) = arrow_to_batches(None, values.slice(0), times, max_batch_bytes=1000)
    assert [r[1:4] for r in decode_records(batch)] == [(1, None, b"a"), (2, None, None), (2500, None, b"c")]
    sliced = pa.array([b"x", b"a", b"b"]).slice(1)
    ((batch, _),) = arrow_to_batches(sliced, sliced, 7, max_batch_bytes=1000)
    assert [r[1:4] for r in decode_records(batch)] == [(7, b"a", b"a"), (7, b"b", b"b")]
    assert arrow_to_batches(None, pa.array([], pa.binary()), 7, max_batch_bytes=1000) == []


def test_a_table_larger_than_one_span_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.wire.arrow_encoder._SPAN_BYTES", 5_000)
    values = pa.array([bytes([n % 251]) * (n % 700) for n in range(500)])
    batches = arrow_to_batches(None, values, 7, max_batch_bytes=2_000)
    assert [r.value for batch, _ in batches for r in decode_records(batch)] == values.to_pylist()
    assert all(len(batch) <= 2_000 for batch, _ in batches)


def test_batches_end_at_the_given_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    values = pa.array([b"%d" % n for n in range(50)])
    for span_bytes in (1 << 20, 300):
        monkeypatch.setattr("oncelog.wire.arrow_encoder._SPAN_BYTES", span_bytes)
        batches = arrow_to_batches(None, values, 7, ends=[3, 4, 30, 50], max_batch_bytes=400)
        ends = list(itertools.accumulate(count for _, count in batches))
        assert {3, 4, 30, 50} < set(ends)
        assert [r.value for batch, _ in batches for r in decode_records(batch)] == values.to_pylist()


def test_columns_of_different_lengths_are_refused() -> None:
    values = pa.array([b"a", b"b"])
    with pytest.raises(MisuseError, match="2 values but 1 keys"):
        arrow_to_batches(pa.array([b"k"]), values, 7, max_batch_bytes=1000)
    with pytest.raises(MisuseError, match="1 timestamps are null"):
        arrow_to_batches(None, values, pa.array([1, None]), max_batch_bytes=1000)
