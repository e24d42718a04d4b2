"""Let days pass after a run, and check which data has expired. Look-ups by time are checked too.

One application works alone. So a small model knows every record with its timestamp, and every commit with its
time. Between rounds the broker's clock is set forward by minutes to months, or back. The broker may also be
stopped, killed, or lose its power. Expiry is measured by the broker's clock (runtime/clock.py). If a periodic
check was not due yet, expired data may remain. Data that must not expire is never excused.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, NamedTuple

from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.client.producer.aio import AsyncProducer
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord
from oncelog_simulator.checks import batches_of
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application
from oncelog_simulator.workloads import create_topic
from oncelog_simulator.world import BrokerHost, World

EXPIRY_CHANCE = 0.07
"""Probability that days pass at the end of a seed."""
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
_SETTLE_SECONDS = 60.0
"""Seconds within which all of the broker's periodic tasks run after a change of the clock.

The time allows for the suspensions of background jobs (`JobSettings`).
"""
_STEPS_MS = (0, 20 * MINUTE_MS, 5 * HOUR_MS, 2 * DAY_MS, 40 * DAY_MS, -3 * HOUR_MS, -10 * DAY_MS)
_AGES_MS = (0, 0, HOUR_MS, 2 * DAY_MS, 400 * DAY_MS, -HOUR_MS, -30 * DAY_MS)


def draw_expiry(seed: int) -> dict[str, object]:
    """Draw the settings of a seed in which days pass at the end. Return an empty dict for other seeds."""
    rng = Random(f"{seed}/expiry")
    if rng.random() >= EXPIRY_CHANCE:
        return {}
    return {
        "offsets.retention.minutes": rng.choice((1_440, 4_320)),
        "transactional.id.expiration.ms": rng.choice((DAY_MS, 3 * DAY_MS)),
        "producer.id.expiration.ms": rng.choice((DAY_MS, 3 * DAY_MS)),
    }


class Stored(NamedTuple):
    """A record with its timestamp (-1 without one), and the broker's wall clock when it was written."""

    offset: int
    timestamp_ms: int
    written_ms: int


class ExpiringItem(NamedTuple):
    """A group, producer id or transactional id that expires.

    It was last used between `earliest_ms` and `latest_ms` of the broker's clock.
    """

    kind: str
    name: Any
    earliest_ms: int
    latest_ms: int


class ExpiryApplication(Application):
    """Writes records, commits offsets and transactions, and looks up offsets by time.

    Between these operations it lets days pass.
    """

    def __init__(self, world: World, broker: BrokerHost, settings: dict[str, object], *, loses_power: bool):
        super().__init__(world, "calendar")
        self.broker, self.loses_power = broker, loses_power
        rng = self.rng
        self.retention_ms = rng.choice((HOUR_MS, 6 * HOUR_MS, 3 * DAY_MS))
        self.is_append_time = rng.random() < 0.25
        configs = {
            "internal.segment.bytes": rng.choice((100, 200, 500, 2_000)),
            "segment.ms": rng.choice((10 * MINUTE_MS, 7 * DAY_MS)),
            "message.timestamp.type": "LogAppendTime" if self.is_append_time else "CreateTime",
            "message.timestamp.after.max.ms": 1 << 62,
        }
        self.topics = [
            NewTopic("aged", num_partitions=1, configs={**configs, "retention.ms": self.retention_ms}),
            NewTopic("kept", num_partitions=1, configs={**configs, "retention.ms": -1}),
        ]
        self.records: dict[TopicPartition, list[Stored]] = {
            TopicPartition(topic.name, 0): [] for topic in self.topics
        }
        self.expiring_items: list[ExpiringItem] = []
        self.expiry_ms = {
            "group": int(str(settings["offsets.retention.minutes"])) * MINUTE_MS,
            "transactional id": int(str(settings["transactional.id.expiration.ms"])),
            "producer id": int(str(settings["producer.id.expiration.ms"])),
        }
        self.latest_ms = 0
        """The latest time in milliseconds that any of the broker's processes had."""
        self.restarted_ms = 0
        """The latest time in milliseconds on the broker's clock just after any restart.

        A start may take this time as the last use of a producer id.
        """
        broker.disk.now_ms = self._wall_ms

    def _wall_ms(self) -> int:
        assert self.broker.runtime is not None
        return self.broker.runtime.wall_ns() // 1_000_000

    @property
    def now_ms(self) -> int:
        """The broker's time in milliseconds."""
        assert self.broker.running is not None
        return self.broker.running.clock.now_ms()

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            for topic in self.topics:
                await create_topic(admin, topic)
        for number in range(self.rng.randint(2, 4)):
            for tp in self.records:
                await self._write(tp, f"{number}")
            await self._commit(f"{number}")
            for _ in range(self.rng.choice((1, 1, 2))):
                await self._restart()
            await self._look_up()
            await self._pass_time()
            await self._look_up()

    # Work

    async def _write(self, tp: TopicPartition, name: str) -> None:
        """Write records with drawn timestamps. Their producer is closed, so its producer id must expire."""
        for _ in range(self.rng.choice((0, 0, 1, 4))):
            await self._write_without_timestamp(tp)
        begin_ms = self.now_ms
        producer = AsyncProducer(
            {**SHORT_TIMEOUTS, "linger.ms": 5, "batch.size": self.rng.choice((1, 300, 2_000))}
        )
        sent = []
        for _ in range(self.rng.randint(2, 8)):
            timestamp_ms = max(self.now_ms - self.rng.choice(_AGES_MS) - self.rng.randrange(MINUTE_MS), 0)
            sent.append(
                (timestamp_ms, await producer.send(tp.topic, b"v", partition=0, timestamp_ms=timestamp_ms))
            )
            if self.rng.random() < 0.5:
                await producer.flush()
        await producer.flush()
        for timestamp_ms, future in sent:
            done = future.result()
            stamp = done.timestamp_ms or 0 if self.is_append_time else timestamp_ms
            self.records[tp].append(Stored(done.offset or 0, stamp, self._wall_ms()))
        self._note_expiring("producer id", (tp, producer.idempotence().producer_id), begin_ms)
        await producer.close()

    async def _write_without_timestamp(self, tp: TopicPartition) -> None:
        """Append a record without a timestamp to the log, as other clients can.

        Our producer refuses timestamps before 1970.
        """
        node, now_ms = self.broker.node, self.now_ms
        assert node is not None
        batch = build_batch([NewRecord(-1, None, b"v")])
        partition = node.log_manager.partitions[tp]
        offset = partition.append(memoryview(batch), origin=Origin.CLIENT, now_ms=now_ms).base_offset
        stamp = now_ms if self.is_append_time else -1
        self.records[tp].append(Stored(offset, stamp, self._wall_ms()))
        while partition.high_watermark <= offset:
            await asyncio.sleep(0.1)

    async def _commit(self, name: str) -> None:
        """Commit offsets for a group that never has members, for groups whose member leaves, and in a
        transaction.
        """
        tp = TopicPartition("kept", 0)
        begin_ms = self.now_ms
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await admin.alter_group_offsets(f"simple-{name}", {tp: 1})
        self._note_expiring("group", f"simple-{name}", begin_ms)
        for protocol in ("classic", "consumer"):
            begin_ms, group = self.now_ms, f"{protocol}-{name}"
            settings = {
                **SHORT_TIMEOUTS,
                "group.id": group,
                "group.protocol": protocol,
                "enable.auto.commit": False,
            }
            async with AsyncConsumer({**settings, "auto.offset.reset": "earliest"}) as consumer:
                consumer.subscribe(["kept"])
                while not await consumer.poll(1.0):
                    pass
                await consumer.commit()
            self._note_expiring("group", group, begin_ms)
        begin_ms = self.now_ms
        producer = AsyncProducer({**SHORT_TIMEOUTS, "transactional.id": f"aged-{name}"})
        await producer.init_transactions()
        await producer.begin_transaction()
        sent = await producer.send("kept", b"t", partition=0, timestamp_ms=begin_ms)
        await producer.commit_transaction()
        await producer.close()
        offset, node = sent.result().offset or 0, self.broker.node
        assert node is not None
        partition = node.log_manager.partitions[tp]
        # Wait for the marker, or for both markers if it is written twice.
        await asyncio.sleep(1.0)
        for header, _ in batches_of(partition):
            # Note the record and its markers, because the markers have timestamps too.
            if header.base_offset >= offset:
                self.records[tp].append(Stored(header.base_offset, header.max_timestamp_ms, self._wall_ms()))
        self._note_expiring("transactional id", f"aged-{name}", begin_ms)

    def _note_expiring(self, kind: str, name: Any, begin_ms: int) -> None:
        self.expiring_items.append(ExpiringItem(kind, name, begin_ms, self.now_ms))

    async def _restart(self) -> None:
        how = self.rng.choice(("none", "stop", "kill", "power" if self.loses_power else "kill"))
        if how == "none":
            return
        self.latest_ms = max(self.latest_ms, self.now_ms)
        if how == "stop":
            await self.broker.stop()
        else:
            self.broker.kill(lose_power=how == "power")
        if self.rng.random() < 0.3:
            self.broker.set_clock(-self.rng.choice((HOUR_MS, 5 * DAY_MS)))
        self.broker.start_if_down()
        while self.broker.running is None:
            await asyncio.sleep(0.05)
        now_ms = self.now_ms
        self.restarted_ms = max(self.restarted_ms, now_ms)
        # For a producer that is in no snapshot, a start takes the broker's clock as the time of last use. The
        # clock may have been set back.
        self.expiring_items = [
            item._replace(earliest_ms=min(item.earliest_ms, now_ms)) if item.kind == "producer id" else item
            for item in self.expiring_items
        ]

    async def _pass_time(self) -> None:
        """Set the broker's clock, and check what has expired."""
        before = {tp: self._segments(tp) for tp in self.records}
        before_ms = self.now_ms
        self.broker.set_clock(self.rng.choice(_STEPS_MS))
        earliest_ms = self.now_ms
        # `passed_ms` is negative if the clock was set back. Then no item has to expire.
        passed_ms = earliest_ms - before_ms
        await asyncio.sleep(_SETTLE_SECONDS)
        self.latest_ms = max(self.latest_ms, self.now_ms)
        self._check_retention(before, earliest_ms if passed_ms >= 10 * MINUTE_MS else 0)
        self._check_expiring_items(earliest_ms if passed_ms >= 2 * HOUR_MS else 0)

    # Checks

    def _segments(self, tp: TopicPartition) -> list[int]:
        """Return the base offsets of the segments on the disk."""
        names = self.broker.disk.list(f"{tp.topic}-{tp.partition}")
        return sorted(int(name[:20]) for name in names if name.endswith(".log"))

    def _expected_start(self, tp: TopicPartition, segments: list[int], now_ms: int) -> int:
        """Return the log start that retention by time must produce at `now_ms`."""
        end = self.records[tp][-1].offset + 1
        if tp.topic == "kept":
            return segments[0]
        for base, stop in zip(segments, [*segments[1:], 1 << 62], strict=True):
            inside = [record for record in self.records[tp] if base <= record.offset < stop]
            newest_ms = max((record.timestamp_ms for record in inside), default=-1)
            # Without timestamps the modification time of the segment's file counts.
            if newest_ms < 0:
                newest_ms = max((record.written_ms for record in inside), default=now_ms)
            if newest_ms >= now_ms - self.retention_ms:
                return base
        return max(end, segments[-1])

    def _check_retention(self, before: dict[TopicPartition, list[int]], earliest_ms: int) -> None:
        """Check that retention by time deleted neither too little nor too much.

        `earliest_ms` is the earliest time at which the retention task ran; 0 if it may not have run.
        """
        node = self.broker.node
        assert node is not None
        for tp, segments in before.items():
            start = node.log_manager.partitions[tp].log_start_offset
            must, may = (self._expected_start(tp, segments, now) for now in (earliest_ms, self.latest_ms))
            if earliest_ms and start < must:
                self.world.violate(
                    "retention by time left what is too old", f"{tp} starts at {start}, not {must}"
                )
            if start > max(may, segments[0]):
                self.world.violate(
                    "retention by time deleted what is young", f"{tp} starts at {start}, not {may}"
                )

    def _check_expiring_items(self, earliest_ms: int) -> None:
        node = self.broker.node
        assert node is not None
        ids = {entry.transactional_id for entry in node.transactions.all()}
        for item in list(self.expiring_items):
            expiry_ms = self.expiry_ms[item.kind]
            if item.kind == "group":
                is_there = bool(node.groups.offsets.of(item.name))
            elif item.kind == "transactional id":
                is_there = item.name in ids
            else:
                tp, producer_id = item.name
                is_there = node.log_manager.partitions[tp].producer(producer_id) is not None
            latest_ms = (
                max(item.latest_ms, self.restarted_ms) if item.kind == "producer id" else item.latest_ms
            )
            if earliest_ms and is_there and latest_ms + expiry_ms <= earliest_ms:
                self.world.violate(f"a {item.kind} did not expire", f"{item}, now {self.now_ms}")
            if not is_there:
                if item.earliest_ms + expiry_ms > self.latest_ms:
                    self.world.violate(f"a {item.kind} expired too early", f"{item}, now {self.now_ms}")
                self.expiring_items.remove(item)

    async def _look_up(self) -> None:
        """Check ListOffsets by time: it must return the lowest offset whose timestamp is not below the
        requested time.
        """
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            for tp, records in self.records.items():
                stamps = [record.timestamp_ms for record in records]
                timestamps = [self.rng.choice(stamps) + self.rng.choice((-1, 0, 1)) for _ in range(3)]
                for timestamp_ms in (*(stamp for stamp in timestamps if stamp >= 0), "max-timestamp"):
                    await self._check_look_up(admin, tp, timestamp_ms)

    async def _check_look_up(self, admin: AsyncAdmin, tp: TopicPartition, spec: Any) -> None:
        start = (await admin.list_offsets({tp: "earliest"}))[tp].offset or 0
        result = (await admin.list_offsets({tp: spec}))[tp]
        if (await admin.list_offsets({tp: "earliest"}))[tp].offset != start:
            # Skip the comparison, because retention deleted records between the requests.
            return
        there = [record for record in self.records[tp] if record.offset >= start]
        newest_ms = max((record.timestamp_ms for record in there), default=-1)
        is_newest = spec == "max-timestamp"
        fitting = [r for r in there if r.timestamp_ms >= (max(newest_ms, 0) if is_newest else spec)]
        expected = (fitting[0].offset, fitting[0].timestamp_ms) if fitting else (None, None)
        got = (result.offset, result.timestamp_ms)
        if got != expected and not (is_newest and fitting and got in {r[:2] for r in fitting}):
            self.world.violate(
                "a look-up by time is wrong", f"{tp} from {start}, {spec}: {got}, not {expected}"
            )

    async def _main(self) -> None:
        try:
            await self.work()
        except Exception as error:
            self.world.violate("a call fails while nothing else happens", f"{error!r}")
        self.is_done = True
