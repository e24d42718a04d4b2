"""Tables that are read as columns, one file after another: Parquet and Delta Lake.

A table of a database counts as one file (postgresql_table.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs, parquet

from oncelog.audit.table_rows import Ints
from oncelog.errors import ConfigError, MissingDependency, StorageError
from oncelog.local_audit.row_runs import RowRuns
from oncelog.local_audit.segment_files import file_system
from oncelog.local_audit.tables.table import (
    ROWS_AT_ONCE,
    Columns,
    missing_column,
    topic_column,
    without_login,
)

_SPARK_LOG = "_spark_metadata"
_COLUMN_MAPPING = "delta.columnMapping.mode"
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class DataFile(NamedTuple):
    """An open data file.

    `names` are the columns in the file. `constants` are the values of columns that are in its path, as in
    Hive's `partition=3/`. `batches` reads the named columns of all rows.
    """

    name: str
    names: Sequence[str]
    constants: Mapping[str, str | None]
    batches: Callable[[list[str]], Iterator[Any]]


class ArrowTable:
    """A snapshot of a table that consists of files. `data_files` opens one file after another.

    `close` is called at the end of the `with` block.
    """

    def __init__(
        self,
        description: str,
        data_files: Callable[[], Iterator[DataFile]],
        columns: Columns,
        topics: Sequence[str],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.description = description
        self.files: list[str] = []
        self._data_files, self._close = data_files, close
        self._columns, self._topics = columns, topics

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Each file is closed when it has been read.
        self._close()

    def read_into(self, rows: RowRuns) -> None:
        """Add the places of all rows to `rows`. Raises ConfigError for a missing or unusable column,
        StorageError for a file that cannot be read.
        """
        for file in self._data_files():
            present = [*file.names, *file.constants]
            topic = topic_column(self._columns, present, self._topics, file.name)
            names = [self._columns.partition, self._columns.offset, *([] if topic is None else [topic])]
            number = rows.add_file(file.name)
            for batch in _read(file, names):
                partition = _integers(file, batch, self._columns.partition)
                offset = _integers(file, batch, self._columns.offset)
                self._add(
                    rows, number, None if topic is None else _texts(file, batch, topic), partition, offset
                )

    def _add(self, rows: RowRuns, number: int, topics: Any, partition: Any, offset: Any) -> None:
        valid = pc.and_(partition.is_valid(), offset.is_valid())
        if topics is not None:
            valid = pc.and_(valid, topics.is_valid())
        if invalid := len(valid) - (pc.sum(valid).as_py() or 0):
            rows.unlocated[number] += invalid
        if topics is None:
            if invalid < len(valid):
                rows.add_rows(self._topics[0], _chosen(partition, valid), _chosen(offset, valid), number)
            return
        rows.rows_of_other_topics += len(valid) - invalid
        for topic in self._topics:
            chosen = pc.and_(valid, pc.fill_null(pc.equal(topics, topic), False))
            if count := pc.sum(chosen).as_py():
                rows.rows_of_other_topics -= count
                rows.add_rows(topic, _chosen(partition, chosen), _chosen(offset, chosen), number)

    def read_keys(self, column: str) -> Iterator[tuple[int, Any]]:
        """Yield the keys as binary columns, each with the number of its file."""
        for file in self._data_files():
            self.files.append(file.name)
            for batch in _read(file, [column]):
                yield len(self.files) - 1, _bytes(file, batch, column)


def _read(file: DataFile, names: list[str]) -> Iterator[Any]:
    """Yield record batches with these columns, at most ROWS_AT_ONCE rows at a time."""
    present = [*file.names, *file.constants]
    for name in names:
        if name not in present:
            raise missing_column(name, present, file.name)
        if present.count(name) > 1:
            raise ConfigError(
                f"{file.name} has {present.count(name)} columns {name!r}: it must have only one"
            )
    stored = [name for name in names if name not in file.constants]
    if not stored:
        raise ConfigError(f"{file.name}: the offset of a row must be in the file, not in its path")
    with reading(file.name):
        for batch in file.batches(stored):
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.slice(start, ROWS_AT_ONCE)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn an OSError or an error of pyarrow into StorageError, whose text contains `name`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"{name}: cannot read this part of the table: {error}. If the table was changed meanwhile, "
            "run the audit again"
        ) from error


def _integers(file: DataFile, batch: Any, name: str) -> Any:
    """Return a column as int64. Raises ConfigError for another type, and for a value that does not fit."""
    if name in file.constants:
        text = file.constants[name]
        try:
            value = None if text is None else int(text)
            return pa.repeat(pa.scalar(value, pa.int64()), batch.num_rows)
        except (ValueError, pa.ArrowInvalid, OverflowError):
            raise ConfigError(f"{file.name}: {name}={text} in the path is not a 64-bit integer") from None
    column = batch[name]
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise ConfigError(f"{file.name}: column {name!r} is {column.type}, but must be an integer")
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"{file.name}: column {name!r} has a value beyond 64-bit integers: {error}"
        ) from error


def _texts(file: DataFile, batch: Any, name: str) -> Any:
    """Return a column as strings. Raises ConfigError for another type."""
    if name in file.constants:
        return pa.repeat(pa.scalar(file.constants[name], pa.string()), batch.num_rows)
    column = batch[name]
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not _is_text(kind) and not pa.types.is_null(kind):
        raise ConfigError(f"{file.name}: column {name!r} is {column.type}, but must be a string")
    return column.cast(pa.string())


def _bytes(file: DataFile, batch: Any, name: str) -> Any:
    """Return a column as bytes. Raises ConfigError for another type."""
    column = _texts(file, batch, name) if name in file.constants else batch[name]
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_bytes = (
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    )
    if not is_bytes and not _is_text(kind) and not pa.types.is_null(kind):
        raise ConfigError(
            f"{file.name}: column {name!r} is {column.type}, but must be bytes or a string, as keys are"
        )
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.binary())


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _chosen(column: Any, mask: Any) -> Ints:
    numbers: Ints = column.filter(mask).to_numpy(zero_copy_only=False)
    return numbers


# Parquet


def open_parquet(path: str, columns: Columns, topics: Sequence[str]) -> ArrowTable:
    """Return a table of the Parquet files that are now in a directory, or of one file. `path` may be a URI of
    pyarrow.fs.

    If Spark's file sink wrote the directory, only the files in its log `_spark_metadata` are in the table.
    Raises ConfigError if the path does not exist, or is a table of another format.
    """
    system, root = file_system(path)
    path = without_login(path)
    try:
        info = system.get_file_info(root)
        if info.type is fs.FileType.NotFound:
            raise ConfigError(f"{path}: no such file or directory")
        is_file = info.type is fs.FileType.File
        names = [""] if is_file else _data_files(system, root, path)
    except UnicodeError as error:
        raise ConfigError(f"{path!a}: the name of the path, or of a file in it, is not UTF-8") from error
    what = path if is_file else f"{path} ({len(names)} files)"

    def data_files() -> Iterator[DataFile]:
        for name in names:
            where = f"{root}/{name}" if name else root
            with reading(where), parquet.ParquetFile(where, filesystem=system) as file:
                constants = _constants(name)
                stored = [column for column in file.schema_arrow.names if column not in constants]
                yield DataFile(name or path, stored, constants, _batches_of(file))

    return ArrowTable(what, data_files, columns, topics)


def _batches_of(file: Any) -> Callable[[list[str]], Iterator[Any]]:
    return lambda names: file.iter_batches(batch_size=ROWS_AT_ONCE, columns=names, use_threads=False)


def _data_files(system: fs.FileSystem, root: str, path: str) -> list[str]:
    """Return the paths of a table's data files, relative to the table's directory. Raises ConfigError for a
    Delta Lake, Iceberg or Hudi table.
    """
    # Read Spark's log first, because every file in it exists when the directory is listed later. Guard:
    # test_a_file_that_is_committed_meanwhile_is_no_error.
    log = _spark_log(system, root)
    # Directories such as Spark's `_temporary` may vanish while they are listed.
    everything = fs.FileSelector(root, recursive=True, allow_not_found=True)
    found = system.get_file_info(everything)
    names = [info.path[len(root) :].lstrip("/") for info in found if info.type is fs.FileType.File]
    first = {name.partition("/")[0] for name in names}
    if log is None and _SPARK_LOG in first:
        # Spark has just committed its first micro-batch.
        return _data_files(system, root, path)
    if "_delta_log" in first:
        raise ConfigError(
            f"{path} is a Delta Lake table, whose files alone are not the table: use delta:{path}"
        )
    if ".hoodie" in first:
        raise ConfigError(
            f"{path} is a Hudi table, whose files alone are not the table: read it with Spark, and use "
            "oncelog.spark.audit.audit_table"
        )
    if any(name.startswith("metadata/") and name.endswith(".metadata.json") for name in names):
        raise ConfigError(
            f"{path} is an Iceberg table, whose files alone are not the table: use iceberg:NAME"
        )
    data = sorted(name for name in names if not any(map(is_hidden, name.split("/"))))
    return data if log is None else _committed(log, root, data)


def is_hidden(part: str) -> bool:
    """Return True for a name that Spark also ignores. A name such as `_partition=3` is not ignored, because
    it has a column's value.
    """
    # Source: Spark HadoopFSUtils.shouldFilterOutPathName.
    return (part[0] == "_" and "=" not in part) or part[0] == "." or part.endswith("._COPYING_")


def _spark_log(system: fs.FileSystem, root: str) -> list[dict[str, str]] | None:
    """Return the entries of the log of Spark's file sink, in their order. Return None if there is no log.

    Raises StorageError if an entry of the log cannot be read.
    """
    directory = f"{root}/{_SPARK_LOG}"
    infos = system.get_file_info(fs.FileSelector(directory, allow_not_found=True))
    log = {
        int(info.base_name.partition(".")[0]): info
        for info in sorted(infos, key=lambda info: len(info.base_name))
        if info.base_name.partition(".")[0].isdecimal()
    }
    if not infos:
        return None
    compacted = [number for number, info in log.items() if info.base_name.endswith(".compact")]
    entries: list[dict[str, str]] = []
    for number in sorted(log):
        if number < max(compacted, default=0):
            continue
        # Spark removes old entries after a compaction.
        with reading(directory), system.open_input_stream(log[number].path) as stream:
            lines = stream.read().decode().splitlines()[1:]
        entries += map(json.loads, filter(None, lines))
    return entries


def _committed(log: Sequence[Mapping[str, str]], root: str, names: Sequence[str]) -> list[str]:
    """Return those of the files that are in the log of Spark's file sink. The others were left by failed
    tasks.
    """
    present = set(names)
    committed: set[str] = set()
    for entry in log:
        parts = PurePosixPath(unquote(urlsplit(entry["path"]).path)).parts
        tails = ("/".join(parts[index:]) for index in range(len(parts)))
        name = next((tail for tail in tails if tail in present), None)
        if name is None:
            raise StorageError(f"{root}: {entry['path']} is in {_SPARK_LOG}, but does not exist")
        (committed.discard if entry["action"] == "delete" else committed.add)(name)
    return sorted(committed)


def _constants(name: str) -> dict[str, str | None]:
    """Return the columns and values that a path contains in the notation of Hive and Spark:
    `topic=a/partition=3/part-0`.
    """
    pairs = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
    return {key: None if value == _NULL_PARTITION else unquote(value) for key, _, value in pairs}


# Delta Lake


def has_column_mapping(table: Any) -> bool:
    """Return True if the columns of a DeltaTable may have other names in its files.

    The package deltalake refuses such a table only if its protocol lists features (reader version 3). With
    reader version 2 it reads the columns of the files by the table's names, which may be other columns.
    Guard: test_a_delta_table_that_maps_its_columns_is_refused.
    """
    return bool(table.metadata().configuration.get(_COLUMN_MAPPING, "none") != "none")


def open_delta(path: str, columns: Columns, topics: Sequence[str]) -> ArrowTable:
    """Return the newest version of a Delta Lake table.

    Raises MissingDependency if the package deltalake is missing. Raises ConfigError for a path that is not a
    table, or for a table with features that the package cannot read (deletion vectors, column mapping).
    """
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ModuleNotFoundError:
        raise MissingDependency(
            "delta:PATH needs the package deltalake: pip install 'oncelog[delta]'"
        ) from None
    try:
        table = DeltaTable(path)
        dataset = table.to_pyarrow_dataset()
    except DeltaError as error:
        text = f"{path}: cannot read this Delta Lake table: {error}"
        raise ConfigError(without_login(text)) from None
    if has_column_mapping(table):
        raise ConfigError(
            f"{without_login(path)}: cannot read this Delta Lake table: it maps the names of its columns "
            f"({_COLUMN_MAPPING}), which the package deltalake ignores"
        )
    fragments = sorted(dataset.get_fragments(), key=lambda fragment: str(fragment.path))

    def data_files() -> Iterator[DataFile]:
        for fragment in fragments:
            yield DataFile(
                str(fragment.path), dataset.schema.names, {}, _batches_in(fragment, dataset.schema)
            )

    return ArrowTable(
        f"{without_login(path)}, version {table.version()} ({len(fragments)} files)",
        data_files,
        columns,
        topics,
    )


def _batches_in(fragment: Any, schema: Any) -> Callable[[list[str]], Iterator[Any]]:
    return lambda names: fragment.to_batches(
        schema=schema, columns=names, batch_size=ROWS_AT_ONCE, batch_readahead=1, use_threads=False
    )
