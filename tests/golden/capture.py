"""Write tests/golden/batches: the record batches that real clients send, one file per client and codec.

`python tests/golden/capture.py` runs a small stand-in broker that answers a producer and keeps the records of
each Produce request. Run it for a new version of a client.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oncelog.wire.frames import FrameReader, decode_request, encode_response
from oncelog.wire.messages import (
    API_BY_KEY,
    ApiVersionsResponse,
    InitProducerIdResponse,
    Message,
    MetadataResponse,
    ProduceResponse,
)

GOLDEN = Path(__file__).with_name("batches")
TOPIC = "golden"
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

Sent = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes]]]
RECORDS: list[Sent] = [
    (1_700_000_000_000, None, b"first", []),
    (1_699_999_999_000, b"key", b"", [("h", b"x"), ("h", b"")]),
    (1_700_000_100_000, b"", None, []),
    (1_700_000_000_001, b"k" * 70, b"v" * 300, [("größe", b"12")]),
]
"""The records that every client sends in one batch."""


class StandIn:
    """A stand-in for a broker. It sends only the responses that a producer needs before and after sending a
    batch.
    """

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.batches: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = FrameReader(1 << 26)
        while data := connection.recv(1 << 20):
            for frame in reader.feed(data):
                header, request = decode_request(frame)
                answer = self._answer(request)
                connection.sendall(encode_response(answer, header.api_version, header.correlation_id))

    def _answer(self, request: Any) -> Message:
        name = request.api.name
        if name == "ApiVersions":
            version = ApiVersionsResponse.ApiVersion
            keys = [
                version(api_key=api.key, min_version=api.min_version, max_version=api.max_version)
                for api in API_BY_KEY.values()
            ]
            return ApiVersionsResponse(api_keys=keys)
        if name == "Metadata":
            broker = MetadataResponse.MetadataResponseBroker(host="127.0.0.1", port=self.port)
            partition = MetadataResponse.MetadataResponsePartition(replica_nodes=[0], isr_nodes=[0])
            topic = MetadataResponse.MetadataResponseTopic(name=TOPIC, partitions=[partition])
            return MetadataResponse(brokers=[broker], cluster_id="golden", controller_id=0, topics=[topic])
        if name == "InitProducerId":
            return InitProducerIdResponse(producer_id=4711, producer_epoch=0)
        if name == "Produce":
            self.batches += [bytes(p.records) for t in request.topic_data for p in t.partition_data]
            answer = ProduceResponse.PartitionProduceResponse(index=0)
            topic_answer = ProduceResponse.TopicProduceResponse(name=TOPIC, partition_responses=[answer])
            return ProduceResponse(responses=[topic_answer])
        raise NotImplementedError(f"the stand-in has no answer to {name}")


def with_confluent(port: int, codec: str) -> None:
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "compression.type": codec,
            "linger.ms": 300,
            "enable.idempotence": True,
        }
    )
    for timestamp, key, value, headers in RECORDS:
        producer.produce(TOPIC, value, key, 0, timestamp=timestamp, headers=headers)
    producer.flush(60)


def with_kafka_python(port: int, codec: str) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=f"127.0.0.1:{port}",
        compression_type=None if codec == "none" else codec,
        linger_ms=300,
    )
    for timestamp, key, value, headers in RECORDS:
        producer.send(TOPIC, value, key, headers, 0, timestamp)
    producer.flush(60)
    producer.close(5)


def with_aiokafka(port: int, codec: str) -> None:
    from aiokafka import AIOKafkaProducer

    async def run() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=f"127.0.0.1:{port}",
            compression_type=None if codec == "none" else codec,
            linger_ms=300,
            enable_idempotence=True,
        )
        await producer.start()
        sent = [
            await producer.send(TOPIC, value, key, 0, timestamp, headers)
            for timestamp, key, value, headers in RECORDS
        ]
        await asyncio.gather(*sent)
        await producer.stop()

    asyncio.run(run())


CLIENTS: dict[str, Callable[[int, str], None]] = {
    "confluent-kafka": with_confluent,
    "kafka-python": with_kafka_python,
    "aiokafka": with_aiokafka,
}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for client, run in CLIENTS.items():
        for codec in CODECS:
            broker = StandIn()
            run(broker.port, codec)
            broker.listener.close()
            (batch,) = broker.batches
            (GOLDEN / f"{client}-{codec}.hex").write_text(batch.hex("\n", 48) + "\n")
            print(client, codec, len(batch), "bytes")


if __name__ == "__main__":
    main()
