"""Transactions on Apache Kafka: markers and aborted records leave gaps in offsets, never a loss."""

from __future__ import annotations

from typing import Any

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.spark.topics import Collected, create_topic, read, read_stream

from oncelog.client.admin.blocking import Admin
from oncelog.spark.audit.audit import audit_topic
from oncelog.types import TopicPartition

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P1")]


def write_transactions(bootstrap: str, topic: str, outcomes: str) -> None:
    """Write one transaction of ten records for each letter of `outcomes`: c (committed), a (aborted) or o
    (open).
    """
    from confluent_kafka import Producer

    for number, outcome in enumerate(outcomes):
        settings = {"bootstrap.servers": bootstrap, "transactional.id": f"{topic}-{number}"}
        # Open transactions must not time out on a slow machine.
        producer = Producer(settings | {"transaction.timeout.ms": 600_000})
        producer.init_transactions(120)
        producer.begin_transaction()
        for n in range(10):
            producer.produce(topic, key=f"{number}-{n}", value=outcome, partition=0)
        producer.flush(60)
        if outcome == "c":
            producer.commit_transaction(120)
        elif outcome == "a":
            producer.abort_transaction(120)


@pytest.mark.timeout(240)
def test_offsets_of_markers_and_aborted_records_are_no_loss(
    spark: Any, apache_kafka: ApacheKafka, topic: str, checkpoint: str
) -> None:
    bootstrap = apache_kafka.bootstrap_servers
    create_topic(bootstrap, topic)
    write_transactions(bootstrap, topic, "cacaao")
    committed = [*range(10), *range(22, 32)]  # each transaction is ten records and a marker

    rows = read(spark, bootstrap, subscribe=topic, maxRecordsPerPartition=7).collect()
    assert sorted(row.offset for row in rows) == committed
    uncommitted = {"kafka_isolation_level": "read_uncommitted"}
    assert read(spark, bootstrap, subscribe=topic, **uncommitted).count() == 60

    stream = Collected()
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 11}
    stream.run(read_stream(spark, bootstrap, **options), checkpoint)
    assert stream.offsets() == committed  # with this limit, some micro-batches contain only aborted records

    result = audit_topic(spark, bootstrap, topic, key_check=True)
    assert result.findings == () and result.verdict == "clean"
    assert (result.totals.records, result.totals.control_batches, result.totals.producers) == (60, 5, 6)
    assert result.keys is not None and result.keys.records == 20

    # In a topic with transactions, too, deleted records are reported as a loss.
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_records({TopicPartition(topic, 0): 15})
    begin = {"subscribe": topic, "startingOffsets": f'{{"{topic}": {{"0": 3}}}}'}
    with pytest.raises(Exception, match=r"contains offsets 15 to 65 \(exclusive\)"):
        read(spark, bootstrap, **begin).count()
    assert read(spark, bootstrap, **begin, failOnDataLoss="false").count() == 10
