"""The ends of records in text files, and the conversion of columns to records."""

from __future__ import annotations

import base64
import csv
import datetime
import io
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.errors import MisuseError
from oncelog.load.parsing import CsvRows, JsonLines, Lines, Options
from oncelog.load.record_boundaries import chunk_ends, csv_record_ends, line_ends
from oncelog.load.rows import json_rows, quoted, typed_key, typed_to_json


@pytest.mark.parametrize(
    ("data", "is_quoted", "max_records", "is_end", "expected"),
    [
        (b"", False, 9, True, []),
        (b"a", False, 9, False, []),
        (b"a", False, 9, True, [1]),
        (b"a\nb", False, 9, False, [2]),
        (b"a\nb", False, 9, True, [3]),
        (b"a\nb\n", False, 9, True, [4]),
        (b"a\nb\nc\n", False, 2, True, [4, 6]),
        (b"a\nb\nc\nd", False, 2, False, [4, 6]),
        (b"a\nb\nc\nd", False, 2, True, [4, 7]),
        (b'"a\nb"\nc\n', True, 1, False, [6, 8]),
        (b'"a\nb"\nc\n', False, 1, False, [3, 6, 8]),
        (b'"a""\n""b"\n"c\n', True, 9, False, [10]),
        # A quote in the middle of a field is plain text. The same is true of anything after the closing
        # quote.
        (b'5"\n"a\nb"\n', True, 1, False, [3, 9]),
        (b'"a"b"\n"c\n', True, 1, False, [6]),
        (b'5" "" "\n"\n",6"\n', True, 1, False, [8, 15]),
        # A single \r ends a record. At the end of the data, a \n may still follow, so there it ends one only
        # with `is_end`.
        (b"a\rb\r\nc\r", True, 1, False, [2, 5]),
        (b"a\rb\r\nc\r", True, 1, True, [2, 5, 7]),
    ],
)
def test_chunks_end_where_records_end(
    data: bytes, is_quoted: bool, max_records: int, is_end: bool, expected: list[int]
) -> None:
    ends = csv_record_ends(data, delimiter=",", is_end=is_end) if is_quoted else line_ends(data)
    assert chunk_ends(ends, len(data), max_records=max_records, is_end=is_end) == expected


@settings(deadline=None)
@given(st.lists(st.none() | st.text()))
def test_quoted_text_is_json(values: list[str | None]) -> None:
    texts = quoted(pa.array(values, pa.string())).to_pylist()
    assert [None if text is None else json.loads(text) for text in texts] == values


_CELL = st.text(st.characters(exclude_characters="\r\x00", codec="utf-8"), max_size=5)


@settings(deadline=None)
@given(st.lists(st.tuples(_CELL, _CELL), min_size=1, max_size=20), st.integers(1, 5))
def test_csv_in_chunks_is_csv(rows: list[tuple[str, str]], max_records: int) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows([("a", 'b"\n'), *rows])
    data = text.getvalue().encode()
    parser = CsvRows(data, True, Options(key="a", is_text=True))
    body, start, rows_read = data[parser.header_bytes :], 0, []
    ends = csv_record_ends(body, delimiter=",", is_end=True)
    for end in chunk_ends(ends, len(body), max_records=max_records, is_end=True):
        table = parser.parse(body[start:end])
        assert table.num_rows <= max_records
        rows_read += zip(table["key"].to_pylist(), map(json.loads, table["value"].to_pylist()), strict=True)
        start = end
    assert rows_read == [(a.encode(), {"a": a, 'b"\n': b}) for a, b in rows]


def parse_csv(text: str, **options: Any) -> tuple[list[Any], list[bytes]]:
    parser = CsvRows(text.encode(), True, Options(**options))
    table = parser.parse(text.encode()[parser.header_bytes :])
    keys = table["key"].to_pylist() if "key" in table.column_names else []
    return keys, table["value"].to_pylist()


def test_csv_keeps_every_digit() -> None:
    _, values = parse_csv(
        "n,big,zip,f,b,s\n1,12345678901234567890,01234,1.50,true,x\n-2,0,99999,1e5,false,\n"
    )
    assert values == [
        b'{"n":1,"big":12345678901234567890,"zip":"01234","f":1.50,"b":true,"s":"x"}',
        b'{"n":-2,"big":0,"zip":"99999","f":1e5,"b":false,"s":""}',
    ]


def test_csv_texts_that_mean_null_become_null() -> None:
    text = "n,s\n1,NA\n,x\nNA,\n"
    assert parse_csv(text, nulls=("NA",), key="n") == (
        [b"1", None, None],
        [b'{"n":1,"s":null}', b'{"n":null,"s":"x"}', b'{"n":null,"s":""}'],
    )
    assert parse_csv(text, key="n") == (
        [b"1", b"", b"NA"],
        [b'{"n":"1","s":"NA"}', b'{"n":"","s":"x"}', b'{"n":"NA","s":""}'],
    )
    assert parse_csv("n\n1\n", is_text=True)[1] == [b'{"n":"1"}']


def test_csv_kinds_come_from_the_head() -> None:
    head, later = b"a,b\n1,x\n", b"2,3\n"
    parser = CsvRows(head, False, Options())
    assert parser.parse(later)["value"].to_pylist() == [b'{"a":2,"b":"3"}']
    with pytest.raises(ValueError, match=r"column 'a': 'x' is not a number.*--text"):
        parser.parse(b"x,y\n")
    with pytest.raises(pa.ArrowInvalid, match="Expected 2 columns"):
        parser.parse(b"1\n")
    assert parser.parse(b"\n\r\n").num_rows == 0


def test_csv_delimiter_byte_order_mark_and_line_ends() -> None:
    assert parse_csv("\ufeffa\tb\r\n1\t2\r\n\r\n3\t4", delimiter="\t")[1] == [
        b'{"a":1,"b":2}',
        b'{"a":3,"b":4}',
    ]


@pytest.mark.parametrize(
    ("text", "options", "what"),
    [
        ("", {}, "no header line"),
        ("a,a\n", {}, "two columns have the same name"),
        ("a,b\n", {"key": "c"}, "column 'c' for the key does not exist; the columns are a, b"),
    ],
)
def test_csv_options_that_do_not_fit_are_refused(text: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises(MisuseError, match=what):
        parse_csv(text, **options)


def test_each_line_is_a_value() -> None:
    parser = Lines(Options())
    assert parser.parse(b"a\r\n\nb\rc\n\xff")["value"].to_pylist() == [b"a", b"", b"b\rc", b"\xff"]
    assert parser.parse(b"\n")["value"].to_pylist() == [b""]
    assert parser.parse(b"")["value"].to_pylist() == []
    with pytest.raises(MisuseError, match="no columns"):
        Lines(Options(key="a"))


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        ([b'{"k":"a\\u00e9"}', b'{"x":1}', b'{"k":null,"y":[{}]}'], ["aé".encode(), None, None]),
        ([b'{"k":1}', b'{"k":-9007199254740993}'], [b"1", b"-9007199254740993"]),
        ([b'{"k":1}', b'{"k":"b"}', b'{"k":1.50}', b'{"k":true}', b'{"k":[1, 2]}'],
         [b"1", b"b", b"1.5", b"true", b"[1,2]"]),
    ],
)  # fmt: skip
def test_each_json_line_is_a_value_and_a_member_its_key(lines: list[bytes], keys: list[bytes | None]) -> None:
    table = JsonLines(Options(key="k"), b"").parse(b"\n \n".join(lines) + b"\r\n")
    assert (table["value"].to_pylist(), table["key"].to_pylist()) == (lines, keys)
    assert JsonLines(Options(), b"").parse(b"\n".join(lines))["value"].to_pylist() == lines


@pytest.mark.parametrize("line", [b"[1]", b'{"k":', b'{"k":1} {"k":2}', b"x"])
def test_lines_that_are_no_json_objects_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        JsonLines(Options(key="k"), b"").parse(line + b"\n")


NOON = datetime.datetime(2013, 1, 1, 12, 0, 0, 5)
NIL_UUID = b"00000000-0000-0000-0000-000000000000"
NO_TEXT = pa.array([b"\xff\xfe"]).view(pa.string())


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array([1, None, -(2**63)]), ["1", None, str(-(2**63))]),
        (pa.array([2**64 - 1], pa.uint64()), [str(2**64 - 1)]),
        (pa.array([0.1, 1e300, math.nan, -math.inf, None]), ["0.1", "1e+300", None, None, None]),
        (pa.array([1.5], pa.float32()), ["1.5"]),
        (pa.array([True, None]), ["true", None]),
        (pa.array([Decimal("1.50")], pa.decimal128(10, 2)), ["1.50"]),
        (pa.array(['a"\n', None]), ['"a\\"\\n"', None]),
        (pa.array(["x", "y"]).dictionary_encode(), ['"x"', '"y"']),
        (pa.array([NOON], pa.timestamp("us")), ['"2013-01-01T12:00:00.000005"']),
        (pa.array([NOON], pa.timestamp("us", "Europe/Berlin")), ['"2013-01-01T12:00:00.000005Z"']),
        (pa.array([NOON.date()]), ['"2013-01-01"']),
        (pa.array([b"\xff"]), [f'"{base64.b64encode(bytes([255])).decode()}"']),
        (pa.array([[1, None], None]), ["[1,null]", None]),
        (pa.array([{"a": math.nan, "b": NOON}]), ['{"a":null,"b":"2013-01-01T12:00:00.000005"}']),
        (pa.array([None, None]), [None, None]),
        (pa.array([[Decimal("1.50"), None], []], pa.list_(pa.decimal128(9, 2))), ["[1.50,null]", "[]"]),
        (pa.array([[1], None], pa.list_(pa.time64("ns"))), ['["00:00:00.000000001"]', None]),
        (pa.array([[1]], pa.list_(pa.timestamp("ns", "Europe/Berlin"), 1)),
         ['["1970-01-01T00:00:00.000000001Z"]']),
        (pa.array([{"a": [0.1], "b": Decimal("2.0")}, None],
                  pa.struct([("a", pa.list_(pa.float32())), ("b", pa.decimal128(3, 1))])),
         ['{"a":[0.1],"b":2.0}', None]),
        (pa.array([None, [("a", b"\xff"), ("b", None)], []], pa.map_(pa.string(), pa.binary())).slice(1),
         ['[["a","/w=="],["b",null]]', "[]"]),
        (pa.array([{}], pa.struct([])), ["{}"]),
        (pa.array([10_000_000], pa.date32()), ['"29349-01-26"']),
        (pa.array([[10_000_000]], pa.list_(pa.date32())), ['["29349-01-26"]']),
    ],
)  # fmt: skip
def test_values_of_every_arrow_type_have_a_json_text(column: Any, texts: list[str | None]) -> None:
    assert typed_to_json(column).to_pylist() == texts
    rows = json_rows({"c": column}, {"c": typed_to_json}).to_pylist()
    assert rows == [f'{{"c":{text or "null"}}}'.encode() for text in texts]
    for row in rows:
        json.loads(row)


@pytest.mark.parametrize(
    ("column", "keys"),
    [
        (pa.array(["a", None]), [b"a", None]),
        (pa.array([b"\xff"]), [b"\xff"]),
        (pa.array([7]), [b"7"]),
        (pa.array([NOON.date()]), [b"2013-01-01"]),
        (pa.array([b"\xff", None], pa.binary_view()), [b"\xff", None]),
        (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16))), [NIL_UUID]),
        (pa.array([["a"], None]), [b'["a"]', None]),
    ],
)
def test_keys_of_typed_columns(column: Any, keys: list[bytes | None]) -> None:
    assert typed_key(column).to_pylist() == keys


@pytest.mark.parametrize(
    ("column", "what"),
    [
        (NO_TEXT, "Invalid UTF8"),
        (NO_TEXT.dictionary_encode(), "Invalid UTF8"),
        (pa.array([2**62], pa.timestamp("us")), "a time cannot be written: .*out of range"),
        (pa.array([[2**62]], pa.list_(pa.timestamp("us"))), "cannot be written"),
    ],
)
def test_values_without_a_text_are_refused(column: Any, what: str) -> None:
    for convert in (typed_to_json, typed_key):
        with pytest.raises(ValueError, match=what):
            convert(column)


@pytest.mark.parametrize("kind", [pa.null(), pa.int32()], ids=str)
def test_maps_with_types_of_only_nulls_inside(kind: Any) -> None:
    """R1073: converting the last of these slices aborted the process within Arrow."""
    rows = [[("x", [None, None])], None, [], [("y", [None]), ("z", None)], [("x", [])]]
    texts = ['[["x",[null,null]]]', None, "[]", '[["y",[null]],["z",null]]', '[["x",[]]]']
    column = pa.array(rows, pa.map_(pa.string(), pa.list_(kind)))
    for start in range(len(rows)):
        assert typed_to_json(column.slice(start)).to_pylist() == texts[start:]
