"""Which partition a record goes to.

default            key: murmur2 as Java's producer has it; no key: one partition at a time (sticky)
round_robin        the next one, whatever the key
consistent_random  key: CRC-32, as librdkafka's default has it; no or empty key: any

Source: Kafka's BuiltInPartitioner and Utils.murmur2; librdkafka's rd_kafka_msg_partitioner_consistent_random.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from oncelog.wire.arrow_bytes import RowBytes, Words

_SEED, _M, _MASK = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF
_CACHED_KEYS = 65_536

KeyHash = Callable[[bytes], int]
Partitions = np.ndarray[tuple[int], np.dtype[np.int32]]


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 as an unsigned 32-bit number."""
    size = len(data)
    h = _SEED ^ size
    whole = size & ~3
    for (k,) in struct.iter_unpack("<I", data[:whole]):
        k = (k * _M) & _MASK
        k ^= k >> 24
        h = ((h * _M) & _MASK) ^ ((k * _M) & _MASK)
    if size > whole:
        h = ((h ^ int.from_bytes(data[whole:], "little")) * _M) & _MASK
    h ^= h >> 13
    h = (h * _M) & _MASK
    return h ^ (h >> 15)


def positive_murmur2(key: bytes) -> int:
    """What Java takes modulo the number of partitions."""
    return murmur2(key) & 0x7FFFFFFF


def positive_murmur2_of(keys: RowBytes) -> Words:
    """`positive_murmur2` of all rows at once, in the order of `keys.rows`."""
    m = np.uint32(_M)
    h = keys.sizes.astype(np.uint32) ^ np.uint32(_SEED)
    for word in keys.words():
        k = word * m
        k ^= k >> np.uint32(24)
        h[: len(k)] = h[: len(k)] * m ^ k * m
    for place, (at, byte) in enumerate(keys.tails()):
        h[at] ^= byte << np.uint32(8 * place)
    h[keys.sizes & 3 > 0] *= m
    h ^= h >> np.uint32(13)
    h *= m
    return (h ^ (h >> np.uint32(15))) & np.uint32(0x7FFFFFFF)


class Partitioner:
    """Chooses for one topic. `choose(n)` gives a random number below n.

    `keyed` is None when keys do not matter. `is_sticky`: records without a key stay together.
    """

    def __init__(self, name: str, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self.is_sticky = name == "default"
        self.is_round_robin = name == "round_robin"
        self._hash: KeyHash = positive_murmur2 if name == "default" else zlib.crc32
        self.hashes_empty_keys = name == "default"
        self._cache: dict[bytes, int] = {}
        self._next = 0

    def for_key(self, key: bytes, count: int) -> int:
        """The partition of a key that is hashed; the hash of frequent keys is remembered."""
        known = self._cache.get(key)
        if known is None:
            if len(self._cache) >= _CACHED_KEYS:
                self._cache.clear()
            known = self._cache[key] = self._hash(key)
        return known % count

    def for_column(self, keys: Any, count: int, otherwise: Partitions | int) -> Partitions:
        """`for_key` of a binary Arrow column; rows whose key is not hashed go `otherwise`."""
        chosen: Partitions = np.full(len(keys), otherwise, np.int32)
        if self._hash is positive_murmur2:
            hashed = RowBytes(keys)
            chosen[hashed.rows] = positive_murmur2_of(hashed) % np.uint32(count)
        else:
            for at, key in enumerate(keys.to_pylist()):
                if key:
                    chosen[at] = self.for_key(key, count)
        return chosen

    def next_round_robin(self, count: int) -> int:
        """One after the other."""
        self._next = (self._next + 1) % count
        return self._next

    def any_other(self, count: int, than: int | None) -> int:
        """A random partition, another one than the last if there is one."""
        if than is None or count == 1 or than >= count:
            return self._choose(count)
        chosen = self._choose(count - 1)
        return chosen + (chosen >= than)
