"""Data directories of Apache Kafka 4.3.0 (tests/golden), and directories of Oncelog without one small file:
behaviour I27.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.broker import RawClient, batch, fetch_request, wait_until
from support.topics import producer_of, values

from oncelog import Admin, Broker, Consumer, NewTopic, TopicPartition
from oncelog.broker.coordinators.internal_topic_config import INTERNAL_TOPICS
from oncelog.broker.coordinators.transaction_log import decode_key, decode_value
from oncelog.broker.topics.kafka_metadata import DIRECTORY, read_metadata
from oncelog.broker.topics.takeover import take_over
from oncelog.client.admin.types import ConfigResource
from oncelog.config import BROKER
from oncelog.errors import FencedLeaderEpoch, StorageError
from oncelog.log.manager import LogManager
from oncelog.rules.transactions.entry import TransactionState
from oncelog.server.disk import RealDisk, RealFile
from oncelog.settings import Settings
from oncelog.wire.batch import build_batch, iter_batches, stamp
from oncelog.wire.messages import MetadataRequest
from oncelog.wire.records import NewRecord, decode_records
from oncelog.wire.stored import (
    ClientQuotaRecord,
    ConfigRecord,
    PartitionChangeRecord,
    PartitionRecord,
    RemoveAccessControlEntryRecord,
    RemoveUserScramCredentialRecord,
    TopicRecord,
)

GOLDEN = Path(__file__).parents[1] / "golden"
UNASSIGNED = (1).to_bytes(16, "big")
"""Kafka's DirectoryId for a replica to which no directory is assigned yet."""
AGELESS = {
    "log.retention.ms": -1,
    "offsets.retention.minutes": 2**31 - 1,
    "transactional.id.expiration.ms": 2**31 - 1,
}
"""Settings with which nothing in the directories expires, however old they are. Some topics have settings of
their own.
"""
CONFIG = {"node.id": 1, "log.retention.check.interval.ms": 50, "log.cleaner.backoff.ms": 50}
KEPT = {"forever": 8, "table": 5, "again": 5}
"""Number of records in each topic whose settings keep them.

All except three of `forever` are over a month old.
"""
SECURED = {
    **CONFIG,
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "log.retention.ms": -1,
}


def unpack(name: str, target: Path) -> Path:
    with tarfile.open(GOLDEN / f"kafka-4.3.0-{name}.tar.gz") as tar:
        tar.extractall(target, filter="data")
    return target / "data"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return unpack("plain", tmp_path)


@pytest.fixture
def secured(tmp_path: Path) -> Path:
    return unpack("secured", tmp_path)


def admin_of(broker: Broker) -> Admin:
    return Admin({"bootstrap.servers": broker.bootstrap_servers})


def refusal(data: Path, **more: object) -> str:
    before = sorted(path.name for path in data.iterdir())
    with pytest.raises(StorageError) as refused:
        Broker(data, config={**CONFIG, **more}).start()
    after = sorted(path.name for path in data.iterdir())
    # The refused start removes only directories marked as deleted. All other files stay, even the
    # clean-shutdown marker.
    assert {*after} - {".lock"} == {name for name in before if not name.endswith("-delete")} - {".lock"}
    return str(refused.value)


def test_a_lost_metadata_log_beside_a_snapshot_is_reported(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / f"{10:020d}-{1:010d}.checkpoint").touch()
    with pytest.raises(StorageError, match="a snapshot but no log"):
        read_metadata(RealDisk(tmp_path))


@pytest.mark.behaviour("I27")
def test_records_that_kafkas_settings_keep_are_kept_and_the_rest_deleted(plain: Path) -> None:
    with Broker(plain, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        wait_until(lambda: client.offset("short", -2) == 5)  # retention has deleted the other records
        assert {name: len(client.values(name)) for name in KEPT} == KEPT
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            names = {topic.name for topic in admin.list_topics(include_internal=True)}
            asked = [ConfigResource("topic", name) for name in sorted(names)]
            told = {r.name: each.entries for r, each in admin.describe_configs(asked).items()}
    assert names == {*KEPT, *INTERNAL_TOPICS, "short", "special", "bank"}
    assert told["forever"]["retention.ms"].value == told["again"]["retention.ms"].value == "-1"
    assert told["bank"]["max.message.bytes"].value == "2000000"
    compacted = {name for name in names if told[name]["cleanup.policy"].value == "compact"}
    assert compacted == {"table", *INTERNAL_TOPICS}
    # Retention must not change Kafka's metadata log, which is not a topic.
    assert (plain / DIRECTORY / f"{0:020}.log").stat().st_size > 0
    with Broker(plain, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        assert len(client.values("forever")) == 8


@pytest.mark.behaviour("I27", "I4")
def test_no_producer_id_of_kafkas_is_given_again(plain: Path) -> None:
    assert read_metadata(RealDisk(plain)).next_producer_id == 1000
    with Broker(plain, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        pid = client.new_producer_id()
        assert pid >= 1000
        answer = client.produce("forever", batch(b"of a new producer", pid=pid, sequence=0))
        assert (answer.error_code, answer.base_offset) == (0, 8)


@pytest.mark.behaviour("I27", "T6", "T7")
def test_transactions_and_offsets_of_kafkas_go_on(plain: Path) -> None:
    with (
        Broker(plain, config={**CONFIG, **AGELESS}) as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        states = {
            transaction.transactional_id: transaction.state for transaction in admin.list_transactions()
        }
        assert states == {"done": "CompleteCommit", "undone": "CompleteAbort", "open": "Ongoing"}
        for group in ("classic-readers", "consumer-readers"):
            assert admin.group_offsets(group)[TopicPartition("forever", 0)].offset == 4
        assert admin.group_offsets("of-done")[TopicPartition("bank", 0)].offset == 7
        assert not admin.group_offsets("of-undone")
        assert committed(broker.bootstrap_servers) == [b"done-0", b"done-1"]
        # The next instance of the transactional id aborts the open transaction.
        with producer_of(broker.bootstrap_servers, transactional_id="open") as producer:
            producer.init_transactions()
            with producer.transaction():
                producer.send("bank", b"next", partition=0)
        assert committed(broker.bootstrap_servers) == [b"done-0", b"done-1", b"next"]


def committed(servers: str) -> list[bytes | None]:
    """Return the values in topic `bank` that read_committed readers see, sorted."""
    config = {"bootstrap.servers": servers, "isolation.level": "read_committed"}
    with Consumer(config) as consumer:
        partitions = [TopicPartition("bank", index) for index in (0, 1)]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        ends = consumer.end_offsets(partitions)
        found: list[bytes | None] = []
        while any(consumer.position(tp) < ends[tp] for tp in partitions):
            found += [record.value for record in consumer.poll(0.2)]
    return sorted(found, key=lambda value: value or b"")


@pytest.mark.behaviour("I27", "T6")
def test_a_transaction_that_kafka_had_decided_is_finished(plain: Path) -> None:
    """Kafka was killed after it had decided to commit and before it wrote markers, so the logs end there."""
    cut_at_marker(plain, "bank-0", "bank-1", "__consumer_offsets-0", "__consumer_offsets-1")
    for index in (0, 1):
        cut_last_complete(plain / f"__transaction_state-{index}")
    (plain / ".kafka_cleanshutdown").unlink()
    with (
        Broker(plain, config={**CONFIG, **AGELESS}) as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        states = {
            transaction.transactional_id: transaction.state for transaction in admin.list_transactions()
        }
        assert states["done"] == "CompleteCommit"
        assert admin.group_offsets("of-done")[TopicPartition("bank", 0)].offset == 7
        assert committed(broker.bootstrap_servers) == [b"done-0", b"done-1"]


def cut_at_marker(data: Path, *directories: str) -> None:
    """Cut each log at its first transaction marker."""
    for directory in directories:
        log = data / directory / f"{0:020}.log"
        content = memoryview(log.read_bytes())
        cut = next((position for position, header in iter_batches(content) if header.is_control), None)
        if cut is not None:
            log.write_bytes(bytes(content[:cut]))
        for snapshot in (data / directory).glob("*.snapshot"):
            snapshot.unlink()
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        (data / name).unlink()


def cut_last_complete(directory: Path) -> None:
    """Truncate the transaction log before the record that completes the transaction of 'done'."""
    log = directory / f"{0:020}.log"
    content = memoryview(log.read_bytes())
    for position, header in iter_batches(content):
        (record, *_) = decode_records(content[position : position + header.size_bytes])
        if decode_key(record.key or b"") != "done":
            continue
        if decode_value("done", record.value or b"").state is TransactionState.COMPLETE_COMMIT:
            log.write_bytes(bytes(content[:position]))
            break


@pytest.mark.behaviour("I27")
def test_acls_and_stored_broker_settings_that_would_be_lost_stop_the_start(secured: Path) -> None:
    text = refusal(secured)
    assert "2 ACLs (of User:alice, User:bob)" in text and "authorizer.class.name" in text
    assert "log.retention.ms=-1" in text and "oncelog.takeover.accept=acls,broker-settings" in text
    with Broker(secured, config={**CONFIG, "oncelog.takeover.accept": "acls,broker-settings"}) as broker:
        assert len(values(broker.bootstrap_servers, "forever")) == 8


@pytest.mark.behaviour("I27")
def test_acls_users_and_quotas_are_taken_over(secured: Path) -> None:
    with (
        Broker(secured, config=SECURED) as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        acls = {(acl.principal, acl.name, acl.operation.name) for acl in admin.describe_acls()}
        assert acls == {("User:alice", "forever", "READ"), ("User:bob", "ba", "ALL")}
        assert set(admin.list_users()) == {"alice"}
        running = broker._running
        assert running is not None
        rates = [dict(each) for each in running.node.quotas.values.values()]
        assert {key for rate in rates for key in rate} == {
            "producer_byte_rate",
            "consumer_byte_rate",
            "connection_creation_rate",
        }
        assert running.node.users.has_password("alice", "alice-secret")


@pytest.mark.behaviour("I27")
def test_partitions_that_are_elsewhere_stop_the_start(plain: Path) -> None:
    shutil.rmtree(plain / "bank-1")
    assert "not in this directory: bank-1 (nodes [1])" in refusal(plain)


@pytest.mark.behaviour("I27")
def test_partitions_whose_checkpoints_were_replaced_stop_the_start(plain: Path) -> None:
    """Several log.dirs may be copied into one. Each has its own checkpoint files, which then replace each
    other.
    """
    path = plain / "recovery-point-offset-checkpoint"
    content = path.read_text()
    lines = [line for line in content.splitlines()[2:] if not line.startswith("forever ")]
    path.write_text("".join(f"{line}\n" for line in ("0", len(lines), *lines)))
    text = refusal(plain)
    assert "recovery-point-offset-checkpoint lacks forever-0" in text and "accept=partitions" in text
    path.write_text(content)
    with Broker(plain, config=CONFIG) as broker:
        assert len(values(broker.bootstrap_servers, "forever")) == 8


@pytest.mark.behaviour("I27")
def test_damaged_metadata_stops_the_start_with_the_files_name(plain: Path) -> None:
    log = plain / DIRECTORY / f"{0:020}.log"
    content = bytearray(log.read_bytes())
    content[200] ^= 1
    log.write_bytes(content)
    assert str(log) in refusal(plain)


@pytest.mark.behaviour("I27")
def test_directories_without_settings_stop_the_start_or_are_kept_forever(plain: Path) -> None:
    """Both sources of a topic's settings are missing: our list of topics, and Kafka's metadata log (its
    metadata.log.dir was elsewhere).
    """
    shutil.rmtree(plain / DIRECTORY)
    text = refusal(plain)
    assert "topic table: its directory exists, but its settings do not" in text
    assert "oncelog.takeover.accept=settings" in text
    accepted = {**CONFIG, "oncelog.takeover.accept": "settings"}
    with Broker(plain, config=accepted) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("new", retention_ms=1)
        old = batch(b"old", timestamp_ms=1)
        assert client.produce("new", old).error_code == 0
        wait_until(lambda: client.offset("new", -2) == 1)  # retention has deleted the old record
        assert {name: len(client.values(name)) for name in (*KEPT, "short")} == {**KEPT, "short": 5}


@pytest.mark.behaviour("I27")
def test_a_lost_list_of_topics_of_ours_stops_the_start(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t", retention_ms=-1)
        client.create_topic("empty")
        assert client.produce("t", batch(b"v")).error_code == 0
    (tmp_path / "oncelog-topics.json").unlink()
    text = refusal(tmp_path)
    assert "topic t: its directory exists" in text and "topic empty" not in text


@pytest.mark.behaviour("I27")
def test_directories_that_a_failed_creation_left_do_not_stop_the_start(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
    shutil.copytree(tmp_path / "t-0", tmp_path / "left-0")
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert not (tmp_path / "left-0").exists()
        client.create_topic("left")
        assert client.produce("left", batch(b"v")).error_code == 0


@pytest.mark.behaviour("I27")
def test_a_directory_that_an_older_version_took_over_gets_kafkas_settings(plain: Path) -> None:
    """Regression: version 0.4.1 treated every directory as a topic without settings, even Kafka's metadata
    log.
    """
    with Broker(plain, config=CONFIG):
        pass
    (plain / "oncelog-takeover.json").unlink()
    file = plain / "oncelog-topics.json"
    content = json.loads(file.read_text())
    for topic in content["topics"]:
        topic["settings"] = {"retention.ms": "777"} if topic["name"] == "special" else {}
    content["topics"].append({**content["topics"][0], "name": "__cluster_metadata", "topic_id": "00" * 16})
    file.write_text(json.dumps(content))
    with Broker(plain, config=CONFIG) as broker:
        running = broker._running
        assert running is not None
        topics = {topic.name: topic.overrides for topic in running.node.topics.all()}
        assert "left out the topic __cluster_metadata" in running.node.takeover_notes[0]
    assert topics["forever"] == {"retention.ms": "-1"} and topics["table"] == {"cleanup.policy": "compact"}
    assert topics["special"]["retention.ms"] == "777" and "__cluster_metadata" not in topics
    assert (plain / DIRECTORY).exists()


def append_metadata(data: Path, *records: bytes) -> None:
    """Append records to the metadata log, in the form in which Kafka writes them."""
    log = data / DIRECTORY / f"{0:020}.log"
    content = memoryview(log.read_bytes())
    end = [header for _, header in iter_batches(content)][-1].last_offset + 1
    made = build_batch([NewRecord(1, None, record) for record in records])
    stamp(memoryview(made), 0, end, 1)
    log.write_bytes(bytes(content) + bytes(made))


def config_record(name: str, key: str, value: str) -> bytes:
    record = ConfigRecord(resource_type=2, resource_name=name, name=key, value=value)
    return b"\x01\x04\x00" + record.encode(0)


@pytest.mark.behaviour("I27")
def test_settings_are_taken_again_when_kafka_has_run_since(plain: Path) -> None:
    with Broker(plain, config=CONFIG):
        pass
    append_metadata(plain, config_record("table", "retention.ms", "5"))
    with Broker(plain, config=CONFIG) as broker:
        running = broker._running
        assert running is not None
        table = running.node.topics.get("table")
        assert table is not None
        assert table.overrides == {"cleanup.policy": "compact", "retention.ms": "5"}


@pytest.mark.behaviour("I27")
def test_segments_written_by_kafka_since_lack_no_index(plain: Path) -> None:
    """Kafka creates a `.txnindex` at the first aborted transaction of a segment, Oncelog with each
    segment."""
    with Broker(plain, config=CONFIG) as broker, admin_of(broker) as admin:
        # a deletion of all records begins a new segment
        admin.delete_records({TopicPartition("forever", 0): -1})
        with producer_of(broker.bootstrap_servers) as producer:
            producer.send("forever", b"later", partition=0).result()
    index = max((plain / "forever-0").glob("*.txnindex"))
    assert index.with_suffix(".log").stat().st_size > index.stat().st_size == 0
    index.unlink()
    append_metadata(plain, config_record("table", "retention.ms", "5"))
    with Broker(plain, config=CONFIG) as broker:
        running = broker._running
        assert running is not None
        opened = running.node.log_manager.partitions.values()
        assert [report for partition in opened for report in partition.recovery_warnings] == []


@pytest.mark.behaviour("I27")
def test_a_setting_that_is_not_known_stops_the_start(plain: Path) -> None:
    append_metadata(plain, config_record("table", "of.a.newer.kafka", "x"))
    assert "of.a.newer.kafka=x is unknown" in refusal(plain)


@pytest.mark.behaviour("I27")
def test_a_topic_that_kafka_put_aside_stops_the_start(plain: Path) -> None:
    with Broker(plain, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("ours")
    (plain / "ours-0").rename(plain / f"ours-0.{'ab' * 16}-stray")
    append_metadata(plain, config_record("table", "retention.ms", "5"))
    text = refusal(plain)
    assert "topic ours was set aside by Apache Kafka" in text and "-stray" in text


@pytest.mark.behaviour("I27")
def test_partitions_that_kafka_put_aside_stop_the_start(plain: Path) -> None:
    """This broker has added partitions to a topic of Kafka, whose metadata does not contain them."""
    with Broker(plain, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        with admin_of(broker) as admin:
            admin.create_partitions({"forever": 3})
        assert client.produce("forever", batch(b"v"), 2).error_code == 0
    for index in (1, 2):
        (plain / f"forever-{index}").rename(plain / f"forever-{index}.{'ab' * 16}-stray")
    append_metadata(plain, config_record("table", "retention.ms", "5"))
    text = refusal(plain)
    assert "2 partitions of topic forever were set aside by Apache Kafka" in text
    assert "oncelog.takeover.accept=strays" in text
    for index in (1, 2):
        (plain / f"forever-{index}.{'ab' * 16}-stray").rename(plain / f"forever-{index}")
    with Broker(plain, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.values("forever", 2) == [b"v"] and client.values("forever", 1) == []


@pytest.mark.behaviour("I27")
def test_partitions_that_kafka_put_aside_are_forgotten_on_request(plain: Path) -> None:
    with Broker(plain, config=CONFIG) as broker, admin_of(broker) as admin:
        admin.create_partitions({"forever": 2})
    (plain / "forever-1").rename(plain / f"forever-1.{'ab' * 16}-stray")
    append_metadata(plain, config_record("table", "retention.ms", "5"))
    with Broker(plain, config={**CONFIG, "oncelog.takeover.accept": "strays"}) as broker:
        assert [name for name, index in partitions_of(broker) if name == "forever"] == ["forever"]
    # Later starts do not ask for consent again.
    append_metadata(plain, config_record("table", "retention.ms", "6"))
    for _ in range(2):
        with Broker(plain, config=CONFIG):
            pass


@pytest.mark.behaviour("I27")
def test_partitions_that_kafka_put_aside_and_made_again_stop_the_start(plain: Path) -> None:
    with Broker(plain, config=CONFIG) as broker, admin_of(broker) as admin:
        admin.create_partitions({"forever": 2})
    (plain / "forever-1").rename(plain / f"forever-1.{'ab' * 16}-stray")
    topic = next(t for t in read_metadata(RealDisk(plain)).topics.values() if t.name == "forever")
    partition = PartitionRecord(
        partition_id=1, topic_id=topic.topic_id, replicas=[1], isr=[1], leader=1, directories=[UNASSIGNED]
    )
    append_metadata(plain, b"\x01\x03\x01" + partition.encode(1))
    assert "1 partitions of topic forever were set aside by Apache Kafka" in refusal(plain)


def partitions_of(broker: Broker) -> list[TopicPartition]:
    running = broker._running
    assert running is not None
    return [tp for tp, _ in running.node.topics.all_partitions()]


@pytest.mark.behaviour("I27")
def test_a_start_without_permission_leaves_the_mark_of_a_clean_stop(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start may be that of a user without permission. The next one must still notice that
    checkpoints were replaced, which it can only after a clean stop.
    """
    path = plain / "recovery-point-offset-checkpoint"
    lines = [line for line in path.read_text().splitlines()[2:] if not line.startswith("forever ")]
    path.write_text("".join(f"{line}\n" for line in ("0", len(lines), *lines)))
    denied = str(plain / "bank-0" / f"{0:020}.log")

    def pread(file: RealFile, size: int, position: int) -> bytes:
        if file._path == denied:
            raise PermissionError(errno.EACCES, "Permission denied", denied)
        return open_pread(file, size, position)

    open_pread = RealFile.pread
    with monkeypatch.context() as patched:
        patched.setattr(RealFile, "pread", pread)
        assert "chown, chmod" in refusal(plain)
    assert "recovery-point-offset-checkpoint lacks forever-0" in refusal(plain)


@pytest.mark.behaviour("I27")
def test_the_leader_epoch_is_above_kafkas(plain: Path) -> None:
    """Java's clients ignore a leader with a lower epoch than they have seen. They would ask this broker with
    Kafka's epoch, which it does not know, again and again.
    """
    topic = next(t for t in read_metadata(RealDisk(plain)).topics.values() if t.name == "forever")
    for leader in (-1, 1):
        change = PartitionChangeRecord(partition_id=0, topic_id=topic.topic_id, leader=leader)
        append_metadata(plain, b"\x01\x05\x01" + change.encode(1))
    kafkas = topic.partitions[0].leader_epoch + 2
    for _ in range(2):
        with Broker(plain, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
            asked = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="forever")])
            assert client.ask(asked, 12).topics[0].partitions[0].leader_epoch == kafkas + 1
            fetch = fetch_request([("forever", 0, 0)])
            fetch.topics[0].partitions[0].current_leader_epoch = kafkas
            code = client.ask(fetch, 12).responses[0].partitions[0].error_code
            assert code == FencedLeaderEpoch.code


def test_a_metadata_snapshot_of_kafka_replaces_the_records_before_it(plain: Path) -> None:
    """Kafka deletes the segments of its metadata log that a snapshot covers. So the snapshot must be read,
    too.
    """
    disk, directory = RealDisk(plain), plain / DIRECTORY
    before = read_metadata(disk)
    log = directory / f"{0:020}.log"
    content = memoryview(log.read_bytes())
    records, end = [], 0
    for position, header in iter_batches(content):
        if not header.is_control:
            records += decode_records(content[position : position + header.size_bytes])
        end = header.last_offset + 1
    snapshot = build_batch([NewRecord(1, None, record.value) for record in records])
    (directory / f"{end:020}-0000000001.checkpoint").write_bytes(bytes(snapshot))
    log.unlink()
    (directory / f"{end:020}.log").write_bytes(b"")
    assert read_metadata(disk) == before


@pytest.mark.behaviour("I27")
@pytest.mark.parametrize("has_metadata", [True, False], ids=["kraft", "zookeeper"])
def test_records_of_an_old_message_format_stop_the_start(plain: Path, has_metadata: bool) -> None:
    """Apache Kafka still reads such records. Recovery would truncate them as invalid batches."""
    body = struct.pack(">bbqii", 1, 0, 1_500_000_000_000, -1, 3) + b"old"
    message = struct.pack(">I", zlib.crc32(body)) + body
    log = max((plain / "forever-0").glob("*.log"))
    content = b"".join(struct.pack(">qi", offset, len(message)) + message for offset in range(5, 8))
    log.write_bytes(content)
    accepted = []
    if not has_metadata:
        shutil.rmtree(plain / DIRECTORY)
        accepted = ["settings"]
    assert "[formats] topic forever has records in message format 1" in refusal(
        plain, **{"oncelog.takeover.accept": accepted}
    )
    assert log.read_bytes() == content
    log.write_bytes(bytes(100))  # zeros, as a power loss may leave them
    with Broker(plain, config={**CONFIG, "oncelog.takeover.accept": accepted}):
        pass


def test_a_torn_end_of_kafkas_metadata_is_not_damage(plain: Path) -> None:
    before = read_metadata(RealDisk(plain))
    log = plain / DIRECTORY / f"{0:020}.log"
    made = build_batch([NewRecord(1, None, b"\x01\x04\x00")])
    log.write_bytes(log.read_bytes() + bytes(made)[:-1])
    assert read_metadata(RealDisk(plain)) == before


class Crash(BaseException):
    pass


@pytest.mark.behaviour("I27")
def test_a_crash_between_any_two_writes_of_a_takeover_is_finished_by_the_next_start(
    secured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test sets quotas of two more entities, so that the takeover writes several changes."""
    append_metadata(secured, *(quota_record(name) for name in ("x", "y")))
    done = 0
    while True:
        data = shutil.copytree(secured, tmp_path / f"copy-{done}")
        left = done

        def replace(
            self: RealDisk, path: str, data: bytes, *, is_private: bool = False, whole: Any = RealDisk.replace
        ) -> None:
            nonlocal left
            if path != "meta.properties":
                if not left:
                    raise Crash
                left -= 1
            whole(self, path, data, is_private=is_private)

        with monkeypatch.context() as patch:
            patch.setattr(RealDisk, "replace", replace)
            manager = opened(data)
            try:
                take_over(manager, settings_of(SECURED))
                has_crashed = False
            except Crash:
                has_crashed = True
            manager.release()
        with Broker(data, config=SECURED) as broker:
            running = broker._running
            assert running is not None and running.node.authorizer is not None
            assert len(running.node.authorizer.acls) == 2 and running.node.users.names() == ["alice"]
            assert sum(len(rates) for rates in running.node.quotas.values.values()) == 5
        if not has_crashed:
            break
        done += 1
    assert done >= 6


def opened(data: Path) -> LogManager:
    return LogManager.open(RealDisk(data), node_id=1, new_uuid=lambda: os.urandom(16), now_ms=1)


def settings_of(config: dict[str, object]) -> Settings:
    return BROKER.parse(config)


def quota_record(user: str) -> bytes:
    entity = [ClientQuotaRecord.EntityData(entity_type="user", entity_name=user)]
    record = ClientQuotaRecord(entity=entity, key="producer_byte_rate", value=1e6, remove=False)
    return b"\x01\x0e\x00" + record.encode(0)


@pytest.mark.behaviour("I27", "I1")
def test_a_directory_whose_records_retention_deleted_is_not_taken_for_one_of_a_failed_creation(
    tmp_path: Path,
) -> None:
    """If the topic were removed and created again, it would reuse offsets that consumers have read."""
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
    (directory := tmp_path / "t-0").joinpath(f"{0:020}.log").unlink()
    (directory / f"{5000:020}.log").write_bytes(b"")
    (tmp_path / "oncelog-topics.json").unlink()
    assert "topic t: its directory exists" in refusal(tmp_path)
    with (
        Broker(tmp_path, config={**CONFIG, "oncelog.takeover.accept": "settings"}) as broker,
        RawClient(broker.bootstrap_servers) as client,
    ):
        assert client.produce("t", batch(b"v")).base_offset == 5000


@pytest.mark.behaviour("I27")
def test_leader_epochs_do_not_fall(secured: Path) -> None:
    """Apache Kafka's metadata has epoch 3 and its files epoch 2, but no record has either."""
    for _ in range(2):
        with Broker(secured, config=SECURED) as broker:
            running = broker._running
            assert running is not None and (forever := running.node.topics.get("forever")) is not None
            assert forever.partitions[0].leader_epoch == 4


@pytest.mark.behaviour("I27")
def test_a_partition_whose_log_directory_kafka_had_lost_stops_the_start(plain: Path) -> None:
    metadata = read_metadata(RealDisk(plain))
    (bank,) = (topic for topic in metadata.topics.values() if topic.name == "bank")
    shutil.rmtree(plain / "bank-1")
    # 0 is MIGRATING and 2 is LOST in Kafka's DirectoryId. Only 1, UNASSIGNED, means that no directory exists
    # yet.
    for number in (0, 2):
        change = PartitionChangeRecord(
            partition_id=1, topic_id=bank.topic_id, directories=[number.to_bytes(16, "big")]
        )
        append_metadata(plain, b"\x01\x05\x01" + change.encode(1))
        assert "not in this directory: bank-1 (nodes [1])" in refusal(plain)


@pytest.mark.behaviour("I27")
def test_a_topic_that_kafka_put_aside_and_made_again_stops_the_start(plain: Path) -> None:
    with Broker(plain, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("ours")
        assert client.produce("ours", batch(b"v")).error_code == 0
    (plain / "ours-0").rename(plain / f"ours-0.{'ab' * 16}-stray")
    topic_id = b"\x09" * 16
    topic = TopicRecord(name="ours", topic_id=topic_id)
    partition = PartitionRecord(
        partition_id=0, topic_id=topic_id, replicas=[1], isr=[1], leader=1, directories=[UNASSIGNED]
    )
    append_metadata(plain, b"\x01\x02\x00" + topic.encode(0), b"\x01\x03\x01" + partition.encode(1))
    text = refusal(plain)
    assert "topic ours was set aside by Apache Kafka" in text and "-stray" in text
    with Broker(plain, config={**CONFIG, "oncelog.takeover.accept": "strays"}) as broker:
        running = broker._running
        assert running is not None and (ours := running.node.topics.get("ours")) is not None
        assert ours.topic_id == topic_id
    with Broker(plain, config=CONFIG):  # a later start does not ask for consent again
        pass


@pytest.mark.behaviour("I27")
def test_a_topic_with_a_long_name_that_kafka_put_aside_stops_the_start(plain: Path) -> None:
    """The name of a directory has at most 255 characters. So when Kafka renames the directory, it truncates
    the topic's name in it.
    """
    name = "n" * 240
    with Broker(plain, config=CONFIG) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic(name)
        assert client.produce(name, batch(b"v")).error_code == 0
    suffix = f"-0.{'ab' * 16}-stray"
    (plain / f"{name}-0").rename(plain / (name[: 255 - len(suffix)] + suffix))
    append_metadata(plain, config_record("table", "retention.ms", "5"))
    assert f"topic {name} was set aside by Apache Kafka" in refusal(plain)


@pytest.mark.behaviour("I27")
def test_an_acl_that_kafka_has_removed_since_no_longer_applies(secured: Path) -> None:
    with Broker(secured, config=SECURED):
        pass
    ids = list(read_metadata(RealDisk(secured)).acls)
    made = [RemoveAccessControlEntryRecord(id=each).encode(0) for each in ids]
    user = RemoveUserScramCredentialRecord(name="alice", mechanism=1).encode(0)
    user_2 = RemoveUserScramCredentialRecord(name="alice", mechanism=2).encode(0)
    removals = [b"\x01\x13\x00" + each for each in made]
    append_metadata(secured, *removals, b"\x01\x16\x00" + user, b"\x01\x16\x00" + user_2)
    assert not read_metadata(RealDisk(secured)).acls and not read_metadata(RealDisk(secured)).users
    with Broker(secured, config=SECURED) as broker:
        running = broker._running
        assert running is not None and running.node.authorizer is not None
        assert not running.node.authorizer.acls and not running.node.users.names()


@pytest.mark.behaviour("I27")
def test_changes_made_only_here_are_kept_when_kafka_has_run_since(secured: Path) -> None:
    with (
        Broker(secured, config=SECURED) as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        (acl, *_) = admin.describe_acls()
        admin.delete_acls([acl])
    append_metadata(secured, config_record("table", "retention.ms", "5"))
    with Broker(secured, config=SECURED) as broker:
        running = broker._running
        assert running is not None and running.node.authorizer is not None
        assert len(running.node.authorizer.acls) == 1
    # With this change, both brokers have changed the ACLs, and it is unknown which version is newer.
    append_metadata(secured, removal_of_an_acl(secured))
    assert "oncelog-acls.json differs" in refusal(secured, **SECURED)


def removal_of_an_acl(data: Path) -> bytes:
    first = next(iter(read_metadata(RealDisk(data)).acls))
    return b"\x01\x13\x00" + RemoveAccessControlEntryRecord(id=first).encode(0)


@pytest.mark.behaviour("I27")
def test_partitions_beyond_the_list_of_topics_stop_the_start(tmp_path: Path) -> None:
    """The list of topics may be older than the partitions. It would then hide the records of newer
    partitions.
    """
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        older = (tmp_path / "oncelog-topics.json").read_text()
        with admin_of(broker) as admin:
            admin.create_partitions({"t": 2})
        assert client.produce("t", batch(b"v"), partition=1).error_code == 0
    (tmp_path / "oncelog-topics.json").write_text(older)
    text = refusal(tmp_path)
    assert "[partitions] topic t has 1 partitions" in text and "t-1" in text


def test_a_copy_of_a_partition_whose_name_ends_in_a_date_stops_the_start(tmp_path: Path) -> None:
    """Regression: the start took the date for a partition number, and listed 20 million missing
    partitions.

    It took 2.7 GB of memory, and its error text had 191 MB.
    """
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        assert client.produce("t", batch(b"v")).error_code == 0
    for name in ("t-0-20261122", "t-0-1732300000", "t-4000000000"):
        shutil.copytree(tmp_path / "t-0", tmp_path / name)
    text = refusal(tmp_path)
    assert text.count("contains records, but a topic has at most 100000 partitions") == 3
    assert len(text) < 2000
    config = {"oncelog.takeover.accept": "partitions"}
    with Broker(tmp_path, config=config) as broker, admin_of(broker) as admin:
        assert [listing.name for listing in admin.list_topics()] == ["t"]
    assert (tmp_path / "t-0-20261122" / "00000000000000000000.log").stat().st_size


@pytest.mark.behaviour("I27")
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_partition_of_which_only_other_nodes_have_all_stops_the_start(
    plain: Path, is_changed: bool
) -> None:
    """No replica is in sync, and the eligible leaders (KIP-966) are other nodes. So this copy may lack
    records.
    """
    metadata = read_metadata(RealDisk(plain))
    (bank,) = (topic for topic in metadata.topics.values() if topic.name == "bank")
    if is_changed:
        change = PartitionChangeRecord(
            partition_id=1, topic_id=bank.topic_id, isr=[], replicas=[1, 2], eligible_leader_replicas=[2]
        )
        record = b"\x01\x05\x02" + change.encode(2)
    else:
        whole = PartitionRecord(
            partition_id=1,
            topic_id=bank.topic_id,
            replicas=[1, 2],
            isr=[],
            directories=bank.partitions[1].directories * 2,
            eligible_leader_replicas=[],
            last_known_elr=[2],
        )
        record = b"\x01\x03\x02" + whole.encode(2)
    append_metadata(plain, record)
    assert "bank-1 is not in sync here; nodes [2] have more records" in refusal(plain)


@pytest.mark.behaviour("I27")
def test_accepted_risks_are_reported_even_without_kafkas_metadata(plain: Path) -> None:
    (plain / DIRECTORY / f"{0:020}.log").write_bytes(bytes(100_000)[:70] + b"x" * 1000)
    manager = opened(plain)
    notes = take_over(manager, settings_of({**CONFIG, "oncelog.takeover.accept": "metadata,settings"}))
    manager.release()
    assert any("accepted (metadata)" in note for note in notes)
    assert any("accepted (settings): topic forever" in note for note in notes)


@pytest.mark.behaviour("I27")
def test_settings_of_groups_that_kafka_stores_are_told(plain: Path) -> None:
    record = ConfigRecord(
        resource_type=32, resource_name="g", name="consumer.session.timeout.ms", value="60000"
    )
    append_metadata(plain, b"\x01\x04\x00" + record.encode(0))
    manager = opened(plain)
    notes = take_over(manager, settings_of(CONFIG))
    manager.release()
    assert any("of group g" in note and "consumer.session.timeout.ms=60000" in note for note in notes)


def test_empty_partitions_count_where_the_list_of_topics_is_lost(tmp_path: Path) -> None:
    """A group's partition of `__consumer_offsets` depends on the number of its partitions. So empty ones must
    be counted, too.
    """
    config = {**CONFIG, "offsets.topic.num.partitions": 7, "oncelog.takeover.accept": "settings"}
    at = TopicPartition("t", 0)
    with Broker(tmp_path, config=config) as broker, admin_of(broker) as admin:
        admin.create_topics([NewTopic("t", 4)])
        with producer_of(broker.bootstrap_servers) as producer:
            producer.send("t", b"v", partition=0).result()
        admin.alter_group_offsets("group", {at: 1})
    (tmp_path / "oncelog-topics.json").unlink()
    with Broker(tmp_path, config=config) as broker, admin_of(broker) as admin:
        described = admin.describe_topics(["t", "__consumer_offsets"])
        assert [len(described[name].partitions) for name in ("t", "__consumer_offsets")] == [4, 7]
        admin.alter_group_offsets("group", {at: 0})
    with Broker(tmp_path, config=config) as broker, admin_of(broker) as admin:
        assert admin.group_offsets("group")[at].offset == 0


@pytest.mark.parametrize("name", ["backup-20261122", "old-01", "moved-to-delete", "notes-2024"])
def test_a_directory_that_is_no_partition_is_left_alone(tmp_path: Path, name: str) -> None:
    with Broker(tmp_path) as broker, producer_of(broker.bootstrap_servers) as producer:
        producer.send("t", b"v").result()
    shutil.copytree(tmp_path / "t-0", tmp_path / name / "t-0")
    for _ in range(2):
        with Broker(tmp_path):
            pass
    assert list((tmp_path / name / "t-0").glob("*.log"))
