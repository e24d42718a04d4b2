"""Valid inputs of `support.fuzz.targets`. The search for inputs that break a target begins with them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from oncelog.client.group.subscription import OwnedPartitions, encode_assignment, encode_subscription
from oncelog.rules.groups.assignors import ASSIGNORS
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Compression, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.compression import compress
from oncelog.wire.frames import encode_request
from oncelog.wire.messages import (
    CreateTopicsRequest,
    FetchRequest,
    InitProducerIdRequest,
    OffsetCommitRequest,
    ProduceRequest,
)
from oncelog.wire.records import NewRecord
from support.fuzz.targets import ALL_APIS, APIS, FILES, ask, open_node
from support.log.partitions import NOW_MS, batch, config, marker, open_partition, put, put_marker


def seeds(name: str) -> list[bytes]:
    """Return valid inputs of each target. The search damages them."""
    return _SEEDS[name]() if name in _SEEDS else [b"", bytes(range(64))]


def _piece(first: int, second: int, body: bytes) -> bytes:
    return struct.pack(">BBH", first, second, len(body)) + bytes(body)


def _request_seeds() -> list[bytes]:
    """Return each request with default fields, in its oldest and newest version, and a producer's
    conversation.
    """
    alone = []
    for place, api in enumerate(APIS):
        for version in {api.first_version, api.max_version}:
            body = api.request().encode(version)
            alone.append(_piece(place, version - api.first_version, body))
    talk = b"".join(
        _piece(_place(message), version - message.api.first_version, message.encode(version))
        for message, version in (
            (CreateTopicsRequest(topics=[_TOPIC]), 7),
            (InitProducerIdRequest(transactional_id="t", transaction_timeout_ms=1000), 5),
            (_produce(batch(0)), 9),
            (_produce(batch(1, count=3)), 12),
            (FetchRequest(max_wait_ms=1, topics=[_FETCHED]), 12),
        )
    )
    return [*alone, talk]


_TOPIC = CreateTopicsRequest.CreatableTopic(name="t", num_partitions=1, replication_factor=1)
_FETCHED = FetchRequest.FetchTopic(
    topic="t", partitions=[FetchRequest.FetchPartition(partition=0, partition_max_bytes=1000)]
)


def _produce(records: memoryview) -> ProduceRequest:
    partition = ProduceRequest.PartitionProduceData(index=0, records=records)
    topic = ProduceRequest.TopicProduceData(name="t", partition_data=[partition])
    return ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[topic])


def _place(message: Any) -> int:
    return next(place for place, api in enumerate(APIS) if api.key == message.api.key)


def _record_seeds() -> list[bytes]:
    some = [
        NewRecord(NOW_MS, b"k", b"value" * 9, (("h", b"1"), ("n", None))),
        NewRecord(NOW_MS - 5, None, None),
        NewRecord(NOW_MS + 1, b"", b""),
    ]
    return [
        bytes(build_batch(some, compression=codec, producer_id=7, producer_epoch=0, base_sequence=0))
        for codec in Compression
    ]


def _appended_seeds() -> list[bytes]:
    plain = [batch(0), batch(1), batch(1), batch(None), batch(2, count=4, compression=Compression.GZIP)]
    open_ = [batch(0, is_transactional=True)]
    return [
        b"".join(_piece(0, 0, bytes(each)) for each in plain),
        b"".join(_piece(0, 0, bytes(each)) for each in open_) + _piece(1, 7, b""),
    ]


def _directory_seeds() -> list[bytes]:
    disk = MemoryDisk()
    partition = open_partition(disk, config(segment_bytes=400))
    for number in range(6):
        put(partition, batch(number))
    put(partition, batch(0, pid=8, is_transactional=True))
    put_marker(partition, marker(8, commit=False))
    partition.close(NOW_MS)
    found = [(name, disk.read(f"orders-0/{name}")) for name in disk.list("orders-0")]
    pieces = [_piece(FILES.index(name), 0, body) for name, body in found if name in FILES]
    return [b"\0" + b"".join(pieces), b"\1" + b"".join(pieces)]


def _dumped_seeds() -> list[bytes]:
    return [bytes([place]) + each for place in range(len(FILES)) for each in (b"", *_record_seeds()[:2])]


def _coordinator_seeds() -> list[bytes]:
    """Return the records that the coordinators write about a transactional id and a group."""
    node = open_node(MemoryDisk())
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(committed_offset=3)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[partition])
    for message, version in (
        (CreateTopicsRequest(topics=[_TOPIC]), 7),
        (InitProducerIdRequest(transactional_id="t", transaction_timeout_ms=1000), 5),
        (OffsetCommitRequest(group_id="g", topics=[topic]), 9),
    ):
        ask(node, memoryview(bytearray(encode_request(message, version, 1, None)[4:])), NOW_MS)
    found = []
    for selector, state in enumerate((node.transactions.topic, node.groups.topic)):
        for stored in state.replay(0):
            pairs = [(record.key or b"", record.value or b"") for record in stored.records]
            found += [_piece(selector, len(key), key + value) for key, value in pairs]
    return [b"".join(found), *found]


def _member_seeds() -> list[bytes]:
    holding = OwnedPartitions((), (TopicPartition("t", 0),), 3)
    subscriptions = [encode_subscription(name, ["t"], holding) for name in ASSIGNORS]
    return [*subscriptions, encode_assignment([TopicPartition("t", 1)])]


_SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "requests": _request_seeds,
    "records": _record_seeds,
    "appended": _appended_seeds,
    "directory": _directory_seeds,
    "dumped": _dumped_seeds,
    "coordinators": _coordinator_seeds,
    "members": _member_seeds,
    "decompressed": lambda: [bytes([codec]) + compress(codec, b"abc" * 99) for codec in Compression],
    "answers": lambda: [
        bytes([place, version - api.first_version]) + b"\0\0\0\1" + b"\0" * 40
        for place, api in enumerate(ALL_APIS)
        for version in (api.first_version, api.last_version)
    ],
}
