"""The sink's verdicts: a table of every case."""

from __future__ import annotations

import pytest
from helpers_rules_append import rows

from oncelog.rules.lane import (
    Already,
    BatchBegun,
    Claim,
    Compare,
    Finished,
    LaneMarker,
    PlanNote,
    Reason,
    Refuse,
    RowSum,
    SinkError,
    Write,
    decide_atomic,
    decide_begun,
    decide_finish,
    decide_lane,
    decide_plan,
    decide_repeated,
    decide_same_content,
    decide_still_mine,
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
        case Already():
            return "already"
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
    numbers = [] if finished == "-" else [int(number) for number in finished.split("/")]
    noted = Finished(*numbers[:2], SUM if numbers[2:] else None) if numbers else None
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
    named = decide_atomic(int(batch), kept, first_batch_id=int(first), name="late")
    assert told(named) == verdict.replace("UNKNOWN", "NEW_NAME")


def test_a_repeated_batch_has_the_same_rows() -> None:
    assert decide_repeated(SUM, SUM) is None
    fewer, other = decide_repeated(SUM, RowSum(2, 0xABC)), decide_repeated(SUM, RowSum(3, 0xABD))
    assert fewer is not None and "3 rows in this lane, and now it has 2" in str(fewer.error(7, 0))
    assert other is not None and "3 rows in this lane, and now they are not the same" in str(
        other.error(7, 0)
    )


def test_the_driver_notes_a_batch() -> None:
    assert decide_finish(5, [1, 0], Finished(4, 3), {2: LaneMarker(4, SUM)}, SUM) == Finished(5, 2, SUM)
    assert decide_finish(5, [0, 1], Finished(5, 2), {}, SUM) == Finished(5, 2, SUM)
    assert told(decide_finish(5, [0], Finished(6, 1), {}, SUM)) == "REWOUND"
    fewer = decide_finish(5, [0, 1], Finished(4, 4), {2: None, 3: LaneMarker(5, SUM)}, SUM)
    assert isinstance(fewer, Refuse) and "lane 3" in str(fewer.error(5))
    with pytest.raises(SinkError, match=r"lanes \[0, 2\]"):
        decide_finish(5, [0, 2], None, {}, SUM)


def test_a_batch_that_is_finished_is_the_same_by_the_sum_of_its_rows() -> None:
    noted = Finished(5, 4, SUM)
    assert decide_finish(5, [0, 1], noted, {3: LaneMarker(5, SUM)}, SUM) is noted
    for other in (RowSum(2, 0xABC), RowSum(3, 0xABD)):
        refusal = decide_finish(5, [0, 1], noted, {}, other)
        assert isinstance(refusal, Refuse) and "3 rows in all, and now" in str(refusal.error(5))


@pytest.mark.parametrize(
    ("note", "answer"),
    [
        (None, PlanNote(5, "me")),
        (PlanNote(4, "a", ("b",)), PlanNote(5, "me")),
        (PlanNote(5, "me"), PlanNote(5, "me")),
        (PlanNote(5, "a"), PlanNote(5, "me", ("a",))),
        (PlanNote(5, "a", ("b",)), PlanNote(5, "me", ("b", "a"))),
        (PlanNote(5, "a", ("me",)), "OVERTAKEN"),
        (PlanNote(6, "me"), "REWOUND"),
    ],
)
def test_one_run_writes_a_batch(note: PlanNote | None, answer: PlanNote | str) -> None:
    plan = decide_plan(5, "me", note)
    assert (plan if isinstance(plan, PlanNote) else told(plan)) == answer
    assert decide_still_mine(PlanNote(5, "me"), PlanNote(5, "me")) is None
    for other in (None, PlanNote(5, "a", ("me",))):
        assert told(decide_still_mine(PlanNote(5, "me"), other)) == "OVERTAKEN"


def test_a_note_of_many_runs_fits_into_an_offset() -> None:
    plan: PlanNote | Refuse | None = None
    for number in range(500):
        plan = decide_plan(5, f"{number:012}", plan if isinstance(plan, PlanNote) else None)
        assert isinstance(plan, PlanNote) and plan.is_repeat == (number > 0)
    assert isinstance(plan, PlanNote) and len(plan.encode().metadata) < 4096


@pytest.mark.parametrize(
    ("begun", "answer"),
    [
        (None, None),
        (BatchBegun(4, "a", 0), None),
        (BatchBegun(5, "me", 0), None),
        (BatchBegun(5, "a", 9_000), None),
        (BatchBegun(5, "a", 100), "EXPIRED"),
        (BatchBegun(6, "a", 9_000), "REWOUND"),
    ],
)
def test_a_batch_begun_too_long_ago_is_refused(begun: BatchBegun | None, answer: str | None) -> None:
    refusal = decide_begun(5, "me", begun, now_ms=10_000, retention_ms=10_000)
    assert (refusal and told(refusal)) == answer


def test_other_rows_for_a_batch_of_one_transaction() -> None:
    assert decide_same_content(SUM, SUM) is None
    assert decide_same_content(RowSum(3), SUM) is None  # 0.4.1 kept no hash
    for other in (RowSum(2, 0xABC), RowSum(3, 0xABD)):
        assert told(decide_same_content(SUM, other)) == "OTHER_ROWS"


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
    for kept in (
        LaneMarker(3, RowSum(2, 2**64 - 1)),
        Finished(3, 9),
        Finished(3, 9, RowSum(2, 2**64 - 1)),
        PlanNote(3, "run", ("a", "b")),
        BatchBegun(3, "run", 5),
        Claim(3, 1, 2, "why"),
    ):
        assert type(kept).decode("g", kept.encode()) == kept
        assert type(kept).decode("g", None) is None
        for strange in ("", "{}", "[1]", '{"oncelog": 2}', "null"):
            with pytest.raises(SinkError, match="consumer group 'g' holds an offset that this sink"):
                type(kept).decode("g", OffsetAndMetadata(3, None, strange))


def test_every_reason_says_what_to_do() -> None:
    for reason in Reason:
        assert any(word in reason.value for word in ("checkpoint", "must", "Restart", "option", "give")), (
            reason
        )
