"""Wherever a file is split into chunks, the chunks together have the records of the undivided file."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oncelog.errors import MisuseError, OncelogError
from oncelog.load import files
from oncelog.load.decisions import Layout
from oncelog.load.files import open_reader
from oncelog.load.parsing import Options

MARK = b"\xef\xbb\xbf"


def records_in_pieces(
    data: bytes, name: str, options: Options, head_bytes: int, max_records: int, max_bytes: int
) -> list[tuple[bytes | None, bytes]]:
    """Read the data in chunks, each with a new reader that starts where the last chunk ended.

    Return keys and values.
    """
    layout = Layout(name, None)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as directory, patch.object(files, "_HEAD_BYTES", head_bytes):
        path = Path(directory) / "file"
        path.write_bytes(data)
        records: list[tuple[bytes | None, bytes]] = []
        position, is_last = 0, False
        while not is_last:
            with closing(open_reader(path, layout, options)) as reader:
                assert reader.digest_at(position) is not None
                chunk = next(reader.chunks(max_records=max_records, max_bytes=max_bytes))
            assert chunk.position > position or chunk.is_last
            position, is_last = chunk.position, chunk.is_last
            values = chunk.table["value"].to_pylist()
            keys = chunk.table["key"].to_pylist() if options.key else [None] * len(values)
            records += zip(keys, values, strict=True)
        return records


def arrow_rows(data: bytes, delimiter: str) -> list[dict[str, str]] | None:
    """Return the rows that Arrow reads from the undivided data, or None if Arrow raises an error."""
    parse = pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    try:
        names = pa.csv.read_csv(pa.BufferReader(data), parse_options=parse).column_names
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        )
        table = pa.csv.read_csv(pa.BufferReader(data), parse_options=parse, convert_options=convert)
    except (pa.ArrowException, KeyError):
        return None
    if len(set(names)) < len(names):
        return None
    return list(table.to_pylist())


_PARTS = st.sampled_from(
    [b"a", b"bc", b",", b",", b'"', b'"', b'""', b"\n", b"\n", b"\r\n", b"\r", b" ", b"\t", b"\0", MARK]
)
_FIELD = st.sampled_from(
    [
        b"x",
        b'5" pipe',
        b'"a\nb"',
        b'"a""b"',
        b'"a"b"c',
        b'""',
        b'"\r\n"',
        b"",
        b" ",
        b"\t",
        MARK,
        b'"a" "b\n"',
    ]
)
_ROW = st.tuples(_FIELD, _FIELD, st.sampled_from([b"\n", b"\n", b"\r\n", b"\r", b"\n\n"])).map(
    lambda row: row[0] + b"," + row[1] + row[2]
)
_CSV = st.one_of(
    st.lists(_PARTS, max_size=30).map(b"".join),
    st.lists(_PARTS, max_size=30).map(lambda parts: b"a,b\n" + b"".join(parts)),
    st.tuples(st.sampled_from([b"", MARK, b"\n", MARK + b"\r\n"]), st.lists(_ROW, max_size=9)).map(
        lambda pair: pair[0] + b"h,i\n" + b"".join(pair[1])
    ),
)


@pytest.mark.behaviour("P4")
@settings(deadline=None, max_examples=600)
@given(_CSV, st.sampled_from([",", "\t"]), st.integers(20, 60), st.integers(1, 4), st.integers(1, 30))
@example(b'h,i\n1,5" pipe\n2,"two\nlines"\n3,c\n4,"a\nb"\n', ",", 60, 1, 1)
@example(b"h,i\r1,2\r3,4\r", ",", 60, 1, 1)
@example(b"h\n\x0b\n \n", ",", 60, 1, 1)
def test_csv_chunks_have_the_records_that_arrow_reads_from_the_whole(
    data: bytes, delimiter: str, head_bytes: int, max_records: int, max_bytes: int
) -> None:
    options = Options(delimiter=delimiter, is_text=True)
    expected = arrow_rows(data, delimiter)
    try:
        records = records_in_pieces(data, "csv", options, head_bytes, max_records, max_bytes)
    except OncelogError as error:
        # The random `head_bytes` may be too short for the header line. No other data that Arrow can read may
        # fail.
        loaded, is_expected = str(error), expected is None or "no header line" in str(error)
    else:
        loaded, is_expected = str(records), [json.loads(value) for _, value in records] == expected
    assert is_expected, (expected, loaded)


def test_a_delimiter_that_is_a_quote_is_refused() -> None:
    for delimiter in ('"', "\r", "\n"):
        with pytest.raises(MisuseError, match="cannot be the delimiter"):
            records_in_pieces(b"a,b\n1,2\n", "csv", Options(delimiter=delimiter), 60, 9, 9)


_LINE = st.lists(st.sampled_from([b"a", b" ", b"\r", b"\0", b"\t", b"\xff", MARK]), max_size=5).map(b"".join)


@settings(deadline=None, max_examples=200)
@given(st.lists(_LINE, max_size=9), st.booleans(), st.integers(1, 40), st.integers(1, 4), st.integers(1, 30))
def test_chunks_of_lines_have_the_lines_of_the_whole(
    lines: list[bytes], has_final: bool, head_bytes: int, max_records: int, max_bytes: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if has_final else b"")
    whole = data.split(b"\n")
    if not whole[-1]:
        whole.pop()
    records = records_in_pieces(data, "lines", Options(), head_bytes, max_records, max_bytes)
    assert [value for _, value in records] == [line.removesuffix(b"\r") for line in whole]


_SCALAR: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
)
_JSON_LINE = st.one_of(
    st.fixed_dictionaries({"k": _SCALAR}, optional={"l": st.lists(_SCALAR, max_size=2)}).map(json.dumps),
    st.fixed_dictionaries({"k": st.integers(-5, 5)}).map(json.dumps),
    st.fixed_dictionaries({"k": st.text(max_size=3)}).map(lambda row: json.dumps(row, ensure_ascii=False)),
    st.sampled_from(
        ["", " ", "\t", '{"k":1.0}', '{"k":-0}', '{"k":1e2}', '{"l":1}', '{"k":"a","k":"b"}', '{"k":1}\0']
    ),
)


def key_of(line: str) -> bytes | None:
    member = json.loads(line).get("k")
    if member is None or isinstance(member, str):
        return None if member is None else member.encode()
    return json.dumps(member, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.behaviour("P4")
@settings(deadline=None, max_examples=400)
@given(
    st.lists(_JSON_LINE, max_size=9), st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n"]),
    st.integers(3, 40), st.integers(1, 4), st.integers(1, 60),
)  # fmt: skip
def test_chunks_of_json_lines_have_the_keys_and_values_of_their_lines(
    lines: list[str],
    has_mark: bool,
    has_final: bool,
    end: str,
    head_bytes: int,
    max_records: int,
    max_bytes: int,
) -> None:
    data = (MARK if has_mark else b"") + (end.join(lines) + (end if has_final else "")).encode()
    given_lines = [line for line in lines if line.strip(" \t")]
    try:
        expected = [(key_of(line), line.encode()) for line in given_lines]
    except ValueError:
        expected = None
    records: list[tuple[bytes | None, bytes]] | None
    try:
        records = records_in_pieces(data, "jsonl", Options(key="k"), head_bytes, max_records, max_bytes)
    except OncelogError:
        records = None
    assert records == expected
