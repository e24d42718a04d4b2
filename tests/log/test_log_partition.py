"""Append and read of one partition."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.log.partitions import (
    NOW_MS,
    TP,
    batch,
    config,
    marker,
    open_partition,
    put,
    put_marker,
    read_all,
)

from oncelog.errors import (
    BrokerError,
    CorruptMessage,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTimestamp,
    InvalidTxnState,
    MessageTooLarge,
    OffsetOutOfRange,
    OutOfOrderSequenceNumber,
    RecordListTooLarge,
    TransactionCoordinatorFenced,
)
from oncelog.log.config import LogConfig
from oncelog.log.partition import Partition
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Compression, Origin, TimestampType
from oncelog.wire.batch import read_header, restamp_time, verify_crc
from oncelog.wire.header import HEADER, HeaderFields, write_crc
from oncelog.wire.records import decode_records


def test_batches_get_offsets_and_keep_their_bytes() -> None:
    partition = open_partition(leader_epoch=5)
    first = put(partition, batch(count=3))
    second = put(partition, batch(0, 2))
    assert (first.base_offset, first.last_offset, first.log_append_time_ms) == (0, 2, None)
    assert (second.base_offset, second.last_offset, second.is_duplicate) == (3, 4, False)
    stored = read_all(partition)
    header = read_header(stored, len(batch(count=3)))
    assert (header.base_offset, header.partition_leader_epoch) == (3, 5)
    assert stored[16 : len(batch(count=3))] == batch(count=3)[16:]
    assert partition.log_end_offset == partition.high_watermark == partition.last_stable_offset == 5


def test_read_only_requests_are_not_written_to() -> None:
    partition = open_partition()
    put(partition, batch())
    sent = bytes(batch())
    assert put(partition, memoryview(sent)).base_offset == 1
    assert sent[:8] == bytes(8)


@pytest.mark.behaviour("I6", "I7", "I8")
def test_repeated_batches_are_stored_once() -> None:
    partition = open_partition()
    for number in range(7):
        put(partition, batch(number))
    before = read_all(partition)
    for number in range(2, 7):
        again = put(partition, batch(number))
        assert (again.base_offset, again.is_duplicate, again.log_append_time_ms) == (number, True, NOW_MS)
    for number in (0, 1, 8):
        with pytest.raises(OutOfOrderSequenceNumber):
            put(partition, batch(number))
    assert read_all(partition) == before
    state = partition.describe_producers()[0]
    assert [b.last_sequence for b in state.entry.batches] == [2, 3, 4, 5, 6]


@pytest.mark.behaviour("I14", "I12")
def test_an_old_epoch_changes_nothing() -> None:
    partition = open_partition()
    put(partition, batch(0, epoch=0))
    put(partition, batch(0, epoch=1))
    state = partition.describe_producers()
    for sequence in (0, 1):
        with pytest.raises(InvalidProducerEpoch):
            put(partition, batch(sequence, epoch=0))
    assert partition.describe_producers() == state
    assert partition.log_end_offset == 2
    # The old epoch's batches are forgotten, so the new epoch may use their sequences.
    assert put(partition, batch(1, epoch=1)).base_offset == 2


@pytest.mark.behaviour("I5")
def test_sequences_wrap_in_the_log() -> None:
    partition = open_partition()
    put(partition, batch(2147483646))
    put(partition, batch(2147483647, 3))
    assert put(partition, batch(2147483647, 3)).is_duplicate
    assert put(partition, batch(2)).base_offset == 4
    with pytest.raises(OutOfOrderSequenceNumber):
        put(partition, batch(2147483647))


@pytest.mark.behaviour("I15")
def test_an_unknown_producer_may_start_anywhere() -> None:
    partition = open_partition()
    assert put(partition, batch(4711)).base_offset == 0
    assert put(partition, batch(4712)).base_offset == 1


@pytest.mark.behaviour("I16")
def test_another_producer_id_or_partition_is_no_duplicate() -> None:
    """A batch of another producer id, or in another partition, may have the same sequence."""
    one, other = open_partition(), open_partition()
    put(one, batch(0, pid=1))
    assert not put(one, batch(0, pid=2)).is_duplicate
    assert not put(other, batch(0, pid=1)).is_duplicate


def _changed(position: int, layout: str, value: int) -> memoryview:
    """Return an idempotent batch with one changed header field. Its checksum fits the change."""
    data = batch(0)
    struct.pack_into(layout, data, position, value)
    if position >= 21:
        header = read_header(data)
        restamp_time(data, 0, header.timestamp_type, header.max_timestamp_ms)
    return data


def _with_bad_checksum() -> memoryview:
    data = batch(0)
    data[-1] ^= 1
    return data


REFUSED = {
    "base offset": (_changed(0, ">q", 1), InvalidRecord),
    "too large": (batch(0, value=bytes(2000)), MessageTooLarge),
    "checksum": (_with_bad_checksum(), CorruptMessage),
    "no records": (_changed(57, ">i", 0), InvalidRecord),
    "negative count": (_changed(57, ">i", -1), InvalidRecord),
    "count and delta": (_changed(23, ">i", 1), InvalidRecord),
    "negative delta": (_changed(23, ">i", -1), InvalidRecord),
    "control": (_changed(21, ">h", 0x20), InvalidRecord),
    "no sequence": (batch(None, pid=1, producer_id=1, producer_epoch=0), InvalidRecord),
    "too late": (batch(0, timestamp_ms=NOW_MS + 3_600_001), InvalidTimestamp),
    "too early": (batch(0, timestamp_ms=NOW_MS - 10_001), InvalidTimestamp),
    "append time": (
        batch(0, timestamp_ms=-1, timestamp_type=TimestampType.LOG_APPEND_TIME),
        InvalidTimestamp,
    ),
    "magic 1": (_changed(16, ">b", 1), InvalidRecord),
    "magic 3": (_changed(16, ">b", 3), CorruptMessage),
    "length": (_changed(8, ">i", 20), CorruptMessage),
    "cut short": (batch(0)[:-1], CorruptMessage),
    "header cut short": (batch(0)[:40], CorruptMessage),
    "nothing": (batch(0)[:0], CorruptMessage),
    "codec 7": (_changed(21, ">h", 7), InvalidRecord),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_batches_leave_no_trace(case: str) -> None:
    data, error = REFUSED[case]
    log_config = config(message_timestamp_before_max_ms=10_000, max_message_bytes=1500)
    disk = MemoryDisk()
    partition = open_partition(disk, log_config)
    before = disk.steps
    with pytest.raises(error) as caught:
        put(partition, data)
    assert isinstance(caught.value, BrokerError)
    assert (partition.log_end_offset, partition.producer_count, disk.steps) == (0, 0, before)


def test_limits_are_inclusive_and_records_without_a_timestamp_pass() -> None:
    partition = open_partition(log_config=config(message_timestamp_before_max_ms=10_000))
    put(partition, batch(0, timestamp_ms=NOW_MS + 3_600_000))
    put(partition, batch(1, timestamp_ms=NOW_MS - 10_000))
    put(partition, batch(2, timestamp_ms=-1))
    assert partition.log_end_offset == 3


def test_a_batch_larger_than_a_segment_is_refused() -> None:
    partition = open_partition(log_config=config(segment_bytes=100))
    with pytest.raises(RecordListTooLarge):
        put(partition, batch(0, value=bytes(100)))


def test_log_append_time_replaces_the_records_timestamps() -> None:
    partition = open_partition(log_config=config(message_timestamp_type="LogAppendTime"))
    appended = put(partition, batch(0, 2, timestamp_ms=5), now_ms=NOW_MS + 9)
    assert appended.log_append_time_ms == NOW_MS + 9
    stored = read_all(partition)
    assert verify_crc(stored, 0, len(stored))
    assert [record.timestamp_ms for record in decode_records(stored)] == [NOW_MS + 9] * 2
    again = put(partition, batch(0, 2, timestamp_ms=5), now_ms=NOW_MS + 99)
    assert (again.is_duplicate, again.log_append_time_ms) == (True, NOW_MS + 9)


def test_another_codec_than_the_topics_is_encoded_again() -> None:
    partition = open_partition(log_config=config(compression_type="gzip"))
    put(partition, batch(0, 3, value=bytes(200)))
    put(partition, batch(3, 3, compression=Compression.GZIP))
    stored = read_all(partition)
    header = read_header(stored)
    assert header.compression is Compression.GZIP
    assert (header.producer_id, header.base_sequence, header.last_offset) == (7, 0, 2)
    assert [record.value for record in decode_records(stored)] == [bytes(200)] * 3
    assert put(partition, batch(0, 3, value=bytes(200))).is_duplicate


def test_compacted_topics_need_keys() -> None:
    partition = open_partition(log_config=config(cleanup_policy="compact"))
    put(partition, batch(0))
    with pytest.raises(InvalidRecord) as caught:
        put(partition, batch(1, 2, key=None))
    assert [index for index, _ in caught.value.record_errors] == [0, 1]
    assert partition.log_end_offset == 1


@settings(deadline=None, max_examples=30)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    max_bytes=st.integers(0, 2000),
    segment_bytes=st.integers(200, 1000),
    interval=st.integers(0, 300),
)
def test_any_offset_can_be_read(counts: list[int], max_bytes: int, segment_bytes: int, interval: int) -> None:
    partition = open_partition(log_config=config(segment_bytes=segment_bytes, index_interval_bytes=interval))
    stored = [put(partition, batch(count=count)) for count in counts]
    for appended in stored:
        for offset in range(appended.base_offset, appended.last_offset + 1):
            found = partition.read(offset, max_bytes)
            headers = [(h.base_offset, h.last_offset) for _, h in _batches(found.records)]
            assert headers[0] == (appended.base_offset, appended.last_offset)
            assert headers[-1][1] + 1 == found.next_offset
            assert len(headers) == 1 or len(found.records) <= max_bytes
            upper = partition.read(offset, max_bytes, upper_offset=appended.last_offset + 1)
            assert upper.next_offset == appended.last_offset + 1
    assert len(read_all(partition, max_bytes)) == partition.size_bytes


def _batches(data: bytes) -> list[tuple[int, object]]:
    found, position = [], 0
    while position < len(data):
        header = read_header(data, position)
        found.append((position, header))
        position += header.size_bytes
    return found


def test_reads_respect_their_size_and_offset_bounds() -> None:
    partition = open_partition()
    put(partition, batch(count=2))
    size = partition.size_bytes
    assert partition.read(2, 100).records == b""
    assert partition.read(0, 10, at_least_one=False).records == b""
    assert len(partition.read(0, 10).records) == size
    assert partition.read(0, 100, upper_offset=0).next_offset == 0
    for offset in (-1, 3):
        with pytest.raises(OffsetOutOfRange):
            partition.read(offset, 100)


@pytest.mark.parametrize(("position", "damage"), [(0, 0x7F), (8, 0x7F), (8, 0xFF)])
def test_a_damaged_stored_batch_is_an_error_and_no_gap(position: int, damage: int) -> None:
    """The offset or length of the second batch is damaged. A reader must get an error, and must not skip that
    batch.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, config(segment_bytes=200))
    sizes = [len(batch(number)) for number in range(5)]
    for number in range(5):
        put(partition, batch(number))
    name = next(name for name in disk.list("orders-0") if name.endswith(".log"))
    disk.open(f"orders-0/{name}").pwrite(bytes([damage]), sizes[0] + position)
    assert partition.read(0, sizes[0]).next_offset == 1
    with pytest.raises(CorruptMessage, match="is damaged at position"):
        partition.read(1, 1000)
    assert partition.read(3, 1000).next_offset > 3


def test_a_reader_at_the_end_continues_after_a_roll() -> None:
    partition = open_partition(log_config=config(segment_bytes=200))
    offset = 0
    for number in range(20):
        put(partition, batch())
        found = partition.read(offset, 1000)
        assert found.next_offset == number + 1
        offset = found.next_offset
    assert partition.segment_count > 5


def test_offsets_are_looked_up_by_timestamp() -> None:
    partition = open_partition(log_config=config(segment_bytes=300, index_interval_bytes=0))
    for step in (0, 100, 50, 200, 150, 300):
        put(partition, batch(count=3, timestamp_ms=NOW_MS + step))
    found = {t: partition.offset_for_timestamp(NOW_MS + t) for t in (-5, 0, 2, 3, 101, 103, 201, 302, 303)}
    offsets = {t: None if f is None else f.offset for t, f in found.items()}
    assert offsets == {-5: 0, 0: 0, 2: 2, 3: 3, 101: 4, 103: 9, 201: 10, 302: 17, 303: None}
    assert found[103] == (NOW_MS + 200, 9)
    assert partition.max_timestamp_offset() == (NOW_MS + 302, 17)
    assert open_partition().max_timestamp_offset() is None


def test_leader_epochs_have_end_offsets() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, leader_epoch=0)
    put(partition, batch())
    partition.close(NOW_MS)
    partition = open_partition(disk, leader_epoch=4)
    put(partition, batch())
    ends = [partition.end_offset_for_epoch(epoch) for epoch in (0, 2, 4, 5)]
    assert ends == [(0, 1), (0, 1), (4, 2), (None, None)]


@pytest.mark.parametrize("is_clean", [True, False], ids=["stop", "kill"])
def test_deleting_records_waits_for_no_sync(is_clean: bool) -> None:
    """The file of the leader epochs is not written. The next start cuts its epochs again."""
    disk = MemoryDisk()
    open_partition(disk, leader_epoch=0)
    for leader_epoch in (0, 4):
        partition = open_partition(disk, leader_epoch=leader_epoch)
        put(partition, batch(count=3))
        partition.flush()
    steps = disk.steps
    partition.delete_records(4, NOW_MS)
    assert disk.steps == steps
    expected = [(0, 4), (4, 6), (None, None)]
    assert [partition.end_offset_for_epoch(epoch) for epoch in (0, 4, 5)] == expected
    if is_clean:
        partition.close(NOW_MS)
    how = {"log_start_offset": 4, "recovery_point": 6, "clean_shutdown": is_clean}
    again = open_partition(disk.after_kill(), leader_epoch=4, **how)
    assert [again.end_offset_for_epoch(epoch) for epoch in (0, 4, 5)] == expected


def test_transactions_hold_the_last_stable_offset() -> None:
    partition = open_partition()
    put(partition, batch(0, pid=1))
    put(partition, batch(0, 2, pid=2, is_transactional=True))
    put(partition, batch(0, pid=3, is_transactional=True))
    assert (partition.last_stable_offset, partition.open_transaction_count) == (1, 2)
    put_marker(partition, marker(2, commit=False))
    assert partition.last_stable_offset == 3
    put_marker(partition, marker(3, commit=True))
    assert partition.last_stable_offset == partition.log_end_offset == 6
    aborted = partition.aborted_transactions(0, 6)
    assert [tuple(entry) for entry in aborted] == [(2, 1, 4, 3)]
    assert partition.aborted_transactions(5, 6) == []
    assert partition.aborted_transactions(0, 1) == []


def test_invalid_transactional_batches_are_refused() -> None:
    partition = open_partition()
    put(partition, batch(0, pid=1, epoch=2, is_transactional=True))
    with pytest.raises(InvalidTxnState):
        put(partition, batch(1, pid=1, epoch=2))
    put_marker(partition, marker(1, commit=True, epoch=2, coordinator_epoch=5))
    with pytest.raises(TransactionCoordinatorFenced):
        put_marker(partition, marker(1, commit=True, epoch=2, coordinator_epoch=4))
    with pytest.raises(InvalidProducerEpoch):
        put_marker(partition, marker(1, commit=True, epoch=1, coordinator_epoch=5))
    with pytest.raises(InvalidRecord):
        partition.append(marker(1, commit=True), origin=Origin.CLIENT, now_ms=NOW_MS)
    assert partition.log_end_offset == 2
    assert put(partition, batch(1, pid=1, epoch=2, is_transactional=True)).base_offset == 2


def test_a_sequence_goes_on_over_transactions_of_one_epoch() -> None:
    partition = open_partition()
    put(partition, batch(0, 3, pid=1, is_transactional=True))
    put_marker(partition, marker(1, commit=True))
    assert put(partition, batch(0, 3, pid=1, is_transactional=True)).is_duplicate
    assert put(partition, batch(3, pid=1, is_transactional=True)).base_offset == 4


def test_no_batch_overtakes_one_for_which_the_coordinator_is_asked() -> None:
    partition = open_partition()
    partition.begin_verification(1, 0, 0, raises_epoch=False)
    with pytest.raises(OutOfOrderSequenceNumber):
        put(partition, batch(3, pid=1, is_transactional=True))
    assert put(partition, batch(0, 3, pid=1, is_transactional=True)).base_offset == 0
    assert put(partition, batch(3, pid=1, is_transactional=True)).base_offset == 3


def test_a_transaction_with_an_epoch_of_its_own_begins_with_its_first_batch() -> None:
    partition = open_partition()

    def begin(sequence: int) -> int:
        data = batch(sequence, pid=1, is_transactional=True)
        return partition.append(data, origin=Origin.CLIENT, now_ms=NOW_MS, begins_epoch=True).base_offset

    with pytest.raises(OutOfOrderSequenceNumber):
        begin(1)
    assert begin(0) == 0


_USUAL_BATCHES = st.tuples(
    st.sampled_from([None, 7, 7, 7, 8]),  # the producer id
    st.sampled_from([0, 0, 0, 1]),  # its epoch
    st.sampled_from([0, 0, 0, 0, -1, 1, -3]),  # its sequence, relative to the next one expected
    st.integers(1, 3),  # number of records
    st.sampled_from([0, 0, 40]),  # bytes of a record
    st.sampled_from([0, 0, 0, 5, -5, 10**13, -NOW_MS - 1]),  # the timestamp, relative to now
    st.sampled_from(
        ["", "", "", "", "transactional", "control", "codec 4", "codec 5", "magic", "count", "crc"]
    ),
)


@given(
    sent=st.lists(_USUAL_BATCHES, max_size=25),
    begins_at=st.sampled_from([0, 2**31 - 4]),
    topic=st.sampled_from(
        [
            config(),
            config(segment_bytes=400, index_interval_bytes=0),
            config(index_interval_bytes=100, max_message_bytes=140),
            config(message_timestamp_before_max_ms=3, segment_ms=4),
            config(message_timestamp_type="LogAppendTime"),
            config(flush_messages=2),
            config(cleanup_policy="compact"),
            config(compression_type="gzip"),
        ]
    ),
)
@settings(deadline=None)
def test_a_usual_batch_is_stored_as_append_stores_it(
    sent: list[tuple[int | None, int, int, int, int, int, str]], begins_at: int, topic: LogConfig
) -> None:
    disks = MemoryDisk(), MemoryDisk()
    general, usual = (open_partition(disk, topic, leader_epoch=3) for disk in disks)
    following: dict[int, int] = {}
    for pid, epoch, distance, count, size, late_ms, change in sent:
        sequence = None
        if pid is not None:
            sequence = (following.get(pid, begins_at) + distance) % 2**31
            following[pid] = (sequence + count) % 2**31
        data = changed_batch(change, sequence, count, pid, epoch, size, NOW_MS + late_ms)
        results = [outcome(general, data, append_next=False), outcome(usual, data, append_next=True)]
        assert results[0] == results[1]
        assert general.describe_producers() == usual.describe_producers()
        assert general.last_stable_offset == usual.last_stable_offset
    for partition in (general, usual):
        partition.close(NOW_MS)
    files = [{path: disk.read(path) for path in paths_of(disk)} for disk in disks]
    assert files[0] == files[1]


def changed_batch(
    change: str, sequence: int | None, count: int, pid: int | None, epoch: int, size: int, timestamp_ms: int
) -> memoryview:
    """Return a batch with this change. Some changes make the batch invalid."""
    timestamp_ms = max(timestamp_ms, -1)
    is_transactional = change == "transactional" and pid is not None
    data = batch(
        sequence, count, pid=pid, epoch=epoch, value=bytes(size), timestamp_ms=timestamp_ms,
        is_transactional=is_transactional,
    )  # fmt: skip
    fields = list(HEADER.unpack_from(data))
    fields[3] += change == "magic"
    fields[5] |= {"control": 0x20, "codec 4": 4, "codec 5": 5}.get(change, 0)
    fields[12] += change == "count"
    HEADER.pack_into(data, 0, *fields)
    write_crc(data, 0, len(data))
    data[-1] ^= change == "crc"
    return data


def outcome(partition: Partition, data: memoryview, *, append_next: bool) -> tuple[int, int] | str:
    """Append a copy of a batch, and return its offsets or the name of the error.

    With `append_next`, append it as produce_direct does, if that is possible.
    """
    records = memoryview(bytearray(data))
    fields: HeaderFields = HEADER.unpack_from(records)
    try:
        base_offset = partition.append_next(records, fields, NOW_MS) if append_next else None
        if base_offset is not None:
            return base_offset, base_offset + fields[6]
        assert records == data
        appended = put(partition, records)
        return appended.base_offset, appended.last_offset
    except BrokerError as error:
        return repr(error)


def paths_of(disk: MemoryDisk) -> list[str]:
    return [f"{TP}/{name}" for name in disk.list(str(TP))]


def test_most_batches_in_writable_buffers_are_usual() -> None:
    partition = open_partition(log_config=config(index_interval_bytes=0))
    put(partition, batch(0, 2))
    for sequence in range(2, 20, 2):
        for data in (batch(sequence, 2), batch(count=3)):
            assert partition.append_next(data, HEADER.unpack_from(data), NOW_MS) is not None
    assert partition.log_end_offset == 2 + 9 * 5
    data = memoryview(bytes(batch(20, 2)))
    assert partition.append_next(data, HEADER.unpack_from(data), NOW_MS) is None
