"""The Java client (kafka-clients) with our broker: producer, consumer, admin, and faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.foreign.clients import (
    Command,
    compiled_java,
    load_past_a_kill,
    load_past_a_lost_acknowledgement,
    run,
)
from support.foreign.pipes import pipe_past_killed_brokers

from oncelog import Broker

TRANSACTIONS = ["endings", "group", "offsets", "zombie member", "fencing"]


@pytest.fixture(scope="module")
def java(kafka_class_path: str) -> Command:
    return compiled_java("Check", kafka_class_path)


@pytest.fixture(scope="module")
def transactions(kafka_class_path: str) -> Command:
    return compiled_java("Transactions", kafka_class_path)


def test_producer_consumer_and_admin(java: Command) -> None:
    with Broker() as broker:
        lines = run(java(broker.bootstrap_servers, "everything"))
    codecs = [f"codec {codec}" for codec in ("none", "gzip", "snappy", "lz4", "zstd")]
    assert lines == ["topics", *codecs, "acks", "reading", "records", "cluster"]


@pytest.mark.behaviour("I1")
def test_a_lost_acknowledgement(java: Command) -> None:
    load_past_a_lost_acknowledgement(java)


@pytest.mark.behaviour("I17")
def test_the_broker_is_killed_in_the_middle(java: Command, tmp_path: Path) -> None:
    load_past_a_kill(java, tmp_path)


@pytest.mark.behaviour("T3", "T4", "T6", "T7", "T10")
@pytest.mark.parametrize("transaction_version", [0, 2])
def test_transactions(transactions: Command, transaction_version: int) -> None:
    with Broker(config={"oncelog.transaction.version": transaction_version}) as broker:
        assert run(transactions(broker.bootstrap_servers, "everything")) == TRANSACTIONS


def test_transactions_on_apache_kafka(transactions: Command, apache_kafka: ApacheKafka) -> None:
    """The expectations for our broker also hold for Apache Kafka."""
    assert run(transactions(apache_kafka.bootstrap_servers, "everything")) == TRANSACTIONS


@pytest.mark.behaviour("T6", "T7")
def test_transactions_stay_whole_when_the_broker_is_killed(transactions: Command, tmp_path: Path) -> None:
    pipe_past_killed_brokers(transactions, tmp_path, 2_000)
