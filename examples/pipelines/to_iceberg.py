r"""Append the records of a topic to an Iceberg table, each once. Needs: pip install 'pyiceberg[sql-sqlite]'

    oncelog pipeline run to_iceberg.py --set SOURCE=orders --set TABLE=lake.orders \
        --set CHECKPOINT=/var/lib/orders

The table is in the default catalog of pyiceberg's configuration (PYICEBERG_CATALOG__DEFAULT__URI=...).
`oncelog audit orders --table iceberg:lake.orders` proves that each committed record has one row. Settings
come from --set, then from the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table
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
NO_RETRY = {"commit.retry.num-retries": "0"}


def append(target: Table, rows: pa.Table) -> None:
    """Append the rows that the table does not have yet.

    The commit that adds rows also sets a table property to the last offset of each partition. A partition is
    read in order, so rows up to that offset are in the table: from a repeated micro-batch, or from another
    checkpoint. The snapshot's summary has the offsets that it added, for people.
    """
    if NO_RETRY.items() - target.properties.items():
        # If pyiceberg repeated a commit after another writer's commit, it would ignore that writer's offsets.
        raise ValueError(f"the table needs the property {NO_RETRY}")
    newest, added = {}, {}
    offsets = [("offset", "min"), ("offset", "max")]
    for part in rows.group_by(["topic", "partition"]).aggregate(offsets).to_pylist():
        name = f"kafka.offset.{part['topic']}-{part['partition']}"
        last = int(target.properties.get(name, -1))
        if part["offset_min"] <= last:  # a filter copies all rows
            is_part = (pc.field("topic") == part["topic"]) & (pc.field("partition") == part["partition"])
            rows = rows.filter(~(is_part & (pc.field("offset") <= last)))
        if last < part["offset_max"]:
            newest[name] = str(part["offset_max"])
            added[f"{part['topic']}-{part['partition']}"] = [last + 1, part["offset_max"]]
    if rows.num_rows:
        with target.transaction() as transaction:
            transaction.set_properties(newest)
            transaction.append(rows, snapshot_properties={"kafka.offsets": json.dumps(added)})


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    catalog, name = load_catalog(), settings["TABLE"]
    if not catalog.table_exists(name):  # creating an existing table would leave a metadata file
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        catalog.create_table_if_not_exists(name, COLUMNS, properties=NO_RETRY)

    def write(batch: DataFrame, _batch_id: int) -> None:
        # The driver has the micro-batch in memory: MAX_OFFSETS bounds it.
        append(catalog.load_table(name), batch.select(COLUMNS.names).toArrow().cast(COLUMNS))

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
