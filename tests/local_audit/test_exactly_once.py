"""`assert_exactly_once`: the topics that it accepts, and its messages for the others."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from support.spark.topics import create_topic, fill

import oncelog
from oncelog.local_audit import audit_topic
from oncelog.testing import assert_exactly_once

pytestmark = pytest.mark.behaviour("P5")


def send(broker: oncelog.Broker, topic: str, count: int = 5) -> None:
    with oncelog.Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
        for n in range(count):
            producer.send(topic, b"v", key=b"k%d" % n)


def test_records_of_an_idempotent_producer_pass(oncelog_broker: oncelog.Broker) -> None:
    send(oncelog_broker, "orders")
    assert_exactly_once("orders", oncelog_broker)
    assert_exactly_once(["orders"], oncelog_broker.bootstrap_servers, keys=True)


def test_a_repeated_key_and_a_lost_one_fail_with_their_offsets(oncelog_broker: oncelog.Broker) -> None:
    send(oncelog_broker, "orders")
    send(oncelog_broker, "orders", 1)
    send(oncelog_broker, "all-orders", 6)
    with pytest.raises(
        AssertionError, match=r"repeated_key in orders-0 at offsets 5 to 5: the key occurs 2 times"
    ):
        assert_exactly_once("orders", oncelog_broker, keys=True)
    with pytest.raises(
        AssertionError, match=r"verdict: violated \(2 findings\)\ndoubled_key (.|\n)*lost_key"
    ):
        assert_exactly_once("orders", oncelog_broker, against="all-orders")


def test_a_comparison_does_not_replace_the_check_of_keys(oncelog_broker: oncelog.Broker) -> None:
    """Both topics contain one key twice, so a comparison finds them equal.

    The check that each key occurs once must still fail (R1197).
    """
    with oncelog.Producer({"bootstrap.servers": oncelog_broker.bootstrap_servers}) as producer:
        for topic in ("orders", "copies"):
            for key in (b"a", b"b", b"b"):
                producer.send(topic, b"", key=key)
    assert_exactly_once("copies", oncelog_broker, against="orders")
    with pytest.raises(AssertionError, match="the key occurs 2 times"):
        assert_exactly_once("copies", oncelog_broker, keys=True, against="orders")


def test_unproven_records_do_not_pass(oncelog_broker: oncelog.Broker) -> None:
    create_topic(oncelog_broker.bootstrap_servers, "plain")
    fill(oncelog_broker.bootstrap_servers, "plain", 0, 3)
    with pytest.raises(AssertionError, match="unproven: 3 records were written without idempotence"):
        assert_exactly_once("plain", oncelog_broker)
    assert_exactly_once("plain", oncelog_broker, keys=True)


def test_keys_prove_nothing_about_records_without_a_key(oncelog_broker: oncelog.Broker) -> None:
    """R1810: each record was stored twice without a key, and the verdict was `clean`."""
    servers = oncelog_broker.bootstrap_servers
    with oncelog.Producer({"bootstrap.servers": servers, "enable.idempotence": False, "acks": 1}) as producer:
        for topic in ("plain", "plain", "copies"):
            producer.send(topic, b"42.00")
    for check in ({"keys": True}, {"against": "copies"}):
        with pytest.raises(
            AssertionError, match=r"unproven: 2 records .* does not cover records without a key"
        ):
            assert_exactly_once("plain", oncelog_broker, **check)  # type: ignore[arg-type]
    result = audit_topic(servers, "plain", key_check=True)
    assert (result.verdict, result.keys) == ("unproven", (0, 0, 0, 2))


def test_keys_prove_nothing_about_records_behind_an_open_transaction(oncelog_broker: oncelog.Broker) -> None:
    """R1810: a check of keys reads up to the last stable offset, and a repeated key above it was `clean`."""
    servers = oncelog_broker.bootstrap_servers
    options = {"bootstrap.servers": servers, "enable.idempotence": False, "acks": 1}
    with (
        oncelog.Producer({"bootstrap.servers": servers, "transactional.id": "open"}) as transactional,
        oncelog.Producer(options) as producer,
    ):
        transactional.init_transactions()
        transactional.begin_transaction()
        transactional.send("orders", b"", key=b"open").result(timeout=60)
        for _ in range(2):
            producer.send("orders", b"", key=b"k").result(timeout=60)
        with pytest.raises(AssertionError, match="or behind an open transaction"):
            assert_exactly_once("orders", oncelog_broker, keys=True)
        transactional.abort_transaction()
        with pytest.raises(AssertionError, match="the key occurs 2 times"):
            assert_exactly_once("orders", oncelog_broker, keys=True)


@pytest.mark.behaviour("P8")
def test_a_table_must_have_each_record_once(oncelog_broker: oncelog.Broker, tmp_path: Path) -> None:
    send(oncelog_broker, "orders")
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute('CREATE TABLE t (part INTEGER, "offset" INTEGER)')
        connection.executemany("INSERT INTO t VALUES (0, ?)", [(n,) for n in range(4)])
    table = f"sqlite:{tmp_path / 't.db'}"
    with pytest.raises(
        AssertionError, match="missing_row in orders-0 at offsets 4 to 4: 1 committed records"
    ):
        assert_exactly_once("orders", oncelog_broker, table=table, columns="partition=part")
    with connection:
        connection.execute("INSERT INTO t VALUES (0, 4)")
    connection.close()
    assert_exactly_once("orders", oncelog_broker, table=table, columns="partition=part")
