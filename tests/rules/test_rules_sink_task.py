"""The decisions of the sink. Tables have the cases of each decision."""

from __future__ import annotations

import pytest
from support.append_notation import rows

from oncelog.spark.sink.decisions import (
    AlreadyCommitted,
    BatchBegun,
    BatchCommit,
    Compare,
    PlanNote,
    Reason,
    Refuse,
    RowSum,
    SinkError,
    SinkRefused,
    TaskMarker,
    Write,
    WriteLease,
    decide_atomic,
    decide_begun,
    decide_finish,
    decide_plan,
    decide_repeated,
    decide_same_content,
    decide_same_topics,
    decide_still_mine,
    decide_task,
    is_plan_repeated,
    may_acquire_lease,
)
from oncelog.types import OffsetAndMetadata

SUM = RowSum(3, 0xABC)

CASES = list(rows("sink_task.txt"))


def told(verdict: object) -> str:
    match verdict:
        case Write():
            return "write"
        case Compare(expected):
            assert expected == SUM
            return "compare"
        case AlreadyCommitted():
            return "already"
        case Refuse(reason, _):
            return reason.name
    raise AssertionError(verdict)


@pytest.mark.parametrize(
    ("batch", "task", "marker", "finished", "first", "verdict"),
    [row[1:] for row in CASES],
    ids=[row[0] for row in CASES],
)
def test_a_task_decides_as_the_table_says(
    batch: str, task: str, marker: str, finished: str, first: str, verdict: str
) -> None:
    kept = None if marker == "-" else TaskMarker(int(marker), SUM)
    numbers = [] if finished == "-" else [int(number) for number in finished.split("/")]
    noted = BatchCommit(*numbers[:2], SUM if numbers[2:] else None) if numbers else None
    decided = decide_task(int(batch), int(task), kept, noted, first_batch_id=int(first))
    assert told(decided) == verdict
    if isinstance(decided, Refuse):
        text = str(decided.error(int(batch), int(task)))
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
        ("5", "6", "0", "BATCH_ID_WENT_BACK"),
    ],
)
def test_a_batch_of_one_transaction_is_decided_as_the_table_says(
    batch: str, marker: str, first: str, verdict: str
) -> None:
    kept = None if marker == "-" else TaskMarker(int(marker), SUM)
    assert told(decide_atomic(int(batch), kept, first_batch_id=int(first))) == verdict
    named = decide_atomic(int(batch), kept, first_batch_id=int(first), name="late")
    assert told(named) == verdict.replace("UNKNOWN", "NEW_NAME")


def test_a_refusal_after_a_lost_marker_names_the_last_one() -> None:
    assert decide_task(5, 0, None, BatchCommit(5, 2)) == Refuse(Reason.LOST, "none")
    older = decide_task(5, 0, TaskMarker(4, SUM), BatchCommit(5, 2))
    assert older == Refuse(Reason.LOST, "the last is for batch 4")


def test_a_repeated_batch_has_the_same_rows() -> None:
    assert decide_repeated(SUM, SUM) is None
    fewer, other = decide_repeated(SUM, RowSum(2, 0xABC)), decide_repeated(SUM, RowSum(3, 0xABD))
    assert fewer is not None and "3 rows in this task, and now it has 2" in str(fewer.error(7, 0))
    assert other is not None and "3 rows in this task, and now they are not the same" in str(
        other.error(7, 0)
    )


def test_the_driver_notes_a_batch() -> None:
    assert decide_finish(5, [1, 0], BatchCommit(4, 3), {2: TaskMarker(4, SUM)}, SUM) == BatchCommit(5, 2, SUM)
    assert decide_finish(5, [0, 1], BatchCommit(5, 2), {}, SUM) == BatchCommit(5, 2, SUM)
    assert told(decide_finish(5, [0], BatchCommit(6, 1), {}, SUM)) == "BATCH_ID_WENT_BACK"
    fewer = decide_finish(5, [0, 1], BatchCommit(4, 4), {2: None, 3: TaskMarker(5, SUM)}, SUM)
    assert isinstance(fewer, Refuse) and "task 3" in str(fewer.error(5))
    with pytest.raises(SinkError, match=r"tasks \[0, 2\]"):
        decide_finish(5, [0, 2], None, {}, SUM)


def test_a_batch_that_is_finished_is_the_same_by_the_sum_of_its_rows() -> None:
    noted = BatchCommit(5, 4, SUM)
    assert decide_finish(5, [0, 1], noted, {3: TaskMarker(5, SUM)}, SUM) is noted
    for other in (RowSum(2, 0xABC), RowSum(3, 0xABD)):
        refusal = decide_finish(5, [0, 1], noted, {}, other)
        assert isinstance(refusal, Refuse)
        difference = "there are 2" if other.rows == 2 else "they are not the same"
        assert f"3 rows in all, and now {difference}" in str(refusal.error(5))


@pytest.mark.parametrize(
    ("note", "answer"),
    [
        (None, PlanNote(5, "me")),
        (PlanNote(4, "a", ("b",)), PlanNote(5, "me")),
        (PlanNote(5, "me"), PlanNote(5, "me")),
        (PlanNote(5, "a"), PlanNote(5, "me", ("a",))),
        (PlanNote(5, "a", ("b",)), PlanNote(5, "me", ("b", "a"))),
        (PlanNote(5, "a", ("me",)), "OVERTAKEN"),
        (PlanNote(6, "me"), "BATCH_ID_WENT_BACK"),
    ],
)
def test_one_run_writes_a_batch(note: PlanNote | None, answer: PlanNote | str) -> None:
    plan = decide_plan(5, "me", note)
    assert (plan if isinstance(plan, PlanNote) else told(plan)) == answer
    assert decide_still_mine(PlanNote(5, "me"), PlanNote(5, "me")) is None
    for other, found in ((None, "its note is missing"), (PlanNote(5, "a", ("me",)), "run a")):
        refusal = decide_still_mine(PlanNote(5, "me"), other)
        assert refusal == Refuse(Reason.OVERTAKEN, found)


def test_only_a_start_that_was_overtaken_or_lost_its_topic_may_be_tried_again() -> None:
    for reason in Reason:
        is_passing = reason in (Reason.OVERTAKEN, Reason.TOPIC_REPLACED)
        kind = SinkError if is_passing else SinkRefused
        assert type(Refuse(reason).error(5)) is kind


def test_a_note_of_many_runs_fits_into_an_offset() -> None:
    plan: PlanNote | Refuse | None = None
    for number in range(500):
        plan = decide_plan(5, f"{number:012}", plan if isinstance(plan, PlanNote) else None)
        assert isinstance(plan, PlanNote) and plan.is_repeat == (number > 0)
    assert isinstance(plan, PlanNote) and len(plan.encode().metadata) < 4096
    assert plan.earlier == tuple(f"{number:012}" for number in range(399, 499))


@pytest.mark.parametrize(
    ("begun", "answer"),
    [
        (None, None),
        (BatchBegun(4, "a", 0), None),
        (BatchBegun(5, "me", 0), None),
        (BatchBegun(5, "a", 9_000), None),
        (BatchBegun(5, "a", 100), "EXPIRED"),
        (BatchBegun(5, "a", 1_001), None),
        (BatchBegun(5, "a", 1_000), "EXPIRED"),
        (BatchBegun(6, "a", 9_000), "BATCH_ID_WENT_BACK"),
    ],
)
def test_a_batch_begun_too_long_ago_is_refused(begun: BatchBegun | None, answer: str | None) -> None:
    refusal = decide_begun(5, "me", begun, now_ms=10_000, retention_ms=10_000)
    assert (refusal and told(refusal)) == answer


@pytest.mark.parametrize(
    ("noted", "now", "answer"),
    [("a", "b", "OTHER_TOPIC"), ("a", "a", None), ("", "b", None), ("a", "", None)],
)
def test_a_batch_of_another_topic_is_refused(noted: str, now: str, answer: str | None) -> None:
    """R1462. A note of an older version, and a write with the column topic, name no topic."""
    begun = decide_begun(0, "me", BatchBegun(0, "a", 9_000, noted), 10_000, 10_000, topic=now)
    assert (begun and told(begun)) == answer
    finished = decide_task(0, 0, None, BatchCommit(0, 1, SUM, topic=noted), topic=now)
    assert told(finished) == (answer or "already")


def test_other_rows_for_a_batch_of_one_transaction() -> None:
    assert decide_same_content(SUM, SUM) is None
    assert decide_same_content(RowSum(3), SUM) is None  # version 0.4.1 stored no hash
    for other in (RowSum(2, 0xABC), RowSum(3, 0xABD)):
        assert told(decide_same_content(SUM, other)) == "OTHER_ROWS"
        assert told(decide_same_content(SUM, other, is_in_stream=True)) == "PLANNED_AGAIN"


def test_a_batch_is_repeated_unless_two_known_plans_differ() -> None:
    assert is_plan_repeated("a", "a") and is_plan_repeated("", "a") and is_plan_repeated("a", "")
    assert is_plan_repeated("", "") and not is_plan_repeated("a", "b")


def test_an_attempt_is_known_by_its_batch_and_writer() -> None:
    mine = WriteLease(5, 7, 3)
    assert mine.is_same_attempt(WriteLease(5, 7, 3, "killed"))
    for other in (None, WriteLease(4, 7, 3), WriteLease(5, 8, 3), WriteLease(5, 7, 4)):
        assert not mine.is_same_attempt(other)


def test_rows_add_up_modulo_two_to_the_64() -> None:
    assert RowSum(1, 2).plus(3, 4) == RowSum(4, 6)
    assert RowSum(1, 2**64 - 1).plus(2, 3) == RowSum(3, 2)
    assert RowSum(0, 2**64 - 1).plus(0, 0) == RowSum(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("found", "allowed"),
    [
        (None, True),
        (WriteLease(4, 7, 3), True),
        (WriteLease(5, 7, 2), True),
        (WriteLease(5, 7, 3), False),
        (WriteLease(5, 7, 3, "killed"), False),
        (WriteLease(5, 7, 4), False),
        (WriteLease(6, 7, 1), False),
        (WriteLease(5, 6, 30_000), True),
    ],
)
def test_one_attempt_of_a_task_claims(found: WriteLease | None, allowed: bool) -> None:
    assert may_acquire_lease(WriteLease(5, 7, 3), found) is allowed


def test_markers_kept_in_groups_are_read_back() -> None:
    # Version 0.5.0 wrote these texts. They must stay readable, because groups keep them for years.
    for kept, text in (
        (TaskMarker(3, RowSum(2, 2**64 - 1)), '{"oncelog": 1, "rows": 2, "hash": "ffffffffffffffff"}'),
        (
            TaskMarker(3, RowSum(2, 1), "p"),
            '{"oncelog": 1, "rows": 2, "hash": "0000000000000001", "planned": "p"}',
        ),
        (BatchCommit(3, 9), '{"oncelog": 1, "lanes": 9}'),
        (
            BatchCommit(3, 9, RowSum(2, 26)),
            '{"oncelog": 1, "lanes": 9, "rows": 2, "hash": "000000000000001a"}',
        ),
        (BatchCommit(3, 9, None, "p"), '{"oncelog": 1, "lanes": 9, "planned": "p"}'),
        (PlanNote(3, "run", ("a", "b")), '{"oncelog": 1, "run": "run", "earlier": ["a", "b"]}'),
        (BatchBegun(3, "run", 5), '{"oncelog": 1, "run": "run", "begun_ms": 5}'),
        # Version 0.7.0 and older did not write the topic.
        (BatchCommit(3, 9, None, "", "t"), '{"oncelog": 1, "lanes": 9, "topic": "t"}'),
        (BatchBegun(3, "run", 5, "t"), '{"oncelog": 1, "run": "run", "begun_ms": 5, "topic": "t"}'),
        (WriteLease(3, 1, 2, "why"), '{"oncelog": 1, "writer": [1, 2], "cause": "why"}'),
    ):
        assert kept.encode() == OffsetAndMetadata(3, None, text)
        assert type(kept).decode("g", kept.encode()) == kept
        assert type(kept).decode("g", None) is None
        newer = text.replace('"oncelog": 1', '"oncelog": 2')
        for strange in ("", "{}", "[1]", '{"oncelog": 1}', newer, "null"):
            with pytest.raises(SinkError, match="consumer group 'g' contains an offset that this sink"):
                type(kept).decode("g", OffsetAndMetadata(3, None, strange))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (TaskMarker, '{"oncelog": 1, "hash": "1"}'),
        (PlanNote, '{"oncelog": 1, "run": "a"}'),
        (BatchBegun, '{"oncelog": 1, "begun_ms": 5}'),
        (WriteLease, '{"oncelog": 1, "cause": ""}'),
    ],
)
def test_a_note_that_lacks_a_field_is_not_ours(kind: type[TaskMarker], text: str) -> None:
    with pytest.raises(SinkError, match="that this sink did not write"):
        kind.decode("g", OffsetAndMetadata(3, None, text))


def test_every_reason_says_what_to_do() -> None:
    for reason in Reason:
        assert any(word in reason.value for word in ("checkpoint", "must", "Restart", "option", "give")), (
            reason
        )


def test_a_transaction_whose_topic_was_created_again_is_refused() -> None:
    before = [("t", "id of t"), ("u", None)]
    for now in ({"t": "id of t", "u": None}, {"t": None, "u": "id of u"}):
        assert decide_same_topics(before, now) is None
    refusal = decide_same_topics(before, {"t": "another id", "u": None})
    assert refusal == Refuse(Reason.TOPIC_REPLACED, "'t'")
