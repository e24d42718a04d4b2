"""Make a consumer's core, and Fetch responses for it, without I/O."""

from __future__ import annotations

from typing import Any

from oncelog.client.consumer.core import ConsumerCore, FetchCall
from oncelog.config import CONSUMER
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch, stamp
from oncelog.wire.control import encode_end_marker
from oncelog.wire.messages import FetchResponse
from oncelog.wire.records import NewRecord

T0 = TopicPartition("t", 0)
T1 = TopicPartition("t", 1)
T2 = TopicPartition("t", 2)


def core(**settings: object) -> ConsumerCore:
    return ConsumerCore(CONSUMER.parse({"auto.offset.reset": "earliest", **settings}))


def batch(base_offset: int, *values: bytes, **options: Any) -> bytes:
    data = build_batch([NewRecord(1000 + i, None, value) for i, value in enumerate(values)], **options)
    stamp(data, 0, base_offset, 0)
    return bytes(data)


def marker(offset: int, producer_id: int, *, commit: bool) -> bytes:
    data = encode_end_marker(producer_id, 0, commit, 0, 1000)
    stamp(data, 0, offset, 0)
    return bytes(data)


def answer(
    *rows: tuple[TopicPartition, bytes],
    error: int = 0,
    aborted: list[tuple[int, int]] | None = None,
    high_watermark: int = 100,
) -> FetchResponse:
    return FetchResponse(
        responses=[
            FetchResponse.FetchableTopicResponse(
                topic=tp.topic,
                partitions=[
                    FetchResponse.PartitionData(
                        partition_index=tp.partition,
                        error_code=error,
                        high_watermark=high_watermark,
                        last_stable_offset=high_watermark,
                        aborted_transactions=[
                            FetchResponse.AbortedTransaction(producer_id=p, first_offset=o)
                            for p, o in aborted or []
                        ],
                        records=records,
                    )
                ],
            )
            for tp, records in rows
        ]
    )


def only_call(consumer: ConsumerCore) -> FetchCall:
    calls, homeless = consumer.plan(lambda tp: 1)
    assert homeless == [] and len(calls) == 1
    return calls[0]


def started(offset: int = 0, **settings: object) -> tuple[ConsumerCore, FetchCall]:
    consumer = core(**settings)
    consumer.assign([T0])
    consumer.seek(T0, offset)
    return consumer, only_call(consumer)


def values(consumer: ConsumerCore, count: int = 500) -> list[bytes | None]:
    return [record.value for record in consumer.take(count, 0)]


def asked_offset(call: FetchCall) -> int:
    return call.request.topics[0].partitions[0].fetch_offset
