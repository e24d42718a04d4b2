"""Parsers that turn whole records into Arrow tables with the column value and, if requested, the column key.

The columns by format:

    csv      value: a JSON object per row. The head of the file decides whether a column is numbers, booleans
             or text. Digits stay as they are in the file.
    jsonl    value: the line unchanged. key: a member's text, or its JSON if it is not text.
    lines    value: the line without its end.
    parquet  value: a JSON object per row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from oncelog.errors import MisuseError
from oncelog.load.decisions import Format
from oncelog.load.record_boundaries import Buffer, csv_record_ends, line_ends
from oncelog.load.rows import is_null_text, json_rows, kind_of_text, text_to_json, typed_key, typed_to_json

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS_AT_ONCE = 1024
"""Number of rows that are read from Parquet files at a time.

A row may need much more memory than the file's metadata says.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Options for parsing. All except `key` are for CSV files.

    - `key`: the column, or member of a JSON object, that becomes the record's key.
    - `delimiter`: None means a tab in files named .tsv, otherwise a comma.
    - `nulls`: the texts that mean null.
    - `is_text`: if True, all columns are text.
    """

    key: str | None = None
    delimiter: str | None = None
    nulls: Sequence[str] = ()
    is_text: bool = False


class TextRows(Protocol):
    """A parser for parts of one file. The first record begins at `header_bytes`."""

    header_bytes: int

    def record_ends(self, data: Buffer, *, is_end: bool) -> Any:
        """Return the end positions of the complete records in `data`. A record begins at the start of `data`.

        `is_end`: True if `data` ends with the file.
        """

    def parse(self, data: Buffer) -> Any:
        """Return the records in `data` as a table. All records in `data` are complete.

        Raises ValueError and pyarrow.ArrowException.
        """


def text_rows(format: Format, head: bytes, is_whole: bool, options: Options) -> TextRows:
    """Return a parser for a text file.

    `head`: the first bytes of the file. `is_whole`: True if `head` is the whole file. Raises MisuseError if
    the options do not fit the file.
    """
    if format == "csv":
        return CsvRows(head, is_whole, options)
    return JsonLines(options, head) if format == "jsonl" else Lines(options)


def _table(value: Any, key: Any | None) -> Any:
    return pa.table({"value": value} if key is None else {"key": key, "value": value})


def _check_names(names: Sequence[str], key: str | None) -> None:
    if len(set(names)) < len(names):
        raise MisuseError(f"two columns have the same name: {', '.join(names)}")
    if key is not None and key not in names:
        raise MisuseError(f"column {key!r} for the key does not exist; the columns are {', '.join(names)}")


class Lines:
    """A parser of files in which every line is a value. An empty line is an empty value."""

    header_bytes = 0

    def __init__(self, options: Options) -> None:
        if options.key is not None:
            raise MisuseError("plain lines have no columns to take a key from; leave out --key")

    def record_ends(self, data: Buffer, *, is_end: bool) -> Any:
        return line_ends(data)

    def parse(self, data: Buffer) -> Any:
        return _table(split_lines(data), None)


def split_lines(data: Buffer) -> Any:
    """Return the lines as a binary array, without their line ends."""
    text = bytes(data)
    if not text:
        return pa.array([], pa.binary())
    lines = pc.split_pattern(pa.array([text.removesuffix(b"\n")], pa.binary()), pattern=b"\n").flatten()
    if b"\r" in text:
        lines = pc.replace_substring_regex(lines, pattern=rb"\r\z", replacement=b"")
    return lines


class JsonLines:
    """A parser of files in which every line is a value, except blank lines.

    A byte order mark at the start of the file is skipped.
    """

    def __init__(self, options: Options, head: bytes) -> None:
        self._key = options.key
        self.header_bytes = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0

    def record_ends(self, data: Buffer, *, is_end: bool) -> Any:
        return line_ends(data)

    def parse(self, data: Buffer) -> Any:
        lines = split_lines(data)
        lines = lines.filter(pc.invert(pc.match_substring_regex(lines, rb"\A[ \t]*\z")))
        if self._key is None or not len(lines):
            return _table(lines, None if self._key is None else pa.array([], pa.binary()))
        keys = None
        if _are_whole_objects(lines):
            keys = self._column(data, pa.string(), len(lines))
            if keys is None:
                keys = self._column(data, pa.int64(), len(lines))
        if keys is None:
            keys = pa.array([self._key_of(line) for line in lines.to_pylist()], pa.string())
        return _table(lines, keys.cast(pa.string()).cast(pa.binary()))

    def _column(self, data: Buffer, kind: Any, count: int) -> Any | None:
        """Return the key member of all lines as a column of type `kind`.

        Return None if the member has another type in some line.
        """
        parse = pa.json.ParseOptions(
            explicit_schema=pa.schema([(self._key, kind)]), unexpected_field_behavior="ignore"
        )
        read = pa.json.ReadOptions(block_size=len(data) + 1)
        try:
            table = pa.json.read_json(pa.BufferReader(data), read_options=read, parse_options=parse)
        except pa.ArrowException:
            return None
        return table.column(self._key).combine_chunks() if len(table) == count else None

    def _key_of(self, line: bytes) -> str | None:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, not {line[:80]!r}")
        member = row.get(self._key)
        if member is None or isinstance(member, str):
            return member
        return json.dumps(member, ensure_ascii=False, separators=(",", ":"))


def _are_whole_objects(lines: Any) -> bool:
    """Return True if every line must have exactly one JSON object, provided that Arrow can parse the lines.

    Arrow parses objects one after another, regardless of line ends. A line with two objects and a line with
    none would shift the keys between them by a line. So each line must begin with `{` and end with `}`. An
    object that begins in such a line also ends there, because inside an object no `{` follows a `}`. Guard:
    test_the_key_of_a_line_is_never_from_another_line.
    """
    return bool(pc.all(pc.and_(pc.starts_with(lines, b"{"), pc.ends_with(lines, b"}"))).as_py())


class CsvRows:
    """A parser for CSV. The head of the file determines the columns' names and kinds."""

    def __init__(self, head: bytes, is_whole: bool, options: Options) -> None:
        self._delimiter = options.delimiter or ","
        if self._delimiter in '"\r\n':
            raise MisuseError("a quote or a line end cannot be the delimiter")
        # Skip a byte order mark and empty lines at the start, as Arrow does. A quote after them begins a
        # field.
        start = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
        while head[start : start + 1] in (b"\r", b"\n"):
            start += 1
        ends = self.record_ends(head[start:], is_end=is_whole) + start
        if is_whole and start < len(head) and (not len(ends) or ends[-1] < len(head)):
            ends = [*ends, len(head)]
        if not len(ends):
            raise MisuseError("the file has no header line with the names of the columns")
        self.header_bytes = int(ends[0])
        self._nulls, self._key = tuple(options.nulls), options.key
        self._names = self._read(head[: self.header_bytes], None).column_names
        _check_names(self._names, options.key)
        sample = self._columns(head[self.header_bytes : int(ends[-1])])
        self._kinds = {
            name: "text" if options.is_text else kind_of_text(column, self._nulls)
            for name, column in sample.items()
        }

    def record_ends(self, data: Buffer, *, is_end: bool) -> Any:
        return csv_record_ends(data, delimiter=self._delimiter, is_end=is_end)

    def parse(self, data: Buffer) -> Any:
        columns = self._columns(data)
        for name, column in columns.items():
            nulls = self._nulls if self._kinds[name] == "text" else ("", *self._nulls)
            if nulls:
                columns[name] = pc.if_else(is_null_text(column, nulls), pa.scalar(None, pa.string()), column)
        to_json = {name: partial(self._to_json, name) for name in columns}
        key = None if self._key is None else columns[self._key].cast(pa.binary())
        return _table(json_rows(columns, to_json), key)

    def _to_json(self, name: str, column: Any) -> Any:
        try:
            return text_to_json(column, self._kinds[name])
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}; --text reads all columns as text") from None

    def _columns(self, data: Buffer) -> dict[str, Any]:
        # Blanks and tabs are values, so they are not stripped.
        if not bytes(data).strip(b"\r\n"):
            return {name: pa.array([], pa.string()) for name in self._names}
        table = self._read(data, self._names).combine_chunks()
        return {name: _single(table.column(name)) for name in self._names}

    def _read(self, data: Buffer, names: Sequence[str] | None) -> Any:
        convert: dict[str, Any] = {"strings_can_be_null": False}
        if names is not None:
            convert["column_types"] = dict.fromkeys(names, pa.string())
            if bytes(data[:3]) == _BYTE_ORDER_MARK:
                # In the middle of a file these bytes are text, but Arrow would skip them as a byte order
                # mark.
                data = b"\n" + bytes(data)
        return pa.csv.read_csv(
            pa.BufferReader(data),
            read_options=pa.csv.ReadOptions(column_names=names, block_size=len(data) + 1),
            parse_options=pa.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(**convert),
        )


def _single(column: Any) -> Any:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def open_file(path: str) -> Any:
    """Open a file. Its name may be any bytes, although Arrow itself accepts only UTF-8."""
    return pa.OSFile(os.fsencode(path), "rb")


class ParquetRows:
    """A reader of the rows of a Parquet file. `count`: number of rows in the file."""

    def __init__(self, path: str, options: Options) -> None:
        self._raw = open_file(path)
        self._file = pa.parquet.ParquetFile(self._raw)
        self.count = int(self._file.metadata.num_rows)
        self._key = options.key
        _check_names(self._file.schema_arrow.names, options.key)

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def records_within(self, max_bytes: int) -> int:
        """Return the approximate number of records that fit in `max_bytes`, at least 1."""
        meta = self._file.metadata
        size = sum(meta.row_group(index).total_byte_size for index in range(meta.num_row_groups))
        return max(1, max_bytes * self.count // max(int(size), 1))

    def nothing(self) -> Any:
        """Return a table without records."""
        return _table(pa.array([], pa.binary()), None if self._key is None else pa.array([], pa.binary()))

    def tables(self, row: int, max_records: int, max_bytes: int) -> Iterator[tuple[Any, int]]:
        """Yield tables of records from row number `row` on, each with its size in memory in bytes.

        The sizes in the file's metadata do not help: they are sizes of encoded columns, which store a
        repeated text only once. Therefore a few rows are read at a time, and combined by their size in
        memory. Guard: test_repeated_text_in_parquet.
        """
        batches: list[Any] = []
        records = size_bytes = 0
        for batch in self._batches(row, min(max_records, _ROWS_AT_ONCE, self.records_within(max_bytes))):
            if batches and (records + batch.num_rows > max_records or size_bytes + batch.nbytes > max_bytes):
                yield self._parse(_joined(batches)), size_bytes
                batches, records, size_bytes = [], 0, 0
            batches.append(batch)
            records, size_bytes = records + batch.num_rows, size_bytes + batch.nbytes
        if batches:
            yield self._parse(_joined(batches)), size_bytes

    def _batches(self, row: int, max_records: int) -> Iterator[Any]:
        """Yield batches of the rows from number `row` on, with dictionary-encoded columns decoded. Earlier
        row groups are not read.
        """
        groups: list[int] = []
        for index in range(self._file.metadata.num_row_groups):
            rows = self._file.metadata.row_group(index).num_rows
            if row >= rows and not groups:
                row -= rows
            else:
                groups.append(index)
        # Read one row group at a time: Arrow cannot combine dictionaries in lists or structs of two row
        # groups.
        for batch in (
            batch
            for index in groups
            for batch in self._file.iter_batches(batch_size=max_records, row_groups=[index])
        ):
            skipped = min(row, batch.num_rows)
            row -= skipped
            if skipped < batch.num_rows:
                columns = [
                    column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
                    for column in batch.slice(skipped).columns
                ]
                yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)

    def _parse(self, batch: Any) -> Any:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        value = json_rows(columns, {name: partial(_typed_to_json, name) for name in columns})
        return _table(value, None if self._key is None else typed_key(columns[self._key]))


def _joined(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _typed_to_json(name: str, column: Any) -> Any:
    try:
        return typed_to_json(column)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from None
