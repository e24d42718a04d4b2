"""The table of an audit: its format and path, and its columns with topic, partition and offset of a row's
record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from oncelog.errors import ConfigError
from oncelog.local_audit.row_runs import RowRuns

FORMATS = ("parquet", "delta", "iceberg", "sqlite")
"""The formats of tables that are named by FORMAT:PATH."""
POSTGRESQL_URL = "jdbc:postgresql://HOST:PORT/DB?table=NAME"
ROWS_AT_ONCE = 65_536
"""Maximum number of rows that a reader has in memory as columns."""


class Columns(NamedTuple):
    """The names of a table's columns.

    `topic` is None if the user did not name the topic's column. Then the column `topic` is used if the table
    has one.
    """

    topic: str | None = None
    partition: str = "partition"
    offset: str = "offset"
    key: str = "key"


def parse_columns(text: str | None) -> Columns:
    """Parse `topic=NAME,partition=NAME,offset=NAME,key=NAME`; each part is optional. Raises ConfigError."""
    names: dict[str, str] = {}
    for part in (text or "").split(",") if text else ():
        key, separator, name = (word.strip() for word in part.partition("="))
        if key not in Columns._fields or not separator or not name or key in names:
            raise ConfigError(
                f"{text!r}: expected topic=NAME,partition=NAME,offset=NAME,key=NAME, each at most once"
            )
        names[key] = name
    return Columns(**names)


def parse_table(text: str) -> tuple[str, str]:
    """Return format and path in `FORMAT:PATH`, or `jdbc` and the rest of a JDBC URL.

    Raises ConfigError for a format that cannot be read here.
    """
    kind, separator, path = text.partition(":")
    if kind == "jdbc":
        if not path.startswith("postgresql://"):
            raise ConfigError(
                f"{kind_of_url(text)}: of the databases behind JDBC, only PostgreSQL can be audited here: "
                "read the table with Spark, and use oncelog.spark.audit.audit_table"
            )
        return kind, path
    if kind not in FORMATS or not separator or not path:
        known = ", ".join([*(f"{name}:PATH" for name in FORMATS), POSTGRESQL_URL])
        raise ConfigError(f"{without_login(text)!r} is not a table: expected one of {known}")
    return kind, path


def without_login(text: str) -> str:
    """Return a text in which the user and password of URLs, and each `password=VALUE`, are masked. Guard:
    test_an_error_of_a_catalog_hides_its_password.

    A login ends at the URL's last `@`, because a password may contain `/` or `@`.
    """
    return re.sub(r"(?i)(password=)[^&\s]+", r"\1***", re.sub(r"://\S*@", "://***@", text))


def kind_of_url(url: str) -> str:
    """Return the beginning of a URL, which says its kind: `jdbc:oracle...`. The rest is left out, because it
    may contain a login in any notation.
    """
    found = re.match("(?:jdbc:)?[^:/]*", url)
    return f"{found[0] if found else ''}..."


def topic_column(columns: Columns, present: Sequence[str], topics: Sequence[str], where: str) -> str | None:
    """Return the column with the topic; None if all rows belong to the only audited topic. Raises
    ConfigError.
    """
    name = columns.topic or "topic"
    if name in present:
        return name
    if columns.topic is not None:
        raise missing_column(name, present, where)
    if len(topics) > 1:
        raise ConfigError(f"{where} has no column 'topic', so only one topic can be compared with it")
    return None


def missing_column(name: str, present: Sequence[str], where: str) -> ConfigError:
    """Return the error that the table `where` lacks the column `name`."""
    return ConfigError(
        f"{where} has no column {name!r}, but {', '.join(present) or 'no columns'}: name the columns with "
        "--columns topic=NAME,partition=NAME,offset=NAME,key=NAME"
    )


class Table(Protocol):
    """A snapshot of a table. Use it as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def description(self) -> str:
        """The path of the table, and its version or number of files, for messages."""

    def read_into(self, rows: RowRuns) -> None:
        """Add all rows of the table's snapshot to `rows`."""

    def read_keys(self, column: str) -> Iterator[tuple[int, Any]]:
        """Yield binary columns of keys, each with the number of its file."""

    @property
    def files(self) -> Sequence[str]:
        """The names of the table's files. The index of a name is the number of the file."""
