"""Chooses the partitions of the rows of an Arrow table, as `partitioner` does for single records."""

from __future__ import annotations

from typing import Any

import numpy as np

from oncelog.client.producer.partitioner import MURMUR2_M, MURMUR2_SEED, Partitioner
from oncelog.client.producer.queues import TopicQueues
from oncelog.wire.arrow_bytes import RowBytes, Words

Partitions = np.ndarray[tuple[int], np.dtype[np.int32]]


def positive_murmur2_of(keys: RowBytes) -> Words:
    """Return `positive_murmur2` of all rows, in the order of `keys.rows`."""
    m = np.uint32(MURMUR2_M)
    h = keys.sizes.astype(np.uint32) ^ np.uint32(MURMUR2_SEED)
    for word in keys.words():
        k = word * m
        k ^= k >> np.uint32(24)
        h[: len(k)] = h[: len(k)] * m ^ k * m
    for place, (rows, byte) in enumerate(keys.tails()):
        h[rows] ^= byte << np.uint32(8 * place)
    h[keys.sizes & 3 > 0] *= m
    h ^= h >> np.uint32(13)
    h *= m
    return (h ^ (h >> np.uint32(15))) & np.uint32(0x7FFFFFFF)


def partitions_of_keys(
    partitioner: Partitioner, keys: Any, count: int, otherwise: Partitions | int
) -> Partitions:
    """Return the partition of each row of a binary Arrow column of keys.

    `otherwise` has the partition of rows whose key is not hashed: one partition, or one per row.
    """
    partitions: Partitions = np.full(len(keys), otherwise, np.int32)
    if partitioner.hashes_with_murmur2:
        hashed = RowBytes(keys)
        partitions[hashed.rows] = positive_murmur2_of(hashed) % np.uint32(count)
    else:
        for row, key in enumerate(keys.to_pylist()):
            if key:
                partitions[row] = partitioner.for_key(key, count)
    return partitions


def partitions_of_rows(queues: TopicQueues, keys: Any, rows: int) -> Partitions | int:
    """Return the partition of each row of a table, or one partition for all rows.

    `keys` is a binary Arrow column or None. Unless the partitioner is round_robin, all rows without a key go
    to one partition.
    """
    partitioner, count = queues.partitioner, queues.count
    if partitioner.is_round_robin:
        return np.array([partitioner.next_round_robin(count) for _ in range(rows)], np.int32)
    sticky = queues.switch_sticky_queue().tp.partition
    return sticky if keys is None else partitions_of_keys(partitioner, keys, count, sticky)
