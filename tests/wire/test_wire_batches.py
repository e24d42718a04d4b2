"""Record batches: headers, stamping and records, compared with other codecs and with captured bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AioBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch as KafkaPythonBatch
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaPythonBuilder
from support.wire import NOW_MS, RECORDS, records_strategy

from oncelog.errors import CorruptMessage, InvalidRecord, MisuseError
from oncelog.rules.idempotence.sequence import last_sequence
from oncelog.types import Compression, TimestampType
from oncelog.wire.batch import (
    HEADER_BYTES,
    assign_producer,
    build_batch,
    iter_batches,
    read_header,
    restamp_time,
    rewrite_batch,
    seal,
    stamp,
    verify_crc,
)
from oncelog.wire.control import ControlRecord, ControlType, decode_control, encode_end_marker
from oncelog.wire.header import write_crc
from oncelog.wire.primitives import VARINT, VARINT_TABLE_SIZE, encode_varint
from oncelog.wire.records import (
    NewRecord,
    decode_records,
    encode_records,
    find_records_without_key,
    read_varint,
    record_size_upper_bound,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "batches"


def rows(batch: Any) -> list[tuple[Any, ...]]:
    return [tuple(record)[1:] for record in decode_records(batch)]


@given(records=records_strategy, codec=st.sampled_from(Compression))
@settings(deadline=None, max_examples=150)
def test_decoded_records_equal_the_encoded_ones(records: list[NewRecord], codec: Compression) -> None:
    batch = build_batch(records, compression=codec, base_offset=7)
    assert rows(batch) == [tuple(record) for record in records]
    assert [record.offset for record in decode_records(batch)] == list(range(7, 7 + len(records)))
    header = read_header(batch)
    assert header.size_bytes == len(batch)
    assert header.max_timestamp_ms == max(record.timestamp_ms for record in records)
    if codec is Compression.NONE:
        bound = sum(record_size_upper_bound(r.key, r.value, r.headers) for r in records)
        assert len(batch) <= HEADER_BYTES + bound


@pytest.mark.parametrize("their_batch", [AioBatch, KafkaPythonBatch])
@pytest.mark.parametrize("codec", Compression)
def test_other_libraries_read_our_batches(their_batch: Any, codec: Compression) -> None:
    batch = build_batch(
        RECORDS, compression=codec, producer_id=9, producer_epoch=3, base_sequence=40, base_offset=100
    )
    theirs = their_batch(bytes(batch))
    assert theirs.validate_crc()
    assert (theirs.producer_id, theirs.producer_epoch, theirs.base_sequence) == (9, 3, 40)
    read = [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in theirs]
    assert read == [(100 + i, *record) for i, record in enumerate(RECORDS)]


@pytest.mark.parametrize("builder_cls", [AioBuilder, KafkaPythonBuilder])
@pytest.mark.parametrize("codec", Compression)
def test_we_read_and_reproduce_batches_of_other_libraries(builder_cls: Any, codec: Compression) -> None:
    builder = builder_cls(2, int(codec), True, 9, 3, 40, 1 << 20)
    for index, record in enumerate(RECORDS):
        key, value, headers = record.key, record.value, list(record.headers)
        builder.append(index, record.timestamp_ms, key, value, headers)
    theirs = bytes(builder.build())
    assert verify_crc(theirs, 0, len(theirs))
    assert rows(theirs) == [tuple(record) for record in RECORDS]
    ours = build_batch(
        RECORDS, compression=codec, producer_id=9, producer_epoch=3, base_sequence=40, is_transactional=True
    )
    if codec is Compression.NONE:
        stamp(ours, 0, 0, read_header(theirs).partition_leader_epoch)
        assert bytes(ours) == theirs


@pytest.mark.behaviour("I21")
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.hex")), ids=lambda path: path.stem)
def test_captured_batches_of_real_clients_are_read(path: Path) -> None:
    """The captured batches include plain Snappy (librdkafka) and Snappy in Xerial's framing, and LZ4 with and
    without content size.
    """
    batch = bytes.fromhex(path.read_text())
    header = read_header(batch)
    assert header.compression.name.lower() == path.stem.rpartition("-")[2]
    assert header.size_bytes == len(batch)
    assert header.base_sequence == (None if header.producer_id is None else 0)
    assert rows(batch) == [
        (1_700_000_000_000, None, b"first", ()),
        (1_699_999_999_000, b"key", b"", (("h", b"x"), ("h", b""))),
        (1_700_000_100_000, b"", None, ()),
        (1_700_000_000_001, b"k" * 70, b"v" * 300, (("größe", b"12"),)),
    ]


def test_every_client_and_codec_is_captured() -> None:
    assert len(list(GOLDEN.glob("*.hex"))) == 15
    raw = bytes.fromhex((GOLDEN / "confluent-kafka-snappy.hex").read_text())[HEADER_BYTES:]
    assert not raw.startswith(b"\x82SNAPPY")


def test_a_negative_timestamp_delta_is_not_read_from_the_table() -> None:
    """If a negative delta were used as an index, it would read the table of short varints from its end,
    without an error.
    """
    for delta in (-1, -2, -8191, -8192, -8193, 8191, 8192):
        batch = build_batch([NewRecord(NOW_MS, None, b""), NewRecord(NOW_MS + delta, None, b"")])
        assert decode_records(batch)[1].timestamp_ms == NOW_MS + delta


def test_long_sizes_keep_null_and_empty_apart() -> None:
    """Sizes that are not in the table take a slower path. That path must also distinguish null from empty."""
    records = [NewRecord(0, None, b"v" * 10_000), NewRecord(0, b"", b"v" * 10_000), NewRecord(0, None, None)]
    records += [NewRecord(0, b"k" * 10_000, None), NewRecord(0, b"k" * 10_000, b"")]
    assert rows(build_batch(records)) == [tuple(record) for record in records]


def test_more_records_than_the_table_has_varints() -> None:
    count = VARINT_TABLE_SIZE + 10
    records = decode_records(build_batch([NewRecord(i, None, b"x") for i in range(count)]))
    assert [record.offset for record in records] == list(range(count))
    assert [record.timestamp_ms for record in records] == list(range(count))


@given(st.integers(-(2**63), 2**63 - 1))
def test_varints_are_encoded_and_decoded(value: int) -> None:
    data = encode_varint(value)
    assert len(data) <= 10 and read_varint(data, 0) == (value, len(data))
    if 0 <= value < VARINT_TABLE_SIZE:
        assert VARINT[value] == data


def test_the_varint_table_matches_the_encoder() -> None:
    assert len(VARINT) == VARINT_TABLE_SIZE
    assert all(read_varint(data, 0) == (value, len(data)) for value, data in enumerate(VARINT))


def test_stamping_leaves_the_checksum_alone() -> None:
    batch = bytearray(b"....") + build_batch(RECORDS)
    stamp(batch, 4, 2**40, 17)
    header = read_header(batch, 4)
    assert (header.base_offset, header.partition_leader_epoch) == (2**40, 17)
    assert header.last_offset == 2**40 + len(RECORDS) - 1
    assert verify_crc(batch, 4, header.size_bytes)


def test_log_append_time_overrules_the_records() -> None:
    batch = build_batch(RECORDS)
    restamp_time(batch, 0, TimestampType.LOG_APPEND_TIME, NOW_MS + 7)
    assert verify_crc(batch, 0, len(batch))
    assert read_header(batch).timestamp_type is TimestampType.LOG_APPEND_TIME
    assert {record.timestamp_ms for record in decode_records(batch)} == {NOW_MS + 7}
    restamp_time(batch, 0, TimestampType.CREATE_TIME, NOW_MS + 100_000)
    assert rows(batch) == [tuple(record) for record in RECORDS]


def test_a_sealed_batch_is_numbered_when_it_is_sent() -> None:
    batch = build_batch(RECORDS, compression=Compression.LZ4)
    assert (read_header(batch).producer_id, read_header(batch).base_sequence) == (None, None)
    assign_producer(batch, 5, 1, 99)
    same = build_batch(
        RECORDS, compression=Compression.LZ4, producer_id=5, producer_epoch=1, base_sequence=99
    )
    assert batch == same
    assign_producer(batch, 5, 1, None, is_transactional=True)
    header = read_header(batch)
    assert (header.is_transactional, header.base_sequence, header.last_sequence) == (True, None, None)
    assert verify_crc(batch, 0, len(batch))


@pytest.mark.behaviour("I5")
@pytest.mark.parametrize("base", [0, 2**31 - 3, 2**31 - 2, 2**31 - 1])
def test_the_last_sequence_wraps_as_the_rule_says(base: int) -> None:
    batch = build_batch(RECORDS[:3], producer_id=1, producer_epoch=0, base_sequence=base)
    assert read_header(batch).last_sequence == last_sequence(base, 3)


def test_batches_are_walked_up_to_a_cut_tail() -> None:
    batches = [build_batch(RECORDS[: n + 1], base_offset=10 * n) for n in range(4)]
    data = b"".join(bytes(batch) for batch in batches)
    found = list(iter_batches(data))
    assert [header.base_offset for _, header in found] == [0, 10, 20, 30]
    assert [bytes(data[p : p + h.size_bytes]) for p, h in found] == [bytes(batch) for batch in batches]
    for cut in (1, 60, 61, 62, len(batches[3]) - 1):
        assert len(list(iter_batches(data[: len(data) - len(batches[3]) + cut]))) == 3
    assert len(list(iter_batches(memoryview(data), found[2][0]))) == 2


@pytest.mark.parametrize(
    ("position", "value", "error"),
    [
        (16, b"\x01", InvalidRecord),
        (16, b"\x00", InvalidRecord),
        (16, b"\x03", CorruptMessage),
        (16, b"\xff", CorruptMessage),
        (8, b"\x00\x00\x00\x30", CorruptMessage),
        (8, b"\xff\xff\xff\xff", CorruptMessage),
    ],
)
def test_impossible_batch_headers_are_refused(position: int, value: bytes, error: type[Exception]) -> None:
    batch = build_batch(RECORDS)
    batch[position : position + len(value)] = value
    with pytest.raises(error):
        read_header(batch)
    with pytest.raises(error):
        list(iter_batches(batch))


def test_an_error_names_the_damage() -> None:
    batch = build_batch(RECORDS, base_offset=55)
    batch[-1] ^= 1
    assert not verify_crc(batch, 0, len(batch))
    with pytest.raises(CorruptMessage, match="offset 55"):
        decode_records(batch)
    with pytest.raises(CorruptMessage, match="truncated"):
        decode_records(batch[:-1])
    with pytest.raises(CorruptMessage, match="too few"):
        read_header(batch[:60])
    unknown = build_batch(RECORDS)
    unknown[22] |= 5
    write_crc(unknown, 0, len(unknown))
    with pytest.raises(CorruptMessage, match="codec 5"):
        decode_records(unknown)


@pytest.mark.parametrize("count", [-1, 0, 4, 6, 2**31 - 1])
def test_a_wrong_record_count_is_refused(count: int) -> None:
    batch = build_batch(RECORDS)
    batch[57:61] = count.to_bytes(4, "big", signed=True)
    write_crc(batch, 0, len(batch))
    with pytest.raises(InvalidRecord):
        decode_records(batch)


@pytest.mark.parametrize(
    "record",
    [
        b"\x0e\x00\x00\x00\x01\x01\x00\x00",  # The record is one byte longer than its fields.
        b"\x0c\x00\x00\x00\x03\x01\x00",  # A key of length -2.
        b"\x0c\x00\x00\x00\x01\x03\x00",  # A value of length -2.
        b"\x0c\x00\x00\x00\x01\x01\x01",  # -1 headers.
        b"\x0c\x00\x00\x00\x01\x01\x7e",  # 63 headers in no bytes.
        b"\x0c\x00\x00\x00\x7e\x01\x00",  # A key beyond the record.
        b"\x0d\x00\x00\x00\x01\x01\x00",  # A negative length.
        b"\x10\x00\x00\x00\x01\x01\x02\x01\x01",  # A header whose name is null.
        b"\x12\x00\x00\x00\x01\x01\x02\x02\xff\x01",  # A header name is not UTF-8.
        b"\x26\x00" + b"\xff" * 11 + b"\x01" + b"\x00" * 6,  # A delta has more than 10 bytes.
    ],
)
def test_records_that_do_not_parse_are_refused(record: bytes) -> None:
    batch = bytearray(build_batch([NewRecord(0, None, None)])[:HEADER_BYTES]) + record
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    write_crc(batch, 0, len(batch))
    with pytest.raises(InvalidRecord):
        decode_records(batch)


def test_an_empty_batch_is_not_built() -> None:
    with pytest.raises(MisuseError):
        build_batch([])


def test_end_markers_have_78_bytes_and_are_kafkas() -> None:
    for commit in (True, False):
        batch = encode_end_marker(9, 3, commit, 12, NOW_MS)
        header = read_header(batch)
        assert len(batch) == 78 and header.attributes == 0x30 and header.base_sequence is None
        kind = ControlType.COMMIT if commit else ControlType.ABORT
        assert decode_control(batch) == ControlRecord(0, NOW_MS, kind, 12)
        (theirs,) = list(KafkaPythonBatch(bytes(batch)))
        assert (theirs.commit, theirs.abort) == (commit, not commit)


def test_control_records_we_do_not_know_are_skipped() -> None:
    def control(key: bytes, value: bytes) -> bytearray:
        record = NewRecord(NOW_MS, key, value)
        return build_batch([record], producer_id=1, producer_epoch=0, is_control=True)

    assert decode_control(control(b"\0\0\0\x63", b"")) == ControlRecord(0, NOW_MS, None, None)
    assert decode_control(control(b"\0\0\0\2", b"\0\0")) == ControlRecord(
        0, NOW_MS, ControlType.LEADER_CHANGE, None
    )
    newer = control(b"\0\7\0\1", b"\0\5\0\0\0\x09more")
    assert decode_control(newer) == ControlRecord(0, NOW_MS, ControlType.COMMIT, 9)
    for key, value in ((b"\xff\xff\0\1", b"\0\0\0\0\0\1"), (b"\0\0\0", b""), (b"\0\0\0\1", b"\0\0")):
        with pytest.raises(CorruptMessage):
            decode_control(control(key, value))


def test_an_empty_control_batch_means_nothing() -> None:
    batch = encode_end_marker(9, 3, True, 12, NOW_MS)[:HEADER_BYTES]
    batch[8:12] = (49).to_bytes(4, "big")
    batch[57:61] = bytes(4)
    write_crc(batch, 0, len(batch))
    assert decode_control(batch) is None


def test_a_delete_horizon_leaves_timestamps_right() -> None:
    """The cleaner replaces the base timestamp by the delete horizon, and rewrites the timestamp deltas."""
    horizon = NOW_MS + 5
    batch = build_batch([NewRecord(horizon, None, b"a"), NewRecord(NOW_MS, None, b"b")])
    batch[22] |= 0x40
    write_crc(batch, 0, len(batch))
    assert read_header(batch).has_delete_horizon
    assert decode_records(batch)[1].timestamp_ms == NOW_MS


def test_random_batches_survive_any_number_of_records() -> None:
    rng = random.Random(3)
    for count in (1, 2, 63, 64, 65, 500):
        records = [
            NewRecord(rng.randrange(2**41), None, rng.randbytes(rng.randrange(90))) for _ in range(count)
        ]
        assert rows(build_batch(records)) == [tuple(record) for record in records]


def _record(
    time_delta: bytes = b"\0", key_size: int = 1, value_size: int = 1, offset_delta: int = 0
) -> bytes:
    body = (
        b"\0" + time_delta + encode_varint(offset_delta) + encode_varint(key_size) + b"k" * max(key_size, 0)
    )
    body += encode_varint(value_size) + b"v" * max(value_size, 0) + b"\0"
    return encode_varint(len(body)) + body


def _is_decodable(batch: bytearray) -> bool:
    try:
        records = decode_records(batch)
    except InvalidRecord:
        return False
    return [record.offset for record in records] == list(range(len(records)))


def _is_accepted(batch: bytearray) -> bool:
    try:
        find_records_without_key(memoryview(batch)[HEADER_BYTES:], read_header(batch), 1)
    except InvalidRecord:
        return False
    return True


@pytest.mark.parametrize(
    ("record", "is_valid"),
    [
        (_record(), True),
        (_record(value_size=-1), True),
        (_record(value_size=-2), False),
        (_record(key_size=-2), False),
        (_record(time_delta=b"\x80" * 9 + b"\0"), True),
        (_record(time_delta=b"\x80" * 10 + b"\0"), False),
    ],
)
def test_a_compacted_topic_accepts_only_records_that_can_be_decoded(record: bytes, is_valid: bool) -> None:
    batch = seal([record], 1, NOW_MS, NOW_MS)
    assert (_is_accepted(batch), _is_decodable(batch)) == (is_valid, is_valid)


@pytest.mark.parametrize("offset_delta", [-9_000, -1, 0, 2, 2**40])
def test_a_compacted_topic_accepts_only_records_with_their_own_offsets(offset_delta: int) -> None:
    """Regression: compaction gave a record with a negative offset delta another offset, or could not write it
    at all.
    """
    batch = seal([_record(), _record(offset_delta=offset_delta)], 2, NOW_MS, NOW_MS)
    assert not _is_accepted(batch)
    assert _is_accepted(seal([_record(), _record(offset_delta=1)], 2, NOW_MS, NOW_MS))


def test_records_with_other_offset_deltas_keep_them_when_they_are_rewritten() -> None:
    """A topic may have accepted such records before its cleanup.policy was changed to compact."""
    deltas = [-9_000, -1, 2, 2**40]
    batch = seal([_record(offset_delta=delta) for delta in deltas], 4, NOW_MS, NOW_MS)
    kept = rewrite_batch(read_header(batch), decode_records(batch)[:3], None)
    assert [record.offset for record in decode_records(kept)] == deltas[:3]


@pytest.mark.parametrize(("base_ms", "delta_ms"), [(NOW_MS, 2**63 - 1), (-3, 0), (-(2**63), -1)])
def test_a_batch_whose_timestamps_overflow_can_be_rewritten(base_ms: int, delta_ms: int) -> None:
    """Regression: such a batch stopped the compaction of its partition.

    Java's 64-bit arithmetic wraps around, so Apache Kafka accepts such a batch, and a log may contain one.
    """
    batch = seal([_record(), _record(encode_varint(delta_ms), offset_delta=1)], 2, base_ms, base_ms)
    horizon_ms = 2**63 - 1
    kept = rewrite_batch(read_header(batch), decode_records(batch)[1:], horizon_ms)
    (record,) = decode_records(kept)
    assert (record.timestamp_ms - base_ms - delta_ms) % 2**64 == 0
    assert len(kept) <= len(batch) + 10


@given(st.randoms(use_true_random=False))
def test_the_check_of_a_compacted_topic_agrees_with_the_decoder(rng: random.Random) -> None:
    rows = [NewRecord(NOW_MS + 50 * i, b"key", None if i % 2 else b"value", (("h", b"x"),)) for i in range(3)]
    records = bytearray(b"".join(encode_records(rows, NOW_MS)))
    for _ in range(rng.randint(1, 3)):
        records[rng.randrange(len(records))] = rng.choice((0, 1, 3, 5, 127, 128, 255, rng.randrange(256)))
    batch = seal([records], len(rows), NOW_MS, NOW_MS)
    assert _is_accepted(batch) == _is_decodable(batch)
