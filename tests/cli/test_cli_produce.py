"""`oncelog produce` against our broker."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from support.cli import Outcome, oncelog
from support.terminal import PseudoTerminal

from oncelog import Admin, Broker, Consumer, NewTopic, Record, TopicPartition
from oncelog.cli import produce as produce_module
from oncelog.cli.produce import _by_delimiter, _Status, _Tally, parse_json
from oncelog.cli.record_format import unescape


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {"auto.create.topics.enable": "false"}


@pytest.fixture
def topic(broker: Broker, request: pytest.FixtureRequest) -> str:
    """Create a topic of two partitions for this test."""
    name = re.sub(r"\W+", "-", request.node.name)[:80]
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.create_topics([NewTopic(name, 2)])
    return name


def produce(broker: Broker, *arguments: str, stdin: bytes | None = b"") -> Outcome:
    source = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
    with mock.patch.object(sys, "stdin", source):
        return oncelog("produce", *arguments, servers=broker.bootstrap_servers)


def read(broker: Broker, topic: str) -> list[Record]:
    with Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer:
        tps = [TopicPartition(topic, partition) for partition in (0, 1)]
        consumer.assign(tps)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(tps)
        records: list[Record] = []
        while len(records) < sum(ends.values()):
            records += consumer.poll(60)
    return sorted(records, key=lambda record: (record.partition, record.offset))


def test_lines_of_standard_input_are_produced(broker: Broker, topic: str) -> None:
    got = produce(broker, topic, "-p", "1", "-o", "json", stdin=b"a\n\xff\r\n\nlast")
    assert (got.code, got.err) == (0, "")
    assert json.loads(got.out) == [
        {"topic": topic, "partition": 1, "first_offset": 0, "last_offset": 3, "records": 4}
    ]
    assert [record.value for record in read(broker, topic)] == [b"a", b"\xff", b"", b"last"]


def test_a_parquet_file_is_not_cut_into_lines(broker: Broker, topic: str, tmp_path: Path) -> None:
    parquet, other = tmp_path / "records.parquet", tmp_path / "PAR1.txt"
    parquet.write_bytes(b"PAR1\n\0\nPAR1")
    other.write_bytes(b"PAR1\nPAR\n")
    got = produce(broker, topic, str(parquet))
    assert got.code == 1 and "records.parquet is a Parquet file" in got.err
    assert produce(broker, topic, str(other)).code == 0
    assert sorted(record.value for record in read(broker, topic)) == [b"PAR", b"PAR1"]


def test_files_with_keys_are_produced(broker: Broker, topic: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"k1\tv1\nk2\tv2\twith\n")
    two.write_bytes(b"k1\tv3\n")
    got = produce(broker, topic, str(one), str(two), "--key-separator", r"\t")
    assert got.code == 0
    assert got.out.splitlines()[0].split() == [
        "TOPIC",
        "PARTITION",
        "FIRST",
        "OFFSET",
        "LAST",
        "OFFSET",
        "RECORDS",
    ]
    records = read(broker, topic)
    assert sorted((record.key, record.value) for record in records) == [
        (b"k1", b"v1"),
        (b"k1", b"v3"),
        (b"k2", b"v2\twith"),
    ]
    assert len({record.partition for record in records if record.key == b"k1"}) == 1


def test_produce_reads_the_json_lines_that_consume_prints(broker: Broker, topic: str) -> None:
    row = {"key": "k", "value_base64": "/w==", "partition": 1, "timestamp": 7, "headers": {"h": "x"}}
    assert produce(broker, topic, "--jsonl", stdin=json.dumps(row).encode()).code == 0
    (first,) = read(broker, topic)
    assert (first.partition, first.key, first.value, first.timestamp_ms) == (1, b"k", b"\xff", 7)
    assert first.headers == (("h", b"x"),)
    ends = ["--from-beginning", "--until-end", "-o", "jsonl"]
    printed = oncelog("consume", topic, *ends, servers=broker.bootstrap_servers).out
    assert produce(broker, topic, "--jsonl", stdin=printed.encode()).code == 0
    assert [record[3:] for record in read(broker, topic)] == [first[3:]] * 2


def test_json_lines_are_parsed_into_fields() -> None:
    assert parse_json(b'{"value": {"a": [1]}, "headers": [{"key": "n", "value": null}]}') == {
        "key": None,
        "value": b'{"a":[1]}',
        "headers": [("n", None)],
        "partition": None,
        "timestamp_ms": None,
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "Expecting"),
        (b"[]", "expected a JSON object"),
        (b'{"valu": 1}', "expected a JSON object"),
        (b'{"partition": "1"}', "whole number"),
        (b'{"value_base64": "x"}', "value_base64"),
        (b'{"headers": 3}', "headers must be"),
        (b'{"headers": [1]}', "a header must be"),
        # R1068: this line ended the command with a traceback
        pytest.param(b"[" * 100_000, "recursion", id="nested"),
    ],
)
def test_a_wrong_line_is_named_and_earlier_lines_are_sent(
    broker: Broker, topic: str, line: bytes, says: str
) -> None:
    got = produce(broker, topic, "--jsonl", "-o", "jsonl", stdin=b'{"value": "good"}\n' + line)
    assert got.code == 1
    assert ":2: " in got.err and says in got.err
    assert json.loads(got.out)["records"] == 1


def test_a_separator_may_be_a_byte_that_is_no_text(broker: Broker, topic: str) -> None:
    """R1068. Python decodes the byte ÿ on the command line to the string that is passed here."""
    assert produce(broker, topic, "-k", "\udcff", "-p", "0", stdin=b"a\xffb").code == 0
    (record,) = read(broker, topic)
    assert (record.key, record.value) == (b"a", b"b")


def test_options_give_all_records_a_key_headers_and_a_timestamp(broker: Broker, topic: str) -> None:
    options = ["--key", "k", "-H", "a=1", "-H", "b", "-H", "a=\udcff", "--timestamp", "1700000000000"]
    assert produce(broker, topic, *options, "-p", "0", stdin=b"one\ntwo\n").code == 0
    first, second = read(broker, topic)
    assert (first.value, second.value) == (b"one", b"two")
    assert first[3:4] + first[5:6] + first[7:] == (
        1_700_000_000_000,
        b"k",
        (("a", b"1"), ("b", None), ("a", b"\xff")),
    )
    assert first.headers == second.headers and first.key == second.key


def test_headers_are_added_to_those_of_json_lines(broker: Broker, topic: str) -> None:
    assert (
        produce(broker, topic, "--jsonl", "-H", "b=2", stdin=b'{"value": 1, "headers": {"a": "1"}}').code == 0
    )
    (record,) = read(broker, topic)
    assert record.headers == (("a", b"1"), ("b", b"2"))


def test_an_empty_value_is_sent_as_null_on_request(broker: Broker, topic: str) -> None:
    assert produce(broker, topic, "-p", "0", "-k", "=", "-Z", stdin=b"a=1\nb=\n").code == 0
    assert produce(broker, topic, "-p", "0", "--key", "c", "--tombstone", stdin=b"\n").code == 0
    assert produce(broker, topic, "-p", "0", "--key", "d", stdin=b"\n").code == 0
    assert [(record.key, record.value) for record in read(broker, topic)] == [
        (b"a", b"1"), (b"b", None), (b"c", None), (b"d", b""),
    ]  # fmt: skip


class SlowPipe(io.BytesIO):
    """A pipe from which each read returns one byte."""

    def read1(self, size: int | None = -1) -> bytes:
        return self.read(1)


@pytest.mark.parametrize(
    ("delimiter", "text", "values"),
    [
        (";", b"a;b\n;;c", [b"a", b"b\n", b"", b"c"]),
        (r"\0", b"a\0b\0", [b"a", b"b"]),
        ("<>", b"a<<>b>", [b"a<", b"b>"]),
        (r"\xff", b"\xff", [b""]),
    ],
)
def test_records_end_at_the_delimiter(delimiter: str, text: bytes, values: list[bytes]) -> None:
    # A read from a pipe may end within a delimiter.
    for file in (io.BytesIO(text), SlowPipe(text)):
        assert list(_by_delimiter(file, unescape(delimiter))) == values


def test_a_file_is_cut_at_the_delimiter_and_compressed(broker: Broker, topic: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a;b\n;c")
    file = str(tmp_path / "file")
    assert produce(broker, topic, file, "-D", ";", "-p", "0", "-z", "gzip").code == 0
    assert [record.value for record in read(broker, topic)] == [b"a", b"b\n", b"c"]
    with Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer:
        (batch,) = consumer.fetch_batches(TopicPartition(topic, 0), 0, 3)
    assert batch[22] & 7 == 1, "the codec in the attributes of the batch"


def test_a_line_without_the_separator_is_an_error(broker: Broker, topic: str) -> None:
    got = produce(broker, topic, "-k", "=", stdin=b"a=1\nb\n")
    assert got.code == 1 and "no '=' between key and value" in got.err


def test_failed_records_are_exit_code_1_with_the_typed_error(broker: Broker, topic: str) -> None:
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.create_topics([NewTopic(f"{topic}-small", 1, configs={"max.message.bytes": "300"})])
    settings = ["-X", "batch.size=100", "-X", "max.request.size=2000", "-o", "json"]
    lines = b"\n".join([b"x", b"y" * 500, b"z" * 5000, b"w"])
    got = produce(broker, f"{topic}-small", *settings, stdin=lines)
    assert got.code == 1
    assert "2 records failed: MessageTooLarge: " in got.err
    assert sum(row["records"] for row in json.loads(got.out)) == 2


def test_wrong_usage_and_unknown_topics_are_errors_of_produce(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    assert produce(broker, topic, "--jsonl", "-k", ",").code == 2
    assert produce(broker, topic, "-k", "").code == 2
    assert produce(broker, topic, "-D", "").code == 2
    assert produce(broker, topic, "-D", r"\q").code == 2
    assert produce(broker, topic, "--key", "a", "-k", ",").code == 2
    assert produce(broker, topic, "-H", "=x").code == 2
    assert produce(broker, topic, "-z", "brotli").code == 2
    assert produce(broker, topic, "--timestamp", "soon").code == 2
    for option in (["--key", "a"], ["-Z"], ["--timestamp", "1h"]):
        assert produce(broker, topic, "--jsonl", *option).code == 2
    assert produce(broker, topic, "-X", "acks=0", "-X", "enable.idempotence=true").code == 2
    assert produce(broker, topic, "-p", "2", stdin=b"x").code == 2
    missing = produce(broker, topic, str(tmp_path / "missing"))
    assert missing.code in (1, 2) and "missing" in missing.err
    gone = produce(broker, "gone", "-X", "max.block.ms=300", stdin=b"x")
    assert gone.code in (1, 4) and "gone" in gone.err


def test_empty_input_sends_nothing(broker: Broker, topic: str) -> None:
    assert produce(broker, topic, "-o", "json", stdin=b"").out == "[]\n"
    assert produce(broker, topic, "-o", "json", stdin=None).out == "[]\n"


def test_a_closed_standard_input_counts_as_empty(broker: Broker, topic: str) -> None:
    command = (
        f"{sys.executable} -m oncelog.cli.main produce {topic} -o json -b {broker.bootstrap_servers} <&-"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_an_interrupt_sends_what_was_read(broker: Broker, topic: str) -> None:
    command = [
        sys.executable,
        "-m",
        "oncelog.cli.main",
        "produce",
        topic,
        "-o",
        "json",
        "-X",
        "linger.ms=60000",
    ]
    with subprocess.Popen(
        [*command, "-X", "delivery.timeout.ms=120000", "-b", broker.bootstrap_servers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        # A pipe holds less than this. Once all of it is written, the command must have read at least the
        # first lines.
        process.stdin.write(b"line\n" * 100_000)
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        rows = json.loads(process.stdout.read())
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, b"")
    count = sum(row["records"] for row in rows)
    assert count > 80_000
    assert [record.value for record in read(broker, topic)] == [b"line"] * count


def test_a_missing_topic_is_an_error_long_before_max_block_ms(broker: Broker) -> None:
    """`send` waits for a missing topic, which may be created soon.

    A missing topic on the command line is probably a typo.
    """
    got = produce(broker, "mistyped", "-X", "max.block.ms=86400000", stdin=b"x")
    assert got.code == 1
    assert "topic 'mistyped' does not exist" in got.err
    assert "0 records failed" not in got.err


def test_progress_changes_at_intervals_and_not_with_each_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(produce_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    tally = _Tally()
    with _Status(tally) as show:
        for _ in range(1000):
            tally.sent += 1
            show()
        now_s += 0.2
        show()
    assert capsys.readouterr().err.split("\r\x1b[K") == [
        "", "sending", "1 records sent, 0 stored", "1000 records sent, 0 stored", ""
    ]  # fmt: skip


def test_a_terminal_shows_progress_of_piped_records_until_the_end(broker: Broker, topic: str) -> None:
    command = [sys.executable, "-m", "oncelog.cli.main", "produce", topic, "-o", "jsonl"]
    with PseudoTerminal(80, 10) as terminal:
        process = terminal.start(
            [*command, "-b", broker.bootstrap_servers], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write("first\n")
        process.stdin.flush()
        terminal.read_until("1 records sent")
        out, _ = process.communicate("second\n", timeout=120)
        assert process.returncode == 0 and terminal.screen().rows == [""]
    assert sum(json.loads(line)["records"] for line in out.splitlines()) == 2
