"""Texts, samples and sinks on the pages: pure functions."""

from __future__ import annotations

import json

import pytest

from oncelog.client.consumer.partition_ends import PartitionEnds
from oncelog.types import OffsetAndMetadata, TopicPartition
from oncelog.web.display import bytes_text, data_text, duration_text, number_text, time_text
from oncelog.web.history import History, Sample, lag
from oncelog.web.sinks import sink_groups, sink_state

TP = TopicPartition("t", 0)


@pytest.mark.parametrize(
    ("data", "kind", "line"),
    [
        (None, "null", "null"),
        (b"", "text", ""),
        (b"plain \xc3\xa9", "text", "plain é"),
        (b'{"a": [1, 2]}', "json", '{"a": [1, 2]}'),
        (b"{not json", "text", "{not json"),
        (b"[" * 100_000, "text", "[" * 90 + "…"),
        (b"\xff\x00", "hex", "ff 00"),
        (b"\x1b[2J", "hex", "1b 5b 32 4a"),
        ("é".encode() * 4000, "text", "é" * 90 + "…"),
    ],
)
def test_data_is_shown_as_what_it_is(data: bytes | None, kind: str, line: str) -> None:
    shown = data_text(data)
    assert (shown["kind"], shown["line"]) == (kind, line)
    assert len(shown["text"]) <= 5 * 4_096


def test_json_is_indented_and_a_schema_id_is_named() -> None:
    assert data_text(b'{"a":{"b":1}}')["text"] == '{\n  "a": {\n    "b": 1\n  }\n}'
    assert data_text(b"\x00\x00\x00\x01\x02avro")["note"] == "schema id 258 in Confluent's wire format"
    assert data_text(b"x" * 5_000)["note"] == "the first 4,096 of 5,000 bytes"


@pytest.mark.parametrize(
    "stored",
    [
        r'{"a": "\ud800"}',
        '{"a": 1, "a": 2}',
        "[1e999, 10000000000000000.1, 1.0000000000000000001]",
        '{"a": [], "b": {}, "c": "d, [e]: {f}", "g\\"": [true, null, -1.5E+3, "\\\\"]}',
    ],
)
def test_json_is_shown_with_the_stored_tokens(stored: str) -> None:
    shown = data_text(stored.encode())
    assert shown["kind"] == "json" and shown["text"].encode()
    assert "".join(shown["text"].split()) == "".join(stored.split())


def test_json_without_repeated_names_is_indented_as_by_json_dumps() -> None:
    value = {"a": [1, {"b": []}, 'x"\\'], "c": {}, "d": "e, f: [g]", "\n": None, "é": [[], [[1]]]}
    assert data_text(json.dumps(value).encode())["text"] == json.dumps(value, indent=2)


def test_deeply_nested_json_is_not_indented() -> None:
    """With indentation, json.dumps would make 1.6 MB of these 1,800 bytes, and a page may show 500 such
    messages.
    """
    shown = data_text(b"[" * 900 + b"]" * 900)
    assert (shown["kind"], len(shown["text"])) == ("text", 1_800)


def test_numbers_sizes_and_times_are_short() -> None:
    assert [number_text(n) for n in (None, 0, 1234567, 0.12345, 12.0)] == [
        "–",
        "0",
        "1,234,567",
        "0.123",
        "12",
    ]
    assert [bytes_text(n) for n in (None, 0, 999, 1_500, 123_456_789, 5e15)] == [
        "–", "0 B", "999 B", "1.5 kB", "123 MB", "5,000 TB",
    ]  # fmt: skip
    assert [duration_text(n) for n in (None, 5, 1_500, 61_000, 3_661_000, 90_000_000)] == [
        "–", "5 ms", "1.5 s", "1 min 1 s", "1 h 1 min", "1 d 1 h",
    ]  # fmt: skip
    assert time_text(1_000) == "1970-01-01 00:00:01Z" and time_text(1_001) == "1970-01-01 00:00:01.001Z"
    assert time_text(-1) == "–" and time_text(1 << 62) == str(1 << 62)


def sample(at_s: float, end: int) -> Sample:
    return Sample(at_s, {TP: PartitionEnds(0, end, end - 1, None)}, {}, {"g": end})


def test_rates_are_differences_over_time_and_never_negative() -> None:
    history = History(3)
    assert history.latest is None and history.rate(lambda past: past.total_end) is None
    for at_s, end in ((0.0, 0), (2.0, 100), (4.0, 500), (6.0, 400)):
        history.add(sample(at_s, end))
    assert history.rates(lambda past: past.total_end) == [200.0, 0.0], "three samples are kept"
    assert history.rate(lambda past: past.topic_end("t")) == 75.0
    assert history.rate(lambda past: past.total_end, window_s=1.0) == 0.0
    assert history.values(lambda past: past.group_lags.get("g")) == [100, 500, 400]
    assert history.latest is not None and list(history.latest.held_back) == [TP]


def test_lag_counts_known_ends_and_never_below_zero() -> None:
    ends = {TP: PartitionEnds(0, 10, 10, None), TopicPartition("t", 1): PartitionEnds(None, None, None, None)}
    assert lag({TP: 4, TopicPartition("t", 1): 4, TopicPartition("gone", 0): 1}, ends) == 6
    assert lag({TP: 12}, ends) == 0


def kept(offset: int, **note: object) -> dict[TopicPartition, OffsetAndMetadata]:
    return {TP: OffsetAndMetadata(offset, None, json.dumps({"oncelog": 1, **note}))}


def test_a_sink_is_recognised_by_its_groups_and_shows_what_a_restart_skips() -> None:
    names = [
        "oncelog-a%2Fb/begun",
        "oncelog-a%2Fb/finished",
        "oncelog-a%2Fb/0",
        "oncelog-a%2Fb/1",
        "team/7",
        "x",
    ]
    groups = sink_groups(names)
    assert groups == {
        "oncelog-a%2Fb": {part: f"oncelog-a%2Fb/{part}" for part in ("begun", "finished", "0", "1")}
    }
    state = sink_state(
        "oncelog-a%2Fb",
        {
            "begun": kept(8, run="r", begun_ms=5),
            "finished": kept(7, lanes=2, rows=30, hash="0"),
            "1": kept(8, rows=4, hash="0"),
            "0": kept(7, rows=3, hash="0"),
        },
    )
    assert state is not None and state.name == "oncelog-a/b"
    assert (state.begun_id, state.begun_ms, state.finished_id, state.finished_rows) == (8, 5, 7, 30)
    assert [(task.task, task.batch_id) for task in state.tasks] == [(0, 7), (1, 8)]
    assert [task.task for task in state.unfinished] == [1]


@pytest.mark.parametrize("metadata", ["", "not json", "[]", '{"other": 1}'])
def test_offsets_of_another_application_are_no_sink(metadata: str) -> None:
    assert sink_state("s", {"begun": {TP: OffsetAndMetadata(1, None, metadata)}}) is None
