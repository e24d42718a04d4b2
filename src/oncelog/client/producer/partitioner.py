"""Chooses the partition of a record.

    default            key: murmur2, as in Java's producer; no key: one partition at a time (sticky)
    round_robin        the next partition, with or without a key
    consistent_random  key: CRC-32, as in librdkafka's default; no key or an empty one: a random partition

Source: Kafka's BuiltInPartitioner and Utils.murmur2; librdkafka's rd_kafka_msg_partitioner_consistent_random.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

try:
    import oncelog.client.producer._partitioner as _c
except ImportError:  # `_partitioner.c` is not compiled, or was compiled for another system
    _c = None  # type: ignore[assignment]

MURMUR2_SEED, MURMUR2_M = 0x9747B28C, 0x5BD1E995
_MASK = 0xFFFFFFFF
_CACHED_KEYS = 65_536

KeyHash = Callable[[bytes], int]


def murmur2(data: bytes) -> int:
    """Return Kafka's murmur2 hash as an unsigned 32-bit number."""
    return _murmur2(data) if _c is None else _c.murmur2(data)


def _murmur2(data: bytes) -> int:
    size = len(data)
    h = MURMUR2_SEED ^ size
    whole = size & ~3
    for (k,) in struct.iter_unpack("<I", data[:whole]):
        k = (k * MURMUR2_M) & _MASK
        k ^= k >> 24
        h = ((h * MURMUR2_M) & _MASK) ^ ((k * MURMUR2_M) & _MASK)
    if size > whole:
        h = ((h ^ int.from_bytes(data[whole:], "little")) * MURMUR2_M) & _MASK
    h ^= h >> 13
    h = (h * MURMUR2_M) & _MASK
    return h ^ (h >> 15)


def positive_murmur2(key: bytes) -> int:
    """Return the hash that Java's producer takes modulo the number of partitions."""
    return murmur2(key) & 0x7FFFFFFF


class Partitioner:
    """The partitioner of one topic. `random_below(n)` returns a random number from 0 to n - 1."""

    def __init__(self, name: str, random_below: Callable[[int], int]) -> None:
        self._random_below = random_below
        self.is_sticky = name == "default"
        """True if records without a key go to one partition until the batch is full."""
        self.is_round_robin = name == "round_robin"
        self.hashes_with_murmur2 = name == "default"
        self._hash: KeyHash = positive_murmur2 if name == "default" else zlib.crc32
        self.hashes_empty_keys = name == "default"
        self._cache: dict[bytes, int] = {}
        self._next = 0

    def for_key(self, key: bytes, count: int) -> int:
        """Return the partition of a key. Hashes of up to 65,536 keys are cached."""
        key_hash = self._cache.get(key)
        if key_hash is None:
            if len(self._cache) >= _CACHED_KEYS:
                self._cache.clear()
            key_hash = self._cache[key] = self._hash(key)
        return key_hash % count

    def next_round_robin(self, count: int) -> int:
        """Return the next partition in turn: the last returned partition plus 1, modulo `count`."""
        self._next = (self._next + 1) % count
        return self._next

    def any_other(self, count: int, last: int | None) -> int:
        """Return a random partition, other than `last` if there is another one."""
        if last is None or count == 1 or last >= count:
            return self._random_below(count)
        partition = self._random_below(count - 1)
        return partition + (partition >= last)
