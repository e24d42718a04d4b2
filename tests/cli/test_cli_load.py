"""`oncelog load` against our broker."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from support.cli import Outcome, oncelog
from support.load import PARTITIONS, content, expected, write_csv
from support.topics import new_topic, values

from oncelog import Admin, Broker, Producer
from oncelog.client.admin.blocking import ConfigResource, NewTopic
from oncelog.errors import InvalidTxnState, LoadRefused, OncelogError, PeerError
from oncelog.load import checkpoints
from oncelog.load.checkpoints import (
    CHECKPOINT_TOPIC,
    checkpoint_partition,
    decode_checkpoint,
    encode_checkpoint,
)
from oncelog.load.decisions import FileCheckpoint
from oncelog.load.loader import Load, Report, fenced_producer, run_load
from oncelog.load.parsing import Options

ROWS = 500


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {"auto.create.topics.enable": "false"}


@pytest.fixture
def topic(broker: Broker) -> str:
    return new_topic(broker.bootstrap_servers, PARTITIONS)


def load(broker: Broker, topic: str, load_id: str, *arguments: str | Path) -> Outcome:
    texts = map(str, arguments)
    return oncelog("load", *texts, "--topic", topic, "--id", load_id, servers=broker.bootstrap_servers)


def row(outcome: Outcome) -> dict[str, object]:
    assert outcome.code == 0, outcome.err
    (report_row,) = json.loads(outcome.out)
    return {key: report_row[key] for key in ("records", "records_before", "transactions")}


def test_a_record_that_is_too_large_is_named(broker: Broker, topic: str, tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    path.write_bytes(b"a\nb\n" + b"x" * 2_000_000 + b"\nc\n")
    outcome = load(broker, topic, topic, path, "--batch-records", "2")
    assert outcome.code == 1
    assert f"{path}, record 3: a record of 2000" in outcome.err
    assert values(broker.bootstrap_servers, topic) == [b"a", b"b"]
    larger = "-X", "max.request.size=3000000"
    outcome = load(broker, topic, topic, path, "--batch-records", "2", *larger)
    assert "MESSAGE_TOO_LARGE" in outcome.err  # the broker's error: the topic accepts one megabyte


@pytest.mark.behaviour("P4")
def test_a_repeated_load_stores_each_record_once(broker: Broker, topic: str, tmp_path: Path) -> None:
    servers = broker.bootstrap_servers
    first, second = write_csv(tmp_path / "1.csv", 0, ROWS), write_csv(tmp_path / "2.csv", ROWS, ROWS)
    options = ("--key", "k", "--batch-records", "200", "-o", "json")
    outcome = load(broker, topic, "once", first, *options)
    assert (row(outcome), outcome.err) == ({"records": ROWS, "records_before": 0, "transactions": 3}, "")
    assert content(servers, topic) == expected(ROWS)
    again = load(broker, topic, "once", first, *options)
    assert row(again) == {"records": 0, "records_before": ROWS, "transactions": 0}
    assert again.err == "load once is complete: its 500 records were loaded earlier\n"
    more = load(broker, topic, "once", first, second, *options)
    assert row(more) == {"records": ROWS, "records_before": ROWS, "transactions": 3}
    assert content(servers, topic) == expected(2 * ROWS)
    fewer = load(broker, topic, "once", first, *options)
    assert (fewer.code, "2 files, but 1 were given" in fewer.err) == (1, True)


@pytest.mark.behaviour("P4")
def test_a_changed_file_is_refused(broker: Broker, topic: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "rows.csv", 0, ROWS)
    was = file.stat()
    assert load(broker, topic, "changed", file, "--key", "k").code == 0
    text = file.read_text()
    file.write_text(text + "key-0,500\n")
    longer = load(broker, topic, "changed", file, "--key", "k")
    assert longer.code == 1
    assert re.search(r"rows.csv changed since it was read: its size was \d+ bytes and is now \d+", longer.err)
    file.write_text(text.replace(",77\n", ",78\n"))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    other = load(broker, topic, "changed", file, "--key", "k")
    assert (other.code, "has changed" in other.err) == (1, True)
    file.write_text(text)  # restores the old content; the modification time is new
    assert "is complete" in load(broker, topic, "changed", file, "--key", "k").err
    keyless = load(broker, topic, "changed", file)
    assert (keyless.code, "begun as csv with key k; now it is csv" in keyless.err) == (1, True)
    assert content(broker.bootstrap_servers, topic) == expected(ROWS)


@pytest.mark.behaviour("P4")
def test_one_file_by_two_paths_is_refused(broker: Broker, topic: str, tmp_path: Path) -> None:
    """Regression: a directory of logs that also had a link to the newest log was loaded with that log
    twice.
    """
    first, second = tmp_path / "2026-01-01.log", tmp_path / "2026-01-02.log"
    first.write_bytes(b"a\n")
    second.write_bytes(b"b\n")
    link, dotted = tmp_path / "current.log", tmp_path / ".." / tmp_path.name / first.name
    link.symlink_to(second.name)
    for duplicate, other in ((link, second), (dotted, first)):
        refused = load(broker, topic, topic, first, second, duplicate)
        assert refused.code == 1
        assert f"{duplicate} is given twice, also as {other}; all its records" in refused.err
    assert values(broker.bootstrap_servers, topic) == []
    assert load(broker, topic, topic, first).code == 0
    added = load(broker, topic, topic, first, dotted)
    assert (added.code, "is given twice, also as" in added.err) == (1, True)
    assert values(broker.bootstrap_servers, topic) == [b"a"]
    assert load(broker, topic, topic, dotted, link).code == 0
    # The values are in two partitions, which are read in any order.
    assert sorted(values(broker.bootstrap_servers, topic)) == [b"a", b"b"]


def write_at(path: Path, text: str | bytes) -> Path:
    """Write a file. All files get the same modification time."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.mark.behaviour("P4")
def test_a_file_that_comes_late_and_sorts_first_is_not_taken_for_the_one_that_was_read(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Equal sizes and modification times, as in archives and fixed-width exports, must not make two files
    look like one.
    """
    february = write_at(tmp_path / "2026-02.txt", "feb-1\nfeb-2\n")
    assert row(load(broker, topic, "late", february, "-o", "json"))["records"] == 2
    january = write_at(tmp_path / "2026-01.txt", "jan-1\njan-2\n")
    for files in ([january, february], [january]):
        refused = load(broker, topic, "late", *files)
        assert refused.code == 1
        assert f"{january} is in the place of {february}" in refused.err
        assert "Give the files in their earlier order with new files at the end" in refused.err
    assert sorted(values(broker.bootstrap_servers, topic)) == [b"feb-1", b"feb-2"]
    assert row(load(broker, topic, "late", february, january, "-o", "json"))["records"] == 2
    assert len(values(broker.bootstrap_servers, topic)) == 4


@pytest.mark.behaviour("P4")
def test_a_file_that_was_renamed_is_known_by_its_content(
    broker: Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_at(tmp_path / "log.txt", "old-1\n")
    assert load(broker, topic, "renamed", old).code == 0
    moved = old.rename(tmp_path / "log.1.txt")
    new = write_at(tmp_path / "log.txt", "new-1\n")
    again = load(broker, topic, "renamed", moved)
    assert (again.code, "is complete" in again.err) == (0, True)
    assert load(broker, topic, "renamed", moved, new).code == 0
    assert sorted(values(broker.bootstrap_servers, topic)) == [b"new-1", b"old-1"]
    # In another directory, a relative path names another file.
    (tmp_path / "elsewhere").mkdir()
    other = write_at(tmp_path / "elsewhere" / "log.1.txt", "fake1\n")
    monkeypatch.chdir(other.parent)
    assert load(broker, topic, "renamed", "log.1.txt", new).code == 1
    monkeypatch.chdir(tmp_path)
    assert load(broker, topic, "renamed", "log.1.txt", "log.txt").code == 0
    twice = load(broker, topic, "renamed", "log.1.txt", "log.txt", new)
    assert (twice.code, "log.txt is given twice" in twice.err) == (1, True)


def test_a_compressed_file_of_the_same_size_that_goes_on_is_another_one(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    short, long = (gzip.compress(b"a\n" * count, 9, mtime=0) for count in (1_000, 1_020))
    assert len(short) == len(long)
    file = write_at(tmp_path / "a.txt.gz", short)
    assert load(broker, topic, "goes-on", file).code == 0
    file.write_bytes(long)
    refused = load(broker, topic, "goes-on", file)
    assert (refused.code, "does not end at position 2000 any more" in refused.err) == (1, True)


@pytest.mark.behaviour("P4")
def test_marks_of_earlier_versions_are_understood(broker: Broker, topic: str, tmp_path: Path) -> None:
    """Checkpoints of earlier versions contain the path as the user wrote it.

    If that path is relative, the load compares the file's content.
    """
    files = [write_at(tmp_path / f"{n}.txt", f"a{n}\nb{n}\n") for n in range(2)]
    servers, tp = broker.bootstrap_servers, checkpoint_partition("old")
    digest = hashlib.sha256(b"a0\nb0\n").hexdigest()
    mark = FileCheckpoint(topic, None, "lines", "0.txt", 6, 10**18, 6, 2, digest, True)
    assert load(broker, topic, "another", files[0]).code == 0  # this load creates the checkpoint topic
    with Producer({"bootstrap.servers": servers}) as producer:
        key, value = encode_checkpoint("old", 0, mark)
        producer.send(tp.topic, value, key, partition=tp.partition).result(60)
    assert row(load(broker, topic, "old", *files, "-o", "json"))["records"] == 2
    assert sorted(values(servers, topic)) == [b"a0", b"a1", b"b0", b"b1"]
    refused = load(broker, topic, "old", *reversed(files))
    assert (refused.code, "1.txt is in the place of 0.txt" in refused.err) == (1, True)


def test_the_part_that_was_read_is_checked(broker: Broker, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = "".join(f'{{"n":{n}}}\n' for n in range(100))
    file.write_text(good + '{"n":}\n')
    options = ("--key", "n", "--batch-records", "10")
    bad = load(broker, topic, "part", file, *options)
    assert (bad.code, "rows.jsonl, in the records from byte 890 on: " in bad.err) == (1, True)
    assert len(values(broker.bootstrap_servers, topic)) == 100
    # Repair the bad line, but also change a line that was already loaded.
    file.write_text(good.replace("55", "56") + '{"n":0}\n')
    refused = load(broker, topic, "part", file, *options)
    assert refused.code == 1
    assert "rows.jsonl changed since it was read" in refused.err


def test_all_formats(broker: Broker, topic: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\n\nb")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n'))
    pa.parquet.write_table(pa.table({"a": [1.5, None]}), tmp_path / "c.parquet")
    (tmp_path / "d.tsv").write_text("a\tb\n1\tNA\n")
    (tmp_path / "e").write_text("a;b\n1;2\n")
    files = sorted(tmp_path.iterdir())
    assert load(broker, topic, "all", *files[:4], "--null", "NA").code == 0
    assert load(broker, topic, "more", files[4], "--format", "csv", "--delimiter", ";", "--text").code == 0
    assert sorted(value or b"" for value in values(broker.bootstrap_servers, topic)) == sorted(
        [b"a", b"", b"b", b'{"a": 1}', b'{"a":1.5}', b'{"a":null}', b'{"a":1,"b":null}', b'{"a":"1","b":"2"}']
    )


@pytest.mark.parametrize(
    ("name", "options", "code", "what"),
    [
        (
            "a.csv",
            ("--key", "none"),
            2,
            "a.csv: column 'none' for the key does not exist; the columns are k, n",
        ),
        ("a.dat", (), 2, "the file name does not show the format"),
        ("a.csv", ("--delimiter", "ab"), 2, "one character"),
        ("a.csv", ("--delimiter", "\udcff"), 2, "one character"),
        ("a.csv", ("-X", "transactional.id=x"), 2, "transactional.id is derived from the load id"),
        ("a.csv", ("-X", "acks=1"), 2, "contradicts acks=1"),
        ("a.txt", ("--key", "k"), 2, "plain lines have no columns"),
    ],
)
def test_misuse(
    broker: Broker, topic: str, tmp_path: Path, name: str, options: tuple[str, ...], code: int, what: str
) -> None:
    outcome = load(broker, topic, "misuse", write_csv(tmp_path / name, 0, 5), *options)
    assert (outcome.code, what in outcome.err) == (code, True), outcome.err


def test_a_bad_id_and_no_such_topic(broker: Broker, topic: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 0, 5)
    assert load(broker, topic, "a/b", file).code == 2
    missing = load(broker, "nowhere", "nowhere", file)
    assert missing.code == 1
    assert re.search("UNKNOWN_TOPIC_OR_PARTITION.*nowhere", missing.err)
    assert row(load(broker, topic, "nowhere", file, "-o", "json"))["records"] == 5


def test_a_partly_read_file_is_not_resumed_with_another_delimiter(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    """A quoted line end is inside a record with one delimiter, and ends a record with the other."""
    file = tmp_path / "a.csv"
    file.write_text("a;b,c\n" + "".join(f'{n};x,"y\nz";{n}\n' for n in range(30)))
    config = {"bootstrap.servers": broker.bootstrap_servers}

    def break_off(report: Report) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run_load(Load([file], topic, topic, max_records=10), config, break_off)
    refused = load(broker, topic, topic, file, "--delimiter", ";")
    assert (refused.code, "was begun with the delimiter ','; now it is ';'" in refused.err) == (1, True), (
        refused.err
    )
    assert load(broker, topic, topic, file, "--delimiter", ",", "--text").code == 0
    assert len(values(broker.bootstrap_servers, topic)) == 30


def test_a_load_into_a_recreated_topic_is_refused(broker: Broker, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 0, 5)
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.create_topics([NewTopic("anew", 1)])
        assert load(broker, "anew", "anew", file).code == 0
        admin.delete_topics(["anew"])
        admin.create_topics([NewTopic("anew", 1)])
    refused = load(broker, "anew", "anew", file)
    assert (refused.code, "was deleted and created again" in refused.err) == (1, True)


def test_a_topic_recreated_during_the_load_ends_it(broker: Broker, tmp_path: Path) -> None:
    """The load must end without a record in the new topic, because another load may fill that topic."""
    config = {"bootstrap.servers": broker.bootstrap_servers}
    loaded = Load([write_csv(tmp_path / "a.csv", 0, ROWS)], "again", "again", max_records=100)
    with Admin(config) as admin:
        admin.create_topics([NewTopic("again", PARTITIONS)])

        def make_again(report: Report) -> None:
            if report.transactions == 2:
                admin.delete_topics(["again"])
                admin.create_topics([NewTopic("again", PARTITIONS)])

        with pytest.raises(LoadRefused, match="was deleted and created again"):
            run_load(loaded, config, make_again)
    assert values(broker.bootstrap_servers, "again") == []


def test_a_commit_that_apache_kafka_takes_for_a_repeated_abort_tells_of_the_other_loader(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    loaded = Load([write_csv(tmp_path / "a.csv", 0, 1)], topic, topic)
    with (
        pytest.raises(OncelogError, match="another loader with this id has taken over"),
        fenced_producer(loaded, {"bootstrap.servers": broker.bootstrap_servers}),
    ):
        raise InvalidTxnState("the state is CompleteAbort")


@pytest.mark.behaviour("P4")
def test_another_open_transaction_hides_no_mark(broker: Broker, topic: str, tmp_path: Path) -> None:
    """The load's checkpoints may lie behind another producer's open transaction. The load must wait for
    them.
    """
    servers = broker.bootstrap_servers
    file = write_csv(tmp_path / "a.csv", 0, ROWS)
    loaded = Load([file], topic, "hidden", Options(key="k"), max_records=100)
    tp = checkpoint_partition(loaded.load_id)
    with Producer({"bootstrap.servers": servers, "transactional.id": "other"}) as other:
        other.init_transactions()

        def open_another(report: Report) -> None:
            if report.transactions == 1:
                other.begin_transaction()
                other.send(tp.topic, b"{}", b"other/0", partition=tp.partition)
                other.flush()

        run_load(loaded, {"bootstrap.servers": servers}, open_another)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(run_load, loaded, {"bootstrap.servers": servers})
            with pytest.raises(TimeoutError):
                again.result(1)
            other.commit_transaction()
            assert again.result(60).was_complete
    assert content(servers, topic) == expected(ROWS)


def test_the_bar_on_a_terminal(broker: Broker, topic: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 0, ROWS)
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "oncelog.cli.main", "load", str(file), "--topic", topic, "--id", "bar"]
    with subprocess.Popen(
        [*command, "-b", broker.bootstrap_servers, "-o", "json"], stdout=subprocess.PIPE, stderr=its_end
    ) as process:
        out, _ = process.communicate(timeout=200)
    os.close(its_end)
    drawn = os.read(terminal, 100_000)
    os.close(terminal)
    assert json.loads(out)[0]["records"] == ROWS
    assert re.search(rb"loading.*100%.*500 records, [0-9,]+/s", drawn)


def test_marks_of_another_version_and_a_topic_that_loses_them(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 0, 5)
    with Broker() as other:
        servers = other.bootstrap_servers
        with Admin({"bootstrap.servers": servers}) as admin:
            admin.create_topics([NewTopic(CHECKPOINT_TOPIC, 16), NewTopic("t", 1)])
            outcome = load(other, "t", "x", file)
            assert (outcome.code, "cleanup.policy=delete, which loses the checkpoints" in outcome.err) == (
                2,
                True,
            )
            resource = ConfigResource("topic", CHECKPOINT_TOPIC)
            admin.alter_configs({resource: {"cleanup.policy": "compact"}})
        tp = checkpoint_partition("x")
        with Producer({"bootstrap.servers": servers}) as producer:
            producer.send(tp.topic, b'{"version": 2}', b"x/0", partition=tp.partition).result(60)
        outcome = load(other, "t", "x", file)
        assert (outcome.code, "written by another version" in outcome.err) == (1, True)


def test_marks_are_json() -> None:
    mark = FileCheckpoint("t", None, "csv", "a", 1, 2, 3, 4, "d", True)
    key, value = encode_checkpoint("load-1", 7, mark)
    assert key == b"load-1/7"
    assert decode_checkpoint(value) == mark
    with pytest.raises(PeerError):
        decode_checkpoint(b"{}")
    assert len({checkpoints.checkpoint_partition(f"load-{n}") for n in range(100)}) == 16
