"""Admin and Consumer against Apache Kafka: the same calls as on our broker, with real transactions and
errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import confluent_kafka
import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.broker import wait_until
from support.client import append, batch_of

from oncelog import Admin, Consumer, NewTopic, TopicPartition
from oncelog.client.admin.blocking import ConfigResource
from oncelog.errors import (
    InvalidConfig,
    InvalidPartitions,
    OffsetOutOfRange,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from oncelog.types import Compression, Isolation
from oncelog.wire.batch import iter_batches


@pytest.fixture
def admin(apache_kafka: ApacheKafka) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": apache_kafka.bootstrap_servers}) as running:
        yield running


def consumer_of(kafka: ApacheKafka, **settings: object) -> Consumer:
    return Consumer(
        {"bootstrap.servers": kafka.bootstrap_servers, "auto.offset.reset": "earliest"}, **settings
    )


def poll_all(consumer: Consumer, count: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    for _ in range(100):
        values += [record.value for record in consumer.poll(0.2)]
        if len(values) >= count:
            break
    return values


def range_values(consumer: Consumer, tp: TopicPartition, start: int, end: int) -> list[Any]:
    return [
        value for table in consumer.fetch_range(tp, start, end) for value in table.column("value").to_pylist()
    ]


def test_topics_settings_and_directories(admin: Admin) -> None:
    created = admin.create_topics(
        [NewTopic("apache-a", 3, configs={"retention.ms": 5000}), NewTopic("apache-b")]
    )
    assert created["apache-a"].num_partitions == 3
    described = admin.describe_topics(["apache-a"])["apache-a"]
    assert described.topic_id == created["apache-a"].topic_id is not None
    assert [part.leader for part in described.partitions] == [1, 1, 1]
    resource = ConfigResource("topic", "apache-a")
    assert admin.describe_configs([resource])[resource].entries["retention.ms"].source == "topic"
    admin.alter_configs({resource: {"retention.ms": None, "segment.bytes": 2_000_000}})
    # The broker learns of the change from the controller a moment later.
    wait_until(lambda: admin.describe_configs([resource])[resource].entries["retention.ms"].is_default)
    entries = admin.describe_configs([resource])[resource].entries
    assert entries["segment.bytes"].value == "2000000"
    admin.create_partitions({"apache-a": 4})
    assert (
        admin.list_offsets({TopicPartition("apache-a", 3): "latest"})[TopicPartition("apache-a", 3)].offset
        == 0
    )
    assert any(log.tp.topic == "apache-a" for row in admin.describe_log_dirs() for log in row.replicas)
    assert [broker.node_id for broker in admin.describe_cluster().brokers] == [1]
    admin.delete_topics(["apache-a", "apache-b"])
    # The controller answers a deletion a moment before a broker learns of it.
    wait_until(lambda: "apache-a" not in [topic.name for topic in admin.list_topics()])


@pytest.mark.behaviour("I18")
def test_refusals_have_the_same_types_as_with_our_broker(admin: Admin) -> None:
    admin.create_topics([NewTopic("apache-c", 1)])
    outcomes = admin.create_topics(
        [NewTopic("apache-c", 1), NewTopic("apache-d", 0), NewTopic("apache-e", configs={"nonsense": 1})],
        raise_errors=False,
    )
    assert isinstance(outcomes["apache-c"].error, TopicAlreadyExists)
    assert isinstance(outcomes["apache-d"].error, InvalidPartitions)
    assert isinstance(outcomes["apache-e"].error, InvalidConfig)
    with pytest.raises(UnknownTopicOrPartition):
        admin.describe_topics(["apache-gone"])
    with pytest.raises(OffsetOutOfRange):
        admin.delete_records({TopicPartition("apache-c", 0): 99})


def test_idempotent_batches_ranges_and_producers(apache_kafka: ApacheKafka, admin: Admin) -> None:
    admin.create_topics([NewTopic("apache-f", 1)])
    tp = TopicPartition("apache-f", 0)
    with confluent_producer(apache_kafka) as producer:
        for number in range(100):
            producer.produce("apache-f", b"%d" % number)
        producer.flush(60)
    (state,) = admin.describe_producers([tp])[tp].producers
    assert (state.producer_epoch, state.last_sequence) == (0, 99)
    assert state.current_txn_start_offset is None
    with consumer_of(apache_kafka) as consumer:
        consumer.assign([tp])
        assert poll_all(consumer, 100) == [b"%d" % number for number in range(100)]
        assert range_values(consumer, tp, 40, 45) == [b"%d" % number for number in range(40, 45)]
        headers = [header for view in consumer.fetch_batches(tp, 0, 100) for _, header in iter_batches(view)]
        assert {header.producer_id for header in headers} == {state.producer_id}
        assert sum(header.records_count for header in headers) == 100
        admin.delete_records({tp: 50})
        with pytest.raises(OffsetOutOfRange, match=r"offsets 50 to 100 \(exclusive\)"):
            list(consumer.fetch_range(tp, 0, 100))


def test_transactions_as_a_committed_reader_sees_them(apache_kafka: ApacheKafka, admin: Admin) -> None:
    admin.create_topics([NewTopic("apache-g", 1)])
    tp = TopicPartition("apache-g", 0)
    with confluent_producer(apache_kafka, **{"transactional.id": "apache-g"}) as producer:
        producer.init_transactions(120)
        for outcome in ("commit", "abort", "abort", "commit", "abort"):
            producer.begin_transaction()
            for number in range(3):
                producer.produce("apache-g", f"{outcome}{number}".encode())
            producer.flush(60)
            producer.commit_transaction(120) if outcome == "commit" else producer.abort_transaction(30)
        producer.begin_transaction()
        producer.produce("apache-g", b"open")
        producer.flush(60)
        stable = admin.list_offsets({tp: "latest"}, Isolation.READ_COMMITTED)[tp].offset
        end = admin.list_offsets({tp: "latest"})[tp].offset
        assert (stable, end) == (20, 21)
        (state,) = admin.describe_producers([tp])[tp].producers
        assert state.current_txn_start_offset == 20
        committed = [b"commit0", b"commit1", b"commit2"] * 2
        with consumer_of(apache_kafka) as consumer:
            consumer.assign([tp])
            assert poll_all(consumer, 6) == committed
            assert consumer.poll(0.3) == []
            assert consumer.position(tp) == 20
            assert consumer.end_offsets([tp]) == {tp: 20}
            assert range_values(consumer, tp, 0, 20) == committed
        with consumer_of(apache_kafka, isolation_level="read_uncommitted") as consumer:
            consumer.assign([tp])
            assert len(poll_all(consumer, 16)) == 16
            assert consumer.end_offsets([tp]) == {tp: 21}
        producer.abort_transaction(120)


@pytest.mark.parametrize("codec", list(Compression))
def test_every_codec_of_ours_passes_through_apache_kafka(
    apache_kafka: ApacheKafka, admin: Admin, codec: Compression
) -> None:
    tp = TopicPartition(f"apache-h-{codec.name}", 0)
    admin.create_topics([NewTopic(tp.topic, 1)])
    values = [b"%d" % number * 20 for number in range(50)]
    append(apache_kafka.bootstrap_servers, tp, batch_of(*values, compression=codec))
    with consumer_of(apache_kafka) as consumer:
        consumer.assign([tp])
        assert poll_all(consumer, 50) == values
        found = consumer.offsets_for_times({tp: 1_700_000_000_007})[tp]
        assert found is not None and found.offset == 7


@contextmanager
def confluent_producer(kafka: ApacheKafka, **settings: Any) -> Iterator[confluent_kafka.Producer]:
    """An idempotent producer of confluent-kafka, flushed at the end of the block."""
    config = {"bootstrap.servers": kafka.bootstrap_servers, "enable.idempotence": True, **settings}
    producer = confluent_kafka.Producer(config)
    yield producer
    producer.flush(60)
