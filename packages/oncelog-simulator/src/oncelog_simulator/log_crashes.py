"""A log alone, which ends at any operation of its disk: no broker, no network and no clients.

A fault of recovery or deletion often needs several rare events in a row. An example is a refused snapshot, a
deletion, a power loss, a killed start, and another power loss before the next flush. In the other
simulations, these events have times of their own, so they seldom follow each other. Here a seed is a list of
drawn operations of the log, without pauses. The seed draws for each snapshot whether the disk refuses it.
Each crash comes before a drawn operation of the disk, also during a start.

Most producers are silent after a few batches. A ledger (batch_ledger.py) notes what was stored, and what
power losses took. Batches are sent again, byte for byte, and at the end the newest one of each producer.

In a third of the seeds, records are deleted around a blocking call of a compaction, which merges several
segments. Every start must find the newest record of each key, unless it was deleted.

In a third of the seeds, clients read the log and look up times between the other operations. A reader closes
each segment that it leaves, and the next access opens it by name. No access may find that a file is missing.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

from oncelog.config import INT64_MAX, TOPIC
from oncelog.errors import BrokerError, DuplicateSequenceNumber, KafkaStorageError, StorageError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.log.background import BackgroundTask, BlockingCall, Kind
from oncelog.log.config import LogConfig
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.log.reader import StepCost
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import Compression, Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.control import encode_end_marker
from oncelog.wire.records import decode_records
from oncelog_simulator.batch_ledger import BatchKey, Fate, Ledger, keys_of
from oncelog_simulator.checks import batches_of
from oncelog_simulator.client_simulation import ClientResult
from oncelog_simulator.world import MISSING_FILE, World

NAME = "log"
TP = TopicPartition("alone", 0)
TOPIC_ID = bytes(range(16))
BEGIN_MS = 1_700_000_000_000
SNAPSHOT = ".producers.tmp"
"""The end of the name of the first file of an unfinished snapshot of producers."""
WEIGHTS: dict[str, tuple[int, ...]] = {
    "write": (6,),
    "repeat": (0, 1),
    "transact": (0, 0, 2),
    "delete": (1, 6),
    "retain": (0, 0, 1),
    "flush": (0, 1),
    "checkpoint": (0, 1, 3),
    "compact": (0, 2),
    "alter": (0, 0, 2),
    "work": (2, 8),
    "refuse": (1,),
    "end_now": (0, 1, 4),
    "end_soon": (1, 6),
    "stop": (0, 0, 1),
}
"""The possible weights of each operation. A seed draws one of them, so that some seeds lack some operations
and have others often.
"""
TRIMMED_SHARE = 1 / 3
"""The share of seeds in which records are deleted during a compaction."""
TRIMMED_WEIGHTS = {
    "write": 6,
    "trim": 6,
    "retain": 1,
    "flush": 1,
    "checkpoint": 2,
    "work": 4,
    "end_now": 1,
    "end_soon": 2,
}
READ_SHARE = 1 / 3
"""The share of seeds in which clients read the log."""
CODECS = (Compression.NONE, Compression.ZSTD)
"""The codecs of such seeds. ZSTD may compress so well that compaction decompresses any batch in a thread."""
_MERGED_BYTES = 4_000


@dataclass(eq=False)
class SentBatch:
    """A batch with the bytes of all its attempts, and the keys of its records."""

    key: BatchKey
    data: bytes
    last_sequence: int
    record_keys: list[bytes]


class LogSimulation:
    """One partition of one seed, with the process and the disk that it has now."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng(NAME)
        rng = self.rng
        self.limits = _draw_limits(rng)
        self.settings: dict[str, object] = {
            "segment.bytes": rng.choice((250, 250, 500, 1_000)),
            "index.interval.bytes": rng.choice((100, 4_096)),
            "cleanup.policy": rng.choice(("delete", "delete", "compact", "compact,delete")),
            "min.cleanable.dirty.ratio": rng.choice((0.0, 0.3)),
            "retention.bytes": rng.choice((-1, 1_000)),
            "flush.messages": rng.choice((1, *[INT64_MAX] * 4)),
        }
        self.weights = {name: rng.choice(weights) for name, weights in WEIGHTS.items()}
        self.key_count = 3
        self._draw_trimmed(world.rng(f"{NAME} trimmed"))
        self.read_chance = 0.0
        """The probability that a client reads the log before records are deleted during a compaction."""
        self.max_calls = 8
        """The most blocking calls of a compaction before records are deleted."""
        self.compression = Compression.NONE
        self._draw_readers(world.rng(f"{NAME} readers"))
        self.new_id_chance = rng.choice((0.1, 0.5))
        self.power_chance = rng.choice((0.5, 0.8))
        self.start_crash_chance = rng.choice((0.1, 0.6))
        self.again_chance = rng.choice((0.2, 0.7))
        """The probability that a process ends right after its start."""
        self.is_new = True
        """True until the process has had time for more than its start and a few batches."""
        self.refused_share = rng.choice((0.0, 0.5))
        """The share of snapshots that the disk refuses now."""
        self.producer_count = 0
        self.sent: list[SentBatch] = []
        self.deleted_to = 0
        """The highest log start so far. No record at or above it was deleted."""
        self.open: set[int] = set()
        """The producer ids with an open transaction."""
        self.disk, self.now_ms = MemoryDisk(), BEGIN_MS
        self.uuid_count = 0
        self.call: BlockingCall | None = None
        """A blocking call of a background task that has not run yet."""
        self.ledger = Ledger(world, lambda: self.manager.partitions, [TP])
        self.lose_power = False

    def _draw_trimmed(self, rng: Random) -> None:
        """Draw whether this seed deletes records during compactions. Such seeds have many keys, so that each
        segment keeps records.
        """
        if rng.random() < TRIMMED_SHARE:
            self.settings["cleanup.policy"] = "compact,delete"
            self.weights = TRIMMED_WEIGHTS
            self.key_count = rng.choice((3, 1_000, 1_000))

    def _draw_readers(self, rng: Random) -> None:
        """Draw whether clients read the log in this seed. A scan then often needs several reads of a segment,
        and a compaction may decompress the batches of several segments in one step.
        """
        if rng.random() < READ_SHARE:
            self.weights = {**self.weights, "read": rng.choice((1, 4)), "look_up": rng.choice((1, 4))}
            self.read_chance = 0.5
            self.compression = rng.choice(CODECS)
            self.max_calls = 8 if self.compression is Compression.NONE else 40
            first_bytes, chunk_bytes = rng.choice(((61, 61), (61, 300), (4_096, 1 << 20)))
            self.limits = replace(
                self.limits,
                scan_first_chunk_bytes=first_bytes,
                scan_chunk_bytes=chunk_bytes,
                compaction_step_items=rng.choice((1, self.limits.compaction_step_items, 1 << 20)),
                search_step_cost=rng.choice((1, self.limits.search_step_cost)),
            )

    @property
    def partition(self) -> Partition:
        return self.manager.partitions[TP]

    # The process

    def _open(self) -> None:
        """Start a process on the disk. Raises StorageError and SimulatedCrash."""
        self.call, self.disk.now_ms = None, lambda: self.now_ms
        self.disk.on_step.append(self._refuse_snapshot)
        self.manager = LogManager.open(
            self.disk, node_id=1, new_uuid=self._new_uuid, now_ms=self.now_ms, limits=self.limits
        )
        self.manager.open_partition(TP, self._config(), TOPIC_ID, self.now_ms)
        self.disk.sync_directory()
        with suppress(OSError):
            self.manager.forget_missing_partitions()
        with suppress(OSError):
            self.manager.forget_last_stop()
        self.manager.background.on_added = lambda: None

    def _config(self, **changes: object) -> LogConfig:
        return LogConfig.from_settings(TOPIC.parse(self.settings | changes), limits=self.limits)

    def _new_uuid(self) -> bytes:
        self.uuid_count += 1
        return self.uuid_count.to_bytes(16, "big")

    def _refuse_snapshot(self, operation: str, path: str) -> None:
        is_new = operation == "create" and path.endswith(SNAPSHOT)
        if is_new and self.refused_share and self.rng.random() < self.refused_share:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _start(self) -> None:
        """Start a process after the last one has ended. Some starts crash, and are repeated."""
        while True:
            self._replace_disk()
            self.lose_power = self.rng.random() < 0.5
            if self.rng.random() < self.start_crash_chance:
                self._crash_soon()
            try:
                self._open()
                break
            except SimulatedCrash:
                self._note("the start crashes")
                self.ledger.ended(lose_power=self.lose_power)
            except StorageError as error:
                if not self.refused_share or "make room" not in str(error):
                    raise
                self._note(f"the start fails: {error}")
                self.refused_share, self.lose_power = 0.0, False
        self.disk.crash_after = None
        self.disk.on_step[:] = [self._refuse_snapshot]
        self._note(f"started: {self.partition.log_start_offset} to {self.partition.log_end_offset}")
        self.ledger.recovered(self.manager.partitions)
        self._check_records()
        self.is_new = True

    def _replace_disk(self) -> None:
        """Replace the disk by the one that the last process left."""
        disk = self.disk
        self.disk = disk.after_power_loss(self.rng) if self.lose_power else disk.after_kill()
        disk.release()

    def _crash_soon(self) -> None:
        """Let the process crash before a drawn sync of the directory, or before any drawn change of names.

        Before such a sync, created, renamed and removed names are not durable. The next process of a kill
        cannot see that.
        """
        is_at_sync = self.rng.random() < 0.7
        left = self.rng.randrange(self.rng.choice((2, 6) if is_at_sync else (5, 40)))

        def count_down(operation: str, path: str) -> None:
            nonlocal left
            left -= (operation, path) == ("sync", str(TP)) if is_at_sync else operation != "write"
            if left < 0 and self.disk.crash_after is None:
                self.disk.crash_after = self.disk.steps

        self.disk.on_step.append(count_down)

    def _end(self) -> None:
        """Note the end of the process, which was killed or lost power, and start another."""
        self._note("loses power" if self.lose_power else "is killed")
        self._note_ending()
        self.ledger.ended(lose_power=self.lose_power)
        self.open.clear()
        self._start()

    def _note_ending(self) -> None:
        """Note what the next process must find."""
        self.ledger.ending()
        self.deleted_to = max(self.deleted_to, self.partition.log_start_offset)

    def _check_records(self) -> None:
        """Check that the log has the newest record of each key that was not deleted."""
        start = min(self.partition.log_start_offset, self.deleted_to)
        newest: dict[bytes, tuple[int, Fate]] = {}
        for batch in self.sent:
            entry = self.ledger.entry(batch.key)
            is_idempotent = batch.key.producer_id in self.ledger.idempotent
            if not is_idempotent or entry is None or entry.fate is Fate.GONE:
                continue
            for offset, key in enumerate(batch.record_keys, entry.offsets[-1]):
                if key not in newest or newest[key][0] < offset:
                    newest[key] = offset, entry.fate
        there = {
            record.key: record.offset
            for header, data in batches_of(self.partition)
            if not header.is_control
            for record in decode_records(data)
        }
        for key, (offset, fate) in newest.items():
            # A later record of the key may be transactional, or its append may not have been answered.
            if fate is Fate.STORED and offset >= start and there.get(key, -1) < offset:
                self.world.violate("a record is lost", f"{key!r} at {offset}; the log has {there.get(key)}")

    def _note(self, text: str) -> None:
        self.world.loop.now_us = (self.now_ms - BEGIN_MS) * 1_000
        self.world.note(NAME, text)

    # Operations

    def run(self) -> None:
        self._start()
        names, weights = list(self.weights), list(self.weights.values())
        for _ in range(self.rng.randint(60, 250)):
            self.now_ms += self.rng.randint(1, 2_000)
            if self.is_new and self.rng.random() < self.again_chance:
                self._do("write")
                self._do("end_now")
            self.is_new = False
            (name,) = self.rng.choices(names, weights)
            self._do(name)
        self.refused_share = 0.0
        for lose_power in (False, True):
            self._do("work_all")
            self.disk.crash_after = None
            self.disk.on_step.clear()
            self.start_crash_chance, self.lose_power = 0.0, lose_power
            self._end()
            for batch in self._newest():
                self._send(batch)
        counts = Counter(key for key, _ in keys_of(TP, self.partition))
        for key in (key for key, count in counts.items() if count > 1):
            self.world.violate("twice in the log", f"{key}")

    def _do(self, name: str) -> None:
        """Carry out an operation, during which the process may end."""
        self._note(name)
        try:
            getattr(self, f"_{name}")()
        except SimulatedCrash:
            self._end()
        except (KafkaStorageError, OSError) as error:
            self._note(f"{name}: {error!r}")
            if MISSING_FILE in str(error):
                self.world.violate("a file is missing", f"{name}: {error!r}")

    def _write(self) -> None:
        """Send a few batches, most of them by new producers."""
        for _ in range(self.rng.choice((1, 2, 4, 8))):
            self._send_next(is_transactional=False)

    def _transact(self) -> None:
        """Begin, continue or end a transaction."""
        if self.open and self.rng.random() < 0.5:
            producer_id = self.rng.choice(sorted(self.open))
            is_commit = self.rng.random() < 0.5
            marker = encode_end_marker(producer_id, 0, is_commit, 0, self.now_ms)
            self.open.discard(producer_id)
            self.partition.append(memoryview(marker), origin=Origin.COORDINATOR, now_ms=self.now_ms)
        else:
            self._send_next(is_transactional=True)

    def _send_next(self, *, is_transactional: bool) -> None:
        last = self.sent[-1] if self.sent else None
        is_new = last is None or self.rng.random() < self.new_id_chance
        if is_transactional or is_new or last is None or last.key.producer_id not in self.ledger.idempotent:
            self.producer_count += 1
            key = BatchKey(TP, self.producer_count, 0, 0)
        else:
            key = last.key._replace(sequence=last.last_sequence + 1)
        count = self.rng.choice((1, 1, 3))
        keys = [b"k%d" % self.rng.randrange(self.key_count) for _ in range(count)]
        data = build_batch(
            [(self.now_ms, one, b"v", ()) for one in keys],  # type: ignore[misc]
            producer_id=key.producer_id,
            producer_epoch=0,
            base_sequence=key.sequence,
            compression=self.compression,
            is_transactional=is_transactional,
        )
        if is_transactional:
            self.open.add(key.producer_id)
        else:
            self.ledger.idempotent.add(key.producer_id)
        batch = SentBatch(key, bytes(data), key.sequence + count - 1, keys)
        try:
            self._send(batch)
        finally:
            if self.ledger.entry(key) is not None:
                self.sent.append(batch)

    def _send(self, batch: SentBatch) -> None:
        """Send a batch, and check the verdict. Raises KafkaStorageError."""
        data, must_be_known = memoryview(bytearray(batch.data)), self.ledger.must_be_known(batch.key)
        try:
            appended = self.partition.append(data, origin=Origin.CLIENT, now_ms=self.now_ms)
        except KafkaStorageError:
            raise
        except BrokerError as error:
            if must_be_known and not isinstance(error, DuplicateSequenceNumber):
                text = f"{batch.key} {self.ledger.entry(batch.key)}: {error!r}"
                self.world.violate("a retry was not recognised", text)
            return
        self.ledger.accepted(
            batch.key, batch.last_sequence, appended.base_offset, is_duplicate=appended.is_duplicate
        )
        if self.partition.unflushed_record_count >= self.partition.config.flush_messages:
            self.partition.flush()

    def _repeat(self) -> None:
        newest = self._newest()
        for batch in self.rng.sample(newest, min(len(newest), 3)):
            self._send(batch)

    def _newest(self) -> list[SentBatch]:
        """Return the newest batch of each producer, without those that a power loss took."""
        newest = {}
        for batch in self.sent:
            entry = self.ledger.entry(batch.key)
            if entry is not None and entry.fate is not Fate.GONE:
                newest[batch.key.producer_id] = batch
        return list(newest.values())

    def _delete(self) -> None:
        end = self.partition.high_watermark
        kept = self.rng.choice((0, self.rng.randint(0, 3), self.rng.randint(0, 12)))
        self.partition.delete_records(max(end - kept, 0), self.now_ms)

    def _read(self) -> None:
        """Read the log from a drawn offset to its end, as clients do."""
        partition, max_bytes = self.partition, self.rng.choice((1, 500, 10_000))
        offset, end_offset = partition.log_start_offset, partition.high_watermark
        offset = self.rng.randint(offset, end_offset)
        try:
            while offset < end_offset:
                next_offset = partition.read(offset, max_bytes, upper_offset=end_offset).next_offset
                if next_offset == offset:
                    return  # compaction has removed all later batches
                offset = next_offset
        except BrokerError as error:
            self.world.violate("a log cannot be read", f"{error!r}")

    def _look_up(self) -> None:
        """Start to look up a time. Other operations come between the steps."""
        timestamp_ms = self.rng.choice((None, self.rng.randint(BEGIN_MS, self.now_ms)))
        self.manager.background.add(self._search(timestamp_ms), Kind.REQUEST)

    def _search(self, timestamp_ms: int | None) -> BackgroundTask:
        partition = self.partition
        try:
            yield from partition.search_timestamp(timestamp_ms, StepCost())
        except BrokerError as error:
            if not partition.is_closed:
                self.world.violate("a time cannot be looked up", f"{error!r}")

    def _retain(self) -> None:
        self.partition.enforce_retention(self.now_ms)

    def _flush(self) -> None:
        self.partition.flush()

    def _checkpoint(self) -> None:
        if self.partition.is_flush_due:
            self.partition.flush()
        self.manager.write_checkpoints()

    def _compact(self) -> None:
        if self.partition.config.is_compacted:
            if self.partition.is_flush_due:
                self.partition.flush()
            self.manager.compact(self.now_ms)

    def _trim(self) -> None:
        """Delete records around a blocking call of a compaction that merges segments."""
        self._compact()
        self.partition.reconfigure(self._config(**{"segment.bytes": _MERGED_BYTES}))
        for _ in range(self.rng.randint(1, self.max_calls)):
            self._work_to_call()
        self._work_steps(self.rng.randrange(2))
        if self.read_chance and self.rng.random() < self.read_chance:
            self._read()
        self.partition.reconfigure(self._config())
        if self.rng.random() < 0.8:
            start, end = self.partition.log_start_offset, self.partition.high_watermark
            self.partition.delete_records(self.rng.randint(start, end), self.now_ms)
        else:
            self._retain()
        self._work_steps(self.rng.randrange(3))
        if self.rng.random() < 0.5:
            self._end_now()

    def _work_to_call(self) -> None:
        """Run the background work up to its next blocking call, which is left for later."""
        self._work_steps(1)
        while self.call is None and self.manager.background:
            self._work_steps(1)

    def _alter(self) -> None:
        self.settings["cleanup.policy"] = self.rng.choice(("delete", "compact"))
        self.partition.reconfigure(self._config())

    def _work(self) -> None:
        """Run some of the background work."""
        self._work_steps(self.rng.choice((1, 3, 10, 100)))

    def _work_steps(self, count: int) -> None:
        """Run steps and blocking calls of the background tasks. The last call may be left for later."""
        for _ in range(count):
            call, self.call = self.call, None
            if call is not None:
                with suppress(Exception):  # the task gets the error in its next step
                    call()
            elif self.manager.background:
                self.call = self.manager.background.step()
            else:
                return

    def _work_all(self) -> None:
        while self.call is not None or self.manager.background:
            self._work()

    def _refuse(self) -> None:
        self.refused_share = self.rng.choice((0.0, 0.5, 0.5, 1.0))

    def _end_soon(self) -> None:
        self.lose_power = self.rng.random() < self.power_chance
        if len(self.disk.on_step) == 1:
            self._crash_soon()

    def _end_now(self) -> None:
        self.lose_power = self.rng.random() < self.power_chance
        self._end()

    def _stop(self) -> None:
        """Stop the process. If the disk refuses a snapshot, this is a kill."""
        self._work_all()
        self.manager.background.on_added = None
        self.lose_power = False
        self._note_ending()
        with suppress(KafkaStorageError):
            self.manager.close(self.now_ms)
        self._start()


def _draw_limits(rng: Random) -> Limits:
    usual = DEFAULT_LIMITS
    return replace(
        usual,
        snapshot_every_bytes=rng.choice((usual.snapshot_every_bytes, usual.snapshot_every_bytes, 1, 300)),
        max_drops_per_step=rng.choice((usual.max_drops_per_step, 1)),
    )


def run_log_crashes(seed: int) -> ClientResult:
    """Run a seed of crashes of a log."""
    world = World(seed)
    simulation = LogSimulation(world)
    try:
        simulation.run()
    finally:
        simulation.disk.release()
        world.loop.close()
    return ClientResult(
        seed,
        NAME,
        world.violations,
        world.digest,
        world.timeline,
        (simulation.now_ms - BEGIN_MS) / 1_000,
        len(simulation.sent),
    )
