"""Tables of how commands parse times, durations, format strings and filters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.cli.partitions import format_plan, parse_partitions, parse_plan
from oncelog.cli.profiles import Profiles, format_profiles, parse_profiles
from oncelog.cli.record_filter import parse_filter, parse_header, parse_json_field
from oncelog.cli.record_format import parse_format, render, unescape
from oncelog.cli.times import parse_duration, parse_time
from oncelog.types import Record, TimestampType, TopicPartition

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        ("1ms", 1),
        ("90s", 90_000),
        ("5m", 300_000),
        ("1h30m", 5_400_000),
        ("7d", 604_800_000),
        ("2w", 1_209_600_000),
        ("PT1H", 3_600_000),
        ("PT1.5S", 1_500),
        ("P1DT2H3M4S", 93_784_000),
        ("P2W", 1_209_600_000),
        ("P0D", 0),
    ],
)
def test_a_duration_is_parsed(text: str, duration_ms: int) -> None:
    assert parse_duration(text) == duration_ms
    assert parse_time(text, NOW_MS) == NOW_MS - duration_ms


@pytest.mark.parametrize(
    "text",
    ["", "1", "h", "1 h", "-1h", "1y", "P", "PT", "P1H", "PT1D", "1h ", "١h", "1h\n", "9" * 5000 + "s"],
)
def test_an_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration such as 90s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("now", NOW_MS),
        ("0", 0),
        ("1700000000123", 1_700_000_000_123),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T22:13:20.123Z", 1_700_000_000_123),
        ("2023-11-14 23:13:20+01:00", 1_700_000_000_000),
        ("1969-12-31T00:00:00Z", 0),
        ("90000w", 0),
        ("20231114T221320Z", 1_700_000_000_000),
    ],
)
def test_a_time_is_parsed(text: str, time_ms: int) -> None:
    assert parse_time(text, NOW_MS) == time_ms


@pytest.mark.parametrize(
    "text", ["", "yesterday", "-1", "1.5", "2026-13-01", "10:00", "9" * 5000, "NaN", "\0"]
)
def test_an_invalid_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time such as 1h"):
        parse_time(text, NOW_MS)


def test_eight_digits_are_a_date() -> None:
    assert parse_time("20231114", NOW_MS) == parse_time("2023-11-14", NOW_MS)


FULL = Record("t", 3, 7, 9, TimestampType.CREATE_TIME, b"k\xff", b"value", (("a", b"1"), ("b", None)))
EMPTY = Record("t", 0, 1, -1, TimestampType.CREATE_TIME, None, None, ())


@pytest.mark.parametrize(
    ("text", "full", "empty"),
    [
        (r"%t/%p@%o %T\n", b"t/3@7 9\n", b"t/0@1 -1\n"),
        ("%k=%s", b"k\xff=value", b"="),
        ("%v", b"value", b""),
        ("%K %S", b"2 5", b"-1 -1"),
        ("%h", b"a=1,b=NULL", b""),
        (r"100%%\t\x41\0\\n", b"100%\tA\0\\n", b"100%\tA\0\\n"),
        ("\udcff", b"\xff", b"\xff"),
        ("", b"", b""),
    ],
)
def test_a_record_is_rendered_by_a_format(text: str, full: bytes, empty: bytes) -> None:
    parts = parse_format(text)
    assert (render(parts, FULL), render(parts, EMPTY)) == (full, empty)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("%q", "%q has no meaning; use %t, %p"),
        ("%", "ends in the middle"),
        ("%t\\", "ends in the middle"),
        (r"\q", "is not an escape"),
        (r"\xZZ", "is not an escape"),
    ],
)
def test_a_wrong_format_is_refused_with_the_letters_that_exist(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_format(text)


def test_escapes_are_replaced_where_percent_signs_have_no_meaning() -> None:
    assert unescape(r"%t\n\x00") == b"%t\n\0"


def record(value: bytes | None = None, **fields: object) -> Record:
    return FULL._replace(value=value, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "matches"),
    [
        ("a=x", b'{"a": "x"}', True),
        ("a=x", b'{"a": "y"}', False),
        ("a=x", b'{"b": "x"}', False),
        ("a.b=x", b'{"a": {"b": "x"}}', True),
        ("a.1.b=x", b'{"a": [0, {"b": "x"}]}', True),
        ("a.2=x", b'{"a": [0, 1]}', False),
        ("a=3", b'{"a": 3}', True),
        ("a=3", b'{"a": "3"}', True),
        ("a=1", b'{"a": true}', False),
        ("a=true", b'{"a": true}', True),
        ("a=null", b'{"a": null}', True),
        ("a=null", b"{}", False),
        ('a={"b": 1}', b'{"a": {"b":1}}', True),
        ("a=", b'{"a": ""}', True),
        ("a=b=c", b'{"a": "b=c"}', True),
        ("a=x", b"no JSON", False),
        ("a=x", b"\xff", False),
        ("a=x", None, False),
        ("0=x", b'"x"', False),
        pytest.param("a=x", b"[" * 100_000, False, id="nested too deeply"),
        pytest.param("a=1", b'{"a": ' + b"1" * 10_000 + b"}", False, id="too long a number"),
        pytest.param("9" * 5000 + "=x", b"[1]", False, id="too long an index"),
    ],
)
def test_a_record_is_chosen_by_a_field_of_its_json_value(
    field: str, value: bytes | None, matches: bool
) -> None:
    assert parse_filter(None, [], [field]).matches(record(value)) is matches


@pytest.mark.parametrize(
    ("key", "headers", "matches"),
    [
        ("k\udcff", [], True),
        ("k", [], False),
        ("", [], False),
        (None, ["a"], True),
        (None, ["a=1"], True),
        (None, ["a=2"], False),
        (None, ["b"], True),
        (None, ["b="], False),
        (None, ["a=1", "c"], False),
        ("k\udcff", ["a=1", "b"], True),
    ],
)
def test_a_record_is_chosen_by_its_key_and_headers(
    key: str | None, headers: list[str], matches: bool
) -> None:
    record_filter = parse_filter(key, headers, [])
    assert record_filter and record_filter.matches(FULL) is matches
    assert not parse_filter(None, [], []) and parse_filter(None, [], []).matches(EMPTY)


@pytest.mark.parametrize("text", ["", "=v"])
def test_a_header_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=VALUE"):
        parse_header(text)


def test_a_name_of_a_header_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(ValueError, match="must be UTF-8"):
        parse_header("a\udcff=v")


@pytest.mark.parametrize("text", ["", "a", "=v", "a..b=v", ".a=v"])
def test_a_field_without_path_or_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected FIELD=VALUE"):
        parse_json_field(text)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("t", ("t", None)),
        ("t:0", ("t", [0])),
        ("t:2,0", ("t", [2, 0])),
    ],
)
def test_partitions_are_parsed(text: str, parsed: tuple[str, list[int] | None]) -> None:
    assert parse_partitions(text) == parsed


@pytest.mark.parametrize(
    "text", ["", ":0", "t:", "t:x", "t:-1", "t:0,", "t:2147483648", "t:" + "9" * 5000, "t:²"]
)
def test_a_text_that_names_no_partitions_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected TOPIC"):
        parse_partitions(text)


T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("t,0,5\nt,1,9223372036854775807\n", {T0: 5, T1: 2**63 - 1}),
        ("g,t,0,5\nother,t,1,6\n", {T0: 5}),
        ('"t","0","5"\r\n\r\n', {T0: 5}),
        ("t, 0, 5", {T0: 5}),
    ],
)
def test_a_reset_plan_is_read_from_csv(text: str, offsets: dict[TopicPartition, int]) -> None:
    assert parse_plan(text.splitlines(keepends=True), "g") == offsets
    assert parse_plan(format_plan(offsets.items()).splitlines(), "g") == offsets


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no offsets of group 'g'"),
        ("other,t,0,5", "no offsets of group 'g'"),
        ("t,0", "line 1: expected"),
        ("t,0,5\nt,0,6", "line 2: t-0 is there twice"),
        ("topic,partition,offset", "line 1: expected"),
        ("t,-1,5", "line 1: expected"),
        (",0,5", "line 1: expected"),
        ("t,2147483648,5", "line 1: the number is too large"),
        ("t,0,9223372036854775808", "line 1: the number is too large"),
        ("t,0," + "9" * 5000, "line 1: expected"),
        pytest.param("t,0," + "x" * 200_000, "line 1: field larger than", id="a field of 200,000 letters"),
    ],
)
def test_a_wrong_reset_plan_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_plan(text.splitlines(), "g")


_KEYS = st.sampled_from(["bootstrap.servers", "client.id", "sasl.password"])
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


@given(settings=st.dictionaries(_KEYS, _TEXTS), current=st.booleans())
def test_a_written_profile_is_read_again(settings: dict[str, str], current: bool) -> None:
    profiles = Profiles("p-1.x" if current else None, {"p-1.x": {"bootstrap.servers": "h:1", **settings}})
    assert parse_profiles(format_profiles(profiles)) == profiles
