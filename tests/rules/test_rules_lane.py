"""The sink's verdicts: a table of every case, and a model of lanes that crash and come again."""

from __future__ import annotations

import pytest
from helpers_rules_append import rows
from hypothesis import given
from hypothesis import strategies as st

from oncelog.rules.lane import (
    Claim,
    Compare,
    Finished,
    LaneMarker,
    Reason,
    Refuse,
    RowSum,
    SinkError,
    Write,
    decide_atomic,
    decide_finish,
    decide_lane,
    decide_repeated,
    may_be_repeated,
    may_claim,
)
from oncelog.types import OffsetAndMetadata

SUM = RowSum(3, 0xABC)

CASES = list(rows("lane.txt"))


def told(verdict: object) -> str:
    match verdict:
        case Write():
            return "write"
        case Compare(expected):
            assert expected == SUM
            return "compare"
        case Refuse(reason, _):
            return reason.name
    raise AssertionError(verdict)


@pytest.mark.parametrize(
    ("batch", "lane", "marker", "finished", "first", "verdict"),
    [row[1:] for row in CASES],
    ids=[row[0] for row in CASES],
)
def test_lanes(batch: str, lane: str, marker: str, finished: str, first: str, verdict: str) -> None:
    kept = None if marker == "-" else LaneMarker(int(marker), SUM)
    noted = None if finished == "-" else Finished(*map(int, finished.split("/")))
    decided = decide_lane(int(batch), int(lane), kept, noted, first_batch_id=int(first))
    assert told(decided) == verdict
    if isinstance(decided, Refuse):
        text = str(decided.error(int(batch), int(lane)))
        assert f"batch {batch}" in text and "{" not in text


@pytest.mark.parametrize(
    ("batch", "marker", "first", "verdict"),
    [
        ("0", "-", "0", "write"),
        ("5", "-", "5", "write"),
        ("5", "-", "0", "UNKNOWN"),
        ("5", "4", "0", "write"),
        ("5", "2", "0", "write"),
        ("5", "5", "0", "compare"),
        ("5", "6", "0", "REWOUND"),
    ],
)
def test_batches_of_one_transaction(batch: str, marker: str, first: str, verdict: str) -> None:
    kept = None if marker == "-" else LaneMarker(int(marker), SUM)
    assert told(decide_atomic(int(batch), kept, first_batch_id=int(first))) == verdict


def test_a_repeated_batch_has_the_same_rows() -> None:
    assert decide_repeated(SUM, SUM) is None
    fewer, other = decide_repeated(SUM, RowSum(2, 0xABC)), decide_repeated(SUM, RowSum(3, 0xABD))
    assert fewer is not None and "3 rows in this lane, and now it has 2" in str(fewer.error(7, 0))
    assert other is not None and "3 rows in this lane, and now they are not the same" in str(
        other.error(7, 0)
    )


def test_the_driver_notes_a_batch() -> None:
    assert decide_finish(5, [1, 0], Finished(4, 3), {2: LaneMarker(4, SUM)}) == Finished(5, 2)
    assert decide_finish(5, [0, 1], Finished(5, 2), {}, "run") == Finished(5, 2, "run")
    assert told(decide_finish(5, [0], Finished(6, 1), {})) == "REWOUND"
    fewer = decide_finish(5, [0, 1], Finished(4, 4), {2: None, 3: LaneMarker(5, SUM)})
    assert isinstance(fewer, Refuse) and "lane 3" in str(fewer.error(5))
    with pytest.raises(SinkError, match=r"lanes \[0, 2\]"):
        decide_finish(5, [0, 2], None, {})


@pytest.mark.parametrize(
    ("finished", "run_id", "answer"),
    [
        (None, "b", True),
        (Finished(4, 2, "a"), "b", True),
        (Finished(4, 2, "b"), "b", False),
        (Finished(4, 2), "b", True),
        (Finished(4, 2), None, True),
    ],
)
def test_the_first_batch_of_a_run_may_be_a_repetition(
    finished: Finished | None, run_id: str | None, answer: bool
) -> None:
    assert may_be_repeated(finished, run_id) is answer


@pytest.mark.parametrize(
    ("found", "allowed"),
    [
        (None, True),
        (Claim(4, 7, 3), True),
        (Claim(5, 7, 2), True),
        (Claim(5, 7, 3), False),
        (Claim(5, 7, 3, "killed"), False),
        (Claim(5, 7, 4), False),
        (Claim(6, 7, 1), False),
        (Claim(5, 6, 30_000), True),
    ],
)
def test_one_attempt_of_a_task_claims(found: Claim | None, allowed: bool) -> None:
    assert may_claim(Claim(5, 7, 3), found) is allowed


def test_what_groups_keep_reads_back() -> None:
    for kept in (LaneMarker(3, RowSum(2, 2**64 - 1)), Finished(3, 9, "run"), Claim(3, 1, 2, "why")):
        assert type(kept).decode("g", kept.encode()) == kept
        assert type(kept).decode("g", None) is None
        for strange in ("", "{}", "[1]", '{"oncelog": 2}', "null"):
            with pytest.raises(SinkError, match="consumer group 'g' holds an offset that this sink"):
                type(kept).decode("g", OffsetAndMetadata(3, None, strange))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=60))
def test_whatever_crashes_each_batch_is_written_once(steps: list[tuple[int, bool, bool]]) -> None:
    """Attempts of lanes in any order, that commit or not; the driver that notes the batch or dies first."""
    batch, markers, noted = 0, dict.fromkeys(range(3)), None
    written: list[tuple[int, int]] = []
    done: set[int] = set()
    for lane, commits, driver_lives in steps:
        verdict = decide_lane(batch, lane, markers[lane], noted)
        assert isinstance(verdict, (Write, Compare))
        if isinstance(verdict, Write) and commits:
            markers[lane] = LaneMarker(batch, SUM)
            written.append((batch, lane))
        if markers[lane] is not None and markers[lane].batch_id == batch:  # type: ignore[union-attr]
            done.add(lane)
        if len(done) == 3:
            decided = decide_finish(batch, [0, 1, 2], noted, {})
            assert isinstance(decided, Finished)
            noted = decided
            done.clear()
            batch += driver_lives  # if not, the checkpoint still asks for the same batch
    assert len(written) == len(set(written))
    assert {(b, lane) for b in range(batch) for lane in range(3)} <= set(written)


def test_every_reason_says_what_to_do() -> None:
    for reason in Reason:
        assert any(word in reason.value for word in ("checkpoint", "must", "Restart", "option")), reason
