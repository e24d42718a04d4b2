"""A data directory as Apache Kafka leaves it after a history that a seed draws.

The history has producers with and without ids, transactions (some open, some decided and incomplete), and
groups with offsets. It has restarts with new leader epochs, deleted records, and compaction. It notes
everything that a broker must find in the directory.

Source: Kafka's LogManager, TransactionLog, GroupMetadata and OffsetCommit records, MetadataRecordSerde.
"""

from __future__ import annotations

import json
import struct
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import TopicPartition
from oncelog.wire.stored import ConfigRecord, PartitionRecord, ProducerIdsRecord, TopicRecord
from oncelog_simulator.clients import Call
from oncelog_simulator.history.check import Item, Kind, Outcome
from oncelog_simulator.kafka_log import TRANSACTIONAL, KafkaBatch, KafkaLog
from oncelog_simulator.runtime import EPOCH_NS

EMPTY, ONGOING, PREPARE_COMMIT, PREPARE_ABORT, COMPLETE_COMMIT, COMPLETE_ABORT = range(6)
OFFSETS, TRANSACTIONS, METADATA = "__consumer_offsets", "__transaction_state", "__cluster_metadata"
INTERNAL_PARTITIONS = 2
GROUPS = ("group-0", "group-1", "group-2")
"""Groups that commit drawn offsets. A commit may move a group back to a lower offset."""
FIRST_PRODUCER_ID, NEXT_PRODUCER_ID = 3, 1_000
END_MS = EPOCH_NS // 1_000_000 - 5_000
"""The time at which Kafka stopped, in milliseconds since 1970: five seconds before the simulation begins."""
STEP_MS = 3_000
LONG_TIMEOUT_MS = 900_000


@dataclass(slots=True)
class KafkaTransactionalId:
    """A transactional id. `sequences` has, by partition, the next sequence of the current producer epoch."""

    name: str
    producer_id: int
    timeout_ms: int
    epoch: int = 0
    state: int = EMPTY
    partitions: list[TopicPartition] = field(default_factory=list)
    start_ms: int = -1
    sequences: dict[TopicPartition, int] = field(default_factory=dict)
    pending: dict[tuple[str, TopicPartition], tuple[int, int]] = field(default_factory=dict)
    """Pending offsets by group and partition: (offset, offset of its record in __consumer_offsets)."""
    transaction: int = 0

    @property
    def process(self) -> str:
        """The name of Kafka's client in the history. Our client may have the same transactional id."""
        return f"kafka {self.name}"


@dataclass(slots=True)
class LastBatch:
    """The newest batch of an idempotent producer in a partition. The producer may send it again."""

    producer_id: int
    epoch: int
    tp: TopicPartition
    batch: KafkaBatch


class KafkaHistory:
    """The history of a Kafka broker before it stopped.

    `topic` is the topic of most records. `table` is a compacted topic.
    """

    def __init__(self, rng: Random, topic: str, table: str, partitions: int, names: list[str]) -> None:
        self.rng, self.topic, self.table = rng, topic, table
        self.is_classic = rng.random() < 0.4
        """True if all transactions of a producer have one epoch (transaction.version 0)."""
        self.is_clean = rng.random() < 0.4
        segment_bytes = rng.choice((300, 900, 3_000, 1 << 20))
        interval_bytes = rng.choice((0, 200, 4_096))
        self.logs: dict[TopicPartition, KafkaLog] = {}
        counts = {
            topic: partitions,
            table: 1,
            OFFSETS: INTERNAL_PARTITIONS,
            TRANSACTIONS: INTERNAL_PARTITIONS,
        }
        for name, count in counts.items():
            topic_id = rng.randbytes(16)
            for number in range(count):
                log = KafkaLog(name, number, segment_bytes, interval_bytes)
                log.topic_id, log.is_compacted = topic_id, name != topic
                self.logs[TopicPartition(name, number)] = log
        self.settings: dict[str, dict[str, str]] = {
            topic: {"retention.ms": "-1", "max.message.bytes": str(rng.choice((1_048_588, 2_000_000)))},
            table: {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"},
        }
        self.now_ms = END_MS - STEP_MS * 200
        self.calls: list[Call] = []
        self.offsets: dict[str, dict[TopicPartition, tuple[int, int]]] = {}
        """Committed offsets by group and partition: (offset, offset of its record in __consumer_offsets)."""
        self.groups: dict[str, int] = {}
        """The generation of each classic group."""
        self.ids = [
            KafkaTransactionalId(name, FIRST_PRODUCER_ID + number, rng.choice((20_000, 60_000)))
            for number, name in enumerate(names)
        ]
        self.producers = [FIRST_PRODUCER_ID + 100 + number for number in range(rng.randint(0, 3))]
        self._epochs = dict.fromkeys(self.producers, 0)
        self._sequences: dict[tuple[int, TopicPartition], int] = {}
        self.last_batches: dict[tuple[int, TopicPartition], LastBatch] = {}
        self._value_count = 0

    def generate(self) -> None:
        """Run Kafka's history up to its stop."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self._send, 6), (self._send_numbered, 6), (self._transact, 9), (self._commit_offset, 3),
            (self._update_table, 5), (self._restart, 1), (self._delete_records, 1), (self._roll, 1),
            (self._compact, 2), (self._delete_offset, 1), (self._change_group, 1),
        ]  # fmt: skip
        steps, weights = zip(*actions, strict=True)
        for entry in self.ids:
            self._store(entry)
        for step in self.rng.choices(steps, weights, k=self.rng.choice((0, 30, 80, 200))):
            self.now_ms += self.rng.randrange(STEP_MS)
            step()
        self.now_ms = END_MS

    # Records

    def _value(self) -> bytes:
        self._value_count += 1
        return b"kafka-%d" % self._value_count

    def _partition(self) -> TopicPartition:
        return self.rng.choice([tp for tp in self.logs if tp.topic == self.topic])

    def _call(self, kind: Kind, process: str, items: list[Item], transaction: int | None = None) -> Call:
        """Note an operation of one of Kafka's clients from before the simulation."""
        time_us = len(self.calls) - 1_000_000
        call = Call(process, process, kind, time_us, tuple(items), transaction, Outcome.OK, time_us)
        self.calls.append(call)
        return call

    def _append(
        self, tp: TopicPartition, process: str, producer: tuple[int, int, int], transaction: int | None = None
    ) -> KafkaBatch:
        values = [self._value() for _ in range(self.rng.choice((1, 1, 3)))]
        attributes = 0 if transaction is None else TRANSACTIONAL
        log = self.logs[tp]
        batch = log.append([(None, value) for value in values], self.now_ms, producer, attributes)
        for record in batch.records:
            self._call(Kind.SEND, process, [Item(*tp, record.offset, record.value)], transaction)
        return batch

    def _send(self) -> None:
        self._append(self._partition(), f"kafka-plain-{self._value_count}", (-1, -1, -1))

    def _send_numbered(self) -> None:
        if not self.producers:
            return
        producer_id, tp = self.rng.choice(self.producers), self._partition()
        if self.rng.random() < 0.1:
            self._epochs[producer_id] += 1
            for key in [key for key in self._sequences if key[0] == producer_id]:
                del self._sequences[key]
        epoch, sequence = self._epochs[producer_id], self._sequences.get((producer_id, tp), 0)
        batch = self._append(tp, f"kafka-{producer_id}-{epoch}", (producer_id, epoch, sequence))
        self._sequences[producer_id, tp] = batch.last_sequence + 1
        self.last_batches[producer_id, tp] = LastBatch(producer_id, epoch, tp, batch)

    def _update_table(self) -> None:
        key = b"key-%d" % self.rng.randrange(5)
        value = None if self.rng.random() < 0.15 else self._value()
        self.logs[TopicPartition(self.table, 0)].append([(key, value)], self.now_ms)

    # Transactions

    def _transact(self) -> None:
        entry = self.rng.choice(self.ids)
        if entry.state != ONGOING or self.rng.random() < 0.6:
            self._write(entry)
        else:
            self._end(entry, is_commit=self.rng.random() < 0.7)

    def _write(self, entry: KafkaTransactionalId) -> None:
        if entry.state in (PREPARE_COMMIT, PREPARE_ABORT):
            return
        if entry.state != ONGOING:
            entry.state, entry.start_ms, entry.partitions = ONGOING, self.now_ms, []
            entry.transaction += 1
        if self.rng.random() < 0.25:
            self._commit_in_transaction(entry)
            return
        tp = self._partition()
        self._add(entry, tp)
        sequence = entry.sequences.get(tp, 0)
        batch = self._append(
            tp, entry.process, (entry.producer_id, entry.epoch, sequence), transaction=entry.transaction
        )
        entry.sequences[tp] = batch.last_sequence + 1

    def _add(self, entry: KafkaTransactionalId, tp: TopicPartition) -> None:
        if tp not in entry.partitions:
            entry.partitions.append(tp)
            self._store(entry)

    def _commit_in_transaction(self, entry: KafkaTransactionalId) -> None:
        group, tp = self.rng.choice(GROUPS), self._partition()
        offsets_partition = TopicPartition(OFFSETS, java_partition(group, INTERNAL_PARTITIONS))
        self._add(entry, offsets_partition)
        offset = self.rng.randint(0, self.logs[tp].end_offset)
        record = offset_commit(group, tp, offset, self.now_ms, self.logs[tp].topic_id)
        batch = self.logs[offsets_partition].append(
            [record], self.now_ms, (entry.producer_id, entry.epoch, -1), TRANSACTIONAL
        )
        entry.pending[group, tp] = offset, batch.base_offset

    def _end(self, entry: KafkaTransactionalId, *, is_commit: bool) -> None:
        """End a transaction, or at times stop after some of its markers, as a stop of Kafka may leave it."""
        entry.state = PREPARE_COMMIT if is_commit else PREPARE_ABORT
        if not self.is_classic:
            entry.epoch += 1
            entry.sequences.clear()
        self._store(entry)
        self._decided(entry, is_commit=is_commit)
        marked = len(entry.partitions)
        if self.rng.random() < 0.1:
            marked = self.rng.randint(0, marked)
            self._mark(entry, marked, is_commit=is_commit)
            # Kafka stopped here, so the transaction is decided and stays incomplete.
            return
        self._mark(entry, marked, is_commit=is_commit)
        entry.state = COMPLETE_COMMIT if is_commit else COMPLETE_ABORT
        entry.partitions = []
        self._store(entry)

    def _mark(self, entry: KafkaTransactionalId, count: int, *, is_commit: bool) -> None:
        for tp in entry.partitions[:count]:
            self.logs[tp].append_marker(entry.producer_id, entry.epoch, self.now_ms, is_commit=is_commit)

    def _decided(self, entry: KafkaTransactionalId, *, is_commit: bool) -> None:
        """Note the outcome of a transaction. It is final, even if another broker writes the markers later."""
        kind = Kind.COMMIT if is_commit else Kind.ABORT
        self._call(kind, entry.process, [], entry.transaction)
        for (group, tp), (offset, place) in entry.pending.items() if is_commit else ():
            held = self.offsets.setdefault(group, {})
            if tp not in held or held[tp][1] < place:
                held[tp] = offset, place
        entry.pending.clear()

    def _store(self, entry: KafkaTransactionalId) -> None:
        """Append the state of a transactional id."""
        index = java_partition(entry.name, INTERNAL_PARTITIONS)
        record = transaction_record(entry, self.now_ms, is_classic=self.is_classic)
        self.logs[TopicPartition(TRANSACTIONS, index)].append([record], self.now_ms)

    # Groups

    def _offsets_log(self, group: str) -> KafkaLog:
        return self.logs[TopicPartition(OFFSETS, java_partition(group, INTERNAL_PARTITIONS))]

    def _commit_offset(self) -> None:
        group, tp = self.rng.choice(GROUPS), self._partition()
        offset = self.rng.randint(0, self.logs[tp].end_offset)
        batch = self._offsets_log(group).append([offset_commit(group, tp, offset, self.now_ms)], self.now_ms)
        self.offsets.setdefault(group, {})[tp] = offset, batch.base_offset

    def _delete_offset(self) -> None:
        """Delete a drawn committed offset. As in Kafka, this also drops pending offsets of its group and
        partition.
        """
        held = [(group, tp) for group, offsets in self.offsets.items() for tp in offsets]
        if not held:
            return
        group, tp = self.rng.choice(sorted(held))
        key, _ = offset_commit(group, tp, 0, 0)
        self._offsets_log(group).append([(key, None)], self.now_ms)
        del self.offsets[group][tp]
        for entry in self.ids:
            entry.pending.pop((group, tp), None)

    def _change_group(self) -> None:
        """Append the record of a classic group that becomes empty in its next generation."""
        group = self.rng.choice(GROUPS)
        self.groups[group] = self.groups.get(group, 0) + 1
        self._offsets_log(group).append([group_record(group, self.groups[group], self.now_ms)], self.now_ms)

    # Broker

    def _restart(self) -> None:
        """Restart Kafka: every partition gets a new leader epoch and a snapshot at its end."""
        for log in self.logs.values():
            log.leader_epoch += 1
            log.take_snapshot()

    def _roll(self) -> None:
        self.logs[self.rng.choice(sorted(self.logs))].roll()

    def _delete_records(self) -> None:
        log = self.logs[self._partition()]
        log.delete_records(self.rng.randint(log.start_offset, log.end_offset))

    def _compact(self) -> None:
        for log in self.logs.values():
            if log.is_compacted:
                log.compact()

    def interrupt_compaction(self, rng: Random) -> None:
        """Stop Kafka while compacted segments replace others."""
        for log in self.logs.values():
            if log.is_compacted and rng.random() < 0.7:
                log.interrupt_compaction(rng)

    # Directory

    def write(self, disk: MemoryDisk, node_id: int) -> None:
        """Write the directory and make all of it durable."""
        directory_id = self.rng.randbytes(16)
        encoded_id = urlsafe_b64encode(directory_id).rstrip(b"=").decode()
        cluster_id = urlsafe_b64encode(self.rng.randbytes(16)).rstrip(b"=").decode()
        properties = f"#\n#Thu Jan 01 00:00:00 UTC 2026\nnode.id={node_id}\ndirectory.id={encoded_id}\n"
        files = {"meta.properties": f"{properties}version=1\ncluster.id={cluster_id}\n".encode()}
        if self.is_clean:
            files[".kafka_cleanshutdown"] = json.dumps({"version": 0, "brokerEpoch": 12}).encode()
        metadata = self._metadata(node_id, directory_id)
        for log in (metadata, *self.logs.values()):
            disk.mkdir(log.directory)
            for name, content in log.files(is_clean=self.is_clean):
                torn = self._torn_end(log, name)
                files[f"{log.directory}/{name}"] = content + torn
        files |= self._checkpoints()
        if self.rng.random() < 0.3:
            name = f"{self.topic}-0.{self.rng.randbytes(16).hex()}-delete"
            disk.mkdir(name)
            files[f"{name}/{0:020}.log"] = (
                self.logs[TopicPartition(self.topic, 0)].files(is_clean=False).__next__()[1]
            )
        for path, content in files.items():
            disk.replace(path, content)
            disk.set_modified_ms(path, END_MS)
        for name in disk.list():
            if disk.is_directory(name):
                disk.sync_directory(name)
        disk.sync_directory()

    def _torn_end(self, log: KafkaLog, name: str) -> bytes:
        """Return the beginning of a batch that a crash cut off at the end of the log; b"" in most cases."""
        is_active = name == f"{log.segments[-1].base_offset:020}.log"
        if self.is_clean or not is_active or self.rng.random() < 0.7:
            return b""
        batch = KafkaBatch(log.end_offset, log.end_offset, (), END_MS, log.leader_epoch)
        return batch.encode()[: self.rng.randrange(1, 61)]

    def _checkpoints(self) -> dict[str, bytes]:
        points: dict[TopicPartition, int] = {}
        watermarks: dict[TopicPartition, int] = {}
        for tp, log in self.logs.items():
            points[tp] = watermarks[tp] = log.end_offset
            if not self.is_clean:
                bases = [segment.base_offset for segment in log.segments]
                points[tp] = self.rng.choice(bases)
                watermarks[tp] = self.rng.randint(log.start_offset, log.end_offset)
        absent = {tp for tp in self.logs if not self.is_clean and self.rng.random() < 0.2}
        starts = {
            tp: log.start_offset
            for tp, log in self.logs.items()
            if log.start_offset > log.segments[0].base_offset
        }
        cleaned = {tp: log.cleaned_offset for tp, log in self.logs.items() if log.cleaned_offset}
        return {
            "recovery-point-offset-checkpoint": _checkpoint(
                {tp: point for tp, point in points.items() if tp not in absent}
            ),
            "replication-offset-checkpoint": _checkpoint(watermarks),
            "log-start-offset-checkpoint": _checkpoint(starts),
            "cleaner-offset-checkpoint": _checkpoint(cleaned),
        }

    def _metadata(self, node_id: int, directory_id: bytes) -> KafkaLog:
        """Return the controller's metadata log."""
        log = KafkaLog(METADATA, 0, 1 << 20, 4_096)
        log.topic_id = (1).to_bytes(16)
        ids = {tp.topic: log.topic_id for tp, log in self.logs.items()}
        values: list[bytes] = []
        for name, topic_id in ids.items():
            values.append(_metadata_record(2, 0, TopicRecord(name=name, topic_id=topic_id).encode(0)))
            for tp in self.logs:
                if tp.topic == name:
                    record = PartitionRecord(
                        partition_id=tp.partition,
                        topic_id=topic_id,
                        replicas=[node_id],
                        isr=[node_id],
                        leader=node_id,
                        directories=[directory_id],
                    )
                    values.append(_metadata_record(3, 1, record.encode(1)))
            for key, text in self.settings.get(name, {}).items():
                config = ConfigRecord(resource_type=2, resource_name=name, name=key, value=text)
                values.append(_metadata_record(4, 0, config.encode(0)))
        block = ProducerIdsRecord(broker_id=node_id, broker_epoch=12, next_producer_id=NEXT_PRODUCER_ID)
        values.append(_metadata_record(15, 0, block.encode(0)))
        for value in values:
            log.append([(None, value)], END_MS)
        return log


def java_partition(name: str, count: int) -> int:
    """Return the partition of a group or transactional id: String.hashCode without its sign bit, modulo
    `count`.
    """
    code = 0
    for character in name:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    return (code & 0x7FFFFFFF) % count


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _compact_string(text: str) -> bytes:
    return bytes([len(text) + 1]) + text.encode()


def _metadata_record(kind: int, version: int, body: bytes) -> bytes:
    return bytes([1, kind, version]) + body


def _checkpoint(offsets: Mapping[TopicPartition, int]) -> bytes:
    lines = "".join(f"{tp.topic} {tp.partition} {offset}\n" for tp, offset in offsets.items())
    return f"0\n{len(offsets)}\n{lines}".encode()


def offset_commit(
    group: str, tp: TopicPartition, offset: int, time_ms: int, topic_id: bytes | None = None
) -> tuple[bytes, bytes]:
    """Return the key and value of an offset commit, in Kafka's value version 4."""
    key = struct.pack(">h", 1) + _string(group) + _string(tp.topic) + struct.pack(">i", tp.partition)
    tags = b"\0" if topic_id is None else b"\x01\x00\x10" + topic_id
    return key, struct.pack(">hqi", 4, offset, -1) + _compact_string("") + struct.pack(">q", time_ms) + tags


def group_record(group: str, generation: int, time_ms: int) -> tuple[bytes, bytes]:
    """Return the key and value of a classic group without members."""
    value = struct.pack(">h", 3) + _string("consumer") + struct.pack(">ihhq", generation, -1, -1, time_ms)
    return struct.pack(">h", 2) + _string(group), value + struct.pack(">i", 0)


def transaction_record(entry: KafkaTransactionalId, time_ms: int, *, is_classic: bool) -> tuple[bytes, bytes]:
    """Return the key and value of a transactional id's state: version 0, or version 1 with
    transaction.version 2.
    """
    by_topic: dict[str, list[int]] = {}
    for tp in entry.partitions:
        by_topic.setdefault(tp.topic, []).append(tp.partition)
    head = struct.pack(">qhib", entry.producer_id, entry.epoch, entry.timeout_ms, entry.state)
    tail = struct.pack(">qq", time_ms, entry.start_ms)
    if is_classic:
        topics = b"".join(
            _string(name) + struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)
            for name, partitions in by_topic.items()
        )
        count = -1 if entry.state == EMPTY else len(by_topic)
        value = struct.pack(">h", 0) + head + struct.pack(">i", count) + topics + tail
    else:
        topics = b"".join(
            _compact_string(name)
            + bytes([len(partitions) + 1])
            + struct.pack(f">{len(partitions)}i", *partitions)
            + b"\0"
            for name, partitions in by_topic.items()
        )
        count = 0 if entry.state == EMPTY else len(by_topic) + 1
        # Tags: the producer id of the previous transaction, and the client's transaction.version.
        tags = b"\x00\x08" + struct.pack(">q", entry.producer_id)
        tags = b"\x01" + tags if entry.state == EMPTY else b"\x02" + tags + b"\x02\x02\x00\x02"
        value = struct.pack(">h", 1) + head + bytes([count]) + topics + tail + tags
    return struct.pack(">h", 0) + _string(entry.name), value
