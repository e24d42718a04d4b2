"""The findings about business keys, made from the number and the places of the records with each key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from oncelog.audit.result import AuditFinding

OFFSETS_NAMED = 10
"""Maximum number of places that the finding about a repeated key lists."""


class Place(NamedTuple):
    """The place of a record. Places are ordered by topic, partition and offset."""

    topic: str
    partition: int
    offset: int


def repeated_key(key: Any, times: int, places: Sequence[Place]) -> AuditFinding:
    """Return the finding about a key that `times` records of a topic have. `places` has the places of the
    first two or more of these records.
    """
    first, second = places[:2]
    named = ", ".join(f"{place.partition}:{place.offset}" for place in places)
    more = ", ..." if times > len(places) else ""
    text = f"the key occurs {times} times, at partition:offset {named}{more}"
    return finding_at("repeated_key", second, first.offset, key_text(key), text)


def differing_key(
    kind: str,
    key: Any,
    expected: int,
    found: int,
    expected_last: Place | None,
    found_first: Place | None,
    found_last: Place | None,
) -> AuditFinding:
    """Return the finding about a key that `found` records have, although `expected` records should have it.

    The finding of a lost key points to the record that should have arrived. Other findings point to the
    surplus record.
    """
    place = expected_last if kind == "lost_key" else found_last
    assert place is not None
    other = found_first if kind != "unexpected_key" else None
    text = f"{found} times in the audited topics, {expected} times expected"
    for name, at in (("expected at", expected_last), ("first found at", found_first)):
        text += f"; {name} {at.topic}-{at.partition}:{at.offset}" if at is not None else ""
    return finding_at(kind, place, None if other is None else other.offset, key_text(key), text)


def finding_at(kind: str, place: Place, other_offset: int | None, key: str | None, text: str) -> AuditFinding:
    """Return a finding about one record. Its producer fields are None."""
    return AuditFinding(
        kind=kind,
        topic=place.topic,
        partition=place.partition,
        base_offset=place.offset,
        last_offset=place.offset,
        producer_id=None,
        producer_epoch=None,
        first_sequence=None,
        last_sequence=None,
        other_offset=other_offset,
        key=key,
        explanation=text,
    )


def key_text(key: Any) -> str:
    """Return a key as readable text. Bytes that are not UTF-8 are escaped."""
    return bytes(key).decode("utf-8", "backslashreplace") if isinstance(key, (bytes, bytearray)) else str(key)
