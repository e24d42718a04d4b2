"""The Spark source's pure planning: options, specifications of offsets, splits, limits, positions and
losses.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.errors import ConfigError
from oncelog.spark.source.offset_ranges import (
    EARLIEST,
    LATEST,
    Available,
    OffsetRange,
    Position,
    limit_end,
    next_position,
    parse_offsets,
    ranges_of_batch,
    split_ranges,
)
from oncelog.spark.source.reader import LARGE_BATCH_BYTES, SMALL_BATCH_BYTES, regroup
from oncelog.spark.source.source_options import OPTIONS, parse_options
from oncelog.types import TopicPartition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
NEEDED = {"kafka.bootstrap.servers": "h:1", "subscribe": "a"}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("word", ["earliest", " Latest "])
def test_earliest_and_latest_apply_to_all_partitions(word: str) -> None:
    spec = parse_offsets("startingOffsets", word)
    assert spec.resolve({A0: 3}, {A0: 9}) == {A0: 3 if "earliest" in word else 9}


def test_json_offsets_may_be_minus_1_and_minus_2() -> None:
    spec = parse_offsets("startingOffsets", '{"a": {"0": -2, "1": 7}, "b": {"0": -1}}')
    assert spec.resolve({A0: 3, A1: 0, B0: 0}, {A0: 9, A1: 8, B0: 5}) == {A0: 3, A1: 7, B0: 5}
    assert spec.uses(EARLIEST) and spec.uses(LATEST)


@pytest.mark.parametrize(
    "text", ["", "soon", "[1]", '{"a": 3}', '{"a": {"x": 3}}', '{"a": {"0": -3}}', '{"a": {"0": "3"}}']
)
def test_malformed_offsets_are_refused_with_the_option_name(text: str) -> None:
    with pytest.raises(ConfigError, match="startingOffsets"):
        parse_offsets("startingOffsets", text)


def test_offsets_must_name_every_partition() -> None:
    spec = parse_offsets("startingOffsets", '{"a": {"0": 1}, "b": {"0": 1}}')
    with pytest.raises(ConfigError, match="missing: a-1; not read: b-0"):
        spec.resolve({A0: 0, A1: 0}, {A0: 9, A1: 9})


@pytest.mark.parametrize(
    ("options", "mode", "said"),
    [
        ({"subscribe": "a"}, None, "kafka.bootstrap.servers is not set"),
        ({"kafka.bootstrap.servers": "h:1"}, None, "found none of them"),
        ({**NEEDED, "assign": '{"a": [0]}'}, None, "found subscribe and assign"),
        ({**NEEDED, "startingOffset": "earliest"}, None, "did you mean startingOffsets"),
        ({**NEEDED, "zzz": "1"}, None, "docs/spark.md lists all"),
        ({**NEEDED, "kafka.auto.offset.reset": "latest"}, None, "use startingOffsets"),
        ({**NEEDED, "kafka.fetch.mn.bytes": "1"}, None, "did you mean fetch.min.bytes"),
        ({**NEEDED, "startingOffsets": "latest"}, "batch", "cannot begin a batch"),
        ({**NEEDED, "startingOffsets": '{"a": {"0": -1}}'}, "batch", "cannot begin a batch"),
        ({**NEEDED, "endingOffsets": "earliest"}, None, "cannot end a batch"),
        ({**NEEDED, "endingTimestamp": "5"}, "stream", "has no meaning in a stream"),
        ({**NEEDED, "maxOffsetsPerTrigger": "0"}, None, "must be from 1 to 9223372036854775807"),
        (
            {**NEEDED, "startingTimestamp": str(2**63)},
            None,
            "startingTimestamp='9223372036854775808': must be",
        ),
        (
            {**NEEDED, "startingOffsetsByTimestamp": f'{{"a": {{"0": {2**63}}}}}'},
            None,
            "numbers from 0 to 9223372036854775807",
        ),
        ({**NEEDED, "minPartitions": "many"}, None, "expected a whole number"),
        ({**NEEDED, "includeHeaders": "yes"}, None, "expected true or false"),
        ({"kafka.bootstrap.servers": "h:1", "subscribePattern": "("}, None, "not a regular expression"),
        ({"kafka.bootstrap.servers": "h:1", "assign": '{"a": 0}'}, None, "expected JSON like"),
        (
            {**NEEDED, "startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "guess"},
            None,
            "expected error or latest",
        ),
        (
            {**NEEDED, "startingOffsetsByTimestampStrategy": "latest"},
            None,
            "no effect without startingTimestamp",
        ),
        (
            {**NEEDED, "startingTimestamp": "5", "startingOffsets": "earliest"},
            None,
            "both set the start",
        ),
        (
            {**NEEDED, "endingTimestamp": "5", "endingOffsetsByTimestamp": "{}"},
            None,
            "both set the end",
        ),
        ({**NEEDED, "startingTimestamp": "5", "endingTimestamp": "4"}, None, "ends it at 4"),
        (
            {**NEEDED, "startingOffsets": '{"a": {"0": 5}}', "endingOffsets": '{"a": {"0": 4}}'},
            None,
            "startingOffsets starts a-0 at 5, after endingOffsets ends it at 4",
        ),
        ({**NEEDED, "maxOffsetsPerTrigger": "5"}, "batch", "has no meaning in a batch"),
        (
            {**NEEDED, "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"},
            None,
            "is above maxOffsetsPer",
        ),
        ({**NEEDED, "maxTriggerDelay": "5s"}, None, "no effect without minOffsetsPerTrigger: set"),
        ({**NEEDED, "commitOffsetsToGroup": "g"}, "batch", "has no meaning in a batch"),
        ({**NEEDED, "commitOffsetsToGroup": " "}, "stream", "commitOffsetsToGroup is empty"),
        ({**NEEDED, "commitOffsetsToGroup": "oncelog-orders/3"}, "stream", "are those of the sink"),
        ({**NEEDED, "minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, None, "like 500ms, 30s, 15m"),
    ],
)
def test_wrong_options_say_what_to_do(options: dict[str, str], mode: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_options(options, mode)  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_option_names_ignore_case_and_have_sparks_defaults() -> None:
    given = {
        "KAFKA.bootstrap.servers": "h:1",
        "SUBSCRIBE": "a,b",
        "kafka.isolation.level": "read_uncommitted",
    }
    batch, stream = parse_options(given, "batch"), parse_options(given, "stream")
    assert batch.subscription.topics == ("a", "b")
    assert (batch.starting.special, stream.starting.special) == (EARLIEST, LATEST)
    assert batch.fail_on_data_loss and not batch.include_headers
    assert batch.client["isolation.level"] == "read_uncommitted"


@pytest.mark.parametrize(
    ("text", "delay_ms"),
    [(None, 900_000), ("250", 250), ("250ms", 250), ("3 s", 3000), ("15M", 900_000), ("2h", 7_200_000)],
)
def test_the_trigger_delay_is_parsed_as_sparks_durations(text: str | None, delay_ms: int) -> None:
    given = {**NEEDED, "minOffsetsPerTrigger": "5"} | ({} if text is None else {"maxTriggerDelay": text})
    assert parse_options(given, "stream").max_trigger_delay_ms == delay_ms


def test_the_documentation_lists_every_option_with_its_meaning() -> None:
    page = (ROOT / "docs" / "spark.md").read_text()
    for option in OPTIONS:
        default = "" if option.default is None else f"`{option.default}`"
        meaning = option.meaning.replace("|", "\\|")
        assert f"| `{option.name}` | {default} | {option.mode} | {meaning} |" in page


# Splitting and limiting

_RANGES = st.lists(st.integers(1, 500), min_size=1, max_size=6).map(
    lambda sizes: [OffsetRange(TopicPartition("t", n), 10 * n, 10 * n + s) for n, s in enumerate(sizes)]
)


@settings(deadline=None, max_examples=150)
@given(
    ranges=_RANGES,
    parts=st.none() | st.integers(1, 40),
    most=st.none() | st.integers(1, 200),
)
def test_splits_cover_the_same_offsets(
    ranges: list[OffsetRange], parts: int | None, most: int | None
) -> None:
    pieces = split_ranges(ranges, min_partitions=parts, max_records=most)
    offsets = [(r.tp, offset) for r in ranges for offset in range(r.start, r.end)]
    assert [(p.tp, offset) for p in pieces for offset in range(p.start, p.end)] == offsets
    assert all(p.size > 0 for p in pieces)
    assert len(pieces) >= min(parts or 0, len(offsets))
    assert most is None or max(p.size for p in pieces) <= most


def test_splits_go_to_the_largest_range() -> None:
    ranges = [OffsetRange(A0, 0, 100), OffsetRange(A1, 0, 10)]
    assert [p.tp.partition for p in split_ranges(ranges, min_partitions=5)] == [0, 0, 0, 0, 1]


@settings(deadline=None, max_examples=150)
@given(waiting=st.lists(st.integers(0, 1000), min_size=1, max_size=6), limit=st.integers(1, 500))
def test_a_limit_is_used_up_and_no_partition_starves(waiting: list[int], limit: int) -> None:
    start = {TopicPartition("t", n): 5 for n in range(len(waiting))}
    end = {TopicPartition("t", n): 5 + count for n, count in enumerate(waiting)}
    triggers = 0
    while start != end:
        reached = limit_end(start, end, limit)
        taken = {tp: reached[tp] - start[tp] for tp in start}
        assert sum(taken.values()) == min(limit, sum(end[tp] - start[tp] for tp in start))
        assert all(0 <= taken[tp] <= end[tp] - start[tp] for tp in start)
        start, triggers = reached, triggers + 1
    assert triggers == -(-sum(waiting) // limit)


def test_a_limit_is_shared_in_proportion_to_waiting_records() -> None:
    assert limit_end({A0: 0, A1: 0}, {A0: 90, A1: 30}, 40) == {A0: 30, A1: 10}


# Positions


def available(latest: dict[TopicPartition, int], topic_id: str = "1", **earliest: int) -> Available:
    low = {tp: earliest.get(f"{tp.topic}{tp.partition}", 0) for tp in latest}
    return Available(low, latest, latest, {tp.topic: topic_id for tp in latest})


def through_json(position: Position) -> Position:
    """Return the position as Spark restores it from a checkpoint: converted to JSON and back."""
    return Position.from_json(json.loads(json.dumps(position.to_json())))


def test_the_first_batch_carries_its_own_beginning() -> None:
    initial = Position({A0: 10}, {"a": "1"}, is_initial=True)
    end, losses = next_position(initial, available({A0: 25}), limit=None)
    assert losses == []
    # After a restart, the batch is repeated only up to its recorded end, although the partition's end is
    # higher by then.
    later = Position({A0: 40}, {"a": "1"}, is_initial=True)
    assert ranges_of_batch(later, through_json(end)) == [OffsetRange(A0, 10, 25)]


def test_without_new_records_the_position_stays_the_same() -> None:
    start = Position({A0: 10}, {"a": "1"})
    assert next_position(start, available({A0: 10}), limit=5)[0] is start


def test_later_batches_begin_where_the_last_ended() -> None:
    start = Position({A0: 10, A1: 3}, {"a": "1"}, begin={A0: 0, A1: 0})
    end, _ = next_position(start, available({A0: 30, A1: 3}), limit=8)
    assert end.begin == {} and ranges_of_batch(start, through_json(end)) == [OffsetRange(A0, 10, 18)]


def test_added_partitions_begin_at_0() -> None:
    start = Position({A0: 10}, {"a": "1"})
    end, losses = next_position(start, available({A0: 10, A1: 4}), limit=None)
    assert losses == []
    assert ranges_of_batch(start, through_json(end)) == [OffsetRange(A1, 0, 4)]


def test_no_micro_batch_passes_the_target_offsets() -> None:
    start = Position({A0: 10}, {"a": "1"})
    now = available({A0: 30, A1: 9})
    end, _ = next_position(start, now, limit=None, target={A0: 12})
    assert end.offsets == {A0: 12}
    assert next_position(end, now, limit=None, target={A0: 12})[0] is end


def test_a_partition_without_a_target_keeps_its_position() -> None:
    """A broker with old metadata may omit the partition at first. After it appears, the partition must not
    begin at offset 0.
    """
    start = Position({A0: 10, A1: 7}, {"a": "1"})
    now = available({A0: 30, A1: 9})
    end, losses = next_position(start, now, limit=None, target={A0: 30})
    assert (end.offsets, losses) == ({A0: 30, A1: 7}, [])
    assert next_position(end, now, limit=None, target={A0: 30})[0] is end
    later, _ = next_position(through_json(end), now, limit=None)
    assert ranges_of_batch(end, through_json(later)) == [OffsetRange(A1, 7, 9)]


@pytest.mark.parametrize(
    ("now", "said", "resumed"),
    [
        (available({A0: 30}, a0=20), "10 offsets were removed", [OffsetRange(A0, 20, 30)]),
        (available({A0: 4}), "the log was truncated", []),
        (available({A0: 30}, "2"), "was deleted and re-created", [OffsetRange(A0, 0, 30)]),
        (available({A0: 10}, "2"), "was deleted and re-created", [OffsetRange(A0, 0, 10)]),
        (available({}), "the partition is gone", []),
        (available({A0: 10, A1: 8}, a1=5), "below 5 no longer exist", [OffsetRange(A1, 5, 8)]),
    ],
)
def test_lost_offsets_are_named_and_can_be_skipped(
    now: Available, said: str, resumed: list[OffsetRange]
) -> None:
    start = Position({A0: 10}, {"a": "1"})
    end, losses = next_position(start, now, limit=None)
    assert len(losses) == 1 and said in losses[0].explanation
    assert ranges_of_batch(start, through_json(end)) == resumed
    assert next_position(through_json(end), now, limit=None)[1] == []


def test_an_open_transaction_is_no_loss_for_a_read_committed_source() -> None:
    now = Available({A0: 0}, {A0: 5}, {A0: 20}, {})
    start = Position({A0: 12})
    end, losses = next_position(start, now, limit=None)
    assert end is start and losses == []


def test_another_sources_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpointLocation"):
        Position.from_json({"logOffset": 3})


# Arrow batches


def test_batches_are_regrouped_without_a_change_of_rows() -> None:
    sizes = [10, 300_000, 900_000, 20, 9_000_000, 30, 2_500_000, 2_500_000]
    batches = [
        pa.RecordBatch.from_pydict({"offset": [n] * 50, "value": [b"x" * (size // 50)] * 50})
        for n, size in enumerate(sizes)
    ]
    grouped = list(regroup(batches))
    assert pa.Table.from_batches(grouped).equals(pa.Table.from_batches(batches).combine_chunks())
    assert all(batch.nbytes <= LARGE_BATCH_BYTES * 1.01 for batch in grouped)
    assert sum(batch.nbytes < SMALL_BATCH_BYTES for batch in grouped) <= 3
