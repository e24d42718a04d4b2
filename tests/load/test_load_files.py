"""Files in chunks: they have all records, from any position on, with the digest of the file up to there."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from oncelog.errors import LoadRefused, MisuseError, OncelogError, StorageError
from oncelog.load import files
from oncelog.load.decisions import layout_of
from oncelog.load.files import Chunk, open_reader
from oncelog.load.parsing import Options

LINES = [f"line {number}" * (number % 7) for number in range(200)]


def write(directory: Path, name: str) -> tuple[Path, list[bytes]]:
    """Write a file of this name, in the format of its suffix. Return its path and the values of its
    records.
    """
    path = directory / name
    rows = [{"n": number, "s": line} for number, line in enumerate(LINES)]
    values = [json.dumps(row, separators=(",", ":")).encode() for row in rows]
    if ".parquet" in name:
        table = pa.table({"n": [row["n"] for row in rows], "s": LINES})
        pa.parquet.write_table(table, path, row_group_size=70)
        return path, values
    if ".csv" in name:
        data = b"n,s\n" + "".join(f'{row["n"]},"{row["s"]}"\n' for row in rows).encode()
    elif ".jsonl" in name:
        data = b"\n".join(values)
    else:
        values = [line.encode() for line in LINES]
        data = b"\n".join(values) + b"\n"
    half = len(data) // 2
    if name.endswith(".gz"):  # two gzip members, as `cat a.gz b.gz` makes them
        data = gzip.compress(data[:half]) + gzip.compress(data[half:])
    elif name.endswith(".zst"):
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    path.write_bytes(data)
    return path, values


def pieces_of(path: Path, position: int = 0, records: int = 30) -> tuple[str | None, list[Chunk]]:
    layout = layout_of(path.name, None)
    assert layout is not None
    with closing(open_reader(path, layout, Options())) as reader:
        digest = reader.digest_at(position)
        return digest, [] if digest is None else list(reader.chunks(max_records=records, max_bytes=1_000))


def values_of(chunks: list[Chunk]) -> list[bytes]:
    return [value for chunk in chunks for value in chunk.table["value"].to_pylist()]


NAMES = ["a.csv", "a.csv.gz", "a.jsonl", "a.jsonl.zst", "a.txt", "a.log.gz", "a.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_can_be_read_from_the_position_of_every_chunk(tmp_path: Path, name: str) -> None:
    path, values = write(tmp_path, name)
    digest, chunks = pieces_of(path)
    assert values_of(chunks) == values
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert max(chunk.records for chunk in chunks) <= 30
    assert chunks[-1].consumed_bytes == path.stat().st_size
    assert len(chunks) > 6
    done = 0
    for chunk in chunks[:-1]:
        done += chunk.records
        digest, rest = pieces_of(path, chunk.position, records=9)
        assert digest == chunk.digest
        assert values_of(rest) == values[done:]
        assert rest[-1].position == chunks[-1].position
        assert rest[-1].digest == chunks[-1].digest


def test_the_digest_is_that_of_the_bytes_before(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "a.csv.gz")
    data = gzip.decompress(path.read_bytes())
    for chunk in pieces_of(path)[1]:
        assert chunk.digest == hashlib.sha256(data[: chunk.position]).hexdigest()
    parquet, _ = write(tmp_path, "a.parquet")
    whole = hashlib.sha256(parquet.read_bytes()).hexdigest()
    assert {chunk.digest for chunk in pieces_of(parquet)[1]} == {whole}


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.parquet"])
def test_a_position_after_the_end_has_no_digest(tmp_path: Path, name: str) -> None:
    path, _ = write(tmp_path, name)
    assert pieces_of(path, 1_000_000) == (None, [])


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt", "a.parquet"])
def test_a_file_without_records_has_one_empty_chunk(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pa.parquet.write_table(pa.table({"n": pa.array([], pa.int64())}), path)
    else:
        path.write_bytes(b"a,b\n" if name == "a.csv" else b"")
    _, (chunk,) = pieces_of(path)
    assert (chunk.records, chunk.is_last) == (0, True)


def test_records_may_be_longer_than_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_HEAD_BYTES", 64)
    path, values = write(tmp_path, "a.csv")
    assert values_of(pieces_of(path)[1]) == values
    long = tmp_path / "long.txt"
    long.write_bytes(b"x" * 5_000 + b"\n" + b"y" * 3_000)
    assert [len(value) for value in values_of(pieces_of(long)[1])] == [5_000, 3_000]
    monkeypatch.setattr(files, "_LONGEST_RECORD_BYTES", 2_000)
    with pytest.raises(StorageError, match=r"long.txt, in the records from byte 0 on: no end of a record"):
        pieces_of(long)


def test_damaged_files_raise_errors_that_name_them(tmp_path: Path) -> None:
    whole, _ = write(tmp_path, "a.txt.gz")
    cut = tmp_path / "cut.txt.gz"
    cut.write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(StorageError, match=r"cut.txt.gz: .*[Tt]runcated"):
        pieces_of(cut)
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"no parquet")
    with pytest.raises(StorageError, match=r"bad.parquet: "):
        pieces_of(bad)
    no_text = pa.array([b"\xff\xfe"]).view(pa.string())
    pyarrow.parquet.write_table(pa.table({"n": [1], "text": no_text}), bad)
    with pytest.raises(StorageError, match=r"bad.parquet, from row 0 on: column 'text': Invalid UTF8"):
        pieces_of(bad)
    ragged = tmp_path / "ragged.csv"
    ragged.write_bytes(b"a,b\n1,2\n3\n")
    with pytest.raises(OncelogError, match=r"ragged.csv.*Expected 2 columns"):
        pieces_of(ragged)
    with pytest.raises(StorageError, match=r"No such file"):
        pieces_of(tmp_path / "none.txt")
    with pytest.raises(MisuseError, match=r"not a regular file"):
        files.source_of(tmp_path)


@pytest.mark.parametrize("text", ["Größe,n\n1,2\n", "n,m\nJürgen,2\n"])
def test_text_of_another_encoding_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(StorageError, match=r"latin.csv: .*(?i:utf-?8)"):
        pieces_of(path)


@pytest.mark.parametrize("name", ["a.csv", "a.txt.gz", "a.parquet"])
def test_a_name_of_any_bytes_is_opened(tmp_path: Path, name: str) -> None:
    path, values = write(tmp_path, name)
    path = path.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xfc" + os.fsencode(path.name)))
    assert values_of(pieces_of(path)[1]) == values


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["wide.csv", "wide.jsonl", "wide.txt", "wide.txt.gz"])
def test_wide_characters_are_refused(tmp_path: Path, name: str, encoding: str) -> None:
    data = '{"a":"b"}\n{"a":"c"}\n'.encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(MisuseError, match=rf"{name}: it is UTF-16 or UTF-32"):
        pieces_of(path)


def test_json_beyond_pythons_depth_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    layout = layout_of(path.name, None)
    assert layout is not None
    match = r"deep.jsonl, in the records from byte 8 on"
    with (
        closing(open_reader(path, layout, Options(key="a"))) as reader,
        pytest.raises(StorageError, match=match),
    ):
        list(reader.chunks(max_records=1, max_bytes=1 << 20))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "a.txt")
    layout = layout_of(path.name, None)
    assert layout is not None
    with closing(open_reader(path, layout, Options())) as reader:
        chunks = reader.chunks(max_records=10, max_bytes=1_000)
        next(chunks)
        with path.open("ab") as file:
            file.write(b"more\n")
        with pytest.raises(LoadRefused, match=r"changed while it was being read"):
            list(chunks)


@pytest.mark.parametrize("is_categorical", [False, True])
def test_repeated_text_in_parquet(tmp_path: Path, is_categorical: bool) -> None:
    """Chunks must stay small. The file's metadata count only three different texts, but the texts of its
    6,000 rows take 12 MB.
    """
    path = tmp_path / "a.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2] * 2_000), [c * 2_000 for c in "abc"])
    text = text if is_categorical else text.cast(pa.string())
    pyarrow.parquet.write_table(pa.table({"n": range(6_000), "text": text}), path)
    layout = layout_of(path.name, None)
    assert layout is not None and path.stat().st_size < 100_000
    with closing(open_reader(path, layout, Options())) as reader:
        chunks = list(reader.chunks(max_records=100_000, max_bytes=3 << 20))
    assert max(chunk.size_bytes for chunk in chunks) <= 3 << 20
    assert [json.loads(value)["n"] for value in values_of(chunks)] == list(range(6_000))


def test_dictionaries_within_lists_of_several_row_groups(tmp_path: Path) -> None:
    """Arrow itself cannot read such a batch: "Nested data conversions not implemented for chunked array
    outputs".
    """
    path = tmp_path / "a.parquet"
    texts = pa.array([f"text {number % 9}" for number in range(40)]).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array(range(41), pa.int32()), texts)
    pyarrow.parquet.write_table(pa.table({"texts": lists}), path, row_group_size=7)
    expected_values = [b'{"texts":["text %d"]}' % (number % 9) for number in range(40)]
    assert values_of(pieces_of(path)[1]) == expected_values
    assert values_of(pieces_of(path, 17)[1]) == expected_values[17:]


def test_a_parquet_file_that_is_replaced_after_it_was_opened(tmp_path: Path) -> None:
    """The load must notice that the path has a new file.

    Otherwise the checkpoint would have the new file's digest, and the next run would resume in the middle of
    that file.
    """
    path, other = tmp_path / "a.parquet", tmp_path / "b.parquet"
    for target, first in ((path, 1000), (other, 5000)):
        pyarrow.parquet.write_table(pa.table({"n": list(range(first, first + 1000))}), target)
    assert path.stat().st_size == other.stat().st_size
    layout = layout_of(path.name, None)
    assert layout is not None
    with closing(open_reader(path, layout, Options())) as reader:
        other.replace(path)
        with pytest.raises(LoadRefused, match="changed while"):
            next(reader.chunks(max_records=400, max_bytes=1 << 20))


@pytest.mark.parametrize(
    "lines",
    [
        ['{"k":"x"}{"k":"y"}', "{", '"k":"a"}'],
        ['{"k":"a"}{"k":"b"}', "\r"],
        ['{"k":1}{"k":2}', '{"k":', "3}"],
    ],
)
def test_the_key_of_a_line_is_never_from_another_line(tmp_path: Path, lines: list[str]) -> None:
    """R1072: a load accepted one line with two objects and another line without any, because it compared only
    the total numbers of objects and lines.
    """
    path = tmp_path / "a.jsonl"
    path.write_bytes("".join(f"{line}\r\n" for line in lines).encode())
    layout = layout_of(path.name, None)
    assert layout is not None
    with (
        closing(open_reader(path, layout, Options(key="k"))) as reader,
        pytest.raises(StorageError, match="in the records from byte 0 on"),
    ):
        list(reader.chunks(max_records=100, max_bytes=1_000))
