"""`oncelog topics` against our broker."""

from __future__ import annotations

import json

import pytest
from support.cli import oncelog
from support.client import append, batch_of

from oncelog import Broker, TopicPartition


def test_a_topic_is_created_listed_described_and_deleted(oncelog_broker: Broker) -> None:
    servers = oncelog_broker.bootstrap_servers
    made = oncelog("topics", "create", "flights", "-p", "2", "--config", "retention.ms=5000", servers=servers)
    assert (made.code, made.out) == (0, "created flights\n")
    listed = oncelog("topics", "ls", "-o", "json", servers=servers)
    (row,) = json.loads(listed.out)
    assert (row["topic"], row["partitions"], row["internal"]) == ("flights", 2, False)
    table = oncelog("topics", "list", servers=servers).out.splitlines()
    assert table[0].split() == ["TOPIC", "PARTITIONS"] and table[1].split() == ["flights", "2"]

    append(servers, TopicPartition("flights", 1), batch_of(b"a", b"b", b"c"))
    rows = json.loads(oncelog("topics", "describe", "flights", "-o", "json", servers=servers).out)
    assert [(r["partition"], r["leader"], r["start_offset"], r["end_offset"]) for r in rows] == [
        (0, 1, 0, 0),
        (1, 1, 0, 3),
    ]
    configs = json.loads(
        oncelog("topics", "describe", "flights", "--configs", "-o", "json", servers=servers).out
    )
    assert {"topic": "flights", "name": "retention.ms", "value": "5000", "source": "topic"} in configs

    dry = oncelog("topics", "delete", "flights", servers=servers)
    assert dry.code == 0
    assert dry.out == "would delete flights: 2 partitions, 3 offsets\n"
    assert "nothing was deleted; repeat with --yes" in dry.err
    assert "flights" in oncelog("topics", "list", servers=servers).out
    assert oncelog("topics", "delete", "flights", "--yes", servers=servers).out == "deleted flights\n"
    assert oncelog("topics", "list", "-o", "json", servers=servers).out == "[]\n"


def test_each_deleted_topic_is_named_if_another_one_is_missing(oncelog_broker: Broker) -> None:
    servers = oncelog_broker.bootstrap_servers
    oncelog("topics", "create", "a", "b", servers=servers)
    got = oncelog("topics", "delete", "a", "missing", "b", "--yes", servers=servers)
    assert (got.code, got.out) == (1, "deleted a\ndeleted b\n")
    assert "UNKNOWN_TOPIC_OR_PARTITION" in got.err and "'missing'" in got.err


def test_topics_are_altered(oncelog_broker: Broker) -> None:
    servers = oncelog_broker.bootstrap_servers
    oncelog("topics", "create", "t", "--config", "retention.ms=5000", servers=servers)
    arguments = ["--partitions", "3", "--config", "segment.bytes=1048576", "--delete-config", "retention.ms"]
    altered = oncelog("topics", "alter", "t", *arguments, servers=servers)
    assert altered.code == 0
    assert altered.out == "altered t: segment.bytes, retention.ms\nt has 3 partitions\n"
    every = json.loads(oncelog("topics", "describe", "t", "--all-configs", "-o", "json", servers=servers).out)
    by_name = {row["name"]: row for row in every}
    assert (by_name["segment.bytes"]["value"], by_name["retention.ms"]["source"]) == ("1048576", "default")
    assert len(json.loads(oncelog("topics", "describe", "t", "-o", "json", servers=servers).out)) == 3


def test_if_not_exists_accepts_an_existing_topic(oncelog_broker: Broker) -> None:
    servers = oncelog_broker.bootstrap_servers
    oncelog("topics", "create", "t", servers=servers)
    again = oncelog("topics", "create", "t", "u", servers=servers)
    assert again.code == 1
    assert again.out == "created u\n"
    assert "TOPIC_ALREADY_EXISTS" in again.err and "'t'" in again.err
    calm = oncelog("topics", "create", "t", "--if-not-exists", servers=servers)
    assert (calm.code, calm.out, calm.err) == (0, "", "t exists already\n")


def test_errors_are_one_line_and_an_exit_code(oncelog_broker: Broker) -> None:
    servers = oncelog_broker.bootstrap_servers
    gone = oncelog("topics", "describe", "gone", servers=servers)
    assert gone.code == 1
    assert gone.err == "oncelog: UNKNOWN_TOPIC_OR_PARTITION (3): topic 'gone' does not exist\n"
    assert oncelog("topics", "alter", "t", servers=servers).code == 2
    assert oncelog("topics", "list", "-X", "nonsense", servers=servers).code == 2
    unknown = oncelog("topics", "list", "-X", "request.timeout=5", servers=servers)
    assert unknown.code == 2 and "did you mean request.timeout.ms?" in unknown.err


def test_an_unreachable_broker_is_named_by_its_address() -> None:
    failed = oncelog("topics", "list", "-X", "oncelog.bootstrap.timeout.ms=0", servers="127.0.0.1:1")
    assert failed.code == 1
    assert "cannot connect to 127.0.0.1:1: Connection refused" in failed.err
    assert len(failed.err.splitlines()) == 1


def test_the_environment_names_the_broker(oncelog_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCELOG_BOOTSTRAP_SERVER", oncelog_broker.bootstrap_servers)
    monkeypatch.setenv("ONCELOG_LINGER_MS", "7")  # a producer's setting, which the admin client ignores
    assert oncelog("topics", "create", "t").code == 0
