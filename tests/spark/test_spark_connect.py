"""The source, the sink and the audits in a session of Spark Connect, with a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.spark.connect import ConnectServer, run_client
from support.topics import new_topic, producer_of, read

import oncelog.spark.session
from oncelog import Broker
from oncelog.errors import ConfigError, MissingDependency
from oncelog.spark.connect import check_classic, connect_url, spark_errors
from oncelog.spark.session import local_session

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("master", "remote", "expected"),
    [
        (None, None, None),
        (None, "", None),
        (None, "sc://h", "sc://h"),
        ("sc://g:1", None, "sc://g:1"),
        ("sc://g:1", "sc://h", "sc://g:1"),
        ("local[2]", None, None),
        ("spark://h:7077", "", None),
    ],
)
def test_the_server_is_that_of_the_option_or_of_the_variable(
    master: str | None, remote: str | None, expected: str | None
) -> None:
    assert connect_url(master, remote) == expected


def test_a_master_and_a_server_exclude_each_other() -> None:
    """R1421: PySparkRuntimeError and a traceback."""
    with pytest.raises(ConfigError, match="SPARK_REMOTE=sc://h and the master local"):
        connect_url("local[*]", "sc://h")


def test_what_needs_a_jvm_is_refused() -> None:
    def session_of(module: str) -> object:
        return type("SparkSession", (), {"__module__": module})()

    assert check_classic(session_of("pyspark.sql.session"), "write_atomic") is None
    with pytest.raises(ConfigError, match=r"write_atomic needs a session of classic Spark.*no SparkContext"):
        check_classic(session_of("pyspark.sql.connect.session"), "write_atomic")


def test_an_installation_without_py4j_has_the_errors_of_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1420: every audit with pyspark-client failed with ModuleNotFoundError."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    assert spark_errors() == (PySparkException, Py4JError)
    monkeypatch.setitem(sys.modules, "py4j.protocol", None)
    assert spark_errors() == (PySparkException,)


@pytest.mark.parametrize("remote", [None, "sc://h"])
def test_a_command_that_starts_the_driver_refuses_a_server(
    monkeypatch: pytest.MonkeyPatch, remote: str | None
) -> None:
    if remote is not None:
        monkeypatch.setenv("SPARK_REMOTE", remote)
    with pytest.raises(ConfigError, match=r"sc://\S+ is a server of Spark Connect, and this command starts"):
        local_session("x", "sc://h:1").__enter__()


def test_missing_packages_of_spark_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql.connect.session", None)
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    with pytest.raises(MissingDependency, match=r"pip install 'pyspark\[connect\]'"):
        oncelog.spark.session._connect("sc://127.0.0.1:1")


def test_a_server_that_cannot_be_used_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark tries for minutes to reach a server, so a stand-in raises its error."""
    import pyspark.sql
    from pyspark.errors import PySparkException

    def fail() -> None:
        raise PySparkException("no route")

    builder = SimpleNamespace(remote=lambda _url: SimpleNamespace(getOrCreate=fail))
    monkeypatch.setattr(pyspark.sql, "SparkSession", SimpleNamespace(builder=builder))
    with pytest.raises(ConfigError, match=r"the Spark Connect server sc://h:1 cannot be used: .*no route"):
        oncelog.spark.session._connect("sc://h:1")


@pytest.fixture(scope="module")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """A server of Spark Connect. Tests may restart it."""
    pytest.importorskip("grpc", reason="needs pyspark[connect]")
    with ConnectServer(tmp_path_factory.mktemp("connect")) as server:
        yield server


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `oncelog` in a process of its own: PySpark has one kind of session in a process."""
    program = [sys.executable, "-m", "oncelog.cli.main", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=900, check=False)


def values_of(servers: str, topic: str) -> list[int]:
    return sorted(int(record.value or b"") for record in read(servers, topic))


def places(broker: Broker) -> dict[str, Any]:
    """Return the arguments of a client: the broker and two new topics."""
    servers = broker.bootstrap_servers
    return {"servers": servers, "source": new_topic(servers, 2), "target": new_topic(servers, 2)}


def test_batches_and_audits_work_unchanged(
    connect_server: ConnectServer, shared_broker: Broker, tmp_path: Path
) -> None:
    given = places(shared_broker)
    got = run_client("batches", url=connect_server.url, table=str(tmp_path / "table"), **given)
    assert got["rows"] == list(range(100))
    assert set(got["verdicts"].values()) == {"clean"} and len(got["verdicts"]) == 4
    assert got["repeated"] == ["repeated_key"] * 3
    assert got["table"] == [0, 100]

    options = ("--keys", "--master", connect_server.url, "-b", given["servers"], "-o", "json")
    audited = command("audit", given["source"], *options)
    assert (audited.returncode, json.loads(audited.stdout)) == (0, []), audited.stderr
    assert "verdict: clean" in audited.stderr


def test_a_stream_writes_each_row_once_though_its_server_is_killed_and_its_commit_is_lost(
    connect_server: ConnectServer, shared_broker: Broker, tmp_path: Path
) -> None:
    given, checkpoint = places(shared_broker), tmp_path / "checkpoint"
    commits = checkpoint / "commits"

    def copy(numbers: range) -> list[int]:
        with producer_of(given["servers"]) as producer:
            producer.send_many(given["source"], [b"%d" % number for number in numbers]).result(60)
        run_client("copy", url=connect_server.url, checkpoint=str(checkpoint), **given)
        return values_of(given["servers"], given["target"])

    assert copy(range(100)) == list(range(100))
    newest = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    assert newest >= 2
    connect_server.kill()
    for path in (commits / f"{newest}", commits / f".{newest}.crc"):
        path.unlink()
    connect_server.start()
    assert copy(range(100, 120)) == list(range(120))
    assert (commits / f"{newest}").exists()


def test_what_needs_classic_spark_is_refused_with_a_typed_error(
    connect_server: ConnectServer, shared_broker: Broker, tmp_path: Path
) -> None:
    given, servers = places(shared_broker), shared_broker.bootstrap_servers
    file = tmp_path / "rows.csv"
    file.write_text("id\n1\n")
    where = {"url": connect_server.url, "servers": servers, "topic": given["target"]}
    got = run_client("refusals", file=str(file), **where)
    for name in ("write_atomic", "require_deterministic", "load"):
        assert got[name].startswith("ConfigError: ") and "needs a session of classic Spark" in got[name]
    assert got["audit"].startswith("UnknownTopicOrPartition: ")

    with producer_of(servers) as producer:
        producer.send_many(given["source"], [b"1", b"2"]).result(60)
    text = run_client("in_foreach_batch", url=connect_server.url, checkpoint=str(tmp_path / "c"), **given)
    assert "ConfigError: write_atomic needs a session of classic Spark" in text
    assert values_of(servers, given["target"]) == []
