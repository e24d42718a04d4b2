"""The simulator's writer of Apache Kafka's directories, compared with bytes that Apache Kafka wrote."""

from __future__ import annotations

import tarfile
from base64 import urlsafe_b64decode
from pathlib import Path
from random import Random

import pytest
from oncelog_simulator import takeover
from oncelog_simulator.checks import batches_of
from oncelog_simulator.kafka_directory import (
    COMPLETE_COMMIT,
    EMPTY,
    ONGOING,
    PREPARE_COMMIT,
    KafkaHistory,
    KafkaTransactionalId,
    java_partition,
    offset_commit,
    transaction_record,
)
from oncelog_simulator.kafka_log import TRANSACTIONAL, KafkaBatch, KafkaLog, KafkaRecord
from oncelog_simulator.simulation import run_scenario, scenario_for
from support.log.partitions import config

from oncelog.broker.state import BrokerState
from oncelog.log.partition import Partition
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import TopicPartition
from oncelog.wire.batch import iter_batches
from oncelog.wire.records import DecodedRecord, decode_records

GOLDEN = Path(__file__).parents[1] / "golden" / "kafka-4.3.0-plain.tar.gz"


def golden(directory: str) -> dict[str, bytes]:
    """Return the files of a partition that Apache Kafka wrote."""
    with tarfile.open(GOLDEN) as tar:
        members = [each for each in tar.getmembers() if each.name.startswith(f"data/{directory}/")]
        return {Path(each.name).name: tar.extractfile(each).read() for each in members if each.isfile()}  # type: ignore[union-attr]


def golden_records(directory: str) -> list[DecodedRecord]:
    log = memoryview(golden(directory)[f"{0:020}.log"])
    return [
        record
        for position, header in iter_batches(log)
        if not header.is_control
        for record in decode_records(log[position : position + header.size_bytes])
    ]


def test_batches_are_those_of_apache_kafka() -> None:
    log = memoryview(golden("bank-0")[f"{0:020}.log"])
    found = []
    for position, header in iter_batches(log):
        data = log[position : position + header.size_bytes]
        records = [KafkaRecord(each.offset, each.key, each.value) for each in decode_records(data)]
        batch = KafkaBatch(
            header.base_offset,
            header.last_offset,
            tuple(records),
            header.max_timestamp_ms,
            0,
            *(-1 if each is None else each for each in (header.producer_id, header.producer_epoch)),
            -1 if header.base_sequence is None else header.base_sequence,
            header.attributes,
        )
        found.append(batch.encode())
    assert b"".join(found) == bytes(log) and len(found) == 5


def swapped_table(seed: int) -> KafkaLog:
    """Return a log in Kafka's format whose compaction was interrupted at a random step."""
    log = KafkaLog("table", 0, 300, 0)
    for number in range(12):
        log.append([(b"%d" % (number % 3), b"%d" % number)], 1_000 + number)
    log.interrupt_compaction(Random(seed))
    return log


def test_an_interrupted_compaction_stops_at_any_step_and_loses_no_newest_record() -> None:
    endings = set()
    for seed in range(60):
        log = swapped_table(seed)
        files, disk = dict(log.files(is_clean=False)), MemoryDisk()
        endings.add(frozenset({name.rpartition(".")[2] for name in files} & {"cleaned", "swap", "deleted"}))
        disk.mkdir("table-0")
        for name, content in files.items():
            disk.replace(f"table-0/{name}", content)
        partition = Partition.open(
            disk,
            "table-0",
            TopicPartition("table", 0),
            config(cleanup_policy="compact"),
            topic_id=None,
            now_ms=2_000,
            clean_shutdown=False,
        )
        found = {
            record.key: record.offset
            for header, data in batches_of(partition)
            for record in decode_records(data)
            if not header.is_control
        }
        assert found == {b"0": 9, b"1": 10, b"2": 11}, seed
        assert not any(name.endswith((".swap", ".cleaned", ".deleted")) for name in disk.list("table-0"))
    stages = ({"cleaned"}, {"cleaned", "swap"}, {"swap"}, {"swap", "deleted"}, {"deleted"})
    assert endings == {frozenset(stage) for stage in stages}


def test_snapshots_and_indexes_are_those_of_apache_kafka() -> None:
    """The test uses topic `bank` of the golden directory, which has a committed, an aborted and an open
    transaction.
    """
    files = golden("bank-0")
    log = KafkaLog("bank", 0, 1 << 20, 4_096)
    source = memoryview(files[f"{0:020}.log"])
    for position, header in iter_batches(source):
        (record, *_) = decode_records(source[position : position + header.size_bytes])
        assert header.producer_id is not None and header.producer_epoch is not None
        if header.is_control:
            is_commit = record.key == b"\0\0\0\1"
            log.append_marker(
                header.producer_id, header.producer_epoch, header.max_timestamp_ms, is_commit=is_commit
            )
        else:
            producer = header.producer_id, header.producer_epoch, header.base_sequence or 0
            log.append([(None, record.value)], header.max_timestamp_ms, producer, TRANSACTIONAL)
    made = dict(log.files(is_clean=True))
    for name in files.keys() - {"partition.metadata"}:
        assert made[name] == files[name], name


def test_transactions_and_offsets_are_those_of_apache_kafka() -> None:
    """The records of transactional id `done`: initialized, ongoing with one and then two partitions, decided,
    complete.
    """
    stored = [
        each.value or b""
        for index in (0, 1)
        for each in golden_records(f"__transaction_state-{index}")
        if each.key == b"\0\0\0\4done"
    ]
    banks = [TopicPartition("bank", 1), TopicPartition("bank", 0)]
    every = [*banks, TopicPartition("__consumer_offsets", 0)]
    steps = [
        (EMPTY, 0, []),
        (ONGOING, 0, banks),
        (ONGOING, 0, every),
        (PREPARE_COMMIT, 1, every),
        (COMPLETE_COMMIT, 1, []),
    ]
    for value, (state, epoch, partitions) in zip(stored, steps, strict=True):
        entry = KafkaTransactionalId("done", 1, 900_000, epoch, state, [*partitions])
        tags_bytes = 11 if state == EMPTY else 15
        times = value[-tags_bytes - 16 : -tags_bytes]
        entry.start_ms = int.from_bytes(times[8:], signed=True)
        key, made = transaction_record(entry, int.from_bytes(times[:8]), is_classic=False)
        assert (key, made) == (b"\0\0\0\4done", value)
    topic_id = urlsafe_b64decode(golden("forever-0")["partition.metadata"].split()[-1] + b"==")
    for group, at, offset, owner in (
        ("of-done", TopicPartition("bank", 0), 7, None),
        ("classic-readers", TopicPartition("forever", 0), 4, topic_id),
    ):
        records = golden_records(f"__consumer_offsets-{java_partition(group, 2)}")
        expected = {each.key: each.value or b"" for each in records}
        key, _ = offset_commit(group, at, offset, 0, owner)
        begin = expected[key].index(b"\xff\xff\xff\xff\x01") + 5
        time_ms = int.from_bytes(expected[key][begin : begin + 8])
        assert offset_commit(group, at, offset, time_ms, owner) == (key, expected[key])


@pytest.mark.parametrize("seed", range(5))
def test_histories_have_what_kafka_leaves(seed: int) -> None:
    history = KafkaHistory(Random(seed), "t", "table", 2, ["continued-takeover", "a", "b"])
    history.generate()
    disk = MemoryDisk()
    history.write(disk, 1)
    assert disk.exists("__cluster_metadata-0") and disk.exists(".kafka_cleanshutdown") == history.is_clean
    for log in history.logs.values():
        assert log.end_offset == max((batch.last_offset + 1 for batch in log.batches), default=0)


def test_a_takeover_that_forgets_producers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = scenario_for(0, 0, workload="takeover")
    check = takeover.Takeover.recovered

    def recovered(self: takeover.Takeover, node: BrokerState) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Partition, "describe_producers", lambda self: [])
            check(self, node)

    monkeypatch.setattr(takeover.Takeover, "recovered", recovered)
    assert any(each.startswith("taken over otherwise") for each in run_scenario(scenario).violations)
