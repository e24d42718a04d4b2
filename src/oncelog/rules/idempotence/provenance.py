"""Decide by provenance whether a record is a repetition: which record of a source topic was it made from?

A job that transforms a topic (the source) into another (the target) at least once may write records again
after a failure. Let it write the source's topic, partition and offset into each record as headers. Then a
reader of the target needs one number to drop repetitions: the highest offset seen so far, for each pair of
a source partition and a target partition.

    headers                                      source offset                decision
    all three, well-formed                       above the highest one seen   NEW
    all three, well-formed                       not above it                 REPEATED
    none of them                                                              None: no provenance
    some of them, one of them twice, malformed                                Malformed

This is exact under five conditions. The first three concern every attempt to write, even one that is killed:

1. The attempt writes the records of a source partition to a target partition in order, and leaves none out
   before its last one.
2. It begins at or before the first source offset that is not yet stored for certain.
3. A source record goes to the same target partition in each attempt, and becomes at most one record there.
4. The name of a source partition means one partition, and one job writes its records to the target. A topic
   that was deleted and created again, or a topic of another cluster, is another source with the same name.
5. The reader gets every record of the target partition. Compaction keeps the last copy of a key, and
   retention may end between two copies: then the remaining copy may come after a higher source offset.

Attempts may overlap in time: a zombie may write between the records of its successor. For each pair, the
offsets seen are always all the pair's offsets up to the highest one. Proof: let an attempt's next record be
above the highest offset seen. By 1 and 2 every lower offset of the pair was stored before the attempt began,
or by the attempt itself. So no offset is missing below the new highest one, and each lower offset was seen.

Guard: test_overlapping_attempts_give_each_record_once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from oncelog.types import TopicPartition

PREFIX = "__oncelog.source."
"""Prefix of the headers' names. The headers of dead letters have the prefix `__oncelog.errors.`."""
HEADERS = TOPIC, PARTITION, OFFSET = f"{PREFIX}topic", f"{PREFIX}partition", f"{PREFIX}offset"
"""Names of the headers. All values are UTF-8 text, the two numbers in decimal digits."""
_MAX_PARTITION, _MAX_OFFSET = 2**31 - 1, 2**63 - 1
# Kafka's rule for topic names. It also limits the memory that hostile headers can use in states and findings.
_TOPIC_NAME = re.compile(rb"[a-zA-Z0-9._-]{1,249}")
_SHOWN_BYTES = 100


class Provenance(NamedTuple):
    """The place of the source record from which a record was made."""

    topic: str
    partition: int
    offset: int


class Malformed(NamedTuple):
    """Provenance headers that name no source record. `reason` says why."""

    reason: str


class Verdict(Enum):
    """The decision about a record with provenance."""

    NEW = "new"
    REPEATED = "repeated"


def read_provenance(headers: Iterable[tuple[str, bytes | None]]) -> Provenance | Malformed | None:
    """Return the source record's place that the headers name; None if there is none of the three headers."""
    values: dict[str, bytes | None] = {}
    for name, value in headers:
        if name in HEADERS:
            if name in values:
                return Malformed(f"the header {name} occurs twice")
            values[name] = value
    if not values:
        return None
    for name in HEADERS:
        if values.get(name) is None:
            return Malformed(f"the header {name} is {'null' if name in values else 'missing'}")
    topic, partition, offset = (values[name] or b"" for name in HEADERS)
    if not _TOPIC_NAME.fullmatch(topic):
        return Malformed(f"the header {TOPIC} is not the name of a topic: {_shown(topic)}")
    partition_number, offset_number = _number(partition, _MAX_PARTITION), _number(offset, _MAX_OFFSET)
    if partition_number is None:
        return Malformed(f"the header {PARTITION} is not a partition number: {_shown(partition)}")
    if offset_number is None:
        return Malformed(f"the header {OFFSET} is not an offset: {_shown(offset)}")
    return Provenance(topic.decode("ascii"), partition_number, offset_number)


def _shown(value: bytes) -> str:
    # Cut the value: it may have megabytes, and an audit lists a thousand such findings.
    more = f" and {len(value) - _SHOWN_BYTES} more bytes" if len(value) > _SHOWN_BYTES else ""
    return f"{value[:_SHOWN_BYTES]!r}{more}"


def _number(text: bytes, maximum: int) -> int | None:
    # Check the text before int(): 19 digits are enough for every offset, and int() takes quadratic time for a
    # long hostile header. It would also accept signs, spaces and underscores, which Spark does not write.
    if not 0 < len(text) <= 19 or not text.isdigit():
        return None
    number = int(text)
    return number if number <= maximum else None


class HighestOffsets:
    """The state of one target partition: the highest offset seen of each source partition."""

    __slots__ = ("_highest",)

    def __init__(self, highest: Mapping[TopicPartition, int] | None = None) -> None:
        self._highest = dict(highest or {})

    def see(self, provenance: Provenance) -> Verdict:
        """Decide about the next record of the target partition, and remember its source offset."""
        source = TopicPartition(provenance.topic, provenance.partition)
        highest = self._highest.get(source)
        if highest is not None and provenance.offset <= highest:
            return Verdict.REPEATED
        self._highest[source] = provenance.offset
        return Verdict.NEW

    def highest(self, source: TopicPartition) -> int | None:
        """Return the highest offset seen of a source partition; None if there is none."""
        return self._highest.get(source)

    def items(self) -> Mapping[TopicPartition, int]:
        """Return a copy of the state: the highest offset by source partition."""
        return dict(self._highest)
