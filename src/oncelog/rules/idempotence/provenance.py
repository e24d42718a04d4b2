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

This is exact under three conditions on every attempt to write, whether it ends or is killed:

1. It writes the records of a source partition to a target partition in order, and leaves none out before its
   last one.
2. It begins at or before the first source offset that is not yet stored for certain.
3. A source record goes to the same target partition in each attempt, and becomes at most one record there.

Attempts may overlap in time: a zombie may write between the records of its successor. For each pair, the
offsets seen are always all the pair's offsets up to the highest one. Proof: let an attempt's next record be
above the highest offset seen. By 1 and 2 every lower offset of the pair was stored before the attempt began,
or by the attempt itself. So none is missing below the new highest one, and what is not above it was seen.

Guard: test_overlapping_attempts_give_each_record_once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from oncelog.types import TopicPartition

PREFIX = "__oncelog.source."
"""Prefix of the headers' names, beside `__oncelog.errors.` of dead letters."""
HEADERS = TOPIC, PARTITION, OFFSET = f"{PREFIX}topic", f"{PREFIX}partition", f"{PREFIX}offset"
"""Names of the headers. All values are UTF-8 text, the two numbers in decimal digits."""
_MAX_PARTITION, _MAX_OFFSET = 2**31 - 1, 2**63 - 1


class Provenance(NamedTuple):
    """The place of the record from which another one was made."""

    topic: str
    partition: int
    offset: int


class Malformed(NamedTuple):
    """Headers that name no place. `reason` says why."""

    reason: str


class Verdict(Enum):
    """The decision about a record."""

    NEW = "new"
    REPEATED = "repeated"


def read_provenance(headers: Iterable[tuple[str, bytes | None]]) -> Provenance | Malformed | None:
    """Return the place that the headers name; None if they have none of the three names."""
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
    try:
        topic = (values[TOPIC] or b"").decode()
    except UnicodeDecodeError:
        topic = ""
    partition = _number(values[PARTITION] or b"", _MAX_PARTITION)
    offset = _number(values[OFFSET] or b"", _MAX_OFFSET)
    if not topic:
        return Malformed(f"the header {TOPIC} is not the name of a topic: {values[TOPIC]!r}")
    if partition is None:
        return Malformed(f"the header {PARTITION} is not a partition number: {values[PARTITION]!r}")
    if offset is None:
        return Malformed(f"the header {OFFSET} is not an offset: {values[OFFSET]!r}")
    return Provenance(topic, partition, offset)


def _number(text: bytes, maximum: int) -> int | None:
    # 19 digits hold every offset. int() would take time quadratic in the length of a hostile header, and
    # would take signs, spaces and underscores, which Spark does not write.
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
        """Return a copy of the state."""
        return dict(self._highest)
