"""Small limits, numbers near their maximum, and many faults at once, which some seeds draw.

A limit that takes a million keys, 32,767 transactions or 2^31 records is never reached in two minutes. Some
seeds therefore make the limit small, or begin close to it. Each of these draws has its own generator.
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
"""A probability that is used twice. A seed has small limits with this probability; then each single limit is
small with the same probability. The same applies, independently, to settings.
"""
NEAR_END_CHANCE = 0.25
"""Probability that a seed begins near the maximum of a number."""
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
    "log.flush.offset.checkpoint.interval.ms": (200, 500),
}
"""Broker settings, each with the small values that a seed may draw."""
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
    "producer_id_block": (1, 3),
    "first_producer_epoch": (32_760, 32_765, 32_766),
    "coordinator_roll_bytes": (1, 300),
    "coordinator_read_bytes": (100, 500),
    "max_tombstones_per_batch": (1, 2),
    "expire_step_entries": (1, 2),
    "assignment_burst_cost": (1, 20),
    "max_immediate_assignment_cost": (1, 5),
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
"""Fields of `Limits`, each with the small values that a seed may draw."""


@dataclass(frozen=True)
class FirstNumbers:
    """The first producer id and first sequence of a run. None means the usual first value."""

    producer_id: int | None = None
    """The first producer id, near its maximum 2^63 - 1."""
    sequence: int | None = None
    """The first sequence of each producer in each partition, near its maximum 2^31 - 1."""

    def write(self, disk: MemoryDisk) -> None:
        """Store the first producer id on the disk of a broker that has not started yet."""
        if self.producer_id is not None:
            content = {"version": 1, "next_producer_id": self.producer_id}
            disk.replace(FILE_NAME, json.dumps(content).encode())


def begin_sequences(producer: AsyncProducer, sequence: int) -> None:
    """Make an idempotent producer begin with `sequence` in partitions that it has not written to.

    A broker accepts any first sequence of a producer id that is new to the partition.
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
    """Draw the broker settings that are small in this seed. Most seeds have none."""
    rng = Random(f"{seed}/small settings")
    if rng.random() >= SMALL_CHANCE:
        return {}
    return {
        name: rng.choice(values) for name, values in _SMALL_SETTINGS.items() if rng.random() < SMALL_CHANCE
    }


def draw_limits(seed: int) -> Limits:
    """Draw the internal limits of this seed's broker."""
    rng = Random(f"{seed}/small limits")
    if rng.random() >= SMALL_CHANCE:
        return DEFAULT_LIMITS
    small = {
        name: rng.choice(values) for name, values in _SMALL_LIMITS.items() if rng.random() < SMALL_CHANCE
    }
    return replace(DEFAULT_LIMITS, **small)


def draw_start(seed: int) -> FirstNumbers:
    """Draw the first producer id and the first sequence of this seed."""
    rng = Random(f"{seed}/start")
    if rng.random() >= NEAR_END_CHANCE:
        return FirstNumbers()
    return FirstNumbers(
        producer_id=LARGEST_PRODUCER_ID - rng.choice((40_000, 1 << 20)) if rng.random() < 0.5 else None,
        sequence=SEQUENCE_MAX - rng.randrange(30) if rng.random() < 0.7 else None,
    )


def cluster_faults(faults: list[Fault], seed: int, until_ms: int) -> list[Fault]:
    """Return the faults in the order of time. In some seeds, move them to a few common moments."""
    rng = Random(f"{seed}/moments")
    if rng.random() >= MOMENTS_CHANCE:
        return sorted(faults)
    moments = [rng.randrange(until_ms) for _ in range(max(len(faults) // 4, 1))]
    return sorted(fault._replace(at_ms=rng.choice(moments)) for fault in faults)


def extra_fault_count(seed: int) -> int:
    """Draw the number of additional faults; 0 in most seeds."""
    rng = Random(f"{seed}/crowd")
    return rng.choice((20, 40)) if rng.random() < CROWD_CHANCE else 0
