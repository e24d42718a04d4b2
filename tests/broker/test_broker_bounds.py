"""Requests that cause much work: the broker bounds each step of it, and serves other clients between two
steps.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

import pytest
from crc32c import crc32c
from support.broker import RawClient, batch, produce_request
from support.log.partitions import NOW_MS, config, open_partition, put
from support.log.partitions import batch as log_batch

from oncelog import Consumer
from oncelog.client.consumer import completed_fetch
from oncelog.client.consumer.completed_fetch import CompletedFetch
from oncelog.client.consumer.fetch_messages import FetchedBatch
from oncelog.errors import InvalidRecord, MessageTooLarge
from oncelog.limits import Limits
from oncelog.log import cleaner, scan, validation
from oncelog.log.index import AbortedTransaction
from oncelog.log.partition import Partition
from oncelog.log.reader import StepCost
from oncelog.rules.storage.read_committed import Verdict
from oncelog.server.connection import Connection
from oncelog.server.embedded import Broker, recover_node
from oncelog.types import Compression, TopicPartition
from oncelog.wire import columns, compression, records
from oncelog.wire.batch import build_batch, read_header, seal
from oncelog.wire.columns import batches_to_arrow
from oncelog.wire.compression import compress, decompress
from oncelog.wire.fetched_records import iter_rows
from oncelog.wire.frames import encode_request
from oncelog.wire.header import write_crc
from oncelog.wire.messages import DeleteRecordsRequest, ListOffsetsRequest, MetadataRequest
from oncelog.wire.records import MAX_RECORDS, NewRecord, decode_records, encode_records

_LOG_APPEND_TIME, _ZSTD = 8, int(Compression.ZSTD)
_RECORD, _KEYLESS = b"\x0e\0\0\0\2k\1\0", b"\x0c\0\0\0\1\1\0"
"""One encoded record with a key, and one without. Both have offset delta 0."""


def payload(count: int, key: bytes | None = b"k") -> bytes:
    """Return `count` encoded small records, each with its own offset."""
    return b"".join(encode_records(repeat(NewRecord(NOW_MS, key, None), count), NOW_MS))


def bomb(count: int, key: bytes | None = b"k", attributes: int = 0) -> bytearray:
    """Return a small compressed batch of `count` records that all have the offset delta 0.

    The header has a correct CRC and claims `count` offsets, so only decompressing the records shows the
    fault.
    """
    data = compress(Compression.ZSTD, payload(count, key))
    tail = struct.pack(">hiqqqhii", attributes | _ZSTD, count - 1, NOW_MS, NOW_MS, -1, -1, -1, count) + bytes(
        data
    )
    return bytearray(struct.pack(">qiibI", 0, 9 + len(tail), -1, 2, crc32c(tail)) + tail)


def numbered(count: int) -> bytearray:
    """Return a small compressed batch of `count` records, each with its own offset."""
    parts = encode_records(repeat(NewRecord(NOW_MS, b"k", b""), count), NOW_MS)
    batch = seal(parts, count, NOW_MS, NOW_MS, compression=Compression.ZSTD)
    assert len(batch) < 1_000_000
    return batch


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the payloads that the log decompresses."""
    sizes: list[int] = []
    original = validation.decompress_within

    def decompress_within(*args: Any) -> Any:
        payload = original(*args)
        sizes.append(len(payload or b""))
        return payload

    monkeypatch.setattr(validation, "decompress_within", decompress_within)
    return sizes


def test_the_append_time_bit_opens_no_batch(opened: list[int]) -> None:
    partition = open_partition(log_config=config())
    put(partition, memoryview(bomb(300_000, attributes=_LOG_APPEND_TIME)))
    assert opened == []
    stored = memoryview(partition.read(0, 1 << 20).records)
    assert not read_header(stored).attributes & _LOG_APPEND_TIME


@pytest.mark.parametrize("settings", [{"cleanup_policy": "compact"}, {"compression_type": "gzip"}])
def test_a_batch_of_too_many_records_is_refused_before_it_is_opened(
    settings: dict[str, str], opened: list[int]
) -> None:
    partition = open_partition(log_config=config(max_message_bytes=70_000, **settings))
    with pytest.raises(MessageTooLarge, match="10001 records"):
        put(partition, memoryview(bomb(10_001)))
    assert opened == []
    put(partition, memoryview(bomb(10_000)))
    assert opened == [len(payload(10_000))]


COMPACTED = {"cleanup_policy": "compact"}


@pytest.mark.behaviour("I29")
def test_batches_that_are_opened_take_turns_with_other_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    start_requests, start_request = Connection._start_requests, Connection._start_request

    def counted_round(self: Any, *args: Any) -> Any:
        rounds.append(0)
        return start_requests(self, *args)

    def counted(self: Any, *args: Any) -> Any:
        rounds[-1] += 1
        return start_request(self, *args)

    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t", 1, **COMPACTED)
        monkeypatch.setattr(Connection, "_start_requests", counted_round)
        monkeypatch.setattr(Connection, "_start_request", counted)
        message = produce_request("t", bytes(bomb(20_000)), acks=1)
        client.socket.sendall(b"".join(encode_request(message, 9, number, "c") for number in range(20)))
        for _ in range(20):
            assert client.read_frame() is not None
    assert max(rounds) == 1


@pytest.mark.parametrize("settings", [{"cleanup_policy": "compact"}, {"compression_type": "gzip"}])
def test_a_batch_that_grows_too_much_is_refused(settings: dict[str, str]) -> None:
    partition = open_partition(log_config=config(max_message_bytes=10_000, **settings))
    large = log_batch(value=bytes(50_000), compression=Compression.ZSTD)
    with pytest.raises(MessageTooLarge, match="larger than 40000 bytes"):
        put(partition, large)
    put(partition, log_batch(value=bytes(30_000), compression=Compression.ZSTD))


def test_ten_records_without_a_key_are_named() -> None:
    partition = open_partition(log_config=config(cleanup_policy="compact"))
    with pytest.raises(InvalidRecord) as caught:
        put(partition, memoryview(bomb(50_000, None)))
    assert [index for index, _ in caught.value.record_errors] == list(range(10))


def test_a_batch_in_another_codec_keeps_its_records() -> None:
    partition = open_partition(log_config=config(compression_type="gzip"))
    sent = log_batch(0, 3, compression=Compression.ZSTD)
    before = decode_records(sent)
    put(partition, sent)
    stored = memoryview(partition.read(0, 1 << 20).records)
    header = read_header(stored)
    assert header.compression is Compression.GZIP and (header.producer_id, header.base_sequence) == (7, 0)
    assert decode_records(stored) == before


@pytest.mark.parametrize("limit", [40_000, pytest.param(None, marks=pytest.mark.full("a million records"))])
def test_a_consumer_reads_a_batch_of_more_records_than_are_decoded_at_once(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """Apache Kafka and this broker accept a batch with more records than a consumer decodes in one step. It
    must not block readers of the partition.
    """
    if limit is not None:
        monkeypatch.setattr(records, "MAX_RECORDS", limit)
    count = (limit or MAX_RECORDS) + 5
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        client.produce("t", numbered(count))
        client.produce("t", batch(b"behind"))
        seen, offset = 0, 0
        with Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer:
            consumer.assign([TopicPartition("t", 0)])
            consumer.seek(TopicPartition("t", 0), 0)
            while seen <= count:
                for record in consumer.poll(30.0, max_records=100_000):
                    assert record.offset == offset
                    seen, offset = seen + 1, offset + 1
        assert record.value == b"behind" and seen == count + 1


def test_a_batch_is_handed_out_part_by_part_and_resumed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completed_fetch, "SLICE_RECORDS", 7)
    monkeypatch.setattr(iter_rows, "__defaults__", (7,))
    data = memoryview(bytes(numbered(20)))
    header = read_header(data)
    for start in range(21):
        for most in (1, 3, 7, 8, 100):
            placed = deque([FetchedBatch(0, header, Verdict.DELIVER)])
            completed, position, offsets = CompletedFetch(TopicPartition("t", 0), data, placed, 20), start, []
            while not completed.is_empty:
                rows, position, _ = completed.take_records(position, most, check_crcs=True)
                assert len(rows) <= most
                offsets += [row.offset for row in rows]
                assert position == (offsets[-1] + 1 if offsets and not completed.is_empty else position)
            assert offsets == list(range(start, 20)) and position == 20


def test_records_before_a_damaged_one_are_delivered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completed_fetch, "SLICE_RECORDS", 4)
    monkeypatch.setattr(iter_rows, "__defaults__", (4,))
    good = _RECORD * 10
    tail = struct.pack(">hiqqqhii", 0, 11, NOW_MS, NOW_MS, -1, -1, -1, 12) + good + b"\x0e\0\0\0\2k\1\2" * 2
    data = memoryview(struct.pack(">qiibI", 0, 9 + len(tail), -1, 2, crc32c(tail)) + tail)
    placed = deque([FetchedBatch(0, read_header(data), Verdict.DELIVER)])
    completed = CompletedFetch(TopicPartition("t", 0), data, placed, 12)
    rows, position, _ = completed.take_records(0, 100, check_crcs=True)
    # Every record of this batch claims offset 0. So the position is 1 after the eight records before the
    # damage.
    assert len(rows) == 8 and position == 1
    with pytest.raises(InvalidRecord, match="seek past it"):
        completed.take_records(8, 100, check_crcs=True)


@pytest.mark.parametrize("count", [2_000, 70_000])
def test_compaction_and_look_ups_open_a_batch_of_any_number_of_records(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS", 1_000)
    partition = open_partition(log_config=config(segment_bytes=1_000_000))
    put(partition, memoryview(numbered(count)))
    search = partition.search_timestamp(NOW_MS, StepCost())
    job = next(search)
    assert job is not None  # a compressed batch is decompressed in a thread
    job()
    assert _found(search) == 0
    partition.log.roll(NOW_MS)
    put(partition, log_batch(value=b"new"))
    partition.flush()
    settings = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0, "segment_bytes": 1_000_000}
    partition.reconfigure(config(**settings))
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    for job in partition.cleaner.compact(dirty, NOW_MS):
        if job is not None:
            job()
    assert partition.cleaner.cleaned_to >= count


def test_readers_refuse_a_batch_of_very_many_records_before_they_open_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = bomb(2_000)
    monkeypatch.setattr(records, "MAX_RECORDS", 1_999)
    monkeypatch.setattr(columns, "_MAX_RECORDS", 1_999)
    for module in (records, columns):
        monkeypatch.setattr(module, "payload_of", None)
    with pytest.raises(InvalidRecord, match="2000 records"):
        decode_records(data)
    with pytest.raises(InvalidRecord, match="2000 records"):
        batches_to_arrow(bytes(data), topic="t", partition=0)


def test_gzip_of_many_members_copies_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the rest of the input was copied after each gzip member, which takes quadratic time."""
    copied: list[int] = []
    make = compression.zlib.decompressobj

    class Counting:
        def __init__(self, window: int) -> None:
            self.unpacker = make(window)

        def decompress(self, data: bytes, most: int) -> bytes:
            copied.append(len(data))
            return self.unpacker.decompress(data, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.unpacker, name)

    data = compress(Compression.GZIP, b"") * 5_000 + compress(Compression.GZIP, b"end")
    monkeypatch.setattr(compression.zlib, "decompressobj", Counting)
    assert decompress(Compression.GZIP, data) == b"end"
    assert sum(copied) < 300 * len(data)


@pytest.fixture
def behind() -> Partition:
    """A partition whose largest timestamp is below its log start offset.

    A look-up of that timestamp reads all batches and finds nothing.
    """
    partition = open_partition(log_config=config(segment_bytes=200_000, limits=Limits(search_step_cost=100)))
    put(partition, log_batch(timestamp_ms=NOW_MS + 1_000))
    for _ in range(3_000):
        put(partition, log_batch())
    partition.delete_records(1, NOW_MS)
    return partition


def _steps(search: Iterator[Any]) -> int:
    return sum(1 for _ in search)


def _found(search: Any) -> int:
    """Run the rest of a lookup; return the offset that it finds."""
    while True:
        try:
            call = next(search)
        except StopIteration as done:
            return int(done.value.offset)
        if call is not None:
            call()


def test_a_look_up_by_time_rests_after_a_bounded_number_of_batches(behind: Partition) -> None:
    steps = _steps(behind.search_timestamp(NOW_MS + 1, StepCost()))
    first = next(iter(behind.log.segments))
    assert steps == (first.end_offset - 1) // 100 > 10


def test_a_look_up_by_time_survives_a_deletion_between_its_steps(behind: Partition) -> None:
    put(behind, log_batch(timestamp_ms=NOW_MS + 1))
    search = behind.search_timestamp(NOW_MS + 1, StepCost())
    next(search)
    behind.delete_records(2_990, NOW_MS)
    assert _found(search) == 3_001


def test_a_look_up_by_time_continues_if_its_segment_is_deleted_during_a_job() -> None:
    """Deleting the segment may close its file before the look-up continues."""
    limits = Limits(scan_first_chunk_bytes=61, scan_chunk_bytes=61)
    partition = open_partition(log_config=config(segment_bytes=1_000, limits=limits))
    rows = [NewRecord(NOW_MS + 1, b"k", b"v"), NewRecord(NOW_MS, b"k", b"v")]
    put(partition, memoryview(build_batch(rows, compression=Compression.GZIP)))
    partition.flush()
    partition.delete_records(1, NOW_MS)  # the batch's largest timestamp is now that of a deleted record
    while partition.segment_count < 3:
        put(partition, log_batch())
    put(partition, log_batch(timestamp_ms=NOW_MS + 1))
    newest = partition.log_end_offset - 1
    search = partition.search_timestamp(NOW_MS + 1, StepCost())
    job = next(search)
    assert job is not None
    partition.flush()  # only synced segments are deleted at once
    partition.delete_records(newest, NOW_MS)
    job()
    assert _found(search) == newest


def test_a_look_up_of_the_largest_time_continues_if_its_segment_is_deleted_during_a_job() -> None:
    """Regression: the look-up found no record, as if the partition were empty."""
    partition = open_partition(log_config=config(segment_bytes=1_000))
    rows = [NewRecord(NOW_MS + 1_000, b"k", b"v"), NewRecord(NOW_MS, b"k", b"v")]
    put(partition, memoryview(build_batch(rows, compression=Compression.GZIP)))
    partition.delete_records(1, NOW_MS)  # the batch's largest timestamp is now that of a deleted record
    while partition.segment_count < 3:
        put(partition, log_batch())
    put(partition, log_batch(timestamp_ms=NOW_MS + 1))
    newest = partition.log_end_offset - 1
    search = partition.search_timestamp(None, StepCost())
    job = next(search)
    assert job is not None
    partition.delete_records(newest, NOW_MS)
    job()
    assert _found(search) == newest


def test_a_look_up_of_the_largest_time_ignores_deleted_segments() -> None:
    """Deleted segments stay until a snapshot covers them and the log is synced up to it."""
    partition = open_partition(log_config=config(segment_bytes=1_000))
    put(partition, log_batch(timestamp_ms=NOW_MS + 1_000))
    while partition.segment_count < 3:
        put(partition, log_batch())
    newest = partition.log_end_offset - 1
    partition.delete_records(newest, NOW_MS)
    assert partition.segment_count == 3
    assert _found(partition.search_timestamp(None, StepCost())) == newest


@pytest.mark.parametrize("step_cost", [1, 4_096])
@pytest.mark.parametrize("codec", [Compression.NONE, Compression.GZIP])
def test_a_look_up_of_the_largest_time_ignores_removed_records(codec: Compression, step_cost: int) -> None:
    """Regression: if a deleted record had the largest timestamp, and its segment stayed because of later
    records, the look-up found no record.
    """
    small = {"segment_bytes": 1_000, "limits": Limits(search_step_cost=step_cost)}
    partition = open_partition(log_config=config(**small))
    rows = [NewRecord(NOW_MS + after_ms, b"k", b"v") for after_ms in (900, 100, 500, 300)]
    for row in rows:
        put(partition, memoryview(build_batch([row], compression=codec)))
    put(partition, memoryview(build_batch(rows, compression=codec)))
    starts = []
    for offset in range(8):
        partition.delete_records(offset, NOW_MS)
        starts.append(_found(partition.search_timestamp(None, StepCost())))
    assert starts == [0, 4, 4, 4, 4, 6, 6, 7]
    while partition.segment_count < 2:
        put(partition, log_batch(timestamp_ms=NOW_MS + 400))
    assert _found(partition.search_timestamp(None, StepCost())) == 8
    without_time = open_partition(log_config=config())
    for timestamp_ms in (NOW_MS, -1):
        put(without_time, log_batch(timestamp_ms=timestamp_ms))
    without_time.delete_records(1, NOW_MS)
    assert without_time.max_timestamp_offset() is None


def test_other_clients_are_served_while_a_look_up_by_time_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up runs in steps, and another client's request is answered before the last step."""
    limits = Limits(search_step_cost=2)
    monkeypatch.setattr("oncelog.server.embedded.recover_node", partial(recover_node, limits=limits))
    answered_at: list[int] = []
    steps: list[int] = []
    original = Partition.search_timestamp

    def search(self: Partition, *args: Any) -> Any:
        work = original(self, *args)
        while True:
            try:
                job = next(work)
            except StopIteration as done:
                return done.value
            steps.append(1)
            yield job

    monkeypatch.setattr(Partition, "search_timestamp", search)
    with Broker() as broker, RawClient(broker.bootstrap_servers) as asking:
        asking.create_topic("t")
        asking.produce("t", batch(b"v", timestamp_ms=2_000))
        for _ in range(40):
            for _ in range(50):
                asking.send(produce_request("t", batch(b"v", timestamp_ms=1_000)), 9)
            assert all(asking.read_frame() for _ in range(50))
        partitions = [DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=1)]
        topics = [DeleteRecordsRequest.DeleteRecordsTopic(name="t", partitions=partitions)]
        asking.ask(DeleteRecordsRequest(topics=topics, timeout_ms=5_000), 2)
        asked = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=1_500)
        topic = ListOffsetsRequest.ListOffsetsTopic(name="t", partitions=[asked])
        with RawClient(broker.bootstrap_servers) as other:
            asking.send(ListOffsetsRequest(replica_id=-1, topics=[topic]), 7)
            other.ask(MetadataRequest(topics=[]), 9)
            answered_at.append(len(steps))
            frame = asking.read_frame()
        assert frame is not None and answered_at[0] < len(steps) and len(steps) >= 900


@pytest.mark.parametrize(("count", "jobs"), [(400, 3), (5_000, 5)])
def test_compaction_opens_a_batch_of_many_records_in_a_thread(count: int, jobs: int) -> None:
    """A swap of segments takes three calls in the thread. For a large batch, reading its keys and its
    remaining records takes two more.
    """
    settings = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0, "segment_bytes": 1_000_000}
    partition = open_partition(log_config=config(**settings))
    put(partition, log_batch(count=count, value=b"old"))
    partition.log.roll(NOW_MS)
    put(partition, log_batch(value=b"new"))
    partition.flush()
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    done, steps = 0, 0
    for job in partition.cleaner.compact(dirty, NOW_MS):
        steps += 1
        if job is not None:
            job()
            done += 1
    # The keys of the batch are collected in steps of 500.
    assert done == jobs and steps >= count // 500
    (last,) = decode_records(partition.read(0, 1 << 20).records)
    assert last.offset == count - 1


@pytest.mark.parametrize("interval", [1 << 20, 2**31 - 1])
def test_a_fetch_reads_few_headers_whatever_the_index_interval_is(
    interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(log_config=config(index_interval_bytes=interval))
    count = 4_000
    for _ in range(count):
        put(partition, log_batch())
    read_count = 0

    def counted(*args: Any) -> Any:
        nonlocal read_count
        read_count += 1
        return read_header(*args)

    monkeypatch.setattr(scan, "read_header", counted)
    for offset in (count - 1, count // 2, count // 3):
        assert read_header(partition.read(offset, 1).records).base_offset == offset
    assert read_count < 3_000


def test_a_look_up_by_time_through_many_segments_takes_many_steps() -> None:
    """The headers name larger timestamps than the records have, so that each segment is searched."""
    partition = open_partition(log_config=config(segment_ms=1))
    count = 300
    for number in range(count):
        data = bytearray(log_batch())
        struct.pack_into(">q", data, 35, NOW_MS + 10 + 2 * number)
        write_crc(data, 0, len(data))
        put(partition, memoryview(data))
    assert partition.segment_count == count
    looks = 0

    class Counted(int):
        def __ge__(self, other: int) -> bool:
            nonlocal looks
            looks += 1
            return int(self) >= other

    for segment in partition.log.segments:
        segment.max_timestamp_ms = Counted(segment.max_timestamp_ms)
    steps = list(partition.search_timestamp(NOW_MS + 5, StepCost()))
    assert len(steps) >= 2
    assert looks <= 3 * count


@pytest.mark.parametrize("codec", [Compression.NONE, Compression.GZIP])
def test_compaction_of_large_records_takes_many_steps(codec: Compression) -> None:
    """A record of 900 KB ends a step, and so does a small batch that may decompress to as much."""
    settings = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0}
    partition = open_partition(log_config=config(**settings))
    count = 12
    for number in range(count):
        put(partition, log_batch(key=b"%d" % number, value=bytes(900_000), compression=codec))
    partition.log.roll(NOW_MS)
    partition.flush()
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    steps = sum(job is None for job in partition.cleaner.compact(dirty, NOW_MS) if job is None or not job())
    # Each batch is read once for its keys, and once to be copied. Three of them may share a step.
    assert steps >= 2 * count // 3


@pytest.mark.parametrize("codec", Compression, ids=lambda codec: codec.name.lower())
def test_compaction_decompresses_in_a_thread_what_may_become_large(
    codec: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 10 KB with a single record can decompress to 256 MB."""
    is_in_thread = False
    original = records.decompress

    def decompress(found: Compression, *args: Any) -> Any:
        assert found is Compression.NONE or is_in_thread
        return original(found, *args)

    monkeypatch.setattr(records, "decompress", decompress)
    monkeypatch.setattr(cleaner, "_LARGE_BYTES", 100_000)
    partition = open_partition(log_config=config(segment_bytes=1_000_000))
    put(partition, log_batch(value=bytes(110_000), compression=codec))
    put(partition, log_batch(value=b"new"))
    partition.log.roll(NOW_MS)
    partition.flush()
    partition.reconfigure(config(cleanup_policy="compact"))
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    for job in partition.cleaner.compact(dirty, NOW_MS):
        if job is not None:
            is_in_thread = True
            job()
            is_in_thread = False
    assert [record.value for record in decode_records(partition.read(0, 1000).records)] == [b"new"]


@pytest.mark.parametrize("codec", Compression, ids=lambda codec: codec.name.lower())
def test_a_count_that_no_codec_could_hold_is_refused(codec: Compression) -> None:
    """If the broker accepted a small batch that claims 2^31 offsets, the next batch would need a new segment.
    Each segment keeps a file descriptor open.
    """
    partition = open_partition(log_config=config(max_message_bytes=10_000_000))
    sealed = {"base_timestamp_ms": NOW_MS, "max_timestamp_ms": NOW_MS, "compression": codec}
    count = 300_000  # identical shortest records compress best
    honest = seal([_KEYLESS * count], count, **sealed)
    assert put(partition, memoryview(honest)).last_offset == count - 1
    with pytest.raises(InvalidRecord, match="the batch says 2147483647 records"):
        put(partition, memoryview(seal([_KEYLESS], 2**31 - 1, **sealed)))
    assert partition.log_end_offset == count


def test_a_reader_at_the_end_looks_at_no_aborted_transaction_before_it() -> None:
    class Counted(list[AbortedTransaction]):
        count = 0

        def __getitem__(self, index: Any) -> Any:
            self.count += 1
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[AbortedTransaction]:
            for index in range(len(self)):
                yield self[index]

    partition = open_partition()
    put(partition, log_batch(count=20_000))
    entries = Counted(AbortedTransaction(n, 2 * n, 2 * n + 1, 2 * n + 2) for n in range(10_000))
    partition.log.segments.active.transactions._entries = entries
    assert [entry.producer_id for entry in partition.aborted_transactions(19_998, 20_000)] == [9_999]
    assert entries.count < 30
    assert len(partition.aborted_transactions(0, 20_000)) == 10_000
