"""`oncelog producers` against our broker."""

from __future__ import annotations

import json

import pytest
from support.cli import oncelog
from support.client import append, batch_of

from oncelog import Admin, Broker, NewTopic, TopicPartition


@pytest.fixture
def servers(oncelog_broker: Broker) -> str:
    with Admin({"bootstrap.servers": oncelog_broker.bootstrap_servers}) as admin:
        admin.create_topics([NewTopic("t", 2)])
    for partition, producer_id in [(0, 7), (0, 8), (1, 7)]:
        batch = batch_of(b"a", b"b", producer_id=producer_id, producer_epoch=1, base_sequence=0)
        append(oncelog_broker.bootstrap_servers, TopicPartition("t", partition), batch)
    return oncelog_broker.bootstrap_servers


def test_producers_of_a_topic_are_listed(servers: str) -> None:
    rows = json.loads(oncelog("producers", "list", "t", "-o", "json", servers=servers).out)
    assert [(r["partition"], r["producer_id"], r["epoch"], r["last_sequence"]) for r in rows] == [
        (0, 7, 1, 1),
        (0, 8, 1, 1),
        (1, 7, 1, 1),
    ]
    assert rows[0]["last_time"].startswith("20") and rows[0]["last_time"].endswith("Z")
    assert rows[0]["transaction_start_offset"] is None
    table = oncelog("producers", "list", "t:1", servers=servers).out.splitlines()
    assert table[0].split()[:4] == ["TOPIC", "PARTITION", "PRODUCER", "ID"]
    assert len(table) == 2


def test_one_producer_is_described(servers: str) -> None:
    got = oncelog("producers", "describe", "t:0", "--producer-id", "8", "-o", "jsonl", servers=servers)
    assert json.loads(got.out)["producer_id"] == 8
    missing = oncelog("producers", "describe", "t:0", "--producer-id", "9", servers=servers)
    assert missing.code == 1 and "has no state of producer id 9" in missing.err


@pytest.mark.parametrize("where", ["t:", ":0", "t:x", ""])
def test_a_malformed_partition_is_a_usage_error(where: str) -> None:
    assert oncelog("producers", "list", where).code == 2


def test_a_missing_topic_of_producers_list_is_an_error(servers: str) -> None:
    gone = oncelog("producers", "list", "gone", servers=servers)
    assert gone.code == 1 and "UNKNOWN_TOPIC_OR_PARTITION" in gone.err
