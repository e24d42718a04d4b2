"""A table of an SQLite database. SQLite sorts the rows, and passes runs of offsets, not rows, to Python."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import numpy as np

from oncelog.audit.table_rows import RUN
from oncelog.errors import ConfigError, StorageError
from oncelog.local_audit.row_runs import RowRuns, row_count
from oncelog.local_audit.tables.table import Columns, missing_column, topic_column
from oncelog.types import TopicPartition

_RUNS_AT_ONCE = 10_000

# Consecutive offsets differ from their row numbers by the same amount, which identifies their run. Negative
# offsets are numbered downwards: `place - number` of the smallest integer would overflow, and SQLite would
# continue with a float. Topics are compared as bytes, whatever the column's collation. `main` distinguishes
# the table from the names in the query itself. Guard: test_a_sqlite_table_may_have_any_name_and_collation.
_RUNS = """
WITH rows_at AS (
  SELECT {topic} COLLATE BINARY AS topic, {partition} AS part, {offset} AS place, COUNT(*) AS times
  FROM main.{table} WHERE {offset} {side} 0 AND {valid} GROUP BY 1, 2, 3
), numbered AS (
  SELECT *, place {sign} ROW_NUMBER() OVER (PARTITION BY topic, part, times ORDER BY place {order}) AS run
  FROM rows_at
)
SELECT topic, part, MIN(place), MAX(place), times FROM numbered
GROUP BY topic, part, times, run ORDER BY topic, part
"""


class SqliteTable:
    """A table or view of a database, read in one transaction. `path` may end in `#NAME`, the name of the
    table.
    """

    def __init__(self, path: str, columns: Columns, topics: Sequence[str]) -> None:
        self._path, _, self._name = path.partition("#")
        self._columns, self._topics = columns, topics
        self.files: list[str] = []
        if not Path(self._path).is_file():
            raise ConfigError(f"{self._path}: no such file")
        uri = f"file:{quote(str(Path(self._path).absolute()))}?mode=ro"
        self._connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        try:
            with self._reading():
                self._connection.execute("BEGIN")
                self._name = self._name or self._only_table()
                head = self._connection.execute(f"SELECT * FROM {_name(self._name)} LIMIT 0")
            self._present = [column[0] for column in head.description]
            self._topic = topic_column(columns, self._present, topics, self.description)
            for name in (columns.partition, columns.offset):
                if name not in self._present:
                    raise missing_column(name, self._present, self.description)
        except BaseException:
            self._connection.close()
            raise

    @property
    def description(self) -> str:
        return f"{self._path}#{self._name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(f"{self._path}: cannot read this SQLite database: {error}") from error

    def _only_table(self) -> str:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY 1"
        names = [name for (name,) in self._connection.execute(query)]
        if len(names) != 1:
            raise ConfigError(
                f"{self._path} has {len(names)} tables ({', '.join(names[:10])}): name one, as in "
                f"sqlite:{self._path}#NAME"
            )
        return str(names[0])

    def read_into(self, rows: RowRuns) -> None:
        """Add the places of all rows to `rows`. Raises ConfigError for values of a wrong type, StorageError
        for a damaged file.
        """
        number = rows.add_file(self.description)
        with self._reading():
            self._check_types()
            names = [self._columns.partition, self._columns.offset, *([self._topic] if self._topic else [])]
            is_null = " OR ".join(f"{_name(name)} IS NULL" for name in names)
            nulls = self._number(f"SELECT COUNT(*) FROM {_name(self._name)} WHERE {is_null}")
            if nulls:
                rows.unlocated[number] += nulls
            for side, sign, order in ((">=", "-", "ASC"), ("<", "+", "DESC")):
                self._add_runs(rows, number, f"NOT ({is_null})", side, sign, order)

    def _add_runs(self, rows: RowRuns, number: int, valid: str, side: str, sign: str, order: str) -> None:
        query = _RUNS.format(
            topic=_name(self._topic) if self._topic else "''",
            partition=_name(self._columns.partition),
            offset=_name(self._columns.offset),
            table=_name(self._name),
            valid=valid,
            side=side,
            sign=sign,
            order=order,
        )
        cursor = self._connection.execute(query)
        while found := cursor.fetchmany(_RUNS_AT_ONCE):
            by_partition: dict[tuple[Any, int], list[tuple[int, int, int, int]]] = {}
            for topic, partition, first, last, times in found:
                by_partition.setdefault((topic, partition), []).append((first, last, times, number))
            for (topic, partition), listed in by_partition.items():
                runs = np.array(listed, RUN)
                if self._topic is None:
                    topic = self._topics[0]
                if topic in self._topics:
                    rows.add_runs(TopicPartition(topic, partition), runs)
                else:
                    rows.rows_of_other_topics += row_count(runs)

    def _check_types(self) -> None:
        expected = [(self._columns.partition, "integer"), (self._columns.offset, "integer")]
        expected += [(self._topic, "text")] if self._topic else []
        for name, kind in expected:
            column = _name(name)
            query = (
                f"SELECT typeof({column}) FROM {_name(self._name)} "
                f"WHERE typeof({column}) NOT IN ('{kind}', 'null') LIMIT 1"
            )
            if (row := self._connection.execute(query).fetchone()) is not None:
                raise ConfigError(
                    f"{self.description}: column {name!r} has a value of type {row[0]}, not {kind}"
                )

    def _number(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    def read_keys(self, column: str) -> Iterator[tuple[int, Any]]:
        """Raise ConfigError. A comparison by key is not supported, because SQLite returns a Python object for
        each key and no columns.
        """
        raise ConfigError("--by key does not support SQLite tables; compare a SQLite table by offset")


def _name(name: str) -> str:
    """Return a name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
