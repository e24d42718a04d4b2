"""Small limits, numbers near their end, and crowds of faults: what some seeds draw besides.

A limit that takes a million keys, 32,767 transactions or 2^31 records to reach is never met in two minutes.
Some seeds therefore make the limit small, or begin close to it. Each kind has dice of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from oncelog.broker.coordinators.producer_ids import FILE_NAME
from oncelog.client.producer.aio import AsyncProducer
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.rules.idempotence.sequence import SEQUENCE_MAX

if TYPE_CHECKING:
    from oncelog.testing.memory_disk import MemoryDisk
    from oncelog_simulator.faults import Fault

SMALL_CHANCE = 0.4
"""Of a seed to draw small limits or settings, and of each of them to be small in such a seed."""
NEAR_END_CHANCE = 0.25
"""Of a seed to begin near the end of a number's range."""
CROWD_CHANCE = 0.06
MOMENTS_CHANCE = 0.1
LARGEST_PRODUCER_ID = 2**63 - 1

_SMALL_SETTINGS: dict[str, tuple[int, ...]] = {
    "max.incremental.fetch.session.cache.slots": (0, 1, 3),
    "oncelog.connection.max.pending.requests": (1, 2),
    "oncelog.connection.max.pending.bytes": (1, 100, 1_000),
    "log.index.size.max.bytes": (12, 40, 100),
    "fetch.max.bytes": (1_024,),
    "message.max.bytes": (700, 1_500),
    "group.max.size": (2,),
    "group.consumer.max.size": (2,),
    "max.connections": (60,),
    "max.request.partition.size.limit": (1,),
}
"""Broker settings and the values that a seed may draw."""
_SMALL_LIMITS: dict[str, tuple[int, ...]] = {
    "max_compaction_keys": (1, 2, 5),
    "compaction_step_items": (1, 3),
    "index_run_entries": (1, 2, 5),
    "max_relative_offset": (60, 200),
    "max_drops_per_step": (1, 2),
    "max_read_cursors": (1, 2),
    "scan_chunk_bytes": (61, 300),
    "scan_first_chunk_bytes": (61, 100),
    "scan_block_headers": (1, 2),
    "search_step_cost": (1, 4),
    "max_producers_at_work": (1, 2),
    "producer_shard_entries": (1, 2),
    "expire_step_producers": (1, 2),
    "snapshot_every_bytes": (1, 500, 5_000),
    "snapshot_step_shards": (1, 2),
    "snapshot_vector_entries": (1, 2),
    "producer_id_block": (1, 3),
    "first_producer_epoch": (32_760, 32_765, 32_766),
    "coordinator_roll_bytes": (1, 300),
    "coordinator_read_bytes": (100, 500),
    "max_tombstones_per_batch": (1, 2),
    "expire_step_entries": (1, 2),
    "assignment_burst_cost": (1, 20),
    "max_catalogued_topics": (1, 2),
    "request_step_elements": (1, 2),
    "partitions_per_step": (1,),
    "large_answer_partitions": (1,),
    "max_answers_kept": (1,),
    "max_session_partitions": (0, 1, 4),
    "session_eviction_ms": (0, 1_000),
    "session_expiry_ms": (1_000, 5_000),
    "max_quota_shares": (1,),
}
"""Fields of `Limits` and the values that a seed may draw."""


@dataclass(frozen=True)
class Start:
    """Numbers from which a run begins; None is the usual beginning."""

    producer_id: int | None = None
    """The first producer id, near 2^63."""
    sequence: int | None = None
    """The first sequence of each producer in each partition, near 2^31."""

    def write(self, disk: MemoryDisk) -> None:
        """Prepare the disk of a broker that has not started yet."""
        if self.producer_id is not None:
            content = {"version": 1, "next_producer_id": self.producer_id}
            disk.replace(FILE_NAME, json.dumps(content).encode())


def begin_sequences(producer: AsyncProducer, sequence: int) -> None:
    """Let an idempotent producer begin with `sequence` in the partitions that it has not written to yet.

    A broker takes any first sequence of a producer id that it does not know in a partition.
    """
    driver = producer._driver
    if driver is None:
        return
    with driver.lock:
        core = driver.core
        for queue in core._partitions.values():
            if core.identity is not None and queue.sequences.identity is None:
                queue.sequences.resume(core.identity, sequence, None)


def draw_settings(seed: int) -> dict[str, object]:
    """Return the broker settings that are small in this seed; mostly none."""
    chance = Random(f"{seed}/small settings")
    if chance.random() >= SMALL_CHANCE:
        return {}
    return {
        name: chance.choice(values)
        for name, values in _SMALL_SETTINGS.items()
        if chance.random() < SMALL_CHANCE
    }


def draw_limits(seed: int) -> Limits:
    """Return the limits of this seed's broker."""
    chance = Random(f"{seed}/small limits")
    if chance.random() >= SMALL_CHANCE:
        return DEFAULT_LIMITS
    small = {
        name: chance.choice(values)
        for name, values in _SMALL_LIMITS.items()
        if chance.random() < SMALL_CHANCE
    }
    return replace(DEFAULT_LIMITS, **small)


def draw_start(seed: int) -> Start:
    """Return the numbers from which a seed begins."""
    chance = Random(f"{seed}/start")
    if chance.random() >= NEAR_END_CHANCE:
        return Start()
    return Start(
        producer_id=LARGEST_PRODUCER_ID - chance.choice((40_000, 1 << 20)) if chance.random() < 0.5 else None,
        sequence=SEQUENCE_MAX - chance.randrange(30) if chance.random() < 0.7 else None,
    )


def gather(faults: list[Fault], seed: int, until_ms: int) -> list[Fault]:
    """In some seeds let faults happen several at one moment."""
    chance = Random(f"{seed}/moments")
    if chance.random() >= MOMENTS_CHANCE:
        return sorted(faults)
    moments = [chance.randrange(until_ms) for _ in range(max(len(faults) // 4, 1))]
    return sorted(fault._replace(at_ms=chance.choice(moments)) for fault in faults)


def crowd_count(seed: int) -> int:
    """Return how many more faults a seed has; mostly 0."""
    chance = Random(f"{seed}/crowd")
    return chance.choice((20, 40)) if chance.random() < CROWD_CHANCE else 0
