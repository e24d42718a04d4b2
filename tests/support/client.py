"""A scripted broker over a real socket. A function that the test passes decides each response or fault."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.config import ADMIN
from oncelog.errors import NotLeaderOrFollower, raise_for_code
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import RequestHeader, decode_request, encode_response
from oncelog.wire.header import write_crc
from oncelog.wire.messages import API_BY_KEY, ApiVersionsResponse, MetadataResponse, ProduceRequest
from oncelog.wire.records import NewRecord
from support.wait import attempts, rest

Handler = Callable[[RequestHeader, Any], Any]
"""A handler of one API. It takes the header and the request, and returns a response, raw bytes, None for no
response, or CUT.
"""

CUT = object()
"""The result of a handler that closes the connection instead of sending a response."""


def api_versions(limits: dict[int, tuple[int, int]] | None = None) -> ApiVersionsResponse:
    """Return an ApiVersions response with all APIs and versions that we know. `limits` replaces the versions
    of some APIs.
    """
    rows = {key: (api.min_version, api.max_version) for key, api in API_BY_KEY.items()} | (limits or {})
    return ApiVersionsResponse(
        api_keys=[
            ApiVersionsResponse.ApiVersion(api_key=key, min_version=low, max_version=high)
            for key, (low, high) in sorted(rows.items())
        ]
    )


def metadata(
    port: int,
    topics: dict[str, int] | None = None,
    *,
    errors: dict[str, int] | None = None,
    leader: int = 1,
    leader_epoch: int = 0,
    host: str = "127.0.0.1",
) -> MetadataResponse:
    """Return a Metadata response from a cluster of one broker.

    `topics` maps each topic's name to its number of partitions, and `errors` to its error code.
    """
    rows = [
        MetadataResponse.MetadataResponseTopic(
            name=name,
            topic_id=name.encode().ljust(16, b"\0"),
            partitions=[
                MetadataResponse.MetadataResponsePartition(
                    partition_index=index,
                    leader_id=leader,
                    leader_epoch=leader_epoch,
                    replica_nodes=[1],
                    isr_nodes=[1],
                )
                for index in range(count)
            ],
        )
        for name, count in (topics or {}).items()
    ]
    rows += [
        MetadataResponse.MetadataResponseTopic(name=name, error_code=code)
        for name, code in (errors or {}).items()
    ]
    return MetadataResponse(
        brokers=[MetadataResponse.MetadataResponseBroker(node_id=1, host=host, port=port)],
        cluster_id="scripted",
        controller_id=1,
        topics=rows,
    )


class ScriptedBroker:
    """A broker that answers each request with the function that `handlers` has for its API's name.

    ApiVersions and Metadata have default handlers.
    """

    def __init__(self) -> None:
        self.port = 0
        self.topics: dict[str, int] = {}
        self.handlers: dict[str, Handler] = {
            "ApiVersions": lambda header, message: api_versions(),
            "Metadata": lambda header, message: metadata(self.port, self.topics),
        }
        self.seen: list[tuple[str, int]] = []
        self.messages: list[Any] = []
        self.connection_count = self.open_count = 0
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def idle(self) -> bool:
        """Return True if no client is connected."""
        return self.open_count == 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        self.open_count += 1
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                if not await self._answer(await reader.readexactly(size), writer):
                    break
        self.open_count -= 1
        writer.close()

    async def _answer(self, frame: bytes, writer: asyncio.StreamWriter) -> bool:
        header, message = decode_request(frame)
        api = API_BY_KEY[header.api_key]
        self.seen.append((api.name, header.api_version))
        self.messages.append(message)
        answer = self.handlers[api.name](header, message)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is CUT:
            return False
        if isinstance(answer, bytes):
            writer.write(answer)
        elif answer is not None:
            writer.write(encode_response(answer, header.api_version, header.correlation_id))
        await writer.drain()
        return True

    def cut_all(self) -> None:
        """Close every open connection."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def abort_all(self) -> None:
        """Abort every open connection, so that data that is not read yet is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def scripted_broker(port: int = 0) -> AsyncIterator[ScriptedBroker]:
    """Run a ScriptedBroker on 127.0.0.1, on a free port or on `port`."""
    broker = ScriptedBroker()
    server = await asyncio.start_server(broker.serve, "127.0.0.1", port)
    broker.port = server.sockets[0].getsockname()[1]
    try:
        yield broker
    finally:
        server.close()
        broker.cut_all()


async def free_port() -> int:
    """Return the number of a free port."""
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


def append(
    servers: str, tp: TopicPartition, *batches: bytes | bytearray, transactional_id: str | None = None
) -> list[int]:
    """Send whole batches without a producer, one in each Produce request. Return their base offsets.

    A batch is sent again while its partition has no leader: Apache Kafka may list a topic before its leaders
    are elected. With a transactional id, the request has the version of clients without transaction version
    2.
    """

    async def run() -> list[int]:
        cluster = ClusterConnection(ADMIN.parse({"bootstrap.servers": servers}))
        offsets = []
        try:
            await cluster.start()
            for records in batches:
                part = ProduceRequest.PartitionProduceData(index=tp.partition, records=records)
                topic = ProduceRequest.TopicProduceData(name=tp.topic, partition_data=[part])
                request = ProduceRequest(
                    acks=-1, timeout_ms=10_000, topic_data=[topic], transactional_id=transactional_id
                )
                version = 11 if transactional_id else 12
                for _ in attempts():
                    response = await cluster.request(await cluster.leader(tp), request, max_version=version)
                    answer = response.responses[0].partition_responses[0]
                    if answer.error_code != NotLeaderOrFollower.code:
                        break
                    await rest(0.02)
                raise_for_code(answer.error_code, str(answer.error_message))
                offsets.append(answer.base_offset)
        finally:
            await cluster.close()
        return offsets

    return asyncio.run(run())


def batch_with_header_name(name: bytes, value: bytes = b"v", key: bytes | None = b"k") -> bytearray:
    """Return a batch of one record that has one header. `name` is the header's name, which need not be
    UTF-8.
    """
    placeholder = "x" * len(name)
    batch = build_batch([NewRecord(1_700_000_000_000, key, value, ((placeholder, b"1"),))])
    start = batch.index(placeholder.encode())
    batch[start : start + len(name)] = name
    write_crc(batch, 0, len(batch))
    return batch


def batch_of(*values: bytes | None, timestamp_ms: int = 1_700_000_000_000, **options: Any) -> bytearray:
    """Return a batch of these values. Its records have no keys, and their timestamps increase."""
    return build_batch(
        [NewRecord(timestamp_ms + i, None, value) for i, value in enumerate(values)], **options
    )
