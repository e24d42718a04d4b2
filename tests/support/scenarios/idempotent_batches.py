"""Topics, producer ids and single idempotent batches over raw connections."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from oncelog.conform.topic_pool import wait_until_led
from oncelog.errors import (
    ERROR_BY_CODE,
    CoordinatorLoadInProgress,
    NotLeaderOrFollower,
    UnknownTopicOrPartition,
)
from oncelog.wire.batch import build_batch
from oncelog.wire.messages import CreateTopicsRequest, InitProducerIdRequest, ProduceRequest
from oncelog.wire.records import NewRecord
from support.broker import RawClient
from support.wait import attempts, pause

PRODUCE_VERSION, CREATE_TOPICS_VERSION, INIT_PRODUCER_ID_VERSION = 9, 7, 4
topic_numbers = itertools.count()


class Step(NamedTuple):
    producer: str
    epoch: int | None
    sequence: int | None
    count: int
    error: str
    offset: int | None


def create_topic(client: RawClient) -> str:
    topic = f"scenario-{next(topic_numbers)}"
    topic_request = CreateTopicsRequest.CreatableTopic(name=topic, num_partitions=1, replication_factor=1)
    answer = client.ask(CreateTopicsRequest(topics=[topic_request], timeout_ms=10_000), CREATE_TOPICS_VERSION)
    assert [result.error_code for result in answer.topics] == [0]
    wait_until_led(client, {answer.topics[0].topic_id: 1})
    return topic


def new_producer_id(client: RawClient) -> int:
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=60_000)
    for _ in attempts():  # a broker that has just started answers COORDINATOR_LOAD_IN_PROGRESS
        answer = client.ask(request, INIT_PRODUCER_ID_VERSION)
        if answer.error_code != CoordinatorLoadInProgress.code:
            break
        pause(0.1)
    assert (answer.error_code, answer.producer_epoch) == (0, 0)
    return answer.producer_id


def produce(client: RawClient, topic: str, producer_id: int | None, step: Step) -> tuple[str, int | None]:
    """Send the step's batch. Return the error name and the offset in the notation of the tables."""
    batch = build_batch(
        [NewRecord(1_700_000_000_000 + i, b"k", b"v") for i in range(step.count)],
        producer_id=producer_id,
        producer_epoch=step.epoch,
        base_sequence=step.sequence,
    )
    partition = ProduceRequest.PartitionProduceData(index=0, records=batch)
    data = ProduceRequest.TopicProduceData(name=topic, partition_data=[partition])
    request = ProduceRequest(transactional_id=None, acks=-1, timeout_ms=10_000, topic_data=[data])
    # A new partition has no leader for a moment. With these errors, no batch is stored, so a retry is safe.
    for _ in attempts():
        answer = client.ask(request, PRODUCE_VERSION).responses[0].partition_responses[0]
        if answer.error_code not in (NotLeaderOrFollower.code, UnknownTopicOrPartition.code):
            break
        pause(0.05)
    if answer.error_code:
        assert answer.base_offset == -1
        return ERROR_BY_CODE[answer.error_code].kafka_name, None
    return "0", answer.base_offset
