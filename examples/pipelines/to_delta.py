r"""Append the records of a topic to a Delta Lake table, each once. Needs: pip install deltalake

    oncelog pipeline run to_delta.py --set SOURCE=orders --set TABLE=/data/orders \
        --set CHECKPOINT=/var/lib/orders

`oncelog audit orders --table delta:/data/orders` proves that each committed record has one row. Settings come
from --set, then from the environment. Without the supervisor: SOURCE=orders ... spark-submit to_delta.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
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


def append(target: DeltaTable, rows: pa.Table) -> None:
    """Append the rows that the table does not have yet.

    The commit that adds rows also stores the last offset of each partition, as a `txn` action. A partition is
    read in order, so rows up to that offset are in the table: from a repeated micro-batch, or from another
    checkpoint. If two drivers add rows of one partition at once, Delta refuses the second commit.
    """
    transactions = []
    offsets = [("offset", "min"), ("offset", "max")]
    for part in rows.group_by(["topic", "partition"]).aggregate(offsets).to_pylist():
        name = f"{part['topic']}-{part['partition']}"
        last = target.transaction_version(name)
        if last is not None and part["offset_min"] <= last:  # a filter copies all rows
            is_part = (pc.field("topic") == part["topic"]) & (pc.field("partition") == part["partition"])
            rows = rows.filter(~(is_part & (pc.field("offset") <= last)))
        if last is None or last < part["offset_max"]:
            transactions.append(Transaction(name, part["offset_max"]))
    if rows.num_rows:
        properties = CommitProperties(app_transactions=transactions)
        write_deltalake(target, rows, mode="append", commit_properties=properties)


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    table = settings["TABLE"]
    DeltaTable.create(table, COLUMNS, mode="ignore")

    def write(batch: DataFrame, _batch_id: int) -> None:
        # The driver has the micro-batch in memory: MAX_OFFSETS bounds it.
        append(DeltaTable(table), batch.select(COLUMNS.names).toArrow().cast(COLUMNS))

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
