"""A raw client for tests of the broker. Each method sends one request as bytes over a real socket."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Self

import pytest

from oncelog.wire.batch import build_batch
from oncelog.wire.frames import decode_response, encode_request
from oncelog.wire.messages import (
    API_BY_KEY,
    ApiVersionsRequest,
    CreateTopicsRequest,
    FetchRequest,
    FetchResponse,
    InitProducerIdRequest,
    ListOffsetsRequest,
    Message,
    ProduceRequest,
    ProduceResponse,
)
from oncelog.wire.records import NewRecord, decode_records
from support.wait import wait_until as wait_until

TIMEOUT_SECONDS = 60


class RawClient:
    """A connection that sends requests as given and reads whole frames."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message: Message, version: int) -> int:
        """Write a request and return its correlation id."""
        self._correlation_id += 1
        self.socket.sendall(encode_request(message, version, self._correlation_id, "raw"))
        return self._correlation_id

    def read_frame(self) -> bytes | None:
        """Return the next frame without its size, or None if the broker has closed the connection."""
        head = self._read(4)
        return None if head is None else self._read(struct.unpack(">i", head)[0])

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                data = self.socket.recv(size - len(parts))
            except ConnectionResetError:
                return None
            if not data:
                return None
            parts += data
        return bytes(parts)

    def receive(self, response_cls: type[Any], version: int) -> tuple[int, Any]:
        frame = self.read_frame()
        assert frame is not None, "the broker ended the connection"
        return decode_response(response_cls, version, frame)

    def ask(self, message: Message, version: int) -> Any:
        """Send a request, wait for its response, and return it."""
        sent = self.send(message, version)
        correlation_id, response = self.receive(API_BY_KEY[message.api.key].response, version)
        assert correlation_id == sent
        return response

    def is_closed(self) -> bool:
        """Wait for a frame. Return True if the broker closes the connection instead of sending one."""
        return self.read_frame() is None

    # --- requests that most tests need

    def create_topic(self, name: str, partitions: int = 1, **configs: object) -> Any:
        creatable = CreateTopicsRequest.CreatableTopic(
            name=name,
            num_partitions=partitions,
            replication_factor=-1,
            configs=[
                CreateTopicsRequest.CreatableTopicConfig(name=key.replace("_", "."), value=str(value))
                for key, value in configs.items()
            ],
        )
        (result,) = self.ask(CreateTopicsRequest(topics=[creatable]), 7).topics
        assert result.error_code == 0, result
        return result

    def new_producer_id(self) -> int:
        response = self.ask(InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=60_000), 4)
        assert response.error_code == 0
        return int(response.producer_id)

    def produce(
        self,
        topic: str,
        records: bytes | bytearray | None,
        partition: int = 0,
        *,
        acks: int = -1,
        version: int = 9,
    ) -> ProduceResponse.PartitionProduceResponse:
        response = self.ask(produce_request(topic, records, partition, acks=acks), version)
        return response.responses[0].partition_responses[0]  # type: ignore[no-any-return]

    def fetch(
        self, topic: str, offset: int = 0, partition: int = 0, *, version: int = 12, **fields: Any
    ) -> FetchResponse.PartitionData:
        response = self.ask(fetch_request([(topic, partition, offset)], **fields), version)
        assert response.error_code == 0
        return response.responses[0].partitions[0]  # type: ignore[no-any-return]

    def offset(self, topic: str, timestamp: int = -1, partition: int = 0) -> int:
        request = ListOffsetsRequest(
            replica_id=-1,
            topics=[
                ListOffsetsRequest.ListOffsetsTopic(
                    name=topic,
                    partitions=[
                        ListOffsetsRequest.ListOffsetsPartition(
                            partition_index=partition, timestamp=timestamp
                        )
                    ],
                )
            ],
        )
        result = self.ask(request, 7).topics[0].partitions[0]
        assert result.error_code == 0
        return int(result.offset)

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        """Return every value of the partition in offset order."""
        values: list[bytes | None] = []
        offset = self.offset(topic, -2, partition)
        while offset < self.offset(topic, -1, partition):
            data = self.fetch(topic, offset, partition, max_wait_ms=0, min_bytes=0).records
            batches = split_batches(data)
            assert batches
            records = [record for batch in batches for record in decode_records(batch)]
            values += [record.value for record in records if record.offset >= offset]
            offset = records[-1].offset + 1
        return values


def split_batches(data: Any) -> list[bytes]:
    """Split the records of a Fetch response into batches. Return the complete ones."""
    batches, position, raw = [], 0, bytes(data or b"")
    while position + 12 <= len(raw):
        size = 12 + struct.unpack_from(">i", raw, position + 8)[0]
        if position + size > len(raw):
            break
        batches.append(raw[position : position + size])
        position += size
    return batches


def batch(
    *values: bytes | None,
    pid: int | None = None,
    epoch: int = 0,
    sequence: int | None = None,
    timestamp_ms: int | None = None,
    key: bytes | None = None,
    **more: Any,
) -> bytearray:
    """Return a record batch of these values, idempotent if `pid` is given."""
    time_ms = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
    return build_batch(
        [NewRecord(time_ms, key, value) for value in values],
        producer_id=pid,
        producer_epoch=epoch if pid is not None else None,
        base_sequence=sequence,
        **more,
    )


def produce_request(
    topic: str, records: bytes | bytearray | None, partition: int = 0, *, acks: int = -1, **fields: Any
) -> ProduceRequest:
    return ProduceRequest(
        acks=acks,
        timeout_ms=5_000,
        topic_data=[
            ProduceRequest.TopicProduceData(
                name=topic,
                partition_data=[ProduceRequest.PartitionProduceData(index=partition, records=records)],
            )
        ],
        **fields,
    )


def fetch_request(
    positions: Sequence[tuple[str, int, int]], *, partition_max_bytes: int = 1 << 20, **fields: Any
) -> FetchRequest:
    """Return a Fetch request for positions (topic, partition, offset)."""
    defaults: dict[str, Any] = {"max_wait_ms": 0, "min_bytes": 1}
    return FetchRequest(
        **{**defaults, **fields},
        topics=[
            FetchRequest.FetchTopic(
                topic=topic,
                partitions=[
                    FetchRequest.FetchPartition(
                        partition=partition, fetch_offset=offset, partition_max_bytes=partition_max_bytes
                    )
                ],
            )
            for topic, partition, offset in positions
        ],
    )


def assert_unanswered(client: RawClient) -> None:
    """Check that the client's request has no response yet, although the broker has read it.

    The check sends two requests on another connection. The broker answers the second one in a later round of
    its event loop.
    """
    with RawClient("{}:{}".format(*client.socket.getpeername())) as other:
        for _ in range(2):
            assert other.ask(ApiVersionsRequest(), 0).error_code == 0
    client.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.socket.recv(1)
    client.socket.settimeout(TIMEOUT_SECONDS)
