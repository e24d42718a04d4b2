"""Text tables of the source's decisions: the next micro-batch, pushed conditions, and when a batch begins."""

from __future__ import annotations

import datetime
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import datasource
from pyspark.sql.types import VariantVal
from pyspark.sql.variant_utils import VariantUtils

from oncelog.spark.source.commit_schedule import CommitSchedule
from oncelog.spark.source.offset_ranges import (
    Available,
    OffsetRange,
    Offsets,
    Position,
    count_waiting,
    next_position,
    ranges_of_batch,
)
from oncelog.spark.source.pushed_filters import combine_filters, times_beyond_python
from oncelog.spark.source.source import FilteringReader
from oncelog.spark.source.trigger_limit import TriggerLimit
from oncelog.types import TopicPartition

pytestmark = pytest.mark.behaviour("P1")
TABLES = Path(__file__).parents[1] / "tables"
OPERATORS = {
    "=": datasource.EqualTo,
    "<=>": datasource.EqualNullSafe,
    ">": datasource.GreaterThan,
    ">=": datasource.GreaterThanOrEqual,
    "<": datasource.LessThan,
    "<=": datasource.LessThanOrEqual,
    "in": datasource.In,
}
WHOLE = "a0:0-100 a1:0-100 b0:0-50"


def rows_of(name: str) -> list[Any]:
    lines = (TABLES / name).read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line and line[0] != "#"]
    return [pytest.param(*cells, id=case) for case, *cells in rows]


def tp_of(text: str) -> TopicPartition:
    return TopicPartition(text[0], int(text[1:]))


def pairs_of(text: str) -> Iterator[tuple[TopicPartition, str]]:
    for name, value in re.findall(r"(\w+):(\S+)", text):
        yield tp_of(name), value


def offsets_of(text: str) -> Offsets:
    return {tp: int(value) for tp, value in pairs_of(text)}


def ids_of(text: str) -> dict[str, str]:
    return {"a": found} if (found := "".join(re.findall(r"id=(\w)", text))) else {}


def available_of(text: str) -> Available:
    rows = {tp: re.split(r"\.\.|/", value) for tp, value in pairs_of(text)}
    bounds = {tp: (int(row[0]), int(row[1]), int(row[-1])) for tp, row in rows.items()}
    earliest, latest, written = ({tp: row[n] for tp, row in bounds.items()} for n in range(3))
    return Available(earliest, latest, written, ids_of(text))


def as_text(ranges: list[OffsetRange]) -> str:
    return " ".join(f"{r.tp.topic}{r.tp.partition}:{r.start}-{r.end}" for r in ranges)


@pytest.mark.parametrize(("start", "now", "bounds", "read", "lost"), rows_of("spark_positions.txt"))
def test_the_next_micro_batch_follows_the_table(
    start: str, now: str, bounds: str, read: str, lost: str
) -> None:
    before = Position(offsets_of(start), ids_of(start), is_initial="first" in start)
    there = available_of(now)
    limit = int(found[1]) if (found := re.search(r"most (\d+)", bounds)) else None
    target = offsets_of(bounds) if "target" in bounds else None
    end, losses = next_position(before, there, limit=limit, target=target)
    ranges = ranges_of_batch(before, Position.from_json(json.loads(json.dumps(end.to_json()))))
    assert as_text(ranges) == read.replace("-", "", read == "-")
    wanted = {} if lost == "-" else dict(pairs_of(lost))
    assert {loss.tp for loss in losses} == wanted.keys()
    assert all(wanted[loss.tp] in loss.explanation for loss in losses)
    assert (end is before) == (not ranges and not losses)
    # Skipped offsets are reported only once, also if the next batch has no limit.
    assert next_position(end, there, limit=None)[1] == []
    if limit is None and target is None:
        assert count_waiting(before, there) == sum(r.size for r in ranges)


def value_of(text: str, column: str) -> object:
    if text == "null":
        return None
    if column == "timestamp":
        when = datetime.datetime.fromtimestamp(int(text.removesuffix("ntz")) / 1000, datetime.UTC)
        return when.replace(tzinfo=None) if text.endswith("ntz") else when
    return float(text) if "." in text else int(text) if re.fullmatch(r"-?\d+", text) else text


def filter_of(text: str) -> datasource.Filter:
    if text.startswith("not "):
        return datasource.Not(filter_of(text.removeprefix("not ")))
    column, operator, *values = text.split()
    if operator == "isnotnull":
        return datasource.IsNotNull((column,))
    found = tuple(value_of(value, column) for value in values)
    return OPERATORS[operator]((column,), found if operator == "in" else found[0])


_LAST_OF_PYTHON = 253_402_300_799_999_999


@settings(deadline=None)
@given(
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-(10**12), 10**12)),
    st.sampled_from([">=", ">", "="]),
)
def test_a_timestamp_condition_of_spark_leaves_out_no_matching_record(micros: int, operator: str) -> None:
    """The condition is decoded as in Spark's planning process, even for years outside the range of Python's
    datetimes.
    """
    stored = VariantVal(bytes([VariantUtils.TIMESTAMP << 2]) + struct.pack("<q", micros), b"\x01\0\0")
    with times_beyond_python():
        condition = OPERATORS[operator](("timestamp",), stored.toPython())
    expected = None if micros < 1000 else min(micros, _LAST_OF_PYTHON) // 1000
    assert combine_filters([condition]).since_ms == expected


@pytest.mark.parametrize(("conditions", "firsts", "left"), rows_of("spark_filters.txt"))
def test_conditions_reduce_the_offsets_that_are_read(conditions: str, firsts: str, left: str) -> None:
    filters = [filter_of(text) for text in conditions.split(", ")] if conditions != "none" else []
    narrowing = combine_filters(filters)
    ranges = [OffsetRange(tp, *map(int, span.split("-"))) for tp, span in pairs_of(WHOLE)]
    found = None if narrowing.since_ms is None else offsets_of(firsts)
    assert as_text(narrowing.apply(ranges, found)) == left
    assert narrowing.since_ms in (None, 500)


def test_spark_checks_every_condition_again() -> None:
    filters = [filter_of("offset >= 5"), filter_of("key = 5")]
    assert FilteringReader(None).pushFilters(filters) is filters  # type: ignore[arg-type]


@pytest.mark.parametrize(("least", "delay", "triggers"), rows_of("spark_admission.txt"))
def test_a_micro_batch_begins_as_the_table_of_triggers_says(least: str, delay: str, triggers: str) -> None:
    trigger_limit = TriggerLimit(None if least == "-" else int(least), int(delay))
    for now_ms, waiting, verdict in re.findall(r"(\d+):(\d+) (\w+)", triggers):
        assert trigger_limit.may_begin(int(waiting), int(now_ms)) == (verdict == "go"), f"at {now_ms}"


@pytest.mark.parametrize(("triggers", "failures"), rows_of("spark_group_commits.txt"))
def test_only_changed_offsets_of_finished_micro_batches_are_committed(triggers: str, failures: str) -> None:
    schedule = CommitSchedule()
    for trigger in triggers.split(";"):
        before, _, outcome = trigger.partition("=>")
        time_ms = int(before.split()[0])
        due = schedule.due(Position(offsets_of(before), is_initial="initial" in before), time_ms)
        word, *_ = outcome.split()
        assert due == offsets_of(outcome), trigger
        assert bool(due) == (word in ("commit", "fail")), trigger
        if word == "commit":
            schedule.succeed(due, time_ms)
        elif word == "fail":
            schedule.fail(time_ms)
    assert f"{schedule.failures} {schedule.failures_in_row}" == failures
