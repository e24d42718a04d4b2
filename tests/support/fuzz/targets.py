"""Fuzz targets: one function for each place that reads bytes from outside.

For each input, a target must return. If it raises an exception that no caller in the product expects, that is
a finding. `tools/fuzz.py` searches for such inputs, guided by coverage. `tests/fuzz` runs the inputs in
`tests/fuzz/corpus` and those of `seeds`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from oncelog.broker.dispatch import end_round, handle, tick
from oncelog.broker.handlers.produce_direct import answer as answer_produce
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.state import OFFERED, BrokerState
from oncelog.client.consumer.fetch_messages import decode_headers, fetched_partitions
from oncelog.client.group.subscription import (
    decode_assignment,
    decode_subscriber,
)
from oncelog.config import BROKER
from oncelog.errors import BrokerError, OncelogError, PeerError, StorageError
from oncelog.log.disk import Disk
from oncelog.log.dump import dump_file
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.log.snapshot import decode_full, decode_snapshot
from oncelog.rules.groups.assignors import ASSIGNORS
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Compression, Isolation
from oncelog.wire.batch import HEADER_BYTES
from oncelog.wire.columns import batches_to_arrow
from oncelog.wire.compression import decompress
from oncelog.wire.frames import FrameReader, decode_request_header, decode_response, encode_response
from oncelog.wire.header import iter_batches, verify_crc, write_crc
from oncelog.wire.messages import (
    API_BY_KEY,
    FetchResponse,
)
from oncelog.wire.records import decode_records
from support.log.partitions import NOW_MS, batch, marker, open_partition, put, put_marker, read_all

MAX_BATCH_BYTES = 1 << 20
"""The largest decompressed batch in these targets; in the product, settings limit it."""
_UUIDS = b"\7" * 16
FILES = (
    "00000000000000000000.log",
    "00000000000000000000.index",
    "00000000000000000000.timeindex",
    "00000000000000000000.txnindex",
    "00000000000000000003.snapshot",
    "00000000000000000003.producers",
    "00000000000000000005.log",
    "leader-epoch-checkpoint",
    "partition.metadata",
)
_SETTINGS = BROKER.parse(
    {"num.partitions": 1, "offsets.topic.num.partitions": 1, "transaction.state.log.num.partitions": 1}
)

Target = Callable[[bytes], None]


def requests(data: bytes) -> None:
    """Check that a broker answers or rejects each request of a conversation.

    The input is a sequence of requests, each with its API, version and size in front.
    """
    disk = MemoryDisk()
    node = open_node(disk)
    for number, (selector, version, body) in enumerate(_pieces(data)):
        api = APIS[selector % len(APIS)]
        version = api.first_version + version % (api.max_version - api.first_version + 1)
        flexible_tags = b"\0" if api.is_flexible(version) else b""
        head = struct.pack(">hhih", api.key, version, number, -1) + flexible_tags
        ask(node, memoryview(bytearray(head + body)), NOW_MS + number)
    tick(node, NOW_MS + 100_000)
    node.close(NOW_MS + 100_000)
    open_node(disk).close(NOW_MS + 200_000)


def ask(node: BrokerState, frame: memoryview, now_ms: int) -> None:
    """Handle a frame as a connection does, but let unexpected exceptions through."""
    try:
        if answer_produce(node, frame, now_ms) is None:
            header = decode_request_header(frame)
            message = OFFERED[header.api_key].request.decode(header.api_version, frame, header.body_position)
            if _asks_for_much(message):
                return
            answer = handle(node, Request(1, header, message, "/127.0.0.1"), now_ms)
            if isinstance(answer, PendingResponse):
                answer.add_done_callback(lambda late: _encoded(late, header.api_version))
            else:
                _encoded(answer, header.api_version)
    except OncelogError:
        return
    end_round(node)


def _asks_for_much(message: Any) -> bool:
    """Return True for a request for more than 20 partitions.

    The broker creates up to 100,000, which would slow the search down.
    """
    counts = [getattr(topic, "num_partitions", 0) for topic in getattr(message, "topics", None) or ()]
    counts += [getattr(topic, "count", 0) for topic in getattr(message, "topics", None) or ()]
    return max(counts, default=0) > 20


def _encoded(answer: Any, version: int) -> None:
    if hasattr(answer, "api"):
        encode_response(answer, version, 1)


def open_node(disk: Disk) -> BrokerState:
    """Start a broker in memory. Raises StorageError if the disk is damaged."""
    manager = LogManager.open(disk, node_id=1, new_uuid=lambda: _UUIDS, now_ms=NOW_MS)
    return BrokerState(manager, _SETTINGS, new_uuid=_new_uuid, now_ms=NOW_MS)


_uuid_numbers = count(1)


def _new_uuid() -> bytes:
    return next(_uuid_numbers).to_bytes(16, "big")


def stream(data: bytes) -> None:
    """Check that a stream is divided into the same frames, whatever the chunks are in which its bytes
    arrive.
    """
    try:
        whole = [bytes(frame) for frame in FrameReader(1 << 16).feed(data)]
    except PeerError:
        whole = None
    reader, cut, frames = FrameReader(1 << 16), max(1, len(data) // 7), []
    try:
        for start in range(0, len(data), cut):
            frames += [bytes(frame) for frame in reader.feed(data[start : start + cut])]
    except PeerError:
        assert whole is None
    else:
        assert frames == whole
        assert reader.pending_bytes <= len(data)


def answers(data: bytes) -> None:
    """Check that a client reads a response, or raises PeerError."""
    if len(data) < 2:
        return
    api = ALL_APIS[data[0] % len(ALL_APIS)]
    version = api.first_version + data[1] % (api.last_version - api.first_version + 1)
    try:
        _, response = decode_response(api.response, version, data[2:])
    except PeerError:
        return
    if isinstance(response, FetchResponse):
        for piece in fetched_partitions(response):
            try:
                decode_headers(piece, 0, Isolation.READ_COMMITTED)
            except BrokerError:
                continue


def records(data: bytes) -> None:
    """Check that decoding a batch to rows and to columns gives the same records, or that both raise an
    error.
    """
    raw = sound_batch(data)
    try:
        rows = decode_records(raw, max_bytes=MAX_BATCH_BYTES)
    except BrokerError:
        rows = None
    try:
        columns = batches_to_arrow(raw, topic="t", partition=0, include_headers=True)
    except BrokerError:
        assert rows is None
        return
    if rows is None or not columns.num_rows:
        return  # columns omit control batches, and ignore bytes behind a batch's last record
    assert columns["offset"].to_pylist() == [row.offset for row in rows]
    assert columns["key"].to_pylist() == [row.key for row in rows]
    assert columns["value"].to_pylist() == [row.value for row in rows]


def sound_batch(data: bytes) -> bytes:
    """Return the bytes as a batch with a correct length and checksum. Without these, the target would reject
    it too early.
    """
    raw = bytearray(data)
    if len(raw) >= HEADER_BYTES:
        struct.pack_into(">i", raw, 8, len(raw) - 12)
        raw[16] = 2
        write_crc(raw, 0, len(raw))
    return bytes(raw)


def appended(data: bytes) -> None:
    """Check that a client's batches are stored unchanged and survive a kill, or are rejected."""
    disk = MemoryDisk()
    partition = open_partition(disk)
    for kind, pid, body in _pieces(data):
        try:
            if kind & 1:
                put_marker(partition, marker(pid, commit=bool(kind & 2), epoch=kind >> 6))
            else:
                put(partition, memoryview(bytearray(sound_batch(body))))
        except BrokerError:
            continue
    stored, last_stable = read_all(partition), partition.last_stable_offset
    again = open_partition(disk.after_kill())
    assert read_all(again) == stored
    assert again.last_stable_offset == last_stable
    assert sorted(again.describe_producers()) == sorted(partition.describe_producers())


def decompressed(data: bytes) -> None:
    """Check that decompression returns at most MAX_BATCH_BYTES bytes, or raises a typed error."""
    codec = list(Compression)[data[0] % 5] if data else Compression.NONE
    try:
        out = decompress(codec, data[1:], MAX_BATCH_BYTES)
    except BrokerError:
        return
    assert codec is Compression.NONE or len(out) <= MAX_BATCH_BYTES


def directory(data: bytes) -> None:
    """Check that a partition with damaged files opens, stores a batch and opens again, or raises
    StorageError.
    """
    disk = MemoryDisk()
    disk.mkdir("orders-0")
    is_clean = bool(data[:1] and data[0] & 1)
    for selector, _, body in _pieces(data[1:]):
        disk.replace(f"orders-0/{FILES[selector % len(FILES)]}", body)
    try:
        partition = open_partition(disk, clean_shutdown=is_clean)
    except StorageError:
        return
    if not _is_readable(partition):
        return
    trusted = partition.log_end_offset if is_clean else 0
    end = put(partition, batch(count=2)).base_offset
    stored = read_all(partition)
    again = open_partition(disk.after_kill(), recovery_point=trusted)
    assert again.log_end_offset == end + 2
    assert read_all(again) == stored


def _is_readable(partition: Partition) -> bool:
    """Return False if a reader notices damage: by a typed error, a wrong checksum or a gap in the offsets."""
    offset = partition.log_start_offset
    while offset < partition.log_end_offset:
        try:
            found = partition.read(offset, 1 << 20)
        except BrokerError:
            return False
        raw = bytes(found.records)
        if found.next_offset == offset or not all(
            verify_crc(raw, position, header.size_bytes) for position, header in iter_batches(raw)
        ):
            return False
        assert found.next_offset > offset
        offset = found.next_offset
    return True


def dumped(data: bytes) -> None:
    """Check that `oncelog dump` of a damaged file prints rows, or raises StorageError and no other error."""
    disk = MemoryDisk()
    name = FILES[data[0] % len(FILES)] if data else FILES[0]
    disk.replace(name, data[1:])
    try:
        for _ in dump_file(disk, name, print_records=True):
            pass
    except StorageError:
        return


def snapshots(data: bytes) -> None:
    """Check that a producer snapshot with a right checksum is read, or raises StorageError."""
    import crc32c

    raw = data[:2] + struct.pack(">I", crc32c.crc32c(data[6:])) + data[6:]
    for decode in (decode_snapshot, lambda each: decode_full(each, 0)):
        try:
            decode(raw)
        except StorageError:
            continue


def coordinators(data: bytes) -> None:
    """Check that a broker with these records in its coordinators' topics starts, or raises StorageError."""
    disk = MemoryDisk()
    node = open_node(disk)
    states = node.transactions.topic, node.groups.topic
    for selector, key_size, body in _pieces(data):
        topic = states[selector & 1]
        topic.ensure(NOW_MS)
        cut = min(key_size, len(body))
        value = None if selector & 2 else body[cut:]
        topic.append(0, [(body[:cut], value)], NOW_MS)
    try:
        tick(open_node(disk.after_kill()), NOW_MS + 100_000)
    except StorageError:
        return


def members(data: bytes) -> None:
    """Check that member metadata and a leader's assignment are decoded, or raise PeerError."""
    for assignor in ASSIGNORS:
        try:
            decode_subscriber(assignor, "member-1", None, data)
        except PeerError:
            continue
    try:
        decode_assignment(data)
    except PeerError:
        return


TARGETS: dict[str, Target] = {
    each.__name__: each
    for each in (
        requests, stream, answers, records, appended, decompressed, directory, dumped, snapshots,
        coordinators, members,
    )
}  # fmt: skip

APIS = sorted(OFFERED.values(), key=lambda api: api.key)
ALL_APIS = sorted(API_BY_KEY.values(), key=lambda api: api.key)


def _pieces(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Split the input into (u8, u8, u16 size, bytes). The last element may be cut short."""
    position = 0
    while position + 4 <= len(data) and position < 64 * 1024:
        first, second, size = struct.unpack_from(">BBH", data, position)
        yield first, second, data[position + 4 : position + 4 + size]
        position += 4 + size
