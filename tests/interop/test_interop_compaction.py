"""Logs that we compacted have gaps in their offsets and empty batches. Apache Kafka's tools and broker and
other clients read them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.broker import RawClient, batch, wait_until
from support.foreign.functions import ReadRow, read_aiokafka, read_confluent, read_kafka_python, read_oncelog
from support.topics import new_topic, producer_of

from oncelog import Broker

QUICK = {"log.cleaner.backoff.ms": 20, "log.index.interval.bytes": 200}
FIRST = f"{0:020d}.log"
KEYS = 4
ROUNDS = 60


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, str, Path]]:
    """Run a broker with a compacted topic. It has the newest values, an empty batch that keeps a producer's
    state, and an aborted transaction.
    """
    directory = tmp_path_factory.mktemp("compacted")
    with Broker(directory, config=QUICK) as broker:
        servers = broker.bootstrap_servers
        topic = new_topic(servers, cleanup_policy="compact", internal_segment_bytes=3_000)
        with RawClient(servers) as client:
            assert client.produce(topic, batch(b"old", key=b"k0", pid=77, sequence=0)).error_code == 0
        with producer_of(servers, transactional_id="compacted") as producer:
            producer.init_transactions()
            producer.begin_transaction()
            producer.send(topic, b"aborted", key=b"k1")
            producer.flush()
            producer.abort_transaction()
        with producer_of(servers, linger_ms=20) as producer:
            for number in range(ROUNDS):
                for key in range(KEYS):
                    producer.send(topic, b"%d" % number, key=b"k%d" % key)
                producer.flush()
        log = directory / f"{topic}-0"
        first = log / FIRST  # during the swap, the file does not exist for a moment
        wait_until(lambda: first.exists() and first.stat().st_size < 1_000)
        # The compacted file exists a moment before readers use it.
        wait_until(lambda: len(read_oncelog(servers, topic, 1)) < KEYS * ROUNDS)
        yield broker, topic, log


EXPECTED = {b"k%d" % key: b"%d" % (ROUNDS - 1) for key in range(KEYS)}


@pytest.mark.parametrize("read", [read_oncelog, read_confluent, read_aiokafka, read_kafka_python])
def test_clients_read_past_compacted_offsets(
    compacted: tuple[Broker, str, Path], read: Callable[[str, str, int], list[ReadRow]]
) -> None:
    broker, topic, _ = compacted
    rows = read(broker.bootstrap_servers, topic, 1)
    assert len(rows) < KEYS * ROUNDS and {row.key: row.value for row in rows} == EXPECTED


def _copy(log: Path, directory: Path) -> Path:
    """Copy the partition's files between two compactions.

    A compaction replaces several files one by one, so the copy is repeated if one was running: a file was
    replaced meanwhile, or waits for that with the suffix `.swap`.
    """

    def files() -> dict[str, int]:
        return {file.name: file.stat().st_ino for file in log.iterdir()}

    def copied() -> bool:
        shutil.rmtree(directory / log.name, ignore_errors=True)
        with suppress(shutil.Error, FileNotFoundError):
            before = files()
            shutil.copytree(log, directory / log.name)
            is_complete = all((directory / log.name / name).exists() for name in before.keys() | {FIRST})
            return is_complete and before == files() and not any("swap" in name for name in before)
        return False

    wait_until(copied)
    return directory / log.name


def test_kafka_dump_log_reads_a_compacted_log(
    compacted: tuple[Broker, str, Path], apache_kafka: ApacheKafka, tmp_path: Path
) -> None:
    log = _copy(compacted[2], tmp_path)
    files = [*log.glob("*.log"), *log.glob("*.index"), *log.glob("*.timeindex"), *log.glob("*.txnindex")]
    dump = apache_kafka.run_tool(
        "org.apache.kafka.tools.DumpLogSegments", "--print-data-log", "--files", ",".join(map(str, files))
    )
    assert "count: 0" in dump and "producerId: 77" in dump and "isvalid: true" in dump
    for complaint in ("Mismatch", "mismatch", "out of order", "isvalid: false", "Exception"):
        assert complaint not in dump


def test_apache_kafka_continues_a_log_that_we_compacted(
    compacted: tuple[Broker, str, Path], kafka_class_path: str, tmp_path: Path
) -> None:
    *_, log = compacted
    shutil.copytree(log, tmp_path / "log")
    topic = "moved"
    with ApacheKafka() as kafka:
        (node,) = kafka.nodes
        with RawClient(kafka.bootstrap_servers) as client:
            client.create_topic(topic)
            wait_until(lambda: (node.data_dir / f"{topic}-0" / "partition.metadata").exists())
        node.stop()
        target = node.data_dir / f"{topic}-0"
        for each in target.iterdir():
            if each.name != "partition.metadata":
                each.unlink()
        for each in (tmp_path / "log").iterdir():
            if each.name != "partition.metadata":
                shutil.copy(each, target / each.name)
        node.start()
        rows = read_confluent(kafka.bootstrap_servers, topic, 1)
        assert {row.key: row.value for row in rows} == EXPECTED
        with RawClient(kafka.bootstrap_servers) as client:
            again = client.produce(topic, batch(b"old", key=b"k0", pid=77, sequence=0))
            assert (again.error_code, again.base_offset) == (0, 0), "known though its record is gone"
