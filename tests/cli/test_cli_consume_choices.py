"""Options of `oncelog consume`: start and end, filters, formats, several topics, and Parquet files."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.cli import Outcome, oncelog
from support.topics import new_topic, producer_of

from oncelog import Admin, Consumer, NewTopic, TopicPartition
from oncelog.cli import consume
from oncelog.cli.parquet_file import ParquetFile
from oncelog.types import Record, TimestampType

BEGIN_MS = 1_700_000_000_000
_numbers = itertools.count()


@pytest.fixture(scope="module")
def topic(ours: str) -> str:
    """Create a topic of two partitions with six records each, one second apart, from 2023-11-14T22:13:20Z."""
    name = new_topic(ours, 2)
    with producer_of(ours) as producer:
        for number in range(12):
            producer.send(
                name,
                json.dumps({"n": number // 2, "place": {"code": "EWR" if number % 3 else "JFK"}}).encode(),
                key=b"k%d" % (number // 2),
                partition=number % 2,
                timestamp_ms=BEGIN_MS + number // 2 * 1000,
                headers=[("trace", b"x%d" % (number // 2))],
            )
    return name


@pytest.fixture
def read(ours: str, topic: str) -> Callable[..., Outcome]:
    def run(*arguments: str) -> Outcome:
        return oncelog("consume", topic, *arguments, servers=ours)

    return run


PLACES = "-f", r"%p:%o\n"


@pytest.mark.parametrize(
    ("arguments", "offsets"),
    [
        (["--tail", "2", "-e"], [4, 5]),
        (["--last", "0", "-e"], []),
        (["--last", "99", "-e"], [0, 1, 2, 3, 4, 5]),
        (["--since", "2023-11-14T22:13:23Z", "--until-end"], [3, 4, 5]),
        (["--since", "1700000003000", "--until", "1700000005000"], [3, 4]),
        (["--from-beginning", "--until", "2023-11-14T22:13:22Z"], [0, 1]),
        (["--from-beginning", "--until", "now"], [0, 1, 2, 3, 4, 5]),
        (["--tail", "2", "--until", "2023-11-14T22:13:22Z"], [0, 1]),
        (["--since", "1h", "-e"], []),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_reading_starts_and_ends_where_the_options_say(
    read: Callable[..., Outcome], arguments: list[str], offsets: list[int]
) -> None:
    got = read(*arguments, *PLACES)
    assert got.code == 0, got.err
    assert sorted(got.out.split()) == [f"{partition}:{offset}" for partition in (0, 1) for offset in offsets]


def test_records_that_are_left_after_a_deletion_are_read(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, place = new_topic(ours), consume._place
    with producer_of(ours) as producer:
        for number in range(6):
            producer.send(name, b"%d" % number)

    def then_delete(*arguments: Any) -> None:
        place(*arguments)
        with Admin({"bootstrap.servers": ours}) as admin:
            admin.delete_records({TopicPartition(name, 0): 4})

    with monkeypatch.context() as patch:
        patch.setattr(consume, "_place", then_delete)
        assert oncelog("consume", name, "--tail", "6", "-e", servers=ours).out == "4\n5\n"
    deleted = oncelog("consume", name, "-p", "0", "--offset", "0", "-e", servers=ours)
    assert deleted.code == 1 and "OFFSET_OUT_OF_RANGE" in deleted.err


def test_a_format_prints_each_part_of_a_record(read: Callable[..., Outcome], topic: str) -> None:
    got = read("-p", "1", "--offset", "5", "-e", "-f", r"%t/%p@%o %T %k %K %S %h\n")
    assert got.out == f"{topic}/1@5 {BEGIN_MS + 5000} k5 2 34 trace=x5\n"


@pytest.mark.parametrize(
    ("arguments", "offsets"),
    [
        (["--key", "k3"], [3]),
        (["--key", "k"], []),
        (["--header", "trace=x1"], [1]),
        (["--header", "trace"], [0, 1, 2, 3, 4, 5]),
        (["--header", "span"], []),
        (["--json-field", "n=4"], [4]),
        (["--json-field", "place.code=JFK"], [0, 3]),
        (["--json-field", "place.code=JFK", "--key", "k3"], [3]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_records_are_chosen_by_key_header_and_json_field(
    read: Callable[..., Outcome], arguments: list[str], offsets: list[int]
) -> None:
    got = read("-p", "0", "--from-beginning", "-e", *arguments, "-f", r"%o\n")
    assert [int(line) for line in got.out.split()] == offsets
    assert got.err == f"{len(offsets)} of 6 records\n"


def test_only_matching_records_count_for_max_messages(read: Callable[..., Outcome]) -> None:
    got = read("-p", "0", "--from-beginning", "-n", "2", "--json-field", "place.code=JFK", "-f", "%o ")
    assert (got.code, got.out) == (0, "0 3 ")


def test_several_topics_and_patterns_are_read(ours: str) -> None:
    mark = f"several-{next(_numbers)}"
    names = [f"{mark}-{letter}" for letter in "abc"]
    with Admin({"bootstrap.servers": ours}) as admin, producer_of(ours) as producer:
        admin.create_topics([NewTopic(name) for name in names])
        for name in names:
            producer.send(name, b"v")
    end = ["--from-beginning", "-e", "-f", r"%t\n"]
    got = oncelog("consume", names[0], names[2], names[0], *end, servers=ours)
    assert sorted(got.out.split()) == [names[0], names[2]]
    consumer_setting = ["-X", "fetch.min.bytes=1"]
    got = oncelog("consume", "--regex", f"{mark}-[ab]", *end, *consumer_setting, servers=ours)
    assert sorted(got.out.split()) == names[:2], got.err
    none = oncelog("consume", "--regex", mark, "x", *end, servers=ours)
    assert none.code == 1 and f"no topic matches '{mark}' or 'x'" in none.err
    group = ["--group", mark, "--from-beginning", "-n", "2", "-f", r"%t\n"]
    got = oncelog("consume", "--regex", f"{mark}-[bc]", *group, servers=ours)
    assert sorted(got.out.split()) == names[1:]


def test_records_are_written_into_a_parquet_file(
    read: Callable[..., Outcome], topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncelog.cli.parquet_file.CHUNK_RECORDS", 5)
    path = tmp_path / "t.parquet"
    path.write_text("what was there before")
    got = read("--from-beginning", "-e", "--to-parquet", str(path))
    assert (got.code, got.out, got.err) == (0, "", "12 records\n")
    file = pq.ParquetFile(path)
    assert file.num_row_groups == 3
    rows = sorted(file.read().to_pylist(), key=lambda row: (row["partition"], row["offset"]))
    assert [(row["topic"], row["partition"], row["offset"]) for row in rows] == [
        (topic, partition, offset) for partition in (0, 1) for offset in range(6)
    ]
    assert rows[1]["key"] == b"k1" and json.loads(rows[1]["value"])["n"] == 1
    assert rows[1]["timestamp"].timestamp() * 1000 == BEGIN_MS + 1000
    assert rows[1]["headers"] == [{"key": "trace", "value": b"x1"}]
    assert os.listdir(tmp_path) == ["t.parquet"]


def test_an_error_leaves_the_old_parquet_file(ours: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("what was there before")
    short = ["-X", "request.timeout.ms=500", "--to-parquet", str(path)]
    got = oncelog("consume", "nosuch-topic", "--from-beginning", "-e", *short, servers=ours)
    assert got.code == 1 and path.read_text() == "what was there before"
    assert os.listdir(tmp_path) == ["t.parquet"]


def test_large_headers_end_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.cli.parquet_file.CHUNK_BYTES", 100)
    record = Record("t", 0, 0, 0, TimestampType.CREATE_TIME, None, b"v", (("trace", bytes(100)),))
    with ParquetFile(tmp_path / "t.parquet") as file:
        file.add([record, record])
    assert pq.ParquetFile(tmp_path / "t.parquet").num_row_groups == 2


def test_a_parquet_file_replaces_no_pipe_and_no_link(read: Callable[..., Outcome], tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    got = read("--from-beginning", "-e", "--to-parquet", str(pipe))
    assert got.code == 2 and "is not a regular file" in got.err and pipe.is_fifo()
    link.symlink_to(target.name)
    assert read("--from-beginning", "-e", "--to-parquet", str(link)).code == 0
    assert link.is_symlink() and pq.read_table(target).num_rows == 12


def test_a_group_commits_only_what_is_in_the_file(
    read: Callable[..., Outcome], ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, path = f"parquet-{next(_numbers)}", tmp_path / "t.parquet"
    arguments = ["--group", group, "--from-beginning", "-n", "12", "--to-parquet", str(path)]

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("oncelog.cli.parquet_file.ParquetFile._write_chunk", full_disk)
        got = read(*arguments)
    assert (got.code, got.err) == (1, "oncelog: OSError: [Errno 28] No space left on device\n")
    with Admin({"bootstrap.servers": ours}) as admin:
        assert admin.group_offsets(group) == {} and os.listdir(tmp_path) == []
        assert read(*arguments).code == 0
        assert sorted(offset.offset for offset in admin.group_offsets(group).values()) == [6, 6]
    assert pq.read_table(path).num_rows == 12


@pytest.mark.parametrize("to_file", [False, True], ids=["printed", "saved"])
def test_a_group_does_not_commit_what_was_polled_and_not_written(
    read: Callable[..., Outcome], ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_file: bool
) -> None:
    group, path = f"interrupted-{next(_numbers)}", tmp_path / "t.parquet"
    output = ["--to-parquet", str(path)] if to_file else ["-f", r"%p:%o\n"]
    arguments = [
        "--group",
        group,
        "--from-beginning",
        "-X",
        "max.poll.records=5",
        "--header",
        "trace",
        *output,
    ]
    matches, calls = consume.RecordFilter.matches, itertools.count(1)

    def interrupted_once(record_filter: consume.RecordFilter, record: Any) -> bool:
        if next(calls) == 8:  # Ctrl-C while the records of the second poll are filtered
            raise KeyboardInterrupt
        return matches(record_filter, record)

    monkeypatch.setattr(consume.RecordFilter, "matches", interrupted_once)
    got = read(*arguments)
    written = pq.read_table(path).num_rows if to_file else len(got.out.splitlines())
    with Admin({"bootstrap.servers": ours}) as admin:
        committed = sum(offset.offset for offset in admin.group_offsets(group).values())
    assert (got.code, written, committed) == (0, 5, 5), got.err


def test_a_filter_with_max_messages_reads_many_records_a_poll(
    read: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, sizes = Consumer.poll, list[int | None]()

    def counted(consumer: Consumer, *arguments: Any, max_records: int | None = None) -> Any:
        sizes.append(max_records)
        return poll(consumer, *arguments, max_records=max_records)

    monkeypatch.setattr(Consumer, "poll", counted)
    got = read("-p", "0", "--from-beginning", "-e", "--key", "k3", "-n", "1", *PLACES)
    assert (got.code, got.out, set(sizes)) == (0, "0:3\n", {None})
    assert got.err == "1 of 4 records\n", "records after the last one that is printed are not examined"


def test_a_group_with_a_filter_and_max_messages_continues_after_the_last_match(
    read: Callable[..., Outcome], ours: str
) -> None:
    group = f"first-match-{next(_numbers)}"
    for number in (1, 4):
        got = read("--group", group, "--from-beginning", "--key", f"k{number}", "-n", "1", "-f", r"%k\n")
        assert (got.code, got.out) == (0, f"k{number}\n"), got.err
        with Admin({"bootstrap.servers": ours}) as admin:
            committed = sorted(offset.offset for offset in admin.group_offsets(group).values())
        assert number + 1 in committed, committed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-f", "%q"], "%q has no meaning"),
        (["-f", "%s", "-o", "json"], "--output and --format exclude each other"),
        (["-f", "%s", "--to-parquet", "x"], "exclude each other"),
        (["--since", "yesterday"], "'yesterday' is not a time such as 1h"),
        (["--tail", "-1"], "-1"),
        (["--tail", "1", "--since", "1h"], "--tail and --since exclude each other"),
        (["--group", "g", "--until", "1h"], "--group assigns partitions"),
        (["--group", "g", "--tail", "1"], "--group assigns partitions"),
        (["--group", "g", "-e"], "--max-messages and --timeout-ms stop a member"),
        (["--json-field", "a"], "expected FIELD=VALUE"),
        (["--header", "=x"], "expected NAME=VALUE"),
        (["--regex", "(?=x)"], "is not a regular expression of RE2"),
        (["--regex", "\udcff"], "is not a regular expression of RE2"),
        (["another", "-p", "0", "--offset", "1"], "--offset needs --partition and one topic"),
    ],
    ids=lambda value: " ".join(value).encode(errors="replace").decode() if isinstance(value, list) else "",
)
def test_wrong_choices_are_usage_errors(
    read: Callable[..., Outcome], arguments: list[str], says: str
) -> None:
    got = read(*arguments)
    assert got.code == 2 and says in got.err, got.err


def test_a_pipe_gets_the_bytes_of_a_value_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", stdout)
    consume._write(b"\xff\0\x1b[2J")
    assert stdout.buffer.getvalue() == b"\xff\0\x1b[2J"  # type: ignore[attr-defined]
