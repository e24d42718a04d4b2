"""Examples of docs/trial.md, and the pipelines into tables, each with one cell on real Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oncelog_devtools import cluster_state
from oncelog_devtools.apache_kafka import ApacheKafka
from oncelog_devtools.spark_cluster import SparkCluster
from support import ROOT
from support.cli import Outcome, oncelog
from support.postgresql import PostgresqlServer
from support.spark.worker_python import spark_python

from oncelog import Admin

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(1200),
    pytest.mark.full("starts drivers of Spark and kills them"),
]
EXAMPLES = ROOT / "examples" / "trial"


def trial(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Outcome:
    monkeypatch.setenv("PYSPARK_PYTHON", spark_python())
    size = ("--rows", "400", "--micro-batches", "2", "--timeout", "900")
    return oncelog("trial", *arguments, *size, "-o", "json")


def only_row(outcome: Outcome) -> dict[str, Any]:
    (row,) = json.loads(outcome.out)
    assert isinstance(row, dict)
    return row


@pytest.mark.behaviour("P7")
def test_our_sink_is_clean_when_a_commit_of_spark_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    work, file = str(tmp_path / "work"), str(EXAMPLES / "to_topic.py")
    outcome = trial(monkeypatch, file, "--cells", "commit-lost", "--work-dir", work)
    row = only_row(outcome)
    assert (outcome.code, row["verdict"], row["happened"]) == (0, "clean", "yes"), outcome
    assert row["found"] == 400


@pytest.mark.behaviour("P7")
def test_on_apache_kafka_our_sink_is_clean_and_sparks_own_doubles(
    monkeypatch: pytest.MonkeyPatch,
    apache_kafka: ApacheKafka,
    connector_jar_files: list[str],
    tmp_path: Path,
) -> None:
    cluster = ("-b", apache_kafka.bootstrap_servers, "--cells", "commit-lost")
    ours = trial(monkeypatch, str(EXAMPLES / "to_topic.py"), *cluster, "--work-dir", str(tmp_path / "ours"))
    row = only_row(ours)
    assert (ours.code, row["verdict"], row["happened"], row["found"]) == (0, "clean", "yes", 400), ours
    conf = ("--conf", "spark.jars=" + ",".join(connector_jar_files), "--work-dir", str(tmp_path / "theirs"))
    theirs = trial(monkeypatch, str(EXAMPLES / "kafka_sink.py"), *cluster, *conf)
    row = only_row(theirs)
    assert (theirs.code, row["verdict"], row["happened"]) == (3, "violated", "yes"), theirs
    assert row["lost"] == 0 and 0 < row["doubled"] <= 200
    with Admin({"bootstrap.servers": apache_kafka.bootstrap_servers}) as admin:
        assert [topic.name for topic in admin.list_topics() if topic.name.startswith("trial-")] == []


ICEBERG_SETTINGS = (
    "TABLE=lake.rows",
    "PYICEBERG_CATALOG__DEFAULT__URI=sqlite:///{target}/catalog.db",
    "PYICEBERG_CATALOG__DEFAULT__WAREHOUSE=file://{target}",
)


@pytest.mark.behaviour("P7")
@pytest.mark.behaviour("P9")
@pytest.mark.parametrize(
    ("kind", "package", "settings"),
    [("delta", "deltalake", ()), ("iceberg", "pyiceberg", ICEBERG_SETTINGS)],
)
def test_a_table_is_clean_when_a_commit_of_spark_is_lost(
    kind: str, package: str, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(package, reason=f"needs the package {package}")
    file = str(ROOT / "examples" / "pipelines" / f"to_{kind}.py")
    arguments = [word for pair in settings for word in ("--set", pair)]
    work = str(tmp_path / "work")
    outcome = trial(
        monkeypatch, file, "--target", kind, "--cells", "commit-lost", "--work-dir", work, *arguments
    )
    row = only_row(outcome)
    assert (outcome.code, row["verdict"], row["happened"]) == (0, "clean", "yes"), outcome
    assert row["found"] == 400


@pytest.mark.behaviour("P7")
def test_sparks_own_sink_doubles_a_micro_batch_whose_commit_is_lost(
    monkeypatch: pytest.MonkeyPatch, connector_jar_files: list[str], tmp_path: Path
) -> None:
    work, conf = str(tmp_path / "work"), "spark.jars=" + ",".join(connector_jar_files)
    file = str(EXAMPLES / "kafka_sink.py")
    outcome = trial(monkeypatch, file, "--cells", "commit-lost", "--work-dir", work, "--conf", conf)
    row = only_row(outcome)
    assert (outcome.code, row["verdict"], row["happened"]) == (3, "violated", "yes"), outcome
    # The query may have seen the 200 rows in two parts, and only the last micro-batch is repeated.
    assert row["lost"] == 0 and 0 < row["doubled"] <= 200


SHUFFLED = """
def pipeline(spark, settings):
    servers = settings["BOOTSTRAP_SERVERS"]
    rows = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
    rows = rows.option("subscribe", settings["SOURCE"]).option("startingOffsets", "earliest").load()
    writer = rows.select("key", "value").repartition(2).writeStream.format("kafka")
    writer = writer.option("kafka.bootstrap.servers", servers).option("topic", settings["TARGET"])
    return writer.option("checkpointLocation", settings["CHECKPOINT"]).start()
"""


@pytest.mark.behaviour("P7")
def test_a_task_fails_that_writes_rows_behind_a_shuffle(
    monkeypatch: pytest.MonkeyPatch, connector_jar_files: list[str], tmp_path: Path
) -> None:
    """R1471: only tasks that read the source failed, so that a sink that is at-least-once was clean."""
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    work, conf = str(tmp_path / "work"), "spark.jars=" + ",".join(connector_jar_files)
    options = ("--cells", "task-fails", "--work-dir", work, "--conf", conf)
    outcome = trial(monkeypatch, str(tmp_path / "shuffled.py"), *options)
    row = only_row(outcome)
    assert (outcome.code, row["verdict"], row["happened"]) == (3, "violated", "yes"), outcome
    assert row["lost"] == 0 and row["doubled"] > 0


IN_A_FUNCTION = """
import sqlite3
from contextlib import closing


def pipeline(spark, settings):
    file = settings["TARGET"]
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS rows (id TEXT, batch INTEGER)")

    def write(batch, number):
        with closing(sqlite3.connect(file, timeout=60)) as database, database:
            database.execute("DELETE FROM rows WHERE batch = ?", (number,))

        def insert(rows):
            with closing(sqlite3.connect(file, timeout=60, isolation_level=None)) as database:
                for row in rows:
                    database.execute("INSERT INTO rows VALUES (?, ?)", (row.id, number))

        batch.repartition(2).foreachPartition(insert)

    servers = settings["BOOTSTRAP_SERVERS"]
    rows = spark.readStream.format("oncelog").option("kafka.bootstrap.servers", servers)
    rows = rows.option("subscribe", settings["SOURCE"]).option("startingOffsets", "earliest").load()
    writer = rows.selectExpr("CAST(key AS STRING) AS id").writeStream.foreachBatch(write)
    return writer.option("checkpointLocation", settings["CHECKPOINT"]).start()
"""


@pytest.mark.behaviour("P7")
def test_a_task_fails_that_writes_rows_in_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """R1522: only tasks that read the source failed, so that rows of a repeated task were not doubled."""
    (tmp_path / "function.py").write_text(IN_A_FUNCTION)
    options = ("--target", "sqlite", "--cells", "task-fails", "--work-dir", str(tmp_path / "work"))
    outcome = trial(monkeypatch, str(tmp_path / "function.py"), *options)
    row = only_row(outcome)
    assert (outcome.code, row["verdict"], row["happened"]) == (3, "violated", "yes"), outcome
    assert row["lost"] == 0 and row["doubled"] > 0


AT_THE_END = """
import sqlite3
from contextlib import closing


def pipeline(spark, settings):
    file = settings["TARGET"]
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS rows (id TEXT, batch INTEGER)")

    def store(ids, number):
        with closing(sqlite3.connect(file, timeout=60)) as database, database:
            database.executemany("INSERT INTO rows VALUES (?, ?)", [(row_id, number) for row_id in ids])

    def write(batch, number):
        with closing(sqlite3.connect(file, timeout=60)) as database, database:
            database.execute("DELETE FROM rows WHERE batch = ?", (number,))
        if settings["WRITES"] == "partitions":
            batch.foreachPartition(lambda rows: store([row.id for row in rows], number))
        else:
            groups = batch.groupBy(batch.id.cast("int") % 10)
            insert = lambda key, rows: store(rows["id"], number) or rows[:0]
            groups.applyInPandas(insert, "id string").count()

    servers = settings["BOOTSTRAP_SERVERS"]
    rows = spark.readStream.format("oncelog").option("kafka.bootstrap.servers", servers)
    rows = rows.option("subscribe", settings["SOURCE"]).option("startingOffsets", "earliest").load()
    writer = rows.selectExpr("CAST(key AS STRING) AS id").writeStream.foreachBatch(write)
    return writer.option("checkpointLocation", settings["CHECKPOINT"]).start()
"""


NOTED = """
import sqlite3
from contextlib import closing


def pipeline(spark, settings):
    file, is_together = settings["TARGET"], settings["TOGETHER"] == "yes"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS rows (id TEXT)")
        database.execute("CREATE TABLE IF NOT EXISTS batches (batch INTEGER PRIMARY KEY)")

    def write(batch, number):
        rows = [tuple(row) for row in batch.collect()]
        with closing(sqlite3.connect(file)) as database:
            if database.execute("SELECT 1 FROM batches WHERE batch = ?", (number,)).fetchone():
                return
            database.execute("INSERT INTO batches VALUES (?)", (number,))
            if not is_together:
                database.commit()
            database.executemany("INSERT INTO rows VALUES (?)", rows)
            database.commit()

    servers = settings["BOOTSTRAP_SERVERS"]
    rows = spark.readStream.format("oncelog").option("kafka.bootstrap.servers", servers)
    rows = rows.option("subscribe", settings["SOURCE"]).option("startingOffsets", "earliest").load()
    writer = rows.selectExpr("CAST(key AS STRING) AS id").writeStream.foreachBatch(write)
    return writer.option("checkpointLocation", settings["CHECKPOINT"]).start()
"""


@pytest.mark.behaviour("P7")
@pytest.mark.parametrize("writes", ["partitions", "groups"])
def test_a_task_fails_after_a_function_that_writes_at_its_end(
    writes: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R1580: a task failed only in the middle of its rows, before such a function writes any."""
    (tmp_path / "end.py").write_text(AT_THE_END)
    options = ("--target", "sqlite", "--cells", "task-fails", "--work-dir", str(tmp_path / "work"))
    outcome = trial(monkeypatch, str(tmp_path / "end.py"), *options, "--set", f"WRITES={writes}")
    row = only_row(outcome)
    assert (outcome.code, row["verdict"], row["happened"]) == (3, "violated", "yes"), outcome
    assert row["lost"] == 0 and row["doubled"] > 0


@pytest.mark.behaviour("P7")
@pytest.mark.parametrize(("together", "code"), [("no", 3), ("yes", 0)])
def test_a_driver_is_killed_at_the_line_that_writes(
    together: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R1581: no cell killed the driver between the note of a micro-batch and its rows."""
    (tmp_path / "noted.py").write_text(NOTED)
    options = ("--target", "sqlite", "--cells", "driver-at-write", "--work-dir", str(tmp_path / "work"))
    outcome = trial(monkeypatch, str(tmp_path / "noted.py"), *options, "--set", f"TOGETHER={together}")
    row = only_row(outcome)
    assert (outcome.code, row["happened"]) == (code, "yes"), outcome
    assert (row["lost"] > 0, row["doubled"]) == (code == 3, 0)


@pytest.mark.behaviour("P7")
def test_an_executor_that_is_killed_loses_and_doubles_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    work, file = tmp_path / "work", str(EXAMPLES / "to_topic.py")
    outcome = trial(monkeypatch, file, "--cells", "executor-killed", "--work-dir", str(work))
    row = only_row(outcome)
    assert (outcome.code, row["verdict"], row["happened"]) == (0, "clean", "yes"), outcome
    # Spark has replaced the killed executor: the logs of three are in the trial's directory.
    logs = list((work / "executor-killed" / "spark" / "work").glob("app-*/*/stderr"))
    assert len(logs) == 3


@pytest.fixture
def spark_cluster(tmp_path: Path) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path / "spark", workers=2) as cluster:
        yield cluster


@pytest.mark.behaviour("P7")
def test_a_standalone_cluster_whose_executor_and_driver_are_killed_loses_and_doubles_nothing(
    monkeypatch: pytest.MonkeyPatch, spark_cluster: SparkCluster, tmp_path: Path
) -> None:
    work, file = tmp_path / "work", str(EXAMPLES / "to_topic.py")
    options = ("--master", spark_cluster.master_url, "--work-dir", str(work))
    outcome = trial(monkeypatch, file, "--cells", "executor-killed,driver-in-write", *options)
    assert outcome.code == 0, outcome
    rows = json.loads(outcome.out)
    assert [(row["verdict"], row["happened"], row["found"]) for row in rows] == [("clean", "yes", 400)] * 2
    assert rows[0]["facts"]["master"] == "spark://"
    # Two executors for each driver, and one in the place of the killed one.
    logs = list((tmp_path / "spark").glob(str(Path("worker-*", "work", "app-*", "*", "stderr"))))
    assert len(logs) >= 3


@pytest.fixture
def restartable_cluster(tmp_path: Path) -> Iterator[Path]:
    """Start a cluster whose worker may be started again by others, and return its directory."""
    directory = tmp_path / "spark"
    try:
        cluster_state.start_spark(directory, workers=2, cores=1, memory_mb=1024, outlive_parent=False)
        yield directory
    finally:
        cluster_state.stop(directory)


@pytest.mark.behaviour("P7")
def test_a_spark_worker_that_is_killed_and_started_again_loses_and_doubles_nothing(
    monkeypatch: pytest.MonkeyPatch, restartable_cluster: Path, tmp_path: Path
) -> None:
    work, file = tmp_path / "work", str(EXAMPLES / "to_topic.py")
    before = cluster_state.find(restartable_cluster)
    master = f"spark://127.0.0.1:{before[0].port}"
    options = ("--cells", "spark-worker-killed", "--master", master, "--work-dir", str(work))
    row = only_row(outcome := trial(monkeypatch, file, *options))
    assert (outcome.code, row["verdict"], row["happened"], row["found"]) == (0, "clean", "yes", 400), outcome
    after = cluster_state.find(restartable_cluster)
    assert [node.name for node in after if node.is_running] == ["master", "worker-1", "worker-2"]
    assert len({node.pid for node in before} & {node.pid for node in after}) == 2


@pytest.mark.behaviour("P7")
@pytest.mark.behaviour("P9")
def test_a_database_is_clean_when_a_commit_of_spark_is_lost(
    monkeypatch: pytest.MonkeyPatch, postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    file, work = str(ROOT / "examples" / "pipelines" / "to_postgresql.py"), str(tmp_path / "work")
    options = ("--target", "postgresql", "--database", postgresql.url, "--cells", "commit-lost")
    outcome = trial(monkeypatch, file, *options, "--work-dir", work)
    row = only_row(outcome)
    assert (outcome.code, row["verdict"], row["happened"]) == (0, "clean", "yes"), outcome
    assert row["found"] == 400


@pytest.mark.behaviour("P7")
def test_jdbc_in_foreach_batch_doubles_a_micro_batch_whose_commit_is_lost(
    monkeypatch: pytest.MonkeyPatch, postgresql: PostgresqlServer, postgresql_jar: str, tmp_path: Path
) -> None:
    file, work = str(EXAMPLES / "to_jdbc.py"), str(tmp_path / "work")
    options = ("--target", "postgresql", "--database", postgresql.url, "--cells", "commit-lost")
    conf = ("--conf", f"spark.jars={postgresql_jar}")
    outcome = trial(monkeypatch, file, *options, *conf, "--work-dir", work)
    row = only_row(outcome)
    assert (outcome.code, row["verdict"], row["happened"]) == (3, "violated", "yes"), outcome
    assert row["lost"] == 0 and 0 < row["doubled"] <= 200
