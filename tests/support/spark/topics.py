"""Topics that are filled batch by batch, and reads of them with Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.errors import NotLeaderOrFollower, UnknownTopicOrPartition
from oncelog.types import Header
from oncelog.wire.batch import build_batch
from oncelog.wire.messages import ProduceRequest, ProduceResponse
from oncelog.wire.records import NewRecord
from support.broker import RawClient, wait_until

PRODUCE_VERSION = 9
_NOT_YET = {UnknownTopicOrPartition.code, NotLeaderOrFollower.code}
"""Errors that Apache Kafka returns until a new partition is ready.

With these errors, it stores nothing, so retries are safe.
"""
START_MS = 1_700_000_000_000


def create_topic(bootstrap: str, name: str, partitions: int = 1, **configs: object) -> None:
    """Create a topic.

    Keywords are settings with underscores. Retention is off, because the records' timestamps are years old.
    """
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        settings = {"retention.ms": -1} | {key.replace("_", "."): value for key, value in configs.items()}
        admin.create_topics([NewTopic(name, num_partitions=partitions, configs=settings)])


def records(
    first: int, count: int, *, headers: Sequence[Header] = (), size_bytes: int = 0
) -> list[NewRecord]:
    """Return records `first` to `first + count - 1`. Record n has key `k{n}`, value `v{n}` padded to
    `size_bytes`, and timestamp START_MS + n.
    """
    return [
        NewRecord(START_MS + n, b"k%d" % n, (b"v%d" % n).ljust(size_bytes, b"."), tuple(headers))
        for n in range(first, first + count)
    ]


def store(bootstrap: str, topic: str, batches: Sequence[bytes | bytearray], partition: int = 0) -> list[int]:
    """Produce whole batches one after another and return their base offsets."""
    with RawClient(bootstrap) as client:
        return [_store_one(client, topic, partition, batch) for batch in batches]


def _store_one(client: RawClient, topic: str, partition: int, batch: bytes | bytearray) -> int:
    data = ProduceRequest.PartitionProduceData(index=partition, records=bytes(batch))
    request = ProduceRequest(
        acks=-1, topic_data=[ProduceRequest.TopicProduceData(name=topic, partition_data=[data])]
    )
    answers: list[ProduceResponse.PartitionProduceResponse] = []

    def is_answered() -> bool:
        answer = client.ask(request, PRODUCE_VERSION).responses[0].partition_responses[0]
        answers.append(answer)
        return answer.error_code not in _NOT_YET

    wait_until(is_answered)
    assert answers[-1].error_code == 0, f"produce to {topic}-{partition}: error {answers[-1].error_code}"
    return int(answers[-1].base_offset)


def fill(bootstrap: str, topic: str, first: int, count: int, partition: int = 0, **options: Any) -> None:
    """Produce records without a producer id, ten to a batch."""
    store(
        bootstrap,
        topic,
        [
            build_batch(records(n, min(10, first + count - n), **options))
            for n in range(first, first + count, 10)
        ],
        partition,
    )


def read(spark: Any, bootstrap: str, **options: object) -> Any:
    """Return a batch DataFrame. Keywords that begin with `kafka_` are options with dots for underscores."""
    return _with_options(spark.read.format("oncelog"), bootstrap, options).load()


def read_stream(spark: Any, bootstrap: str, **options: object) -> Any:
    return _with_options(spark.readStream.format("oncelog"), bootstrap, options).load()


def _with_options(reader: Any, bootstrap: str, options: dict[str, object]) -> Any:
    reader = reader.option("kafka.bootstrap.servers", bootstrap)
    for name, value in options.items():
        name = name.replace("_", ".") if name.startswith("kafka_") else name
        reader = reader.option(name, str(value))
    return reader


class Collected:
    """The rows of a stream as `foreachBatch` got them: one list for each micro-batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def take(self, frame: Any, _batch_id: int) -> None:
        self.batches.append(frame.collect())

    def run(self, frame: Any, checkpoint: str) -> Any:
        """Run the stream until it has read all records that are available now. If the query fails, raise its
        exception.
        """
        query = (
            frame.writeStream.foreachBatch(self.take)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return query

    @property
    def rows(self) -> list[Any]:
        return [row for batch in self.batches for row in batch]

    def offsets(self, partition: int = 0) -> list[int]:
        return sorted(row.offset for row in self.rows if row.partition == partition)


def take_back(checkpoint: str, *logs: str) -> None:
    """Remove the newest entry of these logs (offsets, commits) from the checkpoint."""
    for log in logs:
        entries = (each for each in Path(checkpoint, log).iterdir() if each.name.isdigit())
        newest = max(entries, key=lambda each: int(each.name))
        newest.unlink()
        (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
