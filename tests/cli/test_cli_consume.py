"""`oncelog consume` against our broker."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from support.cli import oncelog
from support.client import append, batch_of

from oncelog import Admin, Broker, NewTopic, TopicPartition
from oncelog.cli.consume import record_row
from oncelog.types import Record, TimestampType
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def servers(oncelog_broker: Broker) -> str:
    with Admin({"bootstrap.servers": oncelog_broker.bootstrap_servers}) as admin:
        admin.create_topics([NewTopic("t", 2)])
    append(oncelog_broker.bootstrap_servers, T0, batch_of(b"a", b"b", b"c"))
    append(oncelog_broker.bootstrap_servers, T1, batch_of(b"d"))
    return oncelog_broker.bootstrap_servers


def test_consume_prints_values_to_the_end(servers: str) -> None:
    got = oncelog("consume", "t", "--from-beginning", "--until-end", servers=servers)
    assert got.code == 0
    assert sorted(got.out.split()) == ["a", "b", "c", "d"]
    assert got.err == "4 records\n"


def test_consume_starts_at_an_offset_of_a_partition(servers: str) -> None:
    got = oncelog("consume", "t", "-p", "0", "--offset", "1", "--until-end", "-o", "jsonl", servers=servers)
    rows = [json.loads(line) for line in got.out.splitlines()]
    assert [(row["offset"], row["value"], row["key"]) for row in rows] == [(1, "b", None), (2, "c", None)]


def test_consume_stops_after_max_messages(servers: str) -> None:
    got = oncelog("consume", "t", "-p", "0", "--from-beginning", "-n", "2", servers=servers)
    assert (got.code, got.out) == (0, "a\nb\n")


def test_a_timeout_without_enough_messages_is_exit_code_4(servers: str) -> None:
    limits = ["--from-beginning", "-n", "9", "--timeout-ms", "200"]
    assert oncelog("consume", "t", *limits, servers=servers).code == 4
    quiet = oncelog("consume", "t", "--timeout-ms", "100", servers=servers)
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "0 records\n")


@pytest.mark.parametrize("output", ["json", "yaml", "table", "wide", "value", "jsonl"])
def test_records_are_printed_in_every_format(servers: str, output: str) -> None:
    got = oncelog("consume", "t", "-p", "0", "--from-beginning", "--until-end", "-o", output, servers=servers)
    assert got.code == 0
    if output == "json":
        assert [row["value"] for row in json.loads(got.out)] == ["a", "b", "c"]
    elif output == "yaml":
        assert got.out.count("- topic: ") == 3 and '  value: "c"' in got.out
    elif output in ("table", "wide"):
        header, *rows = got.out.splitlines()
        assert header.split()[:2] == ["PARTITION", "OFFSET"]
        assert [row.split()[0:2] + row.split()[-1:] for row in rows] == [
            ["0", str(i), v] for i, v in enumerate("abc")
        ]
        assert ("TIME" in header) == (output == "wide")
    else:
        assert len(got.out.splitlines()) == 3


def test_json_output_is_complete_when_the_broker_fails() -> None:
    with Broker() as broker:
        servers = broker.bootstrap_servers
        with Admin({"bootstrap.servers": servers}) as admin:
            admin.create_topics([NewTopic("t")])
        append(servers, T0, batch_of(b"a", b"b"))
        command = [sys.executable, "-m", "oncelog.cli.main", "consume", "t", "--from-beginning", "-o", "json"]
        command += ["-b", servers, "-X", "request.timeout.ms=1000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stderr is not None
            printed = [child.stdout.readline() for _ in range(2)]
            broker.stop()
            printed.append(child.stdout.read())
            assert "cannot connect" in child.stderr.read() and child.wait(120) == 1
    assert [row["value"] for row in json.loads("".join(printed))] == ["a", "b"]


def test_wide_shows_headers_and_readable_times(servers: str) -> None:
    rows = [
        NewRecord(
            1_700_000_000_123,
            "schlüssel中".encode(),
            b"v1",
            (("trace", b"x1"), ("n", None), ("h", b"\x1b[2J")),
        ),
        NewRecord(1_700_000_000_123, None, b"v2\x1b[2J"),
    ]
    append(servers, T1, build_batch(rows, producer_id=-1, producer_epoch=-1, base_sequence=-1))
    got = oncelog("consume", "t", "-p", "1", "--offset", "1", "--until-end", "-o", "wide", servers=servers)
    head, first, second = got.out.splitlines()
    assert head.split() == ["PARTITION", "OFFSET", "TIME", "KEY", "HEADERS", "VALUE"]
    assert first.split() == [
        "1", "1", "2023-11-14T22:13:20.123Z", "schlüssel中", "trace=x1", "n=-", "h=\\x1b[2J", "v1"
    ]  # fmt: skip
    assert second.split() == ["1", "2", "2023-11-14T22:13:20.123Z", "-", "-", "v2\\x1b[2J"]
    assert first.index("trace") + 1 == head.index("HEADERS"), "a wide letter takes two columns"


@pytest.mark.parametrize("output", ["table", "wide", "jsonl"])
def test_an_unknown_topic_prints_no_table_header(oncelog_broker: Broker, output: str) -> None:
    for more in ([], ["-p", "0"]):
        arguments = ["nosuch", "--from-beginning", *more, "-o", output, "-X", "request.timeout.ms=1000"]
        got = oncelog("consume", *arguments, servers=oncelog_broker.bootstrap_servers)
        assert (got.code in (1, 4), got.out) == (True, ""), got


def test_control_characters_are_escaped_on_a_terminal_but_not_in_a_pipe(servers: str) -> None:
    append(servers, T1, batch_of("\x1b[31mred\x07\r\u202e\u00a0ok".encode()))
    command = [sys.executable, "-m", "oncelog.cli.main", "consume", "t", "-p", "1", "--offset", "1"]
    command += ["--until-end", "-b", servers]
    piped = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout
    assert piped == "\x1b[31mred\x07\r\u202e\u00a0ok\n".encode()
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=theirs, stderr=subprocess.DEVNULL, timeout=120, check=True)
    os.close(theirs)
    assert os.read(ours, 10_000).decode() == "\\x1b[31mred\\x07\\r\\u202e\u00a0ok\r\n"
    os.close(ours)


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_an_empty_result_is_still_a_document(servers: str, output: str) -> None:
    got = oncelog("consume", "t", "--until-end", "-o", output, servers=servers)
    assert (got.code, got.out) == (0, "[]\n")


def test_bytes_headers_and_nulls_are_printed(servers: str) -> None:
    append(servers, T1, build_batch([NewRecord(5, b"\xff", None, (("h", b"x"), ("n", None)))]))
    arguments = [
        "-p",
        "1",
        "--offset",
        "1",
        "--until-end",
        "-o",
        "jsonl",
        "--isolation-level",
        "read_uncommitted",
    ]
    row = json.loads(oncelog("consume", "t", *arguments, servers=servers).out)
    assert row["key_base64"] == "/w==" and row["value"] is None and row["timestamp_ms"] == 5
    assert row["headers"] == [{"key": "h", "value": "x"}, {"key": "n", "value": None}]


def test_an_interrupt_ends_consume_cleanly(servers: str) -> None:
    command = [
        sys.executable,
        "-m",
        "oncelog.cli.main",
        "consume",
        "t",
        "-p",
        "0",
        "--from-beginning",
        "-o",
        "json",
    ]
    with subprocess.Popen([*command, "-b", servers], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[\n"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 0
    assert len(json.loads("[" + rest)) == 3


def test_a_closed_pipe_ends_consume_quietly(servers: str) -> None:
    append(servers, T0, *(batch_of(*[b"x" * 1000] * 500) for _ in range(3)))
    command = f"{sys.executable} -m oncelog.cli.main consume t --from-beginning -b {servers} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=240)
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_wrong_usage_and_unknown_topics_are_errors_of_consume(servers: str) -> None:
    assert oncelog("consume", "t", "--offset", "1", servers=servers).code == 2
    assert oncelog("consume", "t", "-p", "0", "--offset", "1", "--from-beginning", servers=servers).code == 2
    gone = oncelog("consume", "gone", "-X", "request.timeout.ms=100", servers=servers)
    assert gone.code == 1 and "'gone' does not exist" in gone.err


def test_a_record_is_printed_as_a_row() -> None:
    record = Record("t", 0, 7, 9, TimestampType.CREATE_TIME, b"k", b"\xfe", ())
    assert record_row(record) == {
        "topic": "t",
        "partition": 0,
        "offset": 7,
        "timestamp_ms": 9,
        "key": "k",
        "value_base64": "/g==",
        "headers": [],
    }


def test_a_group_continues_at_its_committed_offset(servers: str) -> None:
    as_group = ["consume", "t", "--group", "g", "--from-beginning"]
    first = oncelog(*as_group, "-n", "2", servers=servers)
    assert first.code == 0
    rest = oncelog(*as_group, "--timeout-ms", "1500", servers=servers)
    whole = oncelog("consume", "t", "--from-beginning", "--until-end", servers=servers)
    assert len(first.out.splitlines()) == 2
    assert sorted(first.out.splitlines() + rest.out.splitlines()) == sorted(whole.out.splitlines())
    for other in (["-p", "0"], ["-p", "0", "--offset", "1"], ["--until-end"]):
        assert oncelog(*as_group, *other, servers=servers).code == 2
