"""Flip one bit of a stored batch. Its readers must get an error, and all other batches must remain readable.

Kafka's checksum covers a batch from its attributes on. Before the attributes only the length, the format and
the checksum are flipped. No checksum guards the base offset and the leader epoch, so they are never flipped.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.errors import DisconnectedError, NotConnectedError, OncelogError
from oncelog.log.checkpoint import RECOVERY_POINTS, read_offsets
from oncelog.log.partition import Partition
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Record, TopicPartition
from oncelog.wire.header import BatchHeader
from oncelog.wire.records import decode_records
from oncelog_simulator.checks import batches_of
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application
from oncelog_simulator.world import World

_LENGTH, _FORMAT_AND_CHECKSUM, _COVERED = range(8, 12), range(16, 21), 21
BROKER_STATES = ("running", "stopped", "killed")
"""States of the broker after the bit flip: it keeps running, or it was stopped or killed and restarts."""


class BitFlip(NamedTuple):
    """One bit of one stored batch. `position` counts bytes from the start of the batch."""

    tp: TopicPartition
    batch: BatchHeader
    position: int
    bit: int

    def __str__(self) -> str:
        first, last = self.batch.base_offset, self.batch.last_offset
        return f"bit {self.bit} of byte {self.position} of the batch {first}..{last} of {self.tp}"


def draw_bit_flip(
    rng: Random, logs: dict[TopicPartition, Partition], limits: dict[TopicPartition, int]
) -> BitFlip | None:
    """Draw a bit of a batch that ends below its partition's limit. Return None if there is no such batch.

    `limits` has the offset of each partition below which damage must be noticed: the log end, or after a kill
    the recovery point.
    """
    batches = [
        (tp, header)
        for tp, partition in sorted(logs.items())
        for header, _ in batches_of(partition)
        if header.base_offset >= partition.log_start_offset and header.last_offset < limits.get(tp, 0)
    ]
    if not batches:
        return None
    tp, header = rng.choice(batches)
    covered = range(_COVERED, header.size_bytes)
    # Flip no bit in the length of a last batch: the batch would look torn, and a start would cut it off.
    is_last = header.last_offset + 1 == logs[tp].log_end_offset
    length = _FORMAT_AND_CHECKSUM if is_last else _LENGTH
    position = rng.choice(rng.choice((length, _FORMAT_AND_CHECKSUM, covered, covered, covered)))
    return BitFlip(tp, header, position, rng.randrange(8))


def flip(disk: MemoryDisk, partition: Partition, what: BitFlip) -> None:
    """Flip the bit in the segment file."""
    (stored,) = (bytes(data) for header, data in batches_of(partition) if header == what.batch)
    for name in disk.list(partition.directory):
        path = f"{partition.directory}/{name}"
        begin = disk.read(path).find(stored) if name.endswith(".log") else -1
        if begin >= 0:
            file, position = disk.open(path), begin + what.position
            file.pwrite(bytes([file.pread(1, position)[0] ^ 1 << what.bit]), position)
            file.sync()


def recovery_points(disk: MemoryDisk) -> dict[TopicPartition, int]:
    """Return the recovery point of each partition.

    A start after a kill does not read the log below this offset. Above this offset it would cut the log off
    at the first damaged batch.
    """
    return read_offsets(disk, RECOVERY_POINTS)


class DamageReader(Application):
    """Reads a whole partition and continues after batches that it cannot read."""

    def __init__(self, world: World, partition: Partition, what: BitFlip) -> None:
        super().__init__(world, "flip-reader")
        self.what = what
        self.settings: dict[str, object] = {
            **SHORT_TIMEOUTS,
            "client.id": self.name,
            "isolation.level": "read_uncommitted",
        }
        self.batches = [header for header, _ in batches_of(partition)]
        self.expected = [
            (record.offset, record.value)
            for header, data in batches_of(partition)
            if not header.is_control
            for record in decode_records(data)
        ]
        self.start_offset, self.end_offset = partition.log_start_offset, partition.log_end_offset
        self.records: list[Record] = []
        self.errors: list[OncelogError] = []

    async def work(self) -> None:
        self.records, self.errors = [], []
        async with AsyncConsumer(self.settings) as consumer:
            consumer.assign([self.what.tp])
            consumer.seek(self.what.tp, self.start_offset)
            while (position := await consumer.position(self.what.tp)) < self.end_offset:
                try:
                    self.records += await consumer.poll(2.0)
                except (DisconnectedError, NotConnectedError):
                    # The network failed; retry.
                    pass
                except OncelogError as error:
                    if await consumer.position(self.what.tp) == position:
                        self.errors.append(error)
                        here = next(batch for batch in self.batches if batch.last_offset >= position)
                        consumer.seek(self.what.tp, here.last_offset + 1)

    def check(self) -> None:
        """Report a violation unless the damaged batch gave an error and all other records were read."""
        damaged = self.what.batch
        held = range(damaged.base_offset, damaged.last_offset + 1)
        expected = [
            record for record in self.expected if record[0] not in held and record[0] >= self.start_offset
        ]
        actual = [(entry.offset, entry.value) for entry in self.records]
        if not self.errors:
            self.world.violate("a flipped bit is not noticed", f"{self.what}")
        if any(offset in held for offset, _ in actual):
            self.world.violate("a flipped bit is served as data", f"{self.what}")
        elif actual != expected and (self.what.position not in _LENGTH or not set(actual) <= set(expected)):
            # After a flip in the length field, missing records are allowed: the reader may skip the batches
            # that follow.
            lost = [record for record in expected if record not in actual]
            self.world.violate("a flipped bit hides others", f"{self.what}: {lost} of {len(expected)}")
