"""`oncelog transactions` on both brokers, and Kafka's own tool on our broker (behaviour T14)."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka, run_tool
from support.broker import wait_until
from support.cli import oncelog
from support.client import append, batch_of
from support.topics import new_topic, producer_of, values

from oncelog import Admin, Consumer, TopicPartition
from oncelog.client.admin.types import ConfigResource
from oncelog.errors import ProducerFenced

_numbers = itertools.count()
UNVERIFIED = "transaction.partition.verification.enable"
TOOL = "org.apache.kafka.tools.TransactionsCommand"


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {UNVERIFIED: False}


@pytest.fixture(params=["ours", "apache"])
def servers(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on our broker and on Apache Kafka. Neither verifies transactions, so that a transaction
    can hang.
    """
    if request.param == "ours":
        yield request.getfixturevalue("ours")
        return
    kafka: ApacheKafka = request.getfixturevalue("apache_kafka")
    whole = ["--bootstrap-server", kafka.bootstrap_servers, "--entity-type", "brokers", "--entity-default"]
    config = "kafka.admin.ConfigCommand"
    broker = ConfigResource("broker", "1")
    with Admin({"bootstrap.servers": kafka.bootstrap_servers}) as admin:

        def is_verified() -> bool:
            return admin.describe_configs(broker)[broker].entries[UNVERIFIED].value == "true"

        # The controller passes the change to the broker a moment later, but before any topic that is created
        # afterwards.
        run_tool(config, *whole, "--alter", "--add-config", f"{UNVERIFIED}=false")
        wait_until(lambda: not is_verified())
        yield kafka.bootstrap_servers
        run_tool(config, *whole, "--alter", "--delete-config", UNVERIFIED)
        wait_until(is_verified)


def rows(*arguments: str, servers: str, code: int = 0) -> list[dict[str, Any]]:
    got = oncelog("transactions", *arguments, "-o", "json", servers=servers)
    assert got.code == code, got.err
    found: list[dict[str, Any]] = json.loads(got.out)
    return found


def hang(servers: str, producer_id: int) -> str:
    """Create a topic with a record and a transactional batch that no coordinator knows."""
    topic = new_topic(servers)
    append(servers, TopicPartition(topic, 0), batch_of(b"before"))
    lost = batch_of(
        b"lost", producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True
    )
    append(servers, TopicPartition(topic, 0), lost, transactional_id="gone")
    append(servers, TopicPartition(topic, 0), batch_of(b"behind"))
    return topic


def visible(servers: str, topic: str) -> int:
    with Consumer({"bootstrap.servers": servers}) as consumer:
        tp = TopicPartition(topic, 0)
        return consumer.end_offsets([tp])[tp]


@pytest.mark.behaviour("T14")
def test_an_open_and_a_committed_transaction_are_described(servers: str) -> None:
    name, topic = f"cli-{os.getpid()}-{next(_numbers)}", new_topic(servers, 2)
    with producer_of(servers, transactional_id=name) as producer:
        producer.init_transactions()
        (empty,) = [row for row in rows("list", servers=servers) if row["transactional_id"] == name]
        assert empty["state"] == "Empty"
        producer.begin_transaction()
        producer.send(topic, b"a", partition=0)
        producer.send(topic, b"b", partition=1)
        producer.flush()

        producer_id = str(empty["producer_id"])
        listed = rows("list", "--state", "Ongoing", "--producer-id", producer_id, servers=servers)
        assert [row["transactional_id"] for row in listed] == [name]
        (told,) = rows("describe", name, servers=servers)
        assert (told["state"], told["timeout_ms"]) == ("Ongoing", 60_000)
        assert sorted(told["partitions"].split()) == [f"{topic}-0", f"{topic}-1"]
        assert told["start"].endswith("Z") and told["producer_id"] == empty["producer_id"]

        opened = rows("find-hanging", "--topic", topic, "--older-than-s", "0", servers=servers)
        assert [(row["partition"], row["first_offset"]) for row in opened] == [(0, 0), (1, 0)]
        assert all(row["hanging"] == f"no: {name!r} is Ongoing" for row in opened)

        producer.commit_transaction()
    # Apache Kafka answers before the markers are written.
    wait_until(lambda: values(servers, topic) == [b"a", b"b"])
    assert rows("find-hanging", "--topic", topic, servers=servers) == []
    (told,) = rows("describe", name, servers=servers)
    assert told["state"] in ("PrepareCommit", "CompleteCommit")


@pytest.mark.behaviour("T14")
def test_a_hanging_transaction_is_found_and_aborted(servers: str) -> None:
    producer_id = 700_000 + next(_numbers)
    topic = hang(servers, producer_id)
    assert visible(servers, topic) == 1

    arguments = ("find-hanging", "--topic", topic)
    (row,) = rows(*arguments, servers=servers, code=3)
    assert row["hanging"].startswith(f"yes: no coordinator knows producer id {producer_id} among")
    assert (row["first_offset"], row["epoch"]) == (1, 0) and row["since"].startswith("2023-11-14")
    abort_text = f"oncelog transactions abort {topic}:0 --producer-id {producer_id} --start-offset 1"
    assert row["what_to_do"] == abort_text
    much_later = str(10**9)
    (young,) = rows(*arguments, "--older-than-s", much_later, servers=servers)
    assert young["hanging"].startswith("perhaps: no coordinator")

    abort = row["what_to_do"].split()[1:]
    dry = oncelog(*abort, servers=servers)
    assert dry.code == 0 and "would write an ABORT marker" in dry.out
    assert visible(servers, topic) == 1
    done = oncelog(*abort, "--yes", servers=servers)
    assert done.code == 0 and "wrote an ABORT marker" in done.out, done.err
    assert visible(servers, topic) == 4
    assert values(servers, topic) == [b"before", b"behind"]
    again = oncelog(*abort, "--yes", servers=servers)
    assert again.code == 1 and "no open transaction" in again.err


@pytest.mark.behaviour("T14")
def test_a_transaction_that_does_not_hang_is_terminated_as_a_whole(servers: str) -> None:
    name, topic = f"cli-{os.getpid()}-{next(_numbers)}", new_topic(servers, 2)
    with producer_of(servers, transactional_id=name) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"a", partition=0)
        producer.send(topic, b"b", partition=1)
        producer.flush()
        (before,) = rows("describe", name, servers=servers)
        abort = ("transactions", "abort", f"{topic}:0", "--producer-id", str(before["producer_id"]), "--yes")
        refused = oncelog(*abort, servers=servers)
        assert refused.code == 1 and f"does not hang ({name!r} is Ongoing)" in refused.err

        dry = oncelog("transactions", "terminate", name, servers=servers)
        assert dry.code == 0 and f"would abort the transaction of {name!r} on {topic}-0 {topic}-1" in dry.out
        assert rows("describe", name, servers=servers) == [before]
        done = oncelog("transactions", "terminate", name, "--yes", servers=servers)
        assert done.code == 0 and f"aborted the transaction of {name!r}" in done.out, done.err
        with pytest.raises(ProducerFenced):
            producer.commit_transaction()
    assert rows("find-hanging", "--topic", topic, "--older-than-s", "0", servers=servers) == []
    assert values(servers, topic) == []
    (after,) = rows("describe", name, servers=servers)
    assert after["timeout_ms"] == before["timeout_ms"]
    again = oncelog("transactions", "terminate", name, "--yes", servers=servers)
    assert again.code == 1 and f"{name!r} has no open transaction" in again.err


@pytest.mark.behaviour("T14")
def test_kafka_transactions_finds_and_aborts_a_hanging_transaction(ours: str, kafka_class_path: str) -> None:
    producer_id = 700_000 + next(_numbers)
    topic, name = hang(ours, producer_id), f"cli-{next(_numbers)}"
    with producer_of(ours, transactional_id=name) as producer:
        producer.init_transactions()
    server = ["--bootstrap-server", ours]
    listed = run_tool(TOOL, *server, "list")
    assert re.search(rf"{name}\s+1\s+\d+\s+Empty", listed)
    described = run_tool(TOOL, *server, "describe", "--transactional-id", name)
    heading, state = (line.split() for line in described.splitlines()[:2])
    assert dict(zip(heading, state, strict=False))["TransactionState"] == "Empty"
    hanging = run_tool(TOOL, *server, "find-hanging", "--topic", topic)
    assert re.search(rf"{topic}\s+0\s+{producer_id}\s+0", hanging)
    run_tool(TOOL, *server, "abort", "--topic", topic, "--partition", "0", "--start-offset", "1")
    assert visible(ours, topic) == 4


def test_missing_transactions_and_topics_are_errors(servers: str) -> None:
    missing = oncelog("transactions", "describe", "nobody", servers=servers)
    assert missing.code == 1 and "does not exist" in missing.err
    whole = oncelog("transactions", "abort", "t", "--producer-id", "1", servers=servers)
    assert whole.code == 2 and "expected TOPIC:PARTITION" in whole.err


def test_transactions_are_listed_by_state(ours: str) -> None:
    with Admin({"bootstrap.servers": ours}) as admin:
        assert admin.list_transactions(states=["Dead"]) == []
