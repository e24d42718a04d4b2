"""`oncelog audit --local`. tests/spark compares the findings with those of the audit on Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import oncelog
from oncelog.cli import audit as audit_command
from oncelog.cli.main import cli
from oncelog.client.consumer.blocking import Consumer
from oncelog.errors import MisuseError, TimedOut
from oncelog.local_audit import audit_files, audit_topic, key_counts
from oncelog.local_audit.key_counts import KeyCounts
from oncelog.local_audit.spill_directory import SpillDirectory
from oncelog.types import Isolation

pytestmark = pytest.mark.behaviour("P5")


def send(broker: oncelog.Broker, topic: str, count: int = 5) -> None:
    with oncelog.Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
        for n in range(count):
            producer.send(topic, b"v", key=b"k%d" % n)


def test_without_pyspark_the_audit_runs_in_this_process_and_says_so(
    oncelog_broker: oncelog.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(oncelog_broker, "orders")
    monkeypatch.setattr(audit_command, "_has_pyspark", lambda: False)
    arguments = ["audit", "orders", "-b", oncelog_broker.bootstrap_servers]
    ended = CliRunner().invoke(cli, arguments)
    assert (ended.exit_code, ended.stdout) == (0, "")
    assert ended.stderr.startswith("PySpark is not installed: the audit runs in this process\n5 records in ")
    asked = CliRunner().invoke(cli, [*arguments, "--local", "--keys"])
    assert asked.stderr.startswith("5 records in ") and "5 different keys" in asked.stderr
    files = CliRunner().invoke(cli, ["audit", "--files", str(oncelog_broker.data_dir), "--local"])
    assert (files.exit_code, files.stderr.splitlines()[-1][:14]) == (0, "verdict: clean")


def test_keys_are_counted_in_bounded_memory(
    oncelog_broker: oncelog.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic, counts in (("few", (30, 7, 3)), ("many", (30, 7))):
        for count in counts:
            send(oncelog_broker, topic, count)
    servers = oncelog_broker.bootstrap_servers
    whole = audit_topic(servers, "few", key_check=True)
    compared = audit_topic(servers, "few", against="many")
    assert whole.keys == (40, 30, 7, 0) and compared.difference == (37, 40, 0, 3, 0, 0)
    monkeypatch.setattr(key_counts, "ROWS_AT_ONCE", 4)
    assert audit_topic(servers, "few", key_check=True) == whole
    assert audit_topic(servers, "few", against="many") == compared


@pytest.mark.parametrize(
    ("padding", "rows_at_once", "bytes_at_once"),
    [(b"the first bytes of all keys are equal " * 5, 50, 1 << 26), (b"long " * 200, 1 << 20, 50_000)],
    ids=["equal-beginnings", "long"],
)
def test_keys_take_bounded_memory_whatever_they_look_like(
    monkeypatch: pytest.MonkeyPatch, padding: bytes, rows_at_once: int, bytes_at_once: int
) -> None:
    """R1196: all keys with the same first 64 bytes were in memory together, and so were all long keys."""
    monkeypatch.setattr(key_counts, "ROWS_AT_ONCE", rows_at_once)
    monkeypatch.setattr(key_counts, "BYTES_AT_ONCE", bytes_at_once)
    with SpillDirectory() as spill:
        counts = KeyCounts(spill)
        for _ in range(2):
            for start in range(0, 300, 10):
                keys = [padding + b"%d" % n for n in range(start, start + 10)]
                offsets = pa.array(range(start, start + 10), pa.int64())
                counts.add(0, pa.array(keys, pa.binary()), 0, offsets)
        pieces = [table.to_pydict() for table in counts.merged()]
    assert sum(len(piece["key"]) for piece in pieces) == 300
    assert {count for piece in pieces for count in piece["count"]} == {2}
    assert max(len(piece["key"]) for piece in pieces) <= 50


def test_an_audit_of_nothing_is_a_misuse() -> None:
    with pytest.raises(MisuseError, match="no topic to audit"):
        audit_topic("127.0.0.1:1", [])
    with pytest.raises(MisuseError, match="'a' would be compared with itself"):
        audit_topic("127.0.0.1:1", ["a"], against="a")
    with pytest.raises(MisuseError, match="no directory to audit"):
        audit_files([])


def test_a_broker_that_stalls_ends_the_audit_of_its_topic_with_an_error(
    oncelog_broker: oncelog.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1811: after a time-out, the audit read the rest of the range with read_uncommitted. It did not learn
    what readers get, and its verdict was `clean`.
    """
    servers = oncelog_broker.bootstrap_servers
    with oncelog.Producer({"bootstrap.servers": servers, "transactional.id": "writer"}) as producer:
        producer.init_transactions()
        for _ in range(2):
            with producer.transaction():
                producer.send("orders", b"v", key=b"k")
    assert audit_topic(servers, "orders").verdict == "clean"
    fetch = Consumer.fetch_chunks

    def withhold(*args: Any) -> Iterator[Any]:
        if args[-1] is Isolation.READ_COMMITTED:
            raise TimedOut("no response within request.timeout.ms")
        return fetch(*args)

    monkeypatch.setattr(Consumer, "fetch_chunks", withhold)
    with pytest.raises(TimedOut):
        audit_topic(servers, "orders")
