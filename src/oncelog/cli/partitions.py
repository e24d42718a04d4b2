"""Names of partitions as options give them, and reset plans in CSV as Kafka's tool writes them. No I/O."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from oncelog.types import TopicPartition

_MAX_DIGITS = 19
"""Maximum number of digits in a number: the largest 64-bit number has 19. int() of thousands of digits is
slow.
"""
_MAX_PARTITION = 2**31 - 1
_MAX_OFFSET = 2**63 - 1


def parse_partitions(text: str) -> tuple[str, list[int] | None]:
    """Return the topic and the partition numbers in `TOPIC:0,2`. For `TOPIC` alone the numbers are None,
    which means all partitions. Raises ValueError for other text.
    """
    topic, separator, numbers = text.partition(":")
    parts = numbers.split(",") if separator else []
    if not topic or not all(_is_number(part) and int(part) <= _MAX_PARTITION for part in parts):
        raise ValueError(f"{text!r}: expected TOPIC, TOPIC:PARTITION or TOPIC:0,1,2")
    return topic, [int(part) for part in parts] if separator else None


def format_plan(rows: Iterable[tuple[TopicPartition, int]]) -> str:
    """Return offsets as CSV rows of topic, partition and offset. kafka-consumer-groups --from-file reads the
    same format.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows((tp.topic, tp.partition, offset) for tp, offset in rows)
    return text.getvalue()


def parse_plan(lines: Iterable[str], group: str) -> dict[TopicPartition, int]:
    """Return the offsets in CSV rows: topic, partition and offset, optionally with the group before them.

    Rows of other groups are left out. Raises ValueError for a malformed or repeated row (the text has the
    line number), or if no row remains.
    """
    offsets: dict[TopicPartition, int] = {}
    for number, row in _rows(lines):
        if len(row) == 4:
            of_group, *row = row
            if of_group != group:
                continue
        if len(row) != 3 or not row[0] or not _is_number(row[1]) or not _is_number(row[2]):
            raise ValueError(f"line {number}: expected [group,]topic,partition,offset")
        tp, offset = TopicPartition(row[0], int(row[1])), int(row[2])
        if tp.partition > _MAX_PARTITION or offset > _MAX_OFFSET:
            raise ValueError(f"line {number}: the number is too large")
        if tp in offsets:
            raise ValueError(f"line {number}: {tp} is there twice")
        offsets[tp] = offset
    if not offsets:
        raise ValueError(f"no offsets of group {group!r}")
    return offsets


def _rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines)
    try:
        for row in reader:
            if row:
                yield reader.line_num, [cell.strip() for cell in row]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
