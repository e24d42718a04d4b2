"""The rule that drops repetitions by provenance: a table of decisions, headers, and a model of attempts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.rules.idempotence.provenance import (
    HEADERS,
    OFFSET,
    PARTITION,
    TOPIC,
    HighestOffsets,
    Malformed,
    Provenance,
    Verdict,
    read_provenance,
)
from oncelog.types import TopicPartition

pytestmark = pytest.mark.behaviour("P11")

TABLE = Path(__file__).parents[1] / "tables" / "provenance.txt"
CASES = [
    [cell.strip() for cell in line.split("|")]
    for line in TABLE.read_text().splitlines()
    if line and not line.startswith("#")
]
GOOD = {TOPIC: b"orders", PARTITION: b"3", OFFSET: b"120"}


def parse(text: str) -> Provenance:
    place, _, offset = text.partition(":")
    topic, _, partition = place.rpartition("-")
    return Provenance(topic, int(partition), int(offset))


@pytest.mark.parametrize(("records", "expected"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_row(records: str, expected: str) -> None:
    state = HighestOffsets()
    decisions = [state.see(parse(text)) for text in records.split()]
    assert "".join(decision.value[0] for decision in decisions) == expected


def test_a_state_continues_where_it_was_kept() -> None:
    state = HighestOffsets()
    state.see(parse("s-0:5"))
    kept = state.items()
    assert kept == {TopicPartition("s", 0): 5}
    state.see(parse("s-0:6"))
    assert kept == {TopicPartition("s", 0): 5}  # `items` returned a copy
    continued = HighestOffsets(kept)
    assert [continued.see(parse(text)) for text in ("s-0:5", "s-0:6")] == [Verdict.REPEATED, Verdict.NEW]


def test_headers_name_a_place() -> None:
    headers = [("trace", b"1"), *GOOD.items(), ("trace", None)]
    assert read_provenance(headers) == ("orders", 3, 120)
    assert read_provenance(reversed(headers)) == ("orders", 3, 120)
    longest = GOOD | {TOPIC: b"A-z_0.9" * 35 + b"2345"}
    assert read_provenance(longest.items()) == (longest[TOPIC].decode(), 3, 120)
    assert read_provenance([]) is read_provenance([("trace", b"1")]) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        *((dict.fromkeys([name]), f"the header {name} is null") for name in HEADERS),
        ({TOPIC: b""}, f"the header {TOPIC} is not the name of a topic: b''"),
        ({TOPIC: b"\xff"}, rf"the header {TOPIC} is not the name of a topic: b'\xff'"),
        ({TOPIC: b"a b"}, f"the header {TOPIC} is not the name of a topic: b'a b'"),
        ({TOPIC: b"a\n"}, rf"the header {TOPIC} is not the name of a topic: b'a\n'"),
        # The error must quote only a part of a long text, because findings show it.
        *(
            ({name: b"x" * 250}, f"the header {name} is not {what}: {b'x' * 100!r} and 150 more bytes")
            for name, what in (
                (TOPIC, "the name of a topic"),
                (PARTITION, "a partition number"),
                (OFFSET, "an offset"),
            )
        ),
        *(
            ({PARTITION: value}, f"the header {PARTITION} is not a partition number: {value!r}")
            for value in (b"", b"-1", b"+1", b" 1", b"1_0", b"x", b"\0\0\0\3", b"2147483648", b"\xc2\xb2")
        ),
        *(
            ({OFFSET: value}, f"the header {OFFSET} is not an offset: {value!r}")
            for value in (b"", b"-1", b"1.0", b"9223372036854775808", b"0" * 20)
        ),
    ],
)
def test_headers_that_name_no_place_are_malformed(changed: dict[str, bytes | None], reason: str) -> None:
    assert read_provenance((GOOD | changed).items()) == Malformed(reason)


@pytest.mark.parametrize("name", HEADERS)
def test_a_missing_or_repeated_header_is_malformed(name: str) -> None:
    others = [header for header in GOOD.items() if header[0] != name]
    assert read_provenance(others) == Malformed(f"the header {name} is missing")
    assert read_provenance([*GOOD.items(), (name, b"1")]) == Malformed(f"the header {name} occurs twice")


@st.composite
def overlapping_attempts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw the source offsets of one source partition, and the log that overlapping attempts leave.

    Each attempt may be killed anywhere. It begins at or before the first offset that is not stored, and
    writes in order without a gap.
    """
    offsets = sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=12)))
    log: list[int] = []
    positions: list[int] = []  # the next position of each attempt that is alive
    for step in draw(st.lists(st.integers(0, 5), max_size=60)):
        if step == 0 or not positions:
            stored = set(log)
            first_missing = next(
                (n for n, offset in enumerate(offsets) if offset not in stored), len(offsets)
            )
            positions.append(draw(st.integers(0, first_missing)))
        elif step == 1 and len(positions) > 1:
            positions.pop(draw(st.integers(0, len(positions) - 1)))
        else:
            attempt = draw(st.integers(0, len(positions) - 1))
            if positions[attempt] < len(offsets):
                log.append(offsets[positions[attempt]])
                positions[attempt] += 1
    return offsets, log


@given(overlapping_attempts())
def test_overlapping_attempts_give_each_record_once(case: tuple[list[int], list[int]]) -> None:
    offsets, log = case
    state = HighestOffsets()
    new = [offset for offset in log if state.see(Provenance("s", 0, offset)) is Verdict.NEW]
    assert new == offsets[: len(set(log))] and set(new) == set(log)
