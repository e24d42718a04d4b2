"""A scripted broker and a minimal client that exchange real frames over real sockets."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

from oncelog.wire.batch import build_batch, iter_batches
from oncelog.wire.frames import decode_request, decode_response, encode_request, encode_response
from oncelog.wire.messages import (
    API_BY_KEY,
    ApiVersionsResponse,
    DescribeClusterResponse,
    FetchResponse,
    FindCoordinatorResponse,
    InitProducerIdResponse,
    MetadataResponse,
    ProduceRequest,
    ProduceResponse,
)
from oncelog.wire.records import NewRecord


def read_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def read_frame(sock: socket.socket) -> bytes | None:
    prefix = read_exactly(sock, 4)
    return None if prefix is None else read_exactly(sock, struct.unpack(">i", prefix)[0])


class ScriptedBroker:
    """A broker that answers Produce requests with increasing offsets, and records the base sequences of their
    batches.

    `peers` has the (node id, host, port) of each broker that Metadata and similar responses name. If it is
    empty, they name only this broker.
    """

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.peers: list[tuple[int, str, int]] = []
        self.sequences: list[int | None] = []
        self.apis: list[str] = []
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> ScriptedBroker:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self.listener, *self.connections):
            # Closing a socket does not end an accept or recv that blocks in another thread. A shutdown does.
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            while (frame := read_frame(sock)) is not None:
                header, message = decode_request(frame)
                self.apis.append(API_BY_KEY[header.api_key].name)
                answer = self._answer(header.api_key, message)
                if answer is not None:
                    sock.sendall(encode_response(answer, header.api_version, header.correlation_id))
        except OSError:
            pass

    def _answer(self, api_key: int, message: Any) -> Any:
        nodes = self.peers or [(0, "127.0.0.1", self.port)]
        match api_key:
            case 0:
                return self._produce(message)
            case 1:
                endpoint = FetchResponse.NodeEndpoint
                return FetchResponse(
                    node_endpoints=[endpoint(node_id=n, host=h, port=p) for n, h, p in nodes]
                )
            case 3:
                broker = MetadataResponse.MetadataResponseBroker
                return MetadataResponse(brokers=[broker(node_id=n, host=h, port=p) for n, h, p in nodes])
            case 10:
                node_id, host, port = nodes[-1]
                coordinator = FindCoordinatorResponse.Coordinator(
                    key="g", node_id=node_id, host=host, port=port
                )
                return FindCoordinatorResponse(
                    node_id=node_id, host=host, port=port, coordinators=[coordinator]
                )
            case 18:
                version = ApiVersionsResponse.ApiVersion
                rows = [version(api_key=0, min_version=0, max_version=13)]
                rows.append(version(api_key=18, min_version=0, max_version=4))
                return ApiVersionsResponse(api_keys=rows)
            case 22:
                return InitProducerIdResponse(producer_id=1000, producer_epoch=0)
            case 60:
                described = DescribeClusterResponse.DescribeClusterBroker
                return DescribeClusterResponse(
                    cluster_id="c", brokers=[described(broker_id=n, host=h, port=p) for n, h, p in nodes]
                )
        raise AssertionError(f"the script has no answer for API key {api_key}")

    def _produce(self, message: Any) -> Any:
        for topic in message.topic_data:
            for part in topic.partition_data:
                self.sequences += [header.base_sequence for _, header in iter_batches(part.records)]
        if message.acks == 0:
            return None
        offset = 10 * (len(self.sequences) - 1)
        part = ProduceResponse.PartitionProduceResponse(index=0, error_code=0, base_offset=offset)
        endpoints = [ProduceResponse.NodeEndpoint(node_id=n, host=h, port=p) for n, h, p in self.peers]
        return ProduceResponse(
            responses=[ProduceResponse.TopicProduceResponse(name="t", partition_responses=[part])],
            node_endpoints=endpoints,
        )


class TinyClient:
    """A client that sends messages on one connection and reads responses in order."""

    def __init__(self, address: str, timeout: float = 10.0) -> None:
        host, port = address.split(":")
        self.sock = socket.create_connection((host, int(port)), timeout)
        self.sent: list[tuple[Any, int, int]] = []
        self.correlation_id = 0

    def __enter__(self) -> TinyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, message: Any, version: int, *, answered: bool = True) -> int:
        self.correlation_id += 1
        self.sock.sendall(encode_request(message, version, self.correlation_id, "tiny"))
        if answered:
            self.sent.append((message, version, self.correlation_id))
        return self.correlation_id

    def receive(self) -> Any:
        """Return the next response, or None if the connection was closed. Check that it belongs to the oldest
        open request.
        """
        message, version, expected = self.sent.pop(0)
        try:
            frame = read_frame(self.sock)
        except ConnectionError:
            return None
        if frame is None:
            return None
        correlation_id, answer = decode_response(message.api.response, version, frame)
        assert correlation_id == expected
        return answer

    def call(self, message: Any, version: int) -> Any:
        self.send(message, version)
        return self.receive()

    def is_silent(self, seconds: float = 0.2) -> bool:
        self.sock.settimeout(seconds)
        try:
            return self.sock.recv(1, socket.MSG_PEEK) is None
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(10.0)


def produce(
    sequence: int, *, acks: int = -1, producer_id: int | None = 1000, topic: str = "t"
) -> ProduceRequest:
    """Return a Produce request with one batch of one record."""
    epoch, base = (0, sequence) if producer_id is not None else (None, None)
    batch = build_batch(
        [NewRecord(1_700_000_000_000, None, b"v%d" % sequence)],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=base,
    )
    part = ProduceRequest.PartitionProduceData(index=0, records=batch)
    return ProduceRequest(
        acks=acks,
        timeout_ms=1000,
        topic_data=[ProduceRequest.TopicProduceData(name="t", partition_data=[part])],
    )


def base_offset(answer: Any) -> int:
    offset: int = answer.responses[0].partition_responses[0].base_offset
    return offset
