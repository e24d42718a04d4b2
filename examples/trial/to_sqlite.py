"""Insert a topic into a table of SQLite through foreachBatch, at least once.

oncelog trial examples/trial/to_sqlite.py --target sqlite

With REMEMBER=yes the transaction that inserts the rows also stores the micro-batch, so a repeated micro-batch
adds nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    file, remembers = settings["TARGET"], settings.get("REMEMBER") == "yes"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT, value TEXT)")
        database.execute("CREATE TABLE IF NOT EXISTS batches (batch INTEGER PRIMARY KEY)")

    def insert(batch: DataFrame, batch_id: int) -> None:
        rows = [tuple(row) for row in batch.collect()]
        with closing(sqlite3.connect(file)) as database, database:
            if remembers:
                added = database.execute("INSERT OR IGNORE INTO batches VALUES (?)", (batch_id,))
                if added.rowcount == 0:
                    return
            database.executemany("INSERT INTO orders VALUES (?, ?)", rows)

    return (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", settings["BOOTSTRAP_SERVERS"])
        .option("subscribe", settings["SOURCE"])
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr("CAST(key AS STRING) AS id", "CAST(value AS STRING) AS value")
        .writeStream.foreachBatch(insert)
        .option("checkpointLocation", settings["CHECKPOINT"])
        .trigger(processingTime=settings.get("TRIGGER", "1 second"))
        .start()
    )
