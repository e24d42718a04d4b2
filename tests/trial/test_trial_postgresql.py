"""Trials whose target is a PostgreSQL database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli import oncelog
from support.postgresql import PostgresqlServer
from support.trial import StandInDriver

from oncelog import Consumer, Producer, TopicPartition
from oncelog.trial import run
from oncelog.trial.judgement import row_id
from oncelog.trial.plan import TargetKind
from oncelog.trial.targets import PostgresqlTarget, schemas_of, target_of

pytestmark = pytest.mark.behaviour("P7")


def target_in(server: PostgresqlServer, name: str) -> PostgresqlTarget:
    target = target_of(TargetKind.POSTGRESQL, name, Path("unused"), "unused", "orderId", server.url)
    assert isinstance(target, PostgresqlTarget)
    return target


def test_the_rows_of_a_schema_are_those_with_an_id(postgresql: PostgresqlServer) -> None:
    with schemas_of(postgresql.url, "trial-a"), target_in(postgresql, "trial-a-calm-target") as target:
        assert (list(target.read()), target.count_writes()) == ([], 0)
        assert target.table == "trial_a_calm_target.rows"
        schema = target.table.partition(".")[0]
        postgresql.execute(
            f"CREATE TABLE {target.table} (orderId int, value text) PARTITION BY LIST (orderId)",
            f"CREATE TABLE {schema}.part PARTITION OF {target.table} DEFAULT",
            f"CREATE TABLE {schema}.batches (query text, batch int)",
            f"INSERT INTO {schema}.batches VALUES ('q', 1)",
            f"INSERT INTO {target.table} VALUES (0, 'a'), (1, 'b')",
        )
        assert sorted(str(row_id(row, "orderId")) for row in target.read()) == ["0", "1"]
        assert target.count_writes() == 2
    assert postgresql.execute("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'trial_a%'") == []


def test_a_locked_table_does_not_stop_the_trial(postgresql: PostgresqlServer) -> None:
    with schemas_of(postgresql.url, "trial-b"), target_in(postgresql, "trial-b-target") as target:
        postgresql.execute(f"CREATE TABLE {target.table} (key bytea)")
        postgresql.execute(f"INSERT INTO {target.table} VALUES ('17')")
        assert target.count_writes() == 1
        with postgresql.connection() as writer, writer.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(f"LOCK TABLE {target.table} IN ACCESS EXCLUSIVE MODE")
            assert target.count_writes() is None
        assert [row_id(row, "id") for row in target.read()] == ["17"]


class ToDatabase(StandInDriver):
    """A driver that inserts the rows into the table TABLE."""

    server: PostgresqlServer

    def _copy(self, consumer: Consumer, _producer: Producer, begin: Any, ends: Any) -> None:
        table = self.settings["TABLE"]
        self.server.execute(f"CREATE TABLE IF NOT EXISTS {table} (id text)")
        for partition, end in ends.items():
            tp = TopicPartition(self._source, partition)
            for batch in consumer.fetch_range(tp, begin.get(partition, 0), end):
                for key in batch["key"].to_pylist():
                    self.server.execute(f"INSERT INTO {table} VALUES ('{key.decode()}')")


@pytest.fixture
def file(tmp_path: Path, postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path of a pipeline, and let a stand-in run it."""
    monkeypatch.setattr(run, "Driver", type("Driver", (ToDatabase,), {"server": postgresql}))
    path = tmp_path / "mine.py"
    path.write_text("def pipeline(spark, settings): ...\n")
    return str(path)


@pytest.mark.spark
def test_a_trial_counts_the_rows_of_a_database_and_leaves_nothing_there(
    file: str, tmp_path: Path, postgresql: PostgresqlServer
) -> None:
    size = ("--rows", "12", "--cells", "calm,driver-after-commit", "--work-dir", str(tmp_path / "work"))
    options = ("--target", "postgresql", "--database", postgresql.url, "-o", "json")
    outcome = oncelog("trial", file, *size, *options)
    assert outcome.code == 0, outcome
    calm, killed = json.loads(outcome.out)
    assert (calm["found"], killed["found"], killed["happened"]) == (12, 12, "yes")
    assert {"PostgreSQL", "adbc-driver-postgresql"} <= set(calm["facts"])
    assert postgresql.execute("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'trial_%'") == []
    assert "s3cret" not in outcome.out + outcome.err


@pytest.mark.spark
def test_a_database_that_cannot_be_reached_ends_the_trial_before_its_runs(file: str) -> None:
    url = "jdbc:postgresql://127.0.0.1:1/d?user=ann&password=s3cret"
    outcome = oncelog("trial", file, "--target", "postgresql", "--database", url)
    assert outcome.code == 1 and "cannot connect" in outcome.err, outcome
    assert "s3cret" not in outcome.err and "calm" not in outcome.err
