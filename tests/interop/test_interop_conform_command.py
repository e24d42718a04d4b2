"""`oncelog conform` on Apache Kafka: one node, and a cluster whose nodes share topics and coordinators."""

from __future__ import annotations

import json

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.cli import oncelog

OF_A_CLUSTER = ("txn_end_epoch", "txn_offsets")
SMALL = {
    "broker.session.timeout.ms": 120_000,
    # The two numbers must differ. If they were equal, a name could have the same partition number in both
    # topics, and a node would lead neither.
    "offsets.topic.num.partitions": 7,
    "transaction.state.log.num.partitions": 8,
}


@pytest.mark.behaviour("P10")
def test_apache_kafka_passes_every_scenario(apache_kafka: ApacheKafka) -> None:
    ended = oncelog("conform", "--newest", "-o", "json", servers=apache_kafka.bootstrap_servers)
    assert [row for row in json.loads(ended.out) if row["result"] != "pass"] == []
    assert ended.code == 0, ended.err


@pytest.mark.usefixtures("kafka_class_path")
def test_in_a_cluster_one_node_is_asked() -> None:
    sections = [part for name in OF_A_CLUSTER for part in ("--section", name)]
    with ApacheKafka(nodes=2, heap_mb=256, properties=SMALL) as kafka:
        ended = oncelog("conform", "--newest", "-o", "json", *sections, servers=kafka.bootstrap_servers)
    assert [row for row in json.loads(ended.out) if row["result"] != "pass"] == []
    assert ended.code == 0, ended.err
