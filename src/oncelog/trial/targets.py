"""The targets of a pipeline: how a write to them is noticed, and how their rows are read."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa
import pyarrow.parquet

from oncelog.errors import MissingDependency, StorageError, TimedOut
from oncelog.local_audit.tables.arrow_files import has_column_mapping, is_hidden
from oncelog.local_audit.tables.postgresql_table import Database, connect, parse_database, quoted, sql_errors
from oncelog.trial.plan import TargetKind

_STABLE_TIMEOUT_S = 60.0
_LOCK_TIMEOUT_S = 10.0
_COUNT_LOCK_TIMEOUT_MS = 100
"""The longest wait for a lock when writes are counted. It is short, because they are counted continuously."""
_POLL_S = 0.1

_COLUMNS = """
SELECT c.relname::text, a.attname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND a.attnum > 0 AND NOT a.attisdropped ORDER BY 1, a.attnum
"""
"""The tables of a schema and their columns. The partitions of a partitioned table are left out, because the
table itself returns their rows.
"""

_SCHEMAS = "SELECT nspname::text FROM pg_namespace WHERE starts_with(nspname::text, $1)"
Row = Mapping[str, Any]


class Target(Protocol):
    """The place to which a pipeline writes.

    `address` and `table` are the values of its settings TARGET and TABLE.
    """

    address: str
    table: str

    def count_writes(self) -> int | None:
        """Return a number that grows when rows are written to the target; 0 for a topic, where the proxy
        counts. Return None if a writer locks the target, so that it cannot be counted now.
        """
        ...

    def read(self) -> Iterator[Row]:
        """Yield the rows that readers of the target see."""
        ...

    @property
    def remark(self) -> str:
        """A remark about the rows of the last `read`, or an empty text."""
        ...


def target_of(
    kind: TargetKind,
    name: str,
    directory: Path,
    servers: str,
    id_name: str,
    database: str | None = None,
) -> Target:
    """Return the target of a run: the topic `name`, the directory `directory`, or a schema of `database`."""
    match kind:
        case TargetKind.TOPIC:
            return TopicTarget(servers, name)
        case TargetKind.DELTA:
            return DeltaTarget(directory, id_name)
        case TargetKind.ICEBERG:
            return IcebergTarget(directory, id_name)
        case TargetKind.SQLITE:
            return SqliteTarget(directory / "target.db", id_name)
        case TargetKind.POSTGRESQL:
            return PostgresqlTarget(database or "", name, id_name)
        case _:
            return ParquetTarget(directory, id_name, only_committed=kind is TargetKind.PARQUET_COMMITTED)


def columns_of_ids(names: Sequence[str], id_name: str) -> list[str] | None:
    """Return the columns that may contain a row's id. Without any, return None, which means all columns.

    Do not read other columns: Python may have no type for their values, such as a date after the year 9999.
    """
    return [name for name in names if name in (id_name, "key", "value")] or None


class TopicTarget:
    """A topic, whose rows are the records that read_committed consumers see."""

    def __init__(self, servers: str, topic: str) -> None:
        self.address = self.table = topic
        self._servers = servers
        self.remark = ""

    def count_writes(self) -> int:
        return 0

    def read(self) -> Iterator[Row]:
        """Yield key and value of each record. Raises TimedOut if an open transaction hides records."""
        from oncelog import Consumer, TopicPartition

        everything = {"bootstrap.servers": self._servers, "isolation.level": "read_uncommitted"}
        committed = {**everything, "isolation.level": "read_committed"}
        with Consumer(committed) as reader, Consumer(everything) as watcher:
            tps = [
                TopicPartition(self.address, part.partition) for part in reader.partitions_for(self.address)
            ]
            deadline = time.monotonic() + _STABLE_TIMEOUT_S
            # Wait for the last stable offset, because markers are written after the response to a commit.
            while (stable := reader.end_offsets(tps)) != (ends := watcher.end_offsets(tps)):
                if time.monotonic() > deadline:
                    raise TimedOut(
                        f"topic {self.address}: an open transaction hides records: read_committed readers "
                        f"see offsets below {_by_partition(stable)} of {_by_partition(ends)}"
                    )
                time.sleep(_POLL_S)
            for tp, end in ends.items():
                for batch in reader.fetch_range(tp, 0, end):
                    yield from batch.select(["key", "value"]).to_pylist()


def _by_partition(ends: Mapping[Any, int]) -> dict[int, int]:
    return {tp.partition: end for tp, end in ends.items()}


class ParquetTarget:
    """A directory of Parquet files.

    A driver that is killed leaves files that no later run removes. Spark ignores them, because its log of the
    directory (`_spark_metadata`) does not name them; other readers read them. With `only_committed`, ignore
    them as Spark does.
    """

    def __init__(self, directory: Path, id_name: str, *, only_committed: bool) -> None:
        self.address = self.table = str(directory)
        self._directory, self._only_committed, self._id_name = directory, only_committed, id_name
        self.remark = ""
        self._with_rows: set[Path] = set()

    def count_writes(self) -> int:
        return count_files_with_rows(self._directory, self._with_rows)

    def _files(self) -> list[Path]:
        return data_files(self._directory, ".parquet")

    def read(self) -> Iterator[Row]:
        files, broken = self._files(), 0
        if self._only_committed:
            log = self._directory / "_spark_metadata"
            # Only Spark's file sink writes the log. Without it, Spark reads every file.
            if log.is_dir():
                named = files_in_log({path.name: path.read_text() for path in log.glob("[0-9]*")})
                files = [path for path in files if path.name in named]
        for path in files:
            try:
                file = pyarrow.parquet.ParquetFile(path)
            except pa.ArrowInvalid:
                # The driver or the task was killed before it wrote the footer.
                broken += 1
                continue
            with file:
                columns = columns_of_ids(file.schema_arrow.names, self._id_name)
                for batch in file.iter_batches(columns=columns):
                    yield from batch.to_pylist()
        self.remark = f"{broken} unreadable file{'s' * (broken != 1)}" if broken else ""


class DeltaTarget:
    """A Delta Lake table, read with the package deltalake."""

    def __init__(self, directory: Path, id_name: str) -> None:
        try:
            import deltalake  # noqa: F401
        except ImportError:
            raise MissingDependency("--target delta needs deltalake: pip install 'oncelog[delta]'") from None
        self.address = self.table = str(directory)
        self._directory, self._id_name = directory, id_name
        self.remark = ""
        self._with_rows: set[Path] = set()
        self._files_in_log: dict[str, int] = {}
        """Name of an entry of the log -> the number of data files that it adds."""

    def count_writes(self) -> int:
        return count_files_with_rows(self._directory, self._with_rows)

    def count_committed(self) -> int:
        """Return the number of data files that commits have added."""
        for entry in (self._directory / "_delta_log").glob("*.json"):
            if entry.stem.isdecimal() and entry.name not in self._files_in_log:
                added = (json.loads(line).get("add", {}) for line in entry.read_text().splitlines())
                self._files_in_log[entry.name] = sum(action.get("dataChange", False) for action in added)
        return sum(self._files_in_log.values())

    def read(self) -> Iterator[Row]:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            table = DeltaTable(self.address)
        except TableNotFoundError:
            return
        if has_column_mapping(table):
            raise StorageError(f"the target {self.address} maps the names of its columns: it cannot be read")
        columns = columns_of_ids([field.name for field in table.schema().fields], self._id_name)
        yield from table.to_pyarrow_table(columns=columns).to_pylist()


class IcebergTarget:
    """The Iceberg tables of a SQL catalog, whose SQLite file is `catalog.db` in the directory.

    Only the catalog knows a table's newest metadata file, because a refused commit leaves metadata files too.
    """

    def __init__(self, directory: Path, id_name: str) -> None:
        try:
            import pyiceberg  # noqa: F401
        except ImportError:
            raise MissingDependency(
                "--target iceberg needs pyiceberg: pip install 'oncelog[iceberg]'"
            ) from None
        self.address = self.table = str(directory)
        self._directory, self._id_name = directory, id_name
        self.remark = ""
        self._with_rows: set[Path] = set()
        self._rows, self._counted_at = 0, list[str]()

    def count_writes(self) -> int:
        return count_files_with_rows(self._directory, self._with_rows)

    def count_committed(self) -> int | None:
        """Return the number of rows that readers see; None while the catalog cannot be read."""
        from pyiceberg.table import StaticTable

        try:
            locations = self._metadata_files(timeout_s=0)
        except sqlite3.OperationalError:
            return None
        if locations != self._counted_at:
            snapshots = [StaticTable.from_metadata(location).current_snapshot() for location in locations]
            summaries = [snapshot.summary for snapshot in snapshots if snapshot and snapshot.summary]
            self._rows = sum(int(summary["total-records"] or 0) for summary in summaries)
            self._counted_at = locations
        return self._rows

    def _metadata_files(self, timeout_s: float) -> list[str]:
        file = self._directory / "catalog.db"
        if not file.exists():
            return []
        address = f"{file.as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, timeout=timeout_s, uri=True)) as catalog:
            found = catalog.execute("SELECT metadata_location FROM iceberg_tables").fetchall()
        return [location for (location,) in found]

    def read(self) -> Iterator[Row]:
        from pyiceberg.table import StaticTable

        for location in self._metadata_files(_LOCK_TIMEOUT_S):
            table = StaticTable.from_metadata(location)
            columns = columns_of_ids([field.name for field in table.schema().fields], self._id_name)
            yield from table.scan(selected_fields=tuple(columns or ["*"])).to_arrow().to_pylist()


class SqliteTarget:
    """The tables of a SQLite database. `tables_with_rows` chooses which of them are read."""

    def __init__(self, file: Path, id_name: str) -> None:
        self.address = self.table = str(file)
        self._file, self._id_name = file, id_name
        self.remark = ""

    def count_writes(self) -> int | None:
        """Return the number of rows; None while a writer locks the database."""
        try:
            return sum(1 for _ in self._rows(timeout_s=0))
        except sqlite3.OperationalError:
            return None

    def read(self) -> Iterator[Row]:
        return self._rows(timeout_s=_LOCK_TIMEOUT_S)

    def _rows(self, timeout_s: float) -> Iterator[Row]:
        if not self._file.exists():
            return
        address = f"{self._file.as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, timeout=timeout_s, uri=True)) as database:
            names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            select = {name: f'SELECT * FROM "{name.replace(chr(34), chr(34) * 2)}"' for (name,) in names}
            tables = {
                name: [own_name(column, self._id_name) for column, *_ in database.execute(text).description]
                for name, text in select.items()
            }
            for table in tables_with_rows(tables, self._id_name):
                for values in database.execute(select[table]):
                    yield dict(zip(tables[table], values, strict=True))


class PostgresqlTarget:
    """A schema of a PostgreSQL database that belongs to one run.

    Use it as a context manager: it creates the schema, and keeps a connection until the end. `address` is the
    JDBC URL of the database. The pipeline writes to `table`, or to other tables of the schema.
    """

    def __init__(self, address: str, name: str, id_name: str) -> None:
        self._database = parse_database(address)
        self._id_name = id_name
        self._schema = schema_name(name)
        self.address, self.table = f"jdbc:{self._database.uri}", f"{self._schema}.rows"
        self.remark = ""
        self._connection: Any = None

    def __enter__(self) -> Self:
        self._connection = connect(self._database, autocommit=True)
        try:
            self._execute(f"CREATE SCHEMA {self._schema}")
            self._execute(f"SET lock_timeout = {_COUNT_LOCK_TIMEOUT_MS}")
        except BaseException:
            self._connection.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._connection.close()

    def _execute(self, query: str) -> list[tuple[Any, ...]]:
        with sql_errors(self._database, query), self._connection.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())

    def count_writes(self) -> int | None:
        """Return the number of rows; None while a writer locks a table."""
        names = tables_with_rows(self._tables(), self._id_name)
        if not names:
            return 0
        counts = (f"(SELECT count(*) FROM {self._qualified(name)})" for name in names)
        try:
            ((count,),) = self._execute(f"SELECT {' + '.join(counts)}")
        except StorageError:
            return None
        return int(count)

    def _qualified(self, table: str) -> str:
        return f"{self._schema}.{quoted(table)}"

    def _tables(self) -> dict[str, dict[str, str]]:
        """Return the columns of each table: their names in the database, by `own_name`."""
        tables: dict[str, dict[str, str]] = {}
        for table, column in self._execute(_COLUMNS.format(schema=self._schema)):
            tables.setdefault(table, {})[own_name(column, self._id_name)] = column
        return tables

    def read(self) -> Iterator[Row]:
        self._execute(f"SET lock_timeout = {int(1000 * _LOCK_TIMEOUT_S)}")
        tables = self._tables()
        for table in tables_with_rows(tables, self._id_name):
            names = tables[table]
            chosen = columns_of_ids(list(names), self._id_name) or names
            columns = ", ".join(f"{quoted(names[name])} AS {quoted(name)}" for name in chosen)
            yield from self._rows(f"SELECT {columns} FROM {self._qualified(table)}")

    def _rows(self, query: str) -> Iterator[Row]:
        with self._connection.cursor() as cursor:
            with sql_errors(self._database, query):
                cursor.execute(query)
            for batch in cursor.fetch_record_batch():
                yield from batch.to_pylist()


@contextmanager
def schemas_of(address: str, name: str) -> Iterator[None]:
    """At the end of the `with` block, drop the schemas of all runs of the trial `name` with all they contain.

    Raises StorageError if the database of the JDBC URL `address` cannot be reached.
    """
    database = parse_database(address)
    connect(database).close()
    try:
        yield
    finally:
        with _cursor(database, "cannot drop the schemas of the trial") as cursor:
            cursor.execute(_SCHEMAS, (f"{schema_name(name)}_",))
            for (schema,) in cursor.fetchall():
                cursor.execute(f"DROP SCHEMA {schema} CASCADE")


def server_version(address: str) -> str:
    """Return the version of a PostgreSQL server. Raises StorageError if it cannot be reached."""
    with _cursor(parse_database(address), "cannot read the version") as cursor:
        cursor.execute("SELECT current_setting('server_version')")
        return str(cursor.fetchone()[0])


@contextmanager
def _cursor(database: Database, what: str) -> Iterator[Any]:
    """Yield a cursor of a new connection that commits each statement. `what` is for the text of errors."""
    with (
        closing(connect(database, autocommit=True)) as connection,
        connection.cursor() as cursor,
        sql_errors(database, what),
    ):
        yield cursor


def schema_name(name: str) -> str:
    """Return the name of a run's schema. It needs no quotes in SQL."""
    return name.replace("-", "_")


def own_name(column: str, id_name: str) -> str:
    """Return `column`, or `id_name` if the two differ only in case: databases ignore or change the case of
    names.
    """
    return id_name if column.lower() == id_name.lower() else column


def tables_with_rows(tables: Mapping[str, Collection[str]], id_name: str) -> list[str]:
    """Return the tables that contain the pipeline's rows, judged by the names of their columns.

    These are the tables with the id's column. If there are none, they are the tables with a key or value,
    which may contain the id. If there are none either, return all tables: the trial then reports rows without
    an id.
    """
    for columns in ({id_name}, {"key", "value"}):
        if found := [table for table, names in tables.items() if columns & set(names)]:
            return found
    return list(tables)


def data_files(directory: Path, suffix: str) -> list[Path]:
    """Return the files with this suffix below a directory, except hidden files and files in hidden folders.
    A folder such as `_day=1` is not hidden, because it has a column's value.

    Folders such as Spark's `_temporary` may vanish during the search. So hidden folders are not entered, and
    `os.walk` is used: unlike `Path.rglob`, it ignores a folder that has vanished.
    """
    files = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not is_hidden(name)]
        files += [Path(folder, name) for name in names if name.endswith(suffix) and not is_hidden(name)]
    return sorted(files)


def count_files_with_rows(directory: Path, known: set[Path]) -> int:
    """Return the number of Parquet files with rows below a directory. Add them to `known`, so that they are
    not read again.

    Spark opens the file of a task's rows before it has the first row. Guard:
    test_a_file_that_spark_has_only_opened_is_no_write.
    """
    files = data_files(directory, ".parquet")
    known.intersection_update(files)
    known.update(file for file in files if file not in known and _has_rows(file))
    return len(known)


def _has_rows(file: Path) -> bool:
    try:
        return bool(pyarrow.parquet.read_metadata(file).num_rows)
    except (OSError, pa.ArrowInvalid):
        # The file has no footer yet, or it was removed meanwhile.
        return False


def files_in_log(texts: Mapping[str, str]) -> set[str]:
    """Return the names of the data files in the log of Spark's file sink (`_spark_metadata`).

    `texts`: the log's files by name. `N.compact` holds the entries of all micro-batches up to N.
    """
    entries = {int(name.partition(".")[0]): name for name in texts if name.partition(".")[0].isdecimal()}
    compacts = [number for number, name in entries.items() if name.endswith(".compact")]
    first = max(compacts, default=-1)
    named: set[str] = set()
    for number in sorted(entries):
        if number >= first:
            named |= _added(texts[entries[number]].splitlines())
    return named


def _added(lines: Sequence[str] | Iterable[str]) -> set[str]:
    added = set()
    for line in lines:
        if line.startswith("{"):
            entry = json.loads(line)
            if entry.get("action") == "add":
                added.add(str(entry["path"]).rpartition("/")[2])
    return added
