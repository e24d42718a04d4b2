"""A workload on one topic with deletion, compaction, retention, new partitions and transactions at the same
time.

Records have keys, and a name in a header, so that tombstones can be told apart. A witness notes every batch
that the broker stores. At each start it also notes the batches that it missed. At the end each pass of a
reader over the whole topic is checked against the witness, the producers' notes, and the administrators'
requests:

- A pass reads no record that was not stored at its offset, or whose transaction was not committed.
- A pass reads every record above the log start that was committed before the pass began. If the topic was
  ever compacted, only the newest record of each key is required.
- A pass that has read an older value of a deleted key also reads its tombstone, if the pass takes less than
  half of delete.retention.ms.

If the topic was deleted during a pass, only the first rule applies to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, NamedTuple

from oncelog.audit.partition import FindingKind
from oncelog.broker.append_events import AppendEvent
from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import ConfigResource, NewTopic
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.errors import OncelogError, UnknownTopicOrPartition
from oncelog.types import Record, TopicPartition
from oncelog.wire.records import decode_records
from oncelog_simulator.checks import batches_of
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application, Call, LastReader, Reader, Sender
from oncelog_simulator.history.check import Item, Kind, Outcome
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.topic_recreation import LATE_SECONDS, Deletion
from oncelog_simulator.txn_clients import Writer
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import BrokerHost, World

BURSTS = 8
NAME = "name"
KEY_COUNT = 5
POLICIES = ("delete", "compact", "compact,delete")
DELETE_RETENTION_MS = 20_000


class Stored(NamedTuple):
    """A record that the broker stored. `at_us` is the virtual time at which the witness noted it."""

    name: bytes
    key: bytes | None
    is_tombstone: bool
    at_us: int


Log = dict[int, Stored]
"""The stored records of one partition by offset."""


@dataclass(eq=False)
class Pass:
    """One pass of a reader from the beginning to the end of the topic.

    `first_id` and `last_id` are the topic's ids at the start and at the end of the pass. They differ if the
    topic was created again.
    """

    begun_us: int
    first_id: bytes | None
    ends: dict[TopicPartition, int] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    last_id: bytes | None = None
    ended_us: int | None = None
    starts: dict[TopicPartition, int] = field(default_factory=dict)


class Witness:
    """Notes every record that was ever stored in the topic, and in deleted topics of the same name."""

    def __init__(self, world: World, topic: str) -> None:
        self.world, self.topic = world, topic
        self.logs: dict[tuple[bytes, int], Log] = {}
        self.lost: list[tuple[TopicPartition, int, Stored]] = []
        """Records that were at the end of a log when the broker ended, and that the next start did not find.
        """
        self.max_starts: dict[tuple[bytes, int], int] = {}
        self.compacted_ids: set[bytes] = set()

    @property
    def node(self) -> BrokerState | None:
        host = self.world.hosts["broker"]
        assert isinstance(host, BrokerHost)
        return host.node

    def topic_id(self) -> bytes | None:
        """Return the current id of the topic; None if the topic does not exist or the broker is down."""
        topic = None if self.node is None else self.node.topics.get(self.topic)
        return None if topic is None else topic.topic_id

    def stored(self, event: AppendEvent) -> None:
        """Note the records of a batch of this topic that the broker has just stored."""
        node = self.node
        if event.topic != self.topic or event.verdict != "stored" or node is None:
            return
        assert event.base_offset is not None
        topic, partition = node.topics.partition(TopicPartition(event.topic, event.partition))
        self._note(topic.topic_id, event.partition, partition, event.base_offset)

    def observe(self, node: BrokerState) -> None:
        topic = node.topics.get(self.topic)
        for number, partition in enumerate(topic.partitions if topic else ()):
            key = partition.topic_id or b"", number
            self.max_starts[key] = max(self.max_starts.get(key, 0), partition.log_start_offset)
            if partition.config.is_compacted and partition.topic_id:
                self.compacted_ids.add(partition.topic_id)

    def recovered(self, node: BrokerState) -> None:
        """Note which records a start found, because these may be fewer or more than the witness has noted."""
        topic = node.topics.get(self.topic)
        for number, partition in enumerate(topic.partitions if topic else ()):
            assert topic is not None
            log = self.logs.setdefault((topic.topic_id, number), {})
            for offset in [stored for stored in log if stored >= partition.log_end_offset]:
                self.lost.append((partition.topic_partition, offset, log.pop(offset)))
            self._note(topic.topic_id, number, partition, partition.log_start_offset)

    def _note(self, topic_id: bytes, number: int, partition: Any, offset: int) -> None:
        log = self.logs.setdefault((topic_id, number), {})
        for header, data in batches_of(partition, offset):
            if header.is_control:
                continue
            for record in decode_records(data):
                existing = log.get(record.offset)
                name = dict(record.headers)[NAME] or b""
                at_us = self.world.now_us if existing is None or existing.name != name else existing.at_us
                log[record.offset] = Stored(bytes(name), record.key, record.value is None, at_us)


def content_of(rng: Random, name: bytes) -> dict[str, Any]:
    """Return the content of a record for a name: one of a few keys, and a value or a tombstone."""
    return {
        "value": None if rng.random() < 0.2 else name,
        "key": b"key-%d" % rng.randrange(KEY_COUNT),
        "headers": [(NAME, name)],
    }


class KeyedSender(Sender):
    """An idempotent producer of records with keys."""

    def content(self, value: bytes) -> dict[str, Any]:
        return content_of(self.rng, value)


class KeyedWriter(Writer):
    """A transactional producer of records with keys. Some of its transactions are open during compaction."""

    late_chance = 0.15

    def content(self, value: bytes) -> dict[str, Any]:
        return content_of(self.rng, value)


def named_items(records: Iterable[Record]) -> list[Item]:
    return [
        Item(record.topic, record.partition, record.offset, dict(record.headers)[NAME] or b"")
        for record in records
    ]


class PassingReader(Reader):
    """Reads the topic repeatedly from its beginning to its current end, at times slowly."""

    def __init__(self, world: World, name: str, partitions: list[TopicPartition], witness: Witness) -> None:
        super().__init__(world, name, partitions, "read_committed")
        self.witness = witness
        self.passes: list[Pass] = []

    async def work(self) -> None:
        while not self.stop_requested:
            async with AsyncConsumer(self.settings) as consumer:
                await self._pass(consumer, list(self.partitions), self.rng.choice((0.0, 0.0, 2.0)))
            await self.sleep_up_to(4.0)

    async def _pass(self, consumer: AsyncConsumer, partitions: list[TopicPartition], pause_s: float) -> None:
        one = Pass(self.world.now_us, self.witness.topic_id())
        self.passes.append(one)
        consumer.assign(partitions)
        one.ends = ends = await consumer.end_offsets(partitions)
        position: dict[TopicPartition, int] = dict.fromkeys(partitions, 0)
        while any(position[tp] < end for tp, end in ends.items()) and not self.stop_requested:
            records = await consumer.poll(1.0, max_records=self.rng.choice((3, 500)))
            one.items += named_items(records)
            await self.sleep_up_to(pause_s)
            for tp in partitions:
                position[tp] = await consumer.position(tp)
        if all(position[tp] >= end for tp, end in ends.items()):
            self._end(one)

    def _end(self, one: Pass) -> None:
        one.last_id, node = self.witness.topic_id(), self.witness.node
        if node is not None and one.last_id is not None:
            self.witness.observe(node)
            starts = self.witness.max_starts
            one.starts = {tp: starts.get((one.last_id, tp.partition), 0) for tp in one.ends}
            one.ended_us = self.world.now_us


class LastPassingReader(LastReader):
    """Reads everything once at the end."""

    def __init__(self, world: World, name: str, partitions: list[TopicPartition], witness: Witness) -> None:
        super().__init__(world, name, partitions)
        self.reader = PassingReader(world, f"{name}-pass", partitions, witness)
        self.reader.is_done = True

    async def work(self) -> None:
        async with AsyncConsumer(self.settings) as consumer:
            await self.reader._pass(consumer, list(self.partitions), 0.0)


class TopicChanger(Application):
    """Deletes records and the topic, and changes the topic's settings and number of partitions."""

    def __init__(
        self, world: World, name: str, topic: NewTopic, partitions: list[TopicPartition], witness: Witness
    ) -> None:
        super().__init__(world, name)
        self.topic, self.partitions, self.witness = topic, partitions, witness
        self.requested: dict[TopicPartition, int] = {}
        """The highest offset up to which a deletion was requested, by partition."""
        self.deletions: list[Deletion] = []
        self.deleting_since_us: int | None = None
        self.may_retain = False
        """True once retention may have deleted records from some topic of this name."""
        self.steps_left = self.rng.randint(6, 12)

    async def work(self) -> None:
        actions = [self._delete_records, self._delete_topic, self._set_policy, self._add_partition]
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await self._create(admin)
            while self.steps_left > 0:
                self.steps_left -= 1
                await self.sleep_up_to(10.0)
                (act,) = self.rng.choices(actions, [4, 1, 5, 1])
                try:
                    await act(admin)
                except OncelogError as error:
                    self.world.note(self.name, f"{act.__name__}: {error!r}")
                    await self._create(admin)

    async def _create(self, admin: AsyncAdmin) -> None:
        topic = NewTopic(
            self.topic.name, num_partitions=len(self.partitions), configs=dict(self.topic.configs)
        )
        await create_topic(admin, topic)
        # Add missing partitions: a producer may have created the topic first, with the broker's default
        # number of partitions.
        count = len((await admin.describe_topics([topic.name]))[topic.name].partitions)
        if count < len(self.partitions):
            await admin.create_partitions({topic.name: len(self.partitions)})
        if self.deleting_since_us is not None:
            self.deletions.append(Deletion(self.deleting_since_us, self.world.now_us))
            self.deleting_since_us = None

    async def _delete_records(self, admin: AsyncAdmin) -> None:
        tp = self.rng.choice(self.partitions)
        end = (await admin.list_offsets({tp: "latest"}))[tp].offset or 0
        offset = self.rng.randint(0, end)
        self.requested[tp] = max(self.requested.get(tp, 0), offset)
        await admin.delete_records({tp: offset})
        self.world.note(self.name, f"{tp} is deleted up to {offset}")

    async def _delete_topic(self, admin: AsyncAdmin) -> None:
        self.deleting_since_us = self.deleting_since_us or self.world.now_us
        name = self.topic.name
        error = (await admin.delete_topics([name], raise_errors=False))[name].error
        if error is not None and not isinstance(error, UnknownTopicOrPartition):
            raise error
        self.world.note(self.name, f"{name} is deleted")
        await self.sleep_up_to(2 * LATE_SECONDS)
        await self._create(admin)

    async def _set_policy(self, admin: AsyncAdmin) -> None:
        policy = self.rng.choice(POLICIES)
        kept_bytes = self.rng.choice((-1, -1, 3_000))
        self.may_retain = self.may_retain or kept_bytes >= 0
        resource = ConfigResource("topic", self.topic.name)
        await admin.alter_configs({resource: {"cleanup.policy": policy, "retention.bytes": kept_bytes}})
        self.world.note(self.name, f"cleanup.policy={policy}, retention.bytes={kept_bytes}")

    async def _add_partition(self, admin: AsyncAdmin) -> None:
        if len(self.partitions) < 4:
            await admin.create_partitions({self.topic.name: len(self.partitions) + 1})
            self.partitions.append(TopicPartition(self.topic.name, len(self.partitions)))
            self.world.note(self.name, f"{len(self.partitions)} partitions")


class TopicChanges(Workload):
    """Checks that readers of a changing topic see all records that they must see, and none that they must
    not.
    """

    topic: ClassVar[str] = "changed"
    clients: ClassVar[tuple[str, ...]] = ("sender-changed", "writer-changed", "reader-changed", "changer")
    legal_findings: ClassVar[frozenset[FindingKind]] = frozenset(FindingKind)
    """All kinds, because compaction and the re-creation of the topic may cause every kind of finding."""
    compacts: ClassVar[bool] = True
    is_repeatable: ClassVar[bool] = False
    """False, because requests name the topic: a repeated request may reach a new topic of that name."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        sender, writer, reader, changer = self.clients
        self.witness = witness = Witness(world, self.topic)
        configs = {
            "cleanup.policy": world.rng("first policy").choice(POLICIES),
            "min.cleanable.dirty.ratio": 0.01,
            "delete.retention.ms": DELETE_RETENTION_MS,
        }
        self.changer = TopicChanger(
            world, changer, NewTopic(self.topic, configs=configs), self.partitions, witness
        )
        self.senders = [
            KeyedSender(world, sender, self.topic, scenario.partitions, BURSTS),
            KeyedWriter(world, writer, self.topic, scenario.partitions, BURSTS),
        ]
        for client in self.senders:
            client.keeps_producers = False
        self.reader = PassingReader(world, reader, self.partitions, witness)
        self.last = self.last_pass = LastPassingReader(world, f"last-{self.topic}", self.partitions, witness)
        self.applications, self.readers = [self.changer, *self.senders], [self.reader]

    @classmethod
    def broker_settings(cls, rng: Random) -> dict[str, object]:
        return {
            "log.segment.bytes": rng.choice((700, 1_500)),
            "log.retention.check.interval.ms": 5_000,
            "log.cleaner.backoff.ms": 2_000,
        }

    def stored(self, event: AppendEvent) -> None:
        self.witness.stored(event)

    def observe(self, node: BrokerState) -> None:
        self.witness.observe(node)

    def recovered(self, node: BrokerState) -> None:
        self.witness.recovered(node)
        self.witness.observe(node)

    def check(self, node: BrokerState) -> None:
        self.witness.observe(node)
        for (topic_id, number), start in self.witness.max_starts.items():
            requested = self.changer.requested.get(TopicPartition(self.topic, number), 0)
            if start > requested and not self.changer.may_retain:
                self.world.violate("deleted unasked", f"{topic_id.hex()}-{number} starts at {start}")
        notes = Notes(self.senders)
        for tp, offset, record in self.witness.lost:
            call = notes.sends.get(record.name)
            if call is None or call.outcome is not Outcome.OK or call.items[0].offset != offset:
                # Skip a record without an acknowledgement at this offset, because it may be stored at another
                # offset.
                continue
            logs = [log for (_, number), log in self.witness.logs.items() if number == tp.partition]
            if not any(offset in log and log[offset].name == record.name for log in logs):
                self.world.violate("acknowledged, then lost or elsewhere", f"{tp} {offset} {record}")
        for one in (*self.reader.passes, *self.last_pass.reader.passes):
            self._check_pass(one, notes)

    def _check_pass(self, one: Pass, notes: Notes) -> None:
        for item in one.items:
            logs = [log for (_, number), log in self.witness.logs.items() if number == item.partition]
            names = {log[item.offset].name for log in logs if item.offset is not None and item.offset in log}
            lost = {record.name for tp, offset, record in self.witness.lost if offset == item.offset}
            if item.value not in names | lost:
                self.world.violate("read what is not stored there", f"{item}: {sorted(names)}")
            elif not notes.may_be_visible(item.value, one.ended_us or self.world.now_us):
                self.world.violate("read what was not committed", f"{item}")
        is_whole = one.ended_us is not None and one.first_id is not None and one.first_id == one.last_id
        if is_whole and not self._is_deleted_during(one):
            for tp, end in one.ends.items():
                self._check_whole(one, tp, end, notes)

    def _is_deleted_during(self, one: Pass) -> bool:
        assert one.ended_us is not None
        windows = [*self.changer.deletions]
        if self.changer.deleting_since_us is not None:
            windows.append(Deletion(self.changer.deleting_since_us, self.world.now_us))
        return any(
            deletion.began_us <= one.ended_us and deletion.done_us >= one.begun_us for deletion in windows
        )

    def _check_whole(self, one: Pass, tp: TopicPartition, end: int, notes: Notes) -> None:
        """Check that a pass read every record of a partition below `end` that it had to read."""
        assert one.last_id is not None and one.ended_us is not None
        log = self.witness.logs.get((one.last_id, tp.partition), {})
        offsets = [item.offset or 0 for item in one.items if item.partition == tp.partition]
        if offsets != sorted(set(offsets)):
            self.world.violate("a reader went back", f"{tp} {offsets}")
        read = set(offsets)
        is_compacted = one.last_id in self.witness.compacted_ids
        newest = self._newest(log, one.ended_us, notes)
        is_slow = one.ended_us - one.begun_us > DELETE_RETENTION_MS * 1000 // 2
        for offset, record in sorted(log.items()):
            is_due = one.starts[tp] <= offset < end and notes.is_visible(record.name, one.begun_us)
            if not is_due or offset in read:
                continue
            if is_compacted and newest.get(record.key) != offset:
                continue
            if is_compacted and record.is_tombstone:
                older = any(
                    log[read_offset].key == record.key for read_offset in read if read_offset < offset
                )
                if not older or is_slow or self._is_clock_set():
                    continue
            self.world.violate(
                "a committed record is not read", f"{tp} {offset} {record} in a pass from {one.begun_us}"
            )

    def _newest(self, log: Log, until_us: int, notes: Notes) -> dict[bytes | None, int]:
        """Return the offset of the newest record of each key, including records that may be uncommitted."""
        return {
            record.key: offset
            for offset, record in sorted(log.items())
            if record.at_us <= until_us and notes.may_be_visible(record.name, until_us)
        }

    def _is_clock_set(self) -> bool:
        return any(fault.kind == "clock" and fault.target == "broker" for fault in self.scenario.faults)


class Notes:
    """The producers' notes. They say which records certainly are, and which may be, committed."""

    def __init__(self, senders: Iterable[Sender]) -> None:
        self.sends: dict[Any, Call] = {}
        self.ends: dict[tuple[str, Any], list[Call]] = {}
        for sender in senders:
            for call in sender.calls:
                if call.kind is Kind.SEND:
                    self.sends[call.items[0].value] = call
                elif call.transaction is not None:
                    self.ends.setdefault((call.process, call.transaction), []).append(call)

    def _commits(self, call: Call) -> list[Call]:
        ends = self.ends.get((call.process, call.transaction), [])
        return [end for end in ends if end.kind is Kind.COMMIT]

    def may_be_visible(self, name: Any, now_us: int) -> bool:
        """Return False for a record that was refused or aborted, or whose commit began after `now_us`."""
        call = self.sends.get(name)
        if call is None or call.outcome is Outcome.FAIL:
            return False
        if call.transaction is None:
            return True
        commits = self._commits(call)
        is_failed = any(commit.outcome is Outcome.FAIL for commit in commits)
        return not is_failed and any(commit.begin <= now_us for commit in commits)

    def is_visible(self, name: Any, before_us: int) -> bool:
        """Return True for a record that was certainly committed by the time `before_us`."""
        call = self.sends.get(name)
        if call is None:
            return False
        if call.transaction is None:
            return call.outcome is Outcome.OK and call.end is not None and call.end <= before_us
        return any(
            commit.outcome is Outcome.OK and commit.end is not None and commit.end <= before_us
            for commit in self._commits(call)
        )
