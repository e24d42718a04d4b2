"""Tables of PostgreSQL databases: how they are named, and which state of them an audit reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from support.postgresql import PASSWORD, PostgresqlServer
from support.spark.topics import create_topic, fill
from support.wait import wait_until

import oncelog
from oncelog.cli.main import cli
from oncelog.errors import ConfigError, MissingDependency, StorageError
from oncelog.local_audit import audit_table
from oncelog.local_audit.tables import postgresql_table
from oncelog.local_audit.tables.postgresql_table import connect, open_postgresql, parse_database
from oncelog.local_audit.tables.table import Columns, without_login

pytestmark = pytest.mark.behaviour("P8")
TABLE = '(topic text, "partition" int, "offset" bigint)'


@pytest.mark.parametrize(
    ("url", "uri", "table"),
    [
        ("jdbc:postgresql://h:5432/d?table=t", "postgresql://h:5432/d", "t"),
        ("jdbc:postgresql://h/d?user=a&table=s.t&ssl=1", "postgresql://h/d?user=a&ssl=1", "s.t"),
        ("jdbc:postgresql://h/d?table=%22My%20table%22", "postgresql://h/d", '"My table"'),
        ("jdbc:postgresql://h/d?table=", "postgresql://h/d", None),
        ("jdbc:postgresql://h/d", "postgresql://h/d", None),
    ],
)
def test_a_jdbc_url_names_a_database_and_a_table(url: str, uri: str, table: str | None) -> None:
    assert parse_database(url) == (uri, table)


@pytest.mark.parametrize("url", ["postgresql://h/d", "jdbc:mysql://h/d", "jdbc:postgresql:d", "jdbc:"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not a JDBC URL of PostgreSQL: expected jdbc:postgresql://HOST"
    ):
        parse_database(url)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ann:secret@h/d", "postgresql://***@h/d"),
        ("postgresql://h/d?user=ann&password=secret&x=y", "postgresql://h/d?user=ann&password=***&x=y"),
        ("jdbc:mysql://h/d?PASSWORD=secret failed", "jdbc:mysql://h/d?PASSWORD=*** failed"),
        ("no login: a@b", "no login: a@b"),
        ("at mysql://ann:se/c@ret@h/d: a@b", "at mysql://***@h/d: a@b"),
    ],
)
def test_logins_are_masked(text: str, shown: str) -> None:
    assert without_login(text) == shown


@pytest.mark.parametrize(
    "rest",
    [
        "ann:s3/cret@h:5432/d?table=t",
        "ann:12/34@h:5432/d?table=t",
        "ann:s3?cret@h:5432/d?table=t",
        "ann:s3@cret@h:5432/d?table=t",
        "h/d?user=ann&password=s3&cret&table=t",
        "h/d?user=ann&password=s3 cret&table=t",
        "h/d?user=ann&pass%77ord=s3cret",
    ],
)
def test_a_url_with_a_password_that_is_not_encoded_is_refused(rest: str) -> None:
    """Libpq would quote the part that it takes for a port, and no part of such a URL is shown."""
    with pytest.raises(ConfigError, match=r"cannot be parsed: .* percent-encoded") as raised:
        parse_database(f"jdbc:postgresql://{rest}")
    for part in ("s3", "cret", "34", "ann:"):
        assert part not in str(raised.value)


@pytest.mark.parametrize(
    "rest",
    [
        "h",
        "h:1,h2,[::1]:2/d",
        ":5432/",
        "/d?user=ann@site&&ssl=a?b",
        "%2Frun%2Fpg/d?",
        "ann@h",
        "ann:a#:b%2F@h/d",
        "h?table=a b",
    ],
)
def test_a_url_may_have_all_that_libpq_knows(rest: str) -> None:
    assert parse_database(f"jdbc:postgresql://{rest}").uri.startswith("postgresql://")


@pytest.mark.parametrize("login", ["ann:s%2Fcret@h/d", "h/d?user=ann&password=s%2Fcret"])
def test_a_part_of_the_url_in_an_error_shows_no_password(login: str) -> None:
    """Libpq quotes the part of a URI that it cannot read."""
    database = parse_database(f"jdbc:postgresql://{login}")
    for spelling in ("s%2Fcret", "s/cret"):
        assert database.hidden(f'invalid value: "{spelling}"') == 'invalid value: "***"'


def test_a_database_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql", None)
    with pytest.raises(MissingDependency, match=r"pip install 'oncelog\[postgresql\]'"):
        open_postgresql("postgresql://h/d?table=t", Columns(), ["t"])


# With a server


@pytest.fixture(scope="module")
def topic(broker: oncelog.Broker) -> Iterator[str]:
    """A topic with the records 0 to 4."""
    create_topic(broker.bootstrap_servers, "payments")
    fill(broker.bootstrap_servers, "payments", 0, 5)
    return "payments"


def rows(*offsets: int) -> pa.Table:
    return pa.table(
        {
            "topic": ["payments"] * len(offsets),
            "partition": pa.array([0] * len(offsets), pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
        }
    )


def test_an_audit_reads_the_state_at_which_the_table_was_opened(
    broker: oncelog.Broker, topic: str, postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = postgresql.new_schema()
    postgresql.ingest(schema, "orders", rows(*range(5)))
    batches_in = postgresql_table._batches_in

    def add_and_read(*arguments: Any) -> Any:
        postgresql.ingest(schema, "orders", rows(0, 1, 77))
        return batches_in(*arguments)

    monkeypatch.setattr(postgresql_table, "_batches_in", add_and_read)
    place = f"{postgresql.url}&table={schema}.orders"
    result = audit_table(broker.bootstrap_servers, topic, place)
    assert (result.verdict, result.totals.rows) == ("clean", 5)
    monkeypatch.undo()
    assert audit_table(broker.bootstrap_servers, topic, place).verdict == "violated"


def test_a_table_is_named_as_in_sql(broker: oncelog.Broker, topic: str, postgresql: PostgresqlServer) -> None:
    schema = postgresql.new_schema()
    postgresql.ingest(schema, 'My "table"', rows(*range(5)))
    postgresql.execute(
        f'CREATE VIEW {schema}.Half AS SELECT * FROM {schema}."My ""table""" WHERE "offset" < 3',
        f'CREATE TABLE {schema}.parts {TABLE} PARTITION BY LIST ("partition")',
        f"CREATE TABLE {schema}.part_0 PARTITION OF {schema}.parts FOR VALUES IN (0)",
        f'INSERT INTO {schema}.parts SELECT * FROM {schema}."My ""table"""',
    )

    def row_count(name: str) -> int:
        place = f"{postgresql.url}&table={schema}.{name}"
        return audit_table(broker.bootstrap_servers, topic, place).totals.rows

    assert row_count("%22My%20%22%22table%22%22%22") == 5
    assert row_count("HALF") == row_count("half") == 3
    assert row_count("parts") == 5


def test_rows_that_a_policy_hides_are_an_error(
    broker: oncelog.Broker, topic: str, postgresql: PostgresqlServer
) -> None:
    schema = postgresql.new_schema()
    postgresql.ingest(schema, "orders", rows(0, 1, 2, 3, 4, 4))
    postgresql.execute(
        f"CREATE ROLE {schema} LOGIN PASSWORD 'pw'",
        f"GRANT USAGE ON SCHEMA {schema} TO {schema}",
        f"GRANT SELECT ON {schema}.orders TO {schema}",
        f"ALTER TABLE {schema}.orders ENABLE ROW LEVEL SECURITY",
        f"""CREATE POLICY five_rows ON {schema}.orders USING (ctid < '(0,6)')""",
    )
    place = f"{postgresql.url}&table={schema}.orders"
    assert audit_table(broker.bootstrap_servers, topic, place).verdict == "violated"
    as_another_user = f"{place}&user={schema}&password=pw"
    with pytest.raises(StorageError, match="would be affected by row-level security policy"):
        audit_table(broker.bootstrap_servers, topic, as_another_user)


def test_a_table_that_is_filled_again_meanwhile_is_not_empty(
    broker: oncelog.Broker, topic: str, postgresql: PostgresqlServer
) -> None:
    schema = postgresql.new_schema()
    postgresql.ingest(schema, "orders", rows(*range(5)))
    place = f"{postgresql.url}&table={schema}.orders"
    waiting = f"SELECT count(*) FROM pg_locks WHERE relation = '{schema}.orders'::regclass AND NOT granted"
    with (
        ThreadPoolExecutor(1) as pool,
        closing(connect(parse_database(postgresql.url))) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(f"TRUNCATE {schema}.orders")
        cursor.adbc_ingest("orders", rows(*range(5)), mode="append", db_schema_name=schema)
        audit = pool.submit(audit_table, broker.bootstrap_servers, topic, place)
        wait_until(lambda: postgresql.execute(waiting) == [(1,)] or audit.done())
        connection.commit()
        assert audit.result().findings == ()


def test_other_relations_than_tables_are_read(
    broker: oncelog.Broker, topic: str, postgresql: PostgresqlServer
) -> None:
    schema = postgresql.new_schema()
    postgresql.ingest(schema, "orders", rows(*range(5)))
    postgresql.execute(
        f"CREATE MATERIALIZED VIEW {schema}.copies AS SELECT * FROM {schema}.orders",
        f"CREATE VIEW {schema}.seen AS SELECT * FROM {schema}.copies",
    )
    for name in ("copies", "seen"):
        place = f"{postgresql.url}&table={schema}.{name}"
        assert audit_table(broker.bootstrap_servers, topic, place).findings == ()


def test_the_blanks_behind_a_char_are_no_part_of_it(
    broker: oncelog.Broker, topic: str, postgresql: PostgresqlServer
) -> None:
    schema = postgresql.new_schema()
    columns = '(topic char(20), "partition" int, "offset" bigint, key char(4))'
    values = ", ".join(f"('payments', 0, {n}, 'k{n}')" for n in range(5))
    postgresql.execute(
        f"CREATE TABLE {schema}.orders {columns}", f"INSERT INTO {schema}.orders VALUES {values}"
    )
    place = f"{postgresql.url}&table={schema}.orders"
    for by_key in (False, True):
        assert audit_table(broker.bootstrap_servers, topic, place, by_key=by_key).findings == ()


def test_a_table_that_cannot_be_read_is_a_plain_error_without_a_password(
    broker: oncelog.Broker, topic: str, postgresql: PostgresqlServer
) -> None:
    schema = postgresql.new_schema()
    postgresql.execute(f'CREATE TABLE {schema}.texts ("partition" int, "offset" text)')
    postgresql.execute(f"INSERT INTO {schema}.texts VALUES (0, 'seven')")
    cases = [
        (ConfigError, f"&table={schema}.no_such", r"there is no table 'schema_\d+\.no_such'"),
        (ConfigError, f"&table={schema}.texts", "column 'offset' is string, but must be an integer"),
        (ConfigError, f"&table={schema}.texts_", "there is no table"),
        (StorageError, "&table=a..b", "invalid name syntax"),
        (StorageError, "&table=t&port=1", "cannot connect"),
        (StorageError, "&table=t&password=wrong%2Fword", "password authentication failed"),
        (StorageError, "&table=t&nonsense=1", "invalid URI query parameter"),
    ]
    for error, query, text in cases:
        with pytest.raises(error, match=text) as raised:
            audit_table(broker.bootstrap_servers, topic, f"{postgresql.url}{query}")
        assert PASSWORD not in str(raised.value) and "s3cret" not in str(raised.value)
        assert "wrong" not in str(raised.value)


def test_keys_are_compared_as_columns(
    broker: oncelog.Broker, topic: str, postgresql: PostgresqlServer
) -> None:
    schema = postgresql.new_schema()
    keys = pa.table({"key": pa.array([b"k0", b"k1", b"k1", b"k2", b"k3"], pa.binary())})
    postgresql.ingest(schema, "orders", keys)
    place = f"{postgresql.url}&table={schema}.orders"
    result = audit_table(broker.bootstrap_servers, topic, place, by_key=True)
    assert [(f.kind, f.key) for f in result.findings] == [("doubled_key", "k1"), ("lost_key", "k4")]


def test_the_command_shows_no_password(
    broker: oncelog.Broker, topic: str, postgresql: PostgresqlServer, tmp_path: Any
) -> None:
    schema = postgresql.new_schema()
    postgresql.ingest(schema, "orders", rows(0, 1, 1, 2, 3))
    page = tmp_path / "page.html"
    arguments = ["audit", "-b", broker.bootstrap_servers, topic, "--html", str(page), "-o", "json", "--table"]
    ended = CliRunner().invoke(cli, [*arguments, f"{postgresql.url}&table={schema}.orders"])
    assert ended.exit_code == 3
    for text in ("doubled_row", "missing_row", f"{schema}.orders"):
        assert text in ended.stdout
    for text in (ended.stdout, ended.stderr, page.read_text()):
        assert "s3cret" not in text
