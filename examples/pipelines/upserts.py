r"""Keep the newest state of every account in a Delta Lake table. Needs: pip install deltalake

    oncelog pipeline run upserts.py --set SOURCE=changes --set TABLE=/data/accounts \
        --set CHECKPOINT=/var/lib/accounts

A change is a record whose key is the account, so that the changes of an account are in one partition, in
order. Its value is a JSON object with owner and cents, or null for a deleted account. Settings come from
--set, then from the environment. Without the supervisor: SOURCE=changes ... spark-submit upserts.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

STATE = "owner string, cents bigint"
COLUMNS = pa.schema([("account", pa.string()), ("owner", pa.string()), ("cents", pa.int64())])


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    table = settings["TABLE"]
    DeltaTable.create(table, COLUMNS, mode="ignore")

    def upsert(batch: DataFrame, batch_id: int) -> None:
        # The commit that changes the table also stores the last batch of this query. So a repeated batch,
        # whatever was killed, changes nothing twice. A new checkpoint is a new query.
        query_id = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        target = DeltaTable(table)
        last = target.transaction_version(query_id)
        if last is not None and last >= batch_id:
            return
        changes = (
            batch.groupBy(f.col("key").cast("string").alias("account"))
            .agg(f.max_by("value", "offset").cast("string").alias("value"))
            .select("account", f.from_json("value", STATE).alias("new"), f.isnull("value").alias("is_gone"))
            .select("account", "new.*", "is_gone")
        )
        (
            target.merge(  # in the driver's memory, so MAX_OFFSETS limits the rows
                changes.toArrow(),
                "old.account = new.account",
                source_alias="new",
                target_alias="old",
                commit_properties=CommitProperties(app_transactions=[Transaction(query_id, batch_id)]),
            )
            .when_matched_delete("new.is_gone")
            .when_matched_update({"owner": "new.owner", "cents": "new.cents"})
            .when_not_matched_insert(
                {"account": "new.account", "owner": "new.owner", "cents": "new.cents"}, "NOT new.is_gone"
            )
            .execute()
        )

    return (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", settings.get("BOOTSTRAP_SERVERS", "127.0.0.1:9092"))
        .option("subscribe", settings["SOURCE"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", settings.get("MAX_OFFSETS", "100000"))
        .load()
        .writeStream.foreachBatch(upsert)
        .option("checkpointLocation", settings["CHECKPOINT"])
        .trigger(processingTime=settings.get("TRIGGER", "1 second"))
        .start()
    )


if __name__ == "__main__":
    pipeline(SparkSession.builder.getOrCreate(), os.environ).awaitTermination()
