r"""Append the records of a topic to a PostgreSQL table, each once. Needs: pip install adbc-driver-postgresql

    oncelog pipeline run to_postgresql.py --set SOURCE=orders --set TARGET=postgresql://127.0.0.1:5432/shop \
        --set TABLE=orders --set CHECKPOINT=/var/lib/orders

TARGET may also be a JDBC URL. Keep the password in ~/.pgpass. `oncelog audit orders --table
"jdbc:postgresql://127.0.0.1:5432/shop?table=orders"` proves that each committed record has one row.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_postgresql import dbapi
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

COLUMNS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
    ]
)
TABLES = (
    'CREATE TABLE IF NOT EXISTS {table} (topic text, "partition" int, "offset" bigint, '
    '"timestamp" timestamptz, key bytea, value bytea)',
    'CREATE TABLE IF NOT EXISTS {table}_offsets (topic text, "partition" int, last_offset bigint, '
    'batch_id bigint, PRIMARY KEY (topic, "partition"))',
)
SET_OFFSETS = (
    'INSERT INTO {table}_offsets VALUES ($1, $2, $3, $4) ON CONFLICT (topic, "partition") DO UPDATE '
    "SET last_offset = excluded.last_offset, batch_id = excluded.batch_id"
)


def append(connection: dbapi.Connection, table: str, rows: pa.Table, batch_id: int) -> None:
    """Append the rows that the table does not have yet.

    The transaction that adds rows also stores the last offset and micro-batch of each partition. Partitions
    are read in order, so rows up to it are in the table. The lock makes a second driver wait for the first.
    """
    added = []
    with connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {table}_offsets IN SHARE ROW EXCLUSIVE MODE")
        cursor.execute(f'SELECT topic, "partition", last_offset FROM {table}_offsets')
        offsets = {(topic, partition): offset for topic, partition, offset in cursor.fetchall()}
        ranges = [("offset", "min"), ("offset", "max")]
        for part in rows.group_by(["topic", "partition"]).aggregate(ranges).to_pylist():
            last = offsets.get((part["topic"], part["partition"]), -1)
            if part["offset_min"] <= last:  # a filter copies all rows
                is_part = (pc.field("topic") == part["topic"]) & (pc.field("partition") == part["partition"])
                rows = rows.filter(~(is_part & (pc.field("offset") <= last)))
            if last < part["offset_max"]:
                added.append((part["topic"], part["partition"], part["offset_max"], batch_id))
        if rows.num_rows:
            schema, _, name = table.rpartition(".")
            cursor.adbc_ingest(name, rows, mode="append", db_schema_name=schema or None)
            cursor.executemany(SET_OFFSETS.format(table=table), added)
    connection.commit()


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    uri, table = settings["TARGET"].removeprefix("jdbc:"), settings["TABLE"]
    with dbapi.connect(uri, autocommit=True) as connection, connection.cursor() as cursor:
        for text in TABLES:
            cursor.execute(text.format(table=table))

    def write(batch: DataFrame, batch_id: int) -> None:
        # The driver has the micro-batch in memory: MAX_OFFSETS bounds it.
        with dbapi.connect(uri) as connection:
            append(connection, table, batch.select(COLUMNS.names).toArrow().cast(COLUMNS), batch_id)

    return (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", settings.get("BOOTSTRAP_SERVERS", "127.0.0.1:9092"))
        .option("subscribe", settings["SOURCE"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", settings.get("MAX_OFFSETS", "100000"))
        .load()
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", settings["CHECKPOINT"])
        .trigger(processingTime=settings.get("TRIGGER", "1 second"))
        .start()
    )


if __name__ == "__main__":
    pipeline(SparkSession.builder.getOrCreate(), os.environ).awaitTermination()
