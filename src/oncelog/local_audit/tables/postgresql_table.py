"""Tables of PostgreSQL databases, read as columns through ADBC (the package adbc-driver-postgresql).

A JDBC URL names the database, as it does in Spark's jobs: `jdbc:postgresql://HOST:PORT/DB?user=NAME`. Without
`jdbc:` it is a URI of libpq, which ADBC uses. If the URL has no user or password, libpq takes them from its
environment variables (PGUSER, PGPASSWORD) and from ~/.pgpass.

Errors of libpq may quote a part of the URI. So the text of each error passes through `Database.hidden`, which
masks the password.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

from oncelog.errors import ConfigError, MissingDependency, StorageError
from oncelog.local_audit.tables.arrow_files import ArrowTable, DataFile
from oncelog.local_audit.tables.table import POSTGRESQL_URL, Columns, kind_of_url, without_login

_PREFIX = "jdbc:postgresql://"
_URL = re.compile(
    r"jdbc:postgresql://"
    r"([^/?@\s:]*(:[^/?@\s]*)?@)?"  # user and password
    r"(\[[^]]*\]|[^/?@\s:,[\]]*)(:\d*)?(,(\[[^]]*\]|[^/?@\s:,[\]]*)(:\d*)?)*"  # hosts and ports
    r"(/[^/?@\s]*)?"  # database
    r"(\?(table=[^&]*|[^=&?@%\s]+=[^&\s]*)?(&(table=[^&]*|[^=&?@%\s]+=[^&\s]*)?)*)?"  # parameters
)
_PASSWORDS = re.compile(r"password=([^&\s]+)|://[^/?\s:]*:([^/?\s]+)@")
_PADDED = """
SELECT a.attname::text FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass($1) AND 'bpchar'::regtype IN (t.oid, t.typbasetype)
"""
"""The columns of type `char(n)`. PostgreSQL pads their values with blanks, which have no meaning."""
_LOCKABLE = frozenset("rpv")
"""The kinds of relations that LOCK TABLE accepts: tables, partitioned tables and views."""
_BATCH_OPTIONS = {"adbc.postgresql.batch_size_hint_bytes": str(4 << 20)}
"""4 MB for each batch of rows. ADBC's default of 16 MB would be several hundred thousand rows in memory."""


class Database(NamedTuple):
    """A PostgreSQL database. `uri` is for libpq. `table` is the value of the URL's parameter `table`."""

    uri: str
    table: str | None

    def hidden(self, text: object) -> str:
        """Return a text in which the passwords of the URI, and logins of other URLs, are masked."""
        shown = str(text)
        for groups in _PASSWORDS.findall(self.uri):
            for password in filter(None, groups):
                for spelling in (password, unquote(password)):
                    shown = shown.replace(spelling, "***")
        return without_login(shown)


def parse_database(url: str) -> Database:
    """Return the database of a JDBC URL. Raises ConfigError for a URL of another kind.

    A special character in the password may divide the URL at the wrong place. Such a URL is refused, and no
    part of it is shown: `hidden` could not mask a part of the password that libpq quotes. Guard:
    test_a_url_with_a_password_that_is_not_encoded_is_refused.
    """
    if not url.startswith(_PREFIX):
        raise ConfigError(f"{kind_of_url(url)} is not a JDBC URL of PostgreSQL: expected {POSTGRESQL_URL}")
    if not _URL.fullmatch(url):
        raise ConfigError(
            f"this JDBC URL of PostgreSQL cannot be parsed: expected {POSTGRESQL_URL}, with special "
            "characters of user and password percent-encoded (%2F for /)"
        )
    base, _, query = url.removeprefix("jdbc:").partition("?")
    table, kept = None, []
    for parameter in filter(None, query.split("&")):
        name, _, value = parameter.partition("=")
        if name == "table":
            table = unquote(value)
        else:
            kept.append(parameter)
    return Database(f"{base}?{'&'.join(kept)}" if kept else base, table or None)


def connect(database: Database, *, autocommit: bool = False) -> Any:
    """Return a connection of the package adbc-driver-postgresql (DB-API 2.0).

    Raises MissingDependency if the package is missing, and StorageError if the database cannot be reached.
    """
    try:
        from adbc_driver_postgresql import dbapi
    except ModuleNotFoundError:
        raise MissingDependency(
            "jdbc:postgresql://... needs the package adbc-driver-postgresql: "
            "pip install 'oncelog[postgresql]'"
        ) from None
    with sql_errors(database, "cannot connect"):
        return dbapi.connect(database.uri, autocommit=autocommit)


@contextmanager
def sql_errors(database: Database, what: str) -> Iterator[None]:
    """Turn an error of ADBC into StorageError. Its text has the database, `what` and the driver's error, but
    no password.
    """
    from adbc_driver_postgresql import dbapi

    try:
        yield
    except dbapi.Error as error:
        # The original error is not kept as the cause: a traceback would show its text.
        raise StorageError(
            f"{database.hidden(database.uri)}: {what}: {database.hidden(error).strip()}"
        ) from None


def quoted(name: str) -> str:
    """Return a name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def open_postgresql(path: str, columns: Columns, topics: Sequence[str]) -> ArrowTable:
    """Return a table or view as it is now: one read-only transaction reads all of it.

    `path` is a JDBC URL without `jdbc:`. Its parameter `table` is a name as in SQL, with or without a schema.
    Raises ConfigError if there is no such table, MissingDependency, and StorageError.
    """
    database = parse_database(f"jdbc:{path}")
    place = database.hidden(f"jdbc:{path}")
    if database.table is None:
        raise ConfigError(f"{place} names no table: expected {POSTGRESQL_URL}")
    connection = connect(database)
    try:
        with sql_errors(database, "cannot read this table"), connection.cursor() as cursor:
            name = _begin(connection, cursor, database.table)
            if name is None:
                raise ConfigError(f"{place}: there is no table {database.table!r}")
            cursor.execute(f"SELECT * FROM {name} LIMIT 0")
            names = [column[0] for column in cursor.description]
            cursor.execute(_PADDED, (database.table,))
            padded = {column for (column,) in cursor.fetchall()}
    except BaseException:
        connection.close()
        raise

    def data_files() -> Iterator[DataFile]:
        yield DataFile(name, names, {}, _batches_in(database, connection, name, padded))

    return ArrowTable(place, data_files, columns, topics, close=connection.close)


def _begin(connection: Any, cursor: Any, table: str) -> str | None:
    """Begin the transaction that reads a table. Return the table's name as SQL needs it; None if there is no
    such table.
    """
    # Let PostgreSQL resolve the name: it knows the search path, and folds the case of unquoted names.
    cursor.execute("SELECT to_regclass($1)::text", (table,))
    ((name,),) = cursor.fetchall()
    cursor.execute("SELECT relkind::text FROM pg_class WHERE oid = to_regclass($1)", (table,))
    kinds = {kind for (kind,) in cursor.fetchall()}
    connection.rollback()
    cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    # With this setting, a row-level security policy that hides rows is an error. An audit without the hidden
    # rows would prove nothing. Guard: test_rows_that_a_policy_hides_are_an_error.
    cursor.execute("SET row_security = off")
    if kinds & _LOCKABLE:
        # Lock the table before the transaction's first query, which takes the snapshot. If another
        # transaction truncates and fills the table meanwhile, an older snapshot shows an empty table. Guard:
        # test_a_table_that_is_filled_again_meanwhile_is_not_empty.
        cursor.execute(f"LOCK TABLE {name} IN ACCESS SHARE MODE")
    return None if name is None else str(name)


def _batches_in(
    database: Database, connection: Any, name: str, padded: Collection[str]
) -> Callable[[list[str]], Iterator[Any]]:
    def selected(column: str) -> str:
        # The cast to text removes the blanks.
        return f"{quoted(column)}::text AS {quoted(column)}" if column in padded else quoted(column)

    def batches(names: list[str]) -> Iterator[Any]:
        query = f"SELECT {', '.join(map(selected, names))} FROM {name}"
        with connection.cursor(adbc_stmt_kwargs=_BATCH_OPTIONS) as cursor:
            with sql_errors(database, "cannot read this table"):
                cursor.execute(query)
            # The server sends the rows as they are fetched, and pyarrow raises its own errors then.
            yield from cursor.fetch_record_batch()

    return batches
