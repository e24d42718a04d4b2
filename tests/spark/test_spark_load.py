"""`oncelog load --spark` stores the same records as the plain loader, each once, whichever process is
killed.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from oncelog_devtools.apache_kafka import ApacheKafka
from oncelog_devtools.spark_cluster import SparkCluster
from support.cli import Outcome, oncelog
from support.load import PARTITIONS, content, expected, write_csv
from support.topics import new_topic, values
from support.wait import attempts, pause

from oncelog import Admin, Broker, Producer
from oncelog.errors import ProducerFenced
from oncelog.load.checkpoints import read_checkpoints
from oncelog.load.loader import Load, check_load, commit_steps, fenced_producer, file_steps
from oncelog.load.on_spark import _how, _load
from oncelog.load.parsing import Options
from oncelog.testing.proxy import Proxy, Rule, WireEvent

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
FILES, ROWS, KILLS = 4, 600, 4
PATIENCE_S = 500.0
SUBMIT = "--driver-memory 512m --conf spark.executor.memory=512m pyspark-shell"
QUICK = ("-X", "transaction.timeout.ms=5000")
"""Settings with which the open transaction of a killed loader soon times out."""


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    return new_topic(shared_broker.bootstrap_servers, PARTITIONS)


def command(topic: str, load_id: str, *arguments: str | Path) -> list[str]:
    return ["load", *map(str, arguments), "--topic", topic, "--id", load_id]


def load(servers: str, topic: str, load_id: str, *arguments: str | Path) -> Outcome:
    return oncelog(*command(topic, load_id, *arguments), servers=servers)


def row(outcome: Outcome) -> tuple[int, int]:
    """Return the number of records that this run loaded, and the number that earlier runs loaded."""
    assert outcome.code == 0, outcome.err
    (found,) = json.loads(outcome.out)
    return found["records"], found["records_before"]


def write_all(directory: Path) -> list[Path]:
    """Write a file in each format and compression, and an empty file. Each CSV row spans two lines."""
    rows = [{"k": f"k{n}", "n": n, "s": f'"{n}"' * (n % 5)} for n in range(300)]
    table = pa.table({name: [row[name] for row in rows] for name in ("k", "n", "s")})
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    text = "k,n,s\n" + "".join(f'{row["k"]},{row["n"]},"a\n{row["n"]}"\n' for row in rows)
    (directory / "a.csv").write_text(text)
    (directory / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    (directory / "c.jsonl").write_bytes(lines)
    (directory / "d.jsonl.zst").write_bytes(zstandard.compress(lines))
    pa.parquet.write_table(table, directory / "e.parquet", row_group_size=70)
    (directory / "f.csv").write_text("k,n\n")
    return sorted(directory.iterdir())


def load_both_ways(servers: str, topic: str, directory: Path) -> str:
    """Load the files into `topic` on Spark, and into another topic without Spark. Return the other topic."""
    plain, files = new_topic(servers, PARTITIONS), write_all(directory)
    options = ("--key", "k", "--batch-records", "100", "-o", "json")
    assert row(load(servers, plain, f"{topic}-plain", *files, *options)) == (1500, 0)
    assert row(load(servers, topic, topic, *files, *options, "--spark")) == (1500, 0)
    return plain


@pytest.mark.behaviour("P4")
def test_spark_stores_the_same_records_as_the_plain_loader(
    spark: Any, shared_broker: Broker, topic: str, tmp_path: Path
) -> None:
    servers = shared_broker.bootstrap_servers
    plain = load_both_ways(servers, topic, tmp_path)
    assert sorted_content(servers, topic) == sorted_content(servers, plain)
    # The load must keep no state in a group, because a cluster would expire the group's offsets after a week.
    with Admin({"bootstrap.servers": servers}) as admin:
        assert not [group for group in admin.list_groups() if topic in group.group_id]


@pytest.mark.soak
def test_the_audit_reads_the_same_records_from_both_loaders(
    spark: Any, shared_broker: Broker, topic: str, tmp_path: Path
) -> None:
    servers = shared_broker.bootstrap_servers
    plain = load_both_ways(servers, topic, tmp_path)
    key = ("--key-expr", "concat(CAST(key AS STRING), ' ', CAST(value AS STRING))")
    audited = oncelog("audit", topic, "--against", plain, *key, servers=servers)
    assert audited.code == 0, audited.out + audited.err
    assert "1500 records with a key, 1500 expected; keys lost 0, doubled 0" in audited.err


@pytest.mark.behaviour("P4")
def test_repeated_loads_store_every_row_once(
    spark: Any, shared_broker: Broker, topic: str, tmp_path: Path
) -> None:
    servers = shared_broker.bootstrap_servers
    files = [write_csv(tmp_path / f"{n}.csv", n * ROWS, ROWS) for n in range(3)]
    options = ("--key", "k", "--spark", "-o", "json")
    wrong = load(servers, topic, topic, *files, "--key", "none", "--spark")
    assert (wrong.code, "column 'none' for the key does not exist" in wrong.err) == (2, True)
    assert row(load(servers, topic, topic, *files[:2], *options)) == (2 * ROWS, 0)
    again = load(servers, topic, topic, *files[:2], *options)
    assert (row(again), "is complete" in again.err) == ((0, 2 * ROWS), True)
    assert row(load(servers, topic, topic, *files, *options)) == (ROWS, 2 * ROWS)
    was = sorted_content(servers, topic)
    assert was == sorted_expected(3 * ROWS)
    # A changed file is refused. A file of which only the time has changed is read again and accepted.
    os.utime(files[0])
    assert row(load(servers, topic, topic, *files, *options)) == (0, 3 * ROWS)
    files[0].write_text(files[0].read_text().replace(",77\n", ",78\n"))
    changed = load(servers, topic, topic, *files, *options)
    assert (changed.code, "0.csv changed since it was read" in changed.err) == (1, True)
    write_csv(files[0], 0, ROWS + 1)
    longer = load(servers, topic, topic, *files, *options)
    assert (longer.code, "0.csv changed since it was read: its size was" in longer.err) == (1, True)
    assert sorted_content(servers, topic) == was


@pytest.mark.behaviour("P4")
def test_a_file_in_the_place_of_another_stops_the_load_before_anything_is_stored(
    spark: Any, shared_broker: Broker, topic: str, tmp_path: Path
) -> None:
    """A new file in the place of another in the list must not be mistaken for the file that was read."""
    servers = shared_broker.bootstrap_servers
    for name, prefix in (("2.txt", "feb"), ("1.txt", "jan")):
        (tmp_path / name).write_text("".join(f"{prefix}-{n:03}\n" for n in range(ROWS)))
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    assert load(servers, topic, topic, tmp_path / "2.txt", "--spark").code == 0
    refused = load(servers, topic, topic, tmp_path / "1.txt", tmp_path / "2.txt", "--spark")
    assert (refused.code, "1.txt is in the place of" in refused.err) == (1, True), refused.err
    assert len(values(servers, topic)) == ROWS
    right = load(servers, topic, topic, tmp_path / "2.txt", tmp_path / "1.txt", "--spark", "-o", "json")
    assert row(right) == (ROWS, ROWS)


@pytest.mark.behaviour("P4")
def test_a_load_begun_by_one_loader_is_refused_by_the_other(
    spark: Any, shared_broker: Broker, topic: str, tmp_path: Path
) -> None:
    servers, file = shared_broker.bootstrap_servers, write_csv(tmp_path / "a.csv", 0, ROWS)
    assert load(servers, topic, f"{topic}-plain", file).code == 0
    spread = load(servers, topic, f"{topic}-plain", file, "--spark")
    assert (spread.code, "a.csv was begun as csv; now it is csv, with --spark" in spread.err) == (1, True)
    assert load(servers, topic, topic, file, "--spark").code == 0
    plain = load(servers, topic, topic, file)
    assert (plain.code, "a.csv was begun as csv, with --spark; now it is csv" in plain.err) == (1, True)
    assert load(servers, topic, topic, file, "--master", "local[2]").code == 2
    assert len(values(servers, topic)) == 2 * ROWS


@pytest.mark.behaviour("P4")
def test_a_task_that_lives_on_is_fenced_and_a_bad_file_keeps_none_back(
    spark: Any, shared_broker: Broker, topic: str, tmp_path: Path
) -> None:
    servers = shared_broker.bootstrap_servers
    file, bad = write_csv(tmp_path / "a.csv", 0, ROWS), tmp_path / "b.jsonl"
    bad.write_text('{"k": 1}\n{"k":}\n')
    with Producer({"bootstrap.servers": servers, "transactional.id": f"oncelog-load-{topic}/0"}) as zombie:
        zombie.init_transactions()
        zombie.begin_transaction()
        zombie.send(topic, b"a row of the file").result(60)
        refused = load(servers, topic, topic, bad, file, "--key", "k", "--spark")
        assert (refused.code, "b.jsonl, in the records from byte 0 on: " in refused.err) == (1, True)
        with pytest.raises(ProducerFenced):
            zombie.commit_transaction()
    assert sorted_content(servers, topic) == sorted_expected(ROWS)


def test_a_new_transactional_id_does_not_vouch_for_a_file_that_was_begun(
    shared_broker: Broker, topic: str, tmp_path: Path
) -> None:
    """The coordinator may know no transaction of an id, because the id expired or its epochs ran out.

    In the meantime, another task may have continued the file.
    """
    config = {"bootstrap.servers": shared_broker.bootstrap_servers}
    files = [write_csv(tmp_path / "a.csv", 0, ROWS)]
    asked = Load(files, topic, topic, Options(key="k"), max_records=100)
    (layout,) = check_load(asked, config)
    with fenced_producer(asked, config) as producer:
        _, topic_id = read_checkpoints(config, asked.load_id, topic)
        steps = file_steps(asked, 0, layout, _how(asked, 0, layout), topic_id, None)
        first, *_ = [group[-1].checkpoint for group in commit_steps(asked, config, producer, steps)]
    assert (first.records, _load(0, first, asked, config)) == (100, 0)
    assert content(shared_broker.bootstrap_servers, topic) == expected(ROWS)


def sorted_content(servers: str, topic: str) -> dict[int, list[Any]]:
    return {partition: sorted(records) for partition, records in content(servers, topic).items()}


def sorted_expected(count: int) -> dict[int, list[Any]]:
    return {partition: sorted(records) for partition, records in expected(count).items()}


class Loading:
    """`oncelog load --spark` in its own process, with its JVM."""

    def __init__(self, servers: str, master: str, *arguments: str) -> None:
        environment = {**os.environ, "PYSPARK_SUBMIT_ARGS": SUBMIT}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "oncelog.cli.main", *arguments, "--master", master, "-b", servers],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def wait_for(self, is_due: Callable[[], bool]) -> None:
        """Wait until the condition is true or the process has ended."""
        for _ in attempts(lambda: "it is not due", PATIENCE_S, step_s=0.25):
            if self.process.poll() is not None or is_due():
                return

    def kill(self) -> bool:
        """Kill the driver's process group: the driver, its JVM and the JVM's local tasks.

        Return False if the driver had already ended.
        """
        is_over = self.process.poll() is not None
        if not is_over:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=PATIENCE_S)
        return not is_over


def done_of(servers: str, topic: str, load_id: str) -> int:
    """Return the number of records that the file checkpoints cover."""
    marks, _ = read_checkpoints({"bootstrap.servers": servers}, load_id, topic)
    return sum(mark.records for mark in marks)


def is_done(servers: str, topic: str, count: int) -> bool:
    return done_of(servers, topic, topic) >= count


@pytest.mark.soak
@pytest.mark.behaviour("P4")
def test_a_load_continues_after_its_driver_is_killed(
    spark: Any, shared_broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Kill the driver while two tasks run. One of them has committed, but the response was lost."""
    servers = shared_broker.bootstrap_servers
    files = [write_csv(tmp_path / f"{n}.csv", n * ROWS, ROWS) for n in range(FILES)]
    arguments = command(topic, topic, *files, "--key", "k", "--spark", "--batch-records", "20", *QUICK)
    is_struck = threading.Event()

    def strike(event: WireEvent) -> None:
        if event.fate == "dropped":
            is_struck.set()

    # The first EndTxn is the driver's, so the tenth is a task's.
    rule = Rule(action="drop", direction="response", api="EndTxn", nth=10)
    with Proxy(servers, rules=[rule], on_event=strike) as proxy:
        loading = Loading(proxy.bootstrap_servers, "local[2]", *arguments)
        loading.wait_for(is_struck.is_set)
        assert loading.kill()
    records, before = row(oncelog(*arguments, "-o", "json", servers=servers))
    assert records + before == FILES * ROWS and records and before >= 9 * 20
    assert sorted_content(servers, topic) == sorted_expected(FILES * ROWS)
    assert "is complete" in oncelog(*arguments, servers=servers).err


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster(workers=2, memory_mb=600) as running:
        yield running


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.behaviour("P4")
@pytest.mark.parametrize("kind", ["ours", "apache"])
def test_a_load_on_a_cluster_survives_repeated_kills(
    kind: str, shared_broker: Broker, cluster: SparkCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Kill the driver alone, so that its executors continue for a while, or kill workers with their
    executors.
    """
    broker: Broker | ApacheKafka = shared_broker
    if kind == "apache":
        broker = request.getfixturevalue("apache_kafka")
    servers, chance = broker.bootstrap_servers, random.Random(6)
    topic = new_topic(servers, PARTITIONS)
    rows, killed = 60_000, 0
    files = [write_csv(tmp_path / f"{n}.csv", n * rows, rows) for n in range(FILES)]
    arguments = command(topic, topic, *files, "--key", "k", "--spark", "--batch-records", "50", *QUICK)
    for number in range(KILLS + 1):
        goal = done_of(servers, topic, topic) + chance.randint(1, rows)
        loading = Loading(servers, cluster.master_url, *arguments)
        loading.wait_for(partial(is_done, servers, topic, goal))
        if number % 2:
            worker = cluster.workers[number // 2 % 2]
            worker.kill()
            pause(chance.uniform(0, 3))
            worker.start()
            cluster.wait_until_formed()
        if number < KILLS:
            killed += loading.kill()
    _, errors = loading.process.communicate(timeout=PATIENCE_S)
    assert loading.process.returncode == 0, errors
    assert killed > KILLS // 2, "the others were over before"
    assert sorted_content(servers, topic) == sorted_expected(FILES * rows)
    print(f"{killed} drivers and {KILLS // 2} workers killed, {FILES * rows} records, each once")
