"""`oncelog audit --local`. tests/spark compares the findings with those of the audit on Spark."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import oncelog
from oncelog.cli import audit as audit_command
from oncelog.cli.main import cli
from oncelog.errors import MisuseError
from oncelog.local_audit import audit_files, audit_topic, key_counts

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
    assert whole.keys == (40, 30, 7) and compared.difference == (37, 40, 0, 3, 0, 0)
    monkeypatch.setattr(key_counts, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(key_counts, "ROWS_PER_BUCKET", 8)
    assert audit_topic(servers, "few", key_check=True) == whole
    assert audit_topic(servers, "few", against="many") == compared


def test_an_audit_of_nothing_is_a_misuse() -> None:
    with pytest.raises(MisuseError, match="no topic to audit"):
        audit_topic("127.0.0.1:1", [])
    with pytest.raises(MisuseError, match="'a' would be compared with itself"):
        audit_topic("127.0.0.1:1", ["a"], against="a")
    with pytest.raises(MisuseError, match="no directory to audit"):
        audit_files([])
