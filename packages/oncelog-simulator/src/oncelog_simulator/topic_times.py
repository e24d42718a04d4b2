"""A workload with drawn timestamps on one topic, while the topic's time settings change.

The settings are retention.ms, segment.ms, min. and max.compaction.lag.ms, a short delete.retention.ms, and
message.timestamp.type with its bounds. A witness notes each record with its timestamp and the broker's time.
The checks use only these notes and no rule of the product:

- A stored timestamp lies within message.timestamp.before.max.ms and message.timestamp.after.max.ms. With
  LogAppendTime it is the broker's time.
- A log start moves only for three reasons: DeleteRecords, records older than retention.ms, or at least
  retention.bytes above the deleted records. Without cleanup.policy=delete only DeleteRecords moves it.
- At the end no log has records that are too old, or is much larger than retention.bytes.
- A pass of a reader reads the newest record of each key, and all records younger than min.compaction.lag.ms.
  It reads tombstones younger than delete.retention.ms.
- At the end no closed segment has a record that was replaced more than max.compaction.lag.ms ago.

If a record must stay, its age is measured by the latest time that the broker ever had. If a record must go,
its age is measured by the virtual time since the settings changed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any, ClassVar, NamedTuple

from oncelog.broker.append_events import AppendEvent
from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import ConfigResource, NewTopic
from oncelog.errors import OncelogError
from oncelog.limits import DEFAULT_LIMITS
from oncelog.types import TimestampType, TopicPartition
from oncelog.wire.records import decode_records
from oncelog_simulator.checks import batches_of
from oncelog_simulator.clients import SHORT_TIMEOUTS, Sender
from oncelog_simulator.faults import REFUSED_WRITES
from oncelog_simulator.jobs import UNDIVIDED
from oncelog_simulator.kafka_log import KafkaBatch
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.topic_changes import (
    KeyedSender,
    KeyedWriter,
    LastPassingReader,
    Log,
    Notes,
    Pass,
    PassingReader,
    TopicChanger,
    TopicChanges,
    Witness,
    content_of,
)
from oncelog_simulator.workloads import Workload
from oncelog_simulator.world import BrokerHost, World

BURSTS = 10
SECOND_MS, HOUR_MS = 1_000, 3_600_000
FOREVER_MS = 2**63 - 1
NO_LIMIT = -1
POLICIES = ("delete", "delete", "compact", "compact,delete")
RETENTION_MS = (NO_LIMIT, 5 * SECOND_MS, 20 * SECOND_MS, 2 * HOUR_MS)
RETENTION_BYTES = (NO_LIMIT, NO_LIMIT, NO_LIMIT, 500)
MAX_LAGS_MS = (FOREVER_MS, FOREVER_MS, 40 * SECOND_MS)
AGES_MS = (0, 0, 0, 3 * SECOND_MS, 15 * SECOND_MS, HOUR_MS, -3 * SECOND_MS, -HOUR_MS // 2)
"""Ages of record timestamps in milliseconds; a negative age lies in the future."""
SLOW_SYNCS_MS = 4 * SECOND_MS
"""Milliseconds by which a checked timestamp may be too old on a slow disk.

The witness learns of a batch after its sync, on a slow disk after two syncs of 1.5 s each (seed 1048).
"""
SETTLE_MS = 45 * SECOND_MS
"""Milliseconds within which retention and compaction run again after a change of settings or a record."""
FAR_CHANCE = 0.4
"""Probability that a seed's offsets begin near one of FAR_ENDS."""
FAR_ENDS = (2**31, 2**31, 2**32)
"""Limits of relative offsets, which are signed 32-bit numbers within a segment and within a batch."""
MAX_RELATIVE_OFFSET = DEFAULT_LIMITS.max_relative_offset
LAST_SECONDS = 110.0
"""Seconds between the last record and the last check: more than max.compaction.lag.ms plus SETTLE_MS."""


class RecordTimes(NamedTuple):
    """A record's timestamp, and the broker's time when the record was stored or found by a start."""

    timestamp_ms: int
    stored_ms: int


class TimedWitness(Witness):
    """A witness that also notes timestamps."""

    def __init__(
        self, world: World, topic: str, bounds: tuple[int, int], *, is_append_time: bool, slack_ms: int
    ) -> None:
        super().__init__(world, topic)
        self.slack_ms = slack_ms
        self.before_max_ms, self.after_max_ms = bounds
        self.is_append_time = is_append_time
        self.times: dict[tuple[bytes, int], dict[int, RecordTimes]] = {}
        self.is_made = False
        self.latest_ms = 0
        """The latest time in milliseconds that the broker ever had."""
        self.sizes: dict[tuple[bytes, int], dict[int, int]] = {}
        """Sizes of the batches in bytes by base offset, including deleted batches."""
        self.starts: dict[tuple[bytes, int], int] = {}
        """The highest log start so far, which may be one that DeleteRecords requested."""

    async def until_made(self) -> None:
        """Wait until the topic exists, because a client's send would create it with the broker's defaults."""
        while not self.is_made:
            await asyncio.sleep(0.1)

    def stored(self, event: AppendEvent) -> None:
        super().stored(event)
        node = self.node
        if event.topic != self.topic or event.verdict != "stored" or node is None:
            return
        assert event.base_offset is not None
        now_ms = self.now_ms
        topic, partition = node.topics.partition(TopicPartition(event.topic, event.partition))
        # Check the first and the largest timestamp of the batch, which are the ones that the broker checks.
        self._time(topic.topic_id, event.partition, partition, event.base_offset, now_ms)
        header, _ = batches_of(partition, event.base_offset)[0]
        for offset, stamp in (
            (header.base_offset, header.base_timestamp_ms),
            (header.last_offset, header.max_timestamp_ms),
        ):
            where = f"{event.topic}-{event.partition} {offset}: {stamp}, by a clock of {now_ms}"
            is_largest = stamp == header.max_timestamp_ms
            if self.is_append_time and is_largest and abs(stamp - now_ms) > self.slack_ms:
                self.world.violate("a log append time is not the broker's", where)
            if not self.is_append_time and not any(
                -self.after_max_ms - self.slack_ms <= clock_ms - stamp <= self.before_max_ms + self.slack_ms
                for clock_ms in (now_ms, self.wall_ms)
            ):
                self.world.violate("a timestamp beyond its bounds is stored", where)

    @property
    def now_ms(self) -> int:
        """The broker's time in milliseconds, or its wall clock while the broker starts."""
        running = getattr(self.world.hosts["broker"], "running", None)
        now_ms: int = running.clock.now_ms() if running is not None else self.wall_ms
        self.latest_ms = max(self.latest_ms, now_ms)
        return now_ms

    @property
    def wall_ms(self) -> int:
        """The wall clock of the broker's host in milliseconds. The broker's time stays ahead of it after the
        wall clock was set back. Timestamps may be right by either.
        """
        runtime = self.world.hosts["broker"].runtime
        assert runtime is not None
        return runtime.wall_ns() // 1_000_000

    def recovered(self, node: BrokerState) -> None:
        super().recovered(node)
        topic = node.topics.get(self.topic)
        for number, partition in enumerate(topic.partitions if topic else ()):
            assert topic is not None
            times = self.times.setdefault((topic.topic_id, number), {})
            for offset in [lost_offset for lost_offset in times if lost_offset >= partition.log_end_offset]:
                del times[offset]
            self._time(topic.topic_id, number, partition, partition.log_start_offset, self.now_ms)

    def _time(self, topic_id: bytes, number: int, partition: Any, offset: int, now_ms: int) -> None:
        """Note the timestamps of all records of a partition at or above `offset`."""
        times = self.times.setdefault((topic_id, number), {})
        for header, data in batches_of(partition, offset):
            is_append_time = header.timestamp_type is TimestampType.LOG_APPEND_TIME
            if header.is_control:
                times.setdefault(header.base_offset, RecordTimes(header.max_timestamp_ms, now_ms))
                continue
            for record in decode_records(data):
                stamp = header.max_timestamp_ms if is_append_time else record.timestamp_ms
                times.setdefault(record.offset, RecordTimes(stamp, now_ms))


def timed_content(rng: Random, name: bytes, now_ms: int) -> dict[str, Any]:
    """Return the content of a record for a name, with a drawn timestamp."""
    return content_of(rng, name) | {"timestamp_ms": now_ms - rng.choice(AGES_MS)}


class TimedSender(KeyedSender):
    """An idempotent producer of records with drawn timestamps."""

    witness: TimedWitness

    async def work(self) -> None:
        await self.witness.until_made()
        await super().work()

    def content(self, value: bytes) -> dict[str, Any]:
        assert self.runtime is not None
        return timed_content(self.rng, value, self.runtime.wall_ns() // 1_000_000)


class TimedWriter(KeyedWriter):
    """A transactional producer of records with drawn timestamps."""

    witness: TimedWitness

    async def work(self) -> None:
        await self.witness.until_made()
        await super().work()

    def content(self, value: bytes) -> dict[str, Any]:
        assert self.runtime is not None
        return timed_content(self.rng, value, self.runtime.wall_ns() // 1_000_000)


class TimedReader(PassingReader):
    """Reads the topic repeatedly after its creation."""

    witness: TimedWitness

    async def work(self) -> None:
        await self.witness.until_made()
        await super().work()


class RetentionSettings(NamedTuple):
    """Settings of retention. If `is_deleted` is False, retention deletes nothing."""

    is_deleted: bool
    retention_ms: int
    retention_bytes: int


class TimeChanger(TopicChanger):
    """Deletes records, and changes cleanup.policy, retention.ms and retention.bytes."""

    def __init__(
        self,
        world: World,
        name: str,
        topic: NewTopic,
        partitions: list[TopicPartition],
        witness: TimedWitness,
    ) -> None:
        super().__init__(world, name, topic, partitions, witness)
        self.timed = witness
        self.senders: list[Sender] = []
        """The senders that must be done before the final wait of LAST_SECONDS."""
        self.may_retain = True
        self.in_effect: list[tuple[int, RetentionSettings]] = [
            (0, RetentionSettings("delete" in POLICIES[0], NO_LIMIT, NO_LIMIT))
        ]
        """Pairs (virtual time from which the settings may apply, settings), oldest first."""
        self.changed_us = 0
        self.first_offset = 0
        """The end offset of each partition before the first record."""
        self.is_one_batch = False
        """True if one batch without records spans all offsets below `first_offset`."""
        self.is_sure = True
        """False while the outcome of the latest change of settings is unknown."""

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await self._create(admin)
            if self.first_offset and not self.timed.is_made:
                await self._begin_far()
            self.timed.is_made = True
            while self.steps_left > 0:
                self.steps_left -= 1
                await self.sleep_up_to(15.0)
                (act,) = self.rng.choices([self._delete_records, self._set_policy], [1, 4])
                try:
                    await act(admin)
                except OncelogError as error:
                    self.world.note(self.name, f"{act.__name__}: {error!r}")
            while not self.is_sure:
                await self.sleep_up_to(2.0)
                await self._set_policy(admin)
        while not all(sender.is_done for sender in self.senders):
            await asyncio.sleep(1.0)
        await asyncio.sleep(LAST_SECONDS)

    async def _begin_far(self) -> None:
        """Make the empty partitions end far above 0, as if older records had been deleted or compacted
        away.
        """
        broker = self.world.hosts["broker"]
        assert isinstance(broker, BrokerHost)
        while broker.node is None:
            await asyncio.sleep(0.1)
        broker.kill()
        disk = broker.disk.after_kill()
        for tp in self.partitions:
            directory, first = f"{tp.topic}-{tp.partition}", f"{0:020}"
            if self.is_one_batch:
                # Compaction can leave such a batch, which has no records, so that its last offset is not
                # assigned again.
                left = KafkaBatch(0, self.first_offset - 1, (), NO_LIMIT, 0).encode()
                disk.replace(f"{directory}/{first}.log", left)
            else:
                for name in [name for name in disk.list(directory) if name.startswith(first)]:
                    disk.rename(f"{directory}/{name}", f"{directory}/{self.first_offset:020}{name[20:]}")
                self.requested[tp] = self.first_offset
            disk.sync_directory(directory)
        broker.replace_disk(disk)
        broker.start_if_down()

    async def _set_policy(self, admin: AsyncAdmin) -> None:
        policy = self.rng.choice(POLICIES)
        kept = RetentionSettings(
            "delete" in policy, self.rng.choice(RETENTION_MS), self.rng.choice(RETENTION_BYTES)
        )
        resource = ConfigResource("topic", self.topic.name)
        self.in_effect.append((self.world.now_us, kept))
        self.is_sure = False
        await admin.alter_configs(
            {
                resource: {
                    "cleanup.policy": policy,
                    "retention.ms": kept.retention_ms,
                    "retention.bytes": kept.retention_bytes,
                }
            }
        )
        self.in_effect.append((self.world.now_us, kept))
        minute_ago_us = self.world.now_us - 60_000_000
        first = max(
            (number for number, entry in enumerate(self.in_effect) if entry[0] < minute_ago_us), default=0
        )
        del self.in_effect[:first]
        self.changed_us, self.is_sure = self.world.now_us, True
        self.world.note(self.name, f"cleanup.policy={policy}, {kept}")

    def strictest_retention(self) -> RetentionSettings:
        """Return the strictest combination of all settings that may have been in effect in the last
        minute.
        """
        kept = [settings for _, settings in self.in_effect if settings.is_deleted]
        if not kept:
            return RetentionSettings(False, NO_LIMIT, NO_LIMIT)
        times = [settings.retention_ms for settings in kept if settings.retention_ms != NO_LIMIT]
        sizes = [settings.retention_bytes for settings in kept if settings.retention_bytes != NO_LIMIT]
        return RetentionSettings(True, min(times, default=NO_LIMIT), min(sizes, default=NO_LIMIT))


class TopicTimes(TopicChanges):
    """Checks that the passing of time deletes and compacts the records that it must, and no others."""

    topic: ClassVar[str] = "timed"
    clients: ClassVar[tuple[str, ...]] = ("sender-timed", "writer-timed", "reader-timed", "time-changer")

    def __init__(self, world: World, scenario: Scenario) -> None:
        Workload.__init__(self, world, scenario)
        sender, writer, reader, changer = self.clients
        rng = world.rng("times")
        self.is_append_time = rng.random() < 0.3
        self.min_lag_ms = rng.choice((0, 0, 5 * SECOND_MS, 30 * SECOND_MS))
        self.max_lag_ms = rng.choice(MAX_LAGS_MS)
        self.delete_retention_ms = rng.choice((0, 3 * SECOND_MS, 20 * SECOND_MS))
        self.segment_ms = rng.choice((2 * SECOND_MS, 10 * SECOND_MS, HOUR_MS))
        bounds = (
            rng.choice((FOREVER_MS, HOUR_MS * 2, 10 * SECOND_MS)),
            rng.choice((HOUR_MS, 5 * SECOND_MS)),
        )
        configs = {
            "cleanup.policy": POLICIES[0],
            "retention.ms": NO_LIMIT,
            "min.cleanable.dirty.ratio": 0.01 if self.max_lag_ms == FOREVER_MS else 1.0,
            "min.compaction.lag.ms": self.min_lag_ms,
            "max.compaction.lag.ms": self.max_lag_ms,
            "delete.retention.ms": self.delete_retention_ms,
            "segment.ms": self.segment_ms,
            "message.timestamp.type": "LogAppendTime" if self.is_append_time else "CreateTime",
            "message.timestamp.before.max.ms": bounds[0],
            "message.timestamp.after.max.ms": bounds[1],
        }
        has_slow_disk = any(fault.kind == "slow-disk" for fault in scenario.faults)
        self.timed = TimedWitness(
            world,
            self.topic,
            bounds,
            is_append_time=self.is_append_time,
            slack_ms=SLOW_SYNCS_MS if has_slow_disk else SECOND_MS,
        )
        self.witness = self.timed
        topic = NewTopic(self.topic, configs=configs)
        self.changer = self.times = TimeChanger(world, changer, topic, self.partitions, self.timed)
        far = world.rng("far offsets")
        if far.random() < FAR_CHANCE:
            self.times.first_offset = far.choice(FAR_ENDS) - far.choice((0, 2, 5, 20))
            self.times.is_one_batch = far.random() < 0.7 and self.times.first_offset <= MAX_RELATIVE_OFFSET
        plain = TimedSender(world, sender, self.topic, scenario.partitions, BURSTS)
        writing = TimedWriter(world, writer, self.topic, scenario.partitions, BURSTS)
        plain.witness = writing.witness = self.timed
        plain.keeps_producers = writing.keeps_producers = False
        self.senders = [plain, writing]
        self.times.senders = [plain, writing]
        self.reader = TimedReader(world, reader, self.partitions, self.timed)
        self.last = self.last_pass = LastPassingReader(
            world, f"last-{self.topic}", self.partitions, self.timed
        )
        self.applications, self.readers = [self.changer, *self.senders], [self.reader]

    def prepare(self, broker: BrokerHost) -> None:
        if self.times.is_one_batch:
            broker.limits = replace(broker.limits, max_relative_offset=MAX_RELATIVE_OFFSET)

    def observe(self, node: BrokerState) -> None:
        self._check_starts(node)
        super().observe(node)

    def recovered(self, node: BrokerState) -> None:
        super().recovered(node)
        self._check_starts(node, may_be_cut=True)

    # Checks of records that must stay

    def _check_starts(self, node: BrokerState, *, may_be_cut: bool = False) -> None:
        """Check that each log start that has moved up was allowed to move.

        The reasons are DeleteRecords requests and the retention settings of the last minute. `may_be_cut` is
        True if a power loss may have taken the end of the log since the last check.
        """
        topic, most = node.topics.get(self.topic), self.times.strictest_retention()
        latest_ms = max(self.timed.now_ms, self.timed.latest_ms)
        for number, partition in enumerate(topic.partitions if topic else ()):
            assert topic is not None
            key, start = (topic.topic_id, number), partition.log_start_offset
            before = max(
                self.timed.starts.get(key, 0), self.changer.requested.get(self.partitions[number], 0)
            )
            self.timed.starts[key] = max(start, before)
            sizes = self.timed.sizes.setdefault(key, {})
            sizes |= {header.base_offset: header.size_bytes for header, _ in batches_of(partition)}
            if start <= before:
                continue
            limit_bytes, limit_ms = most.retention_bytes, most.retention_ms
            # Skip the check if compaction or a power loss may have made the log smaller since retention
            # measured it.
            is_smaller = may_be_cut or topic.topic_id in self.timed.compacted_ids
            if limit_bytes != NO_LIMIT and is_smaller:
                continue
            if not most.is_deleted or limit_bytes == limit_ms == NO_LIMIT:
                self.world.violate(
                    "deleted unasked", f"{self.topic}-{number} starts at {start}, not {before}"
                )
                continue
            for offset, (stamp, _) in sorted(self.timed.times.get(key, {}).items()):
                above_bytes = sum(size for base, size in sizes.items() if base > offset)
                is_young = limit_ms == NO_LIMIT or stamp > latest_ms - limit_ms
                is_excess = limit_bytes != NO_LIMIT and above_bytes >= limit_bytes
                if before <= offset < start and is_young and not is_excess and self._stays(key, offset):
                    text = f"{self.topic}-{number} {offset} of {stamp}, by a clock of {latest_ms}, {most}"
                    self.world.violate("retention deleted what is young or not too much", text)

    def _stays(self, key: tuple[bytes, int], offset: int) -> bool:
        """Return False for a record that compaction may have removed."""
        log = self.timed.logs.get(key, {})
        if key[0] not in self.timed.compacted_ids:
            return True
        record = log.get(offset)
        if record is None or record.is_tombstone:
            return False
        if not Notes(self.senders).is_visible(record.name, self.world.now_us):
            # The record may belong to an aborted transaction, so compaction may remove it.
            return False
        return not any(
            other_offset > offset and other.key == record.key for other_offset, other in log.items()
        )

    def _check_whole(self, one: Pass, tp: TopicPartition, end: int, notes: Notes) -> None:
        assert one.last_id is not None and one.ended_us is not None
        log = self.timed.logs.get((one.last_id, tp.partition), {})
        times = self.timed.times.get((one.last_id, tp.partition), {})
        offsets = [item.offset or 0 for item in one.items if item.partition == tp.partition]
        if offsets != sorted(set(offsets)):
            self.world.violate("a reader went back", f"{tp} {offsets}")
        read, newest = set(offsets), self._newest(log, one.ended_us, notes)
        is_compacted = one.last_id in self.timed.compacted_ids
        for offset, record in sorted(log.items()):
            is_due = one.starts[tp] <= offset < end and notes.is_visible(record.name, one.begun_us)
            if not is_due or offset in read:
                continue
            is_young = times[offset].timestamp_ms > self.timed.latest_ms - self.min_lag_ms and self.min_lag_ms
            may_go = is_compacted and newest.get(record.key) != offset
            if is_compacted and record.is_tombstone:
                passed_ms = (one.ended_us - record.at_us) // 1_000
                may_go = may_go or self._is_clock_set() or passed_ms >= self.delete_retention_ms
            if is_young or not may_go:
                text = f"{tp} {offset} {record} of {times[offset]} in a pass from {one.begun_us}"
                self.world.violate("a committed record is not read", text)

    # Checks of records that must go

    def check(self, node: BrokerState) -> None:
        super().check(node)
        if any(fault.kind in REFUSED_WRITES for fault in self.scenario.faults):
            # Skip these checks: after a refused write, a partition may be offline or its cleaning stopped
            # until a restart.
            return
        quiet_ms = (self.world.now_us - max(self.times.changed_us, self._last_stored_us())) // 1_000
        if quiet_ms < SETTLE_MS or not self.times.is_sure or self.scenario.jobs != UNDIVIDED:
            return
        (*_, (_, kept)) = self.times.in_effect
        topic = node.topics.get(self.topic)
        for number, partition in enumerate(topic.partitions if topic else ()):
            assert topic is not None
            if partition.high_watermark < partition.log_end_offset:
                # Skip the partition, because retention keeps records above the high watermark.
                continue
            key = topic.topic_id, number
            if kept.is_deleted and kept.retention_ms != NO_LIMIT:
                self._check_old(key, partition, kept.retention_ms)
            if kept.is_deleted and kept.retention_bytes != NO_LIMIT:
                self._check_size(number, partition, kept.retention_bytes)
            if partition.config.is_compacted and self.max_lag_ms != FOREVER_MS:
                self._check_replaced(key, partition)

    def _last_stored_us(self) -> int:
        logs: list[Log] = [*self.timed.logs.values()]
        return max((record.at_us for log in logs for record in log.values()), default=0)

    def _check_old(self, key: tuple[bytes, int], partition: Any, retention_ms: int) -> None:
        """Check that the oldest segment has a record younger than retention.ms, or no records."""
        there = [header.base_offset for header, _ in batches_of(partition)]
        bases = self._bases(partition)
        end = bases[1] if len(bases) > 1 else partition.log_end_offset
        stamps = [
            self.timed.times[key][base_offset].timestamp_ms
            for base_offset in there
            if base_offset < end and base_offset in self.timed.times[key]
        ]
        oldest_ms = self.timed.now_ms - retention_ms - SETTLE_MS
        if there and stamps and max(self._all_stamps(key, bases[0], end)) < oldest_ms:
            text = (
                f"{self.topic}-{key[1]} begins with {bases}, of {stamps}, by a clock of {self.timed.now_ms}"
            )
            self.world.violate("retention by time left what is too old", text)

    def _all_stamps(self, key: tuple[bytes, int], begin: int, end: int) -> list[int]:
        return [
            times.timestamp_ms for offset, times in self.timed.times[key].items() if begin <= offset < end
        ]

    def _check_size(self, number: int, partition: Any, retention_bytes: int) -> None:
        """Check that a log is at most two segments larger than retention.bytes."""
        most = retention_bytes + 2 * int(str(self.scenario.broker["log.segment.bytes"]))
        size = sum(header.size_bytes for header, _ in batches_of(partition))
        if size > most:
            self.world.violate("retention by size left too much", f"{self.topic}-{number} has {size} bytes")

    def _check_replaced(self, key: tuple[bytes, int], partition: Any) -> None:
        """Check that no closed segment has a record that was replaced long ago.

        If a newer record of the same key is in a closed segment too, the older one must be compacted away
        when max.compaction.lag.ms has passed.
        """
        bases = self._bases(partition)
        active = bases[-1]
        log, there = self.timed.logs.get(key, {}), set()
        firsts: dict[int, int] = {}
        for header, data in batches_of(partition):
            base = max(base for base in bases if base <= header.last_offset)
            firsts.setdefault(base, header.max_timestamp_ms)
            if header.last_offset < active and not header.is_control:
                there |= {record.offset for record in decode_records(data)}
        now_us, lag_us = self.world.now_us, (max(self.max_lag_ms, self.min_lag_ms) + SETTLE_MS) * 1_000
        notes = Notes(self.senders)
        newest: dict[bytes | None, int] = {}
        for offset in sorted(there, reverse=True):
            record = log[offset]
            is_old = now_us - record.at_us > lag_us and not self._is_clock_set()
            is_young = self.min_lag_ms and self._is_young(key, active)
            if record.key in newest and is_old and not is_young and self._is_due(newest[record.key], firsts):
                text = f"{self.topic}-{key[1]} {offset} {record}, replaced at {newest[record.key]}"
                self.world.violate("compaction left what was replaced long ago", text)
            if notes.is_visible(record.name, now_us - lag_us):
                newest.setdefault(record.key, offset)

    def _is_due(self, offset: int, firsts: dict[int, int]) -> bool:
        """Return True if max.compaction.lag.ms has passed since the first batch in the segment of `offset`.

        As in Apache Kafka, the timestamp of that batch counts, even if it lies in the future.
        """
        first_ms = firsts[max(base for base in firsts if base <= offset)]
        return first_ms <= self.timed.now_ms - self.max_lag_ms - SETTLE_MS

    def _is_young(self, key: tuple[bytes, int], end: int) -> bool:
        """Return True if any closed segment may be younger than min.compaction.lag.ms."""
        return max(self._all_stamps(key, 0, end), default=0) > self.timed.now_ms - self.min_lag_ms - SETTLE_MS

    def _bases(self, partition: Any) -> list[int]:
        """Return the base offsets of the segments on the disk."""
        host = self.world.hosts["broker"]
        assert isinstance(host, BrokerHost)
        names = host.disk.list(partition.directory)
        return sorted(int(name[:20]) for name in names if name.endswith(".log"))
