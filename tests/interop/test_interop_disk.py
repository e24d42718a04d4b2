"""Apache Kafka's kafka-dump-log reads our directory, and our log reads a directory of Apache Kafka.

Source: Kafka's DumpLogSegments, which checks every index entry against the segment.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.broker import RawClient, batch, wait_until
from support.scenarios.idempotent_batches import Step, create_topic, new_producer_id, produce
from support.topics import new_topic, producer_of

import oncelog
from oncelog import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

BATCHES = 40


def fill(client: RawClient) -> tuple[str, int]:
    """Write records with the sequences 0 to 2*BATCHES-1 of one producer id to a new topic, two in each
    batch.

    Return the topic and the producer id.
    """
    topic = create_topic(client)
    producer_id = new_producer_id(client)
    for index in range(BATCHES):
        answer = produce(client, topic, producer_id, Step("A", 0, 2 * index, 2, "0", None))
        assert answer == ("0", 2 * index)
    return topic, producer_id


def test_kafka_dump_log_reads_our_directory(apache_kafka: ApacheKafka, tmp_path: Path) -> None:
    config = {"log.segment.bytes": 1500, "log.index.interval.bytes": 200}
    with oncelog.Broker(tmp_path, config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        topic, producer_id = fill(client)
    directory = tmp_path / f"{topic}-0"
    segments = sorted(directory.glob("*.log"))
    assert len(segments) > 2
    dump = apache_kafka.run_tool(
        "org.apache.kafka.tools.DumpLogSegments",
        "--print-data-log",
        "--files",
        ",".join(
            str(each) for each in [*segments, *directory.glob("*.index"), *directory.glob("*.timeindex")]
        ),
    )
    assert dump.count(f"producerId: {producer_id} ") == BATCHES
    assert dump.count("isvalid: true") == BATCHES
    for complaint in ("Mismatches", "mismatch", "Found timestamp mismatch", "out of order", "isvalid: false"):
        assert complaint not in dump
    snapshots = sorted(directory.glob("*.snapshot"))
    snapshot = apache_kafka.run_tool("org.apache.kafka.tools.DumpLogSegments", "--files", str(snapshots[-1]))
    assert f"producerId: {producer_id} producerEpoch: 0" in snapshot
    assert f"lastSequence: {2 * BATCHES - 1}" in snapshot


@pytest.mark.behaviour("T2")
def test_kafka_dump_log_decodes_our_coordinators_logs(apache_kafka: ApacheKafka, tmp_path: Path) -> None:
    with (
        oncelog.Broker(tmp_path) as broker,
        producer_of(broker.bootstrap_servers, transactional_id="dumped") as producer,
    ):
        topic = new_topic(broker.bootstrap_servers)
        producer.init_transactions()
        for commit in (True, False):
            producer.begin_transaction()
            producer.send(topic, b"v")
            offsets = {TopicPartition(topic, 0): OffsetAndMetadata(7)}
            producer.send_offsets_to_transaction(offsets, ConsumerGroupMetadata("readers"))
            producer.flush()
            producer.commit_transaction() if commit else producer.abort_transaction()

    def dump(name: str, *decoder: str) -> str:
        files = [str(each) for each in sorted(tmp_path.glob(name)) if each.stat().st_size]
        tool = "org.apache.kafka.tools.DumpLogSegments"
        return apache_kafka.run_tool(tool, *decoder, "--files", ",".join(files))

    states = dump("__transaction_state-*/*.log", "--transaction-log-decoder")
    seen = re.findall(r'"transactionStatus":(\d)', states)
    # The states in the order of the log: 0 Empty, 1 Ongoing (stored twice), 2 PrepareCommit and 4
    # CompleteCommit, 3 PrepareAbort and 5 CompleteAbort.
    assert "".join(seen) == "0" + "1124" + "1135"
    assert '"transactionalId":"dumped"' in states and f'"topic":"{topic}","partitionIds":[0]' in states
    offsets_dump = dump("__consumer_offsets-*/*.log", "--offsets-decoder")
    assert offsets_dump.count('"offset":7') == 2 and '"group":"readers"' in offsets_dump
    assert offsets_dump.count("endTxnMarker: COMMIT") == offsets_dump.count("endTxnMarker: ABORT") == 1
    assert "producerId: " in dump(f"{topic}-0/*.txnindex")


@pytest.mark.behaviour("I17")
def test_our_broker_continues_a_partition_of_apache_kafka(apache_kafka: ApacheKafka, tmp_path: Path) -> None:
    with RawClient(apache_kafka.bootstrap_servers) as client:
        topic, producer_id = fill(client)
    with oncelog.Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        ours = create_topic(client)
    place_files(apache_kafka.nodes[0].data_dir / f"{topic}-0", tmp_path / f"{ours}-0")
    (tmp_path / ".kafka_cleanshutdown").unlink(missing_ok=True)
    with oncelog.Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        last = 2 * BATCHES - 2
        again = produce(client, ours, producer_id, Step("A", 0, last, 2, "0", last))
        following = produce(client, ours, producer_id, Step("A", 0, last + 2, 1, "0", last + 2))
    assert (again, following) == (("0", last), ("0", last + 2))


@pytest.mark.behaviour("I17")
def test_apache_kafka_continues_our_partition(kafka_class_path: str, tmp_path: Path) -> None:
    def send(client: RawClient, sequence: int, count: int = 2) -> tuple[int, int]:
        # `batch` gives the records the current time. Kafka expires a producer by the timestamps of its
        # records, so old ones would not do.
        answer = client.produce(topic, batch(*[b"v"] * count, pid=7, sequence=sequence))
        return answer.error_code, answer.base_offset

    config, topic = {"log.segment.bytes": 1500, "log.index.interval.bytes": 200}, "moved"
    with oncelog.Broker(tmp_path, config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic(topic)
        assert [send(client, 2 * index) for index in range(BATCHES)] == [(0, 2 * i) for i in range(BATCHES)]
    with ApacheKafka() as kafka:
        (node,) = kafka.nodes
        with RawClient(kafka.bootstrap_servers) as client:
            client.create_topic(topic)
            wait_until(lambda: (node.data_dir / f"{topic}-0" / "partition.metadata").exists())
        node.stop()
        place_files(tmp_path / f"{topic}-0", node.data_dir / f"{topic}-0")
        node.start()
        with RawClient(kafka.bootstrap_servers) as client:
            wait_until(lambda: client.produce(topic, batch(b"first")).error_code == 0)
            last = 2 * BATCHES - 2
            # Kafka recognises the duplicate by the snapshot of producers that our broker wrote.
            assert send(client, last) == (0, last)
            assert send(client, last + 2, 1) == (0, last + 3)
            assert client.values(topic) == [b"v"] * (2 * BATCHES) + [b"first", b"v"]


def place_files(source: Path, target: Path) -> None:
    """Replace a partition's files by those of another partition. The partition keeps its topic id."""
    for each in target.iterdir():
        if each.name != "partition.metadata":
            each.unlink()
    for each in source.iterdir():
        if each.name != "partition.metadata":
            shutil.copy(each, target / each.name)
