"""The streaming query that enriches flights. It is a separate program, so that its driver can be killed.

Run it as `python -m oncelog_demo.enriching JSON`, with the fields of `Job` as a JSON object. A second run
resumes from the checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from oncelog_demo.flights import (
    COLUMNS,
    ENRICHED_COLUMNS,
    Lookups,
    load_lookups,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TEXT = ("carrier", "tailnum", "origin", "dest")
VALUE_SCHEMA = ", ".join(f"{name} {'string' if name in _TEXT else 'bigint'}" for name in COLUMNS)


@dataclass(frozen=True, slots=True)
class Job:
    """The program's argument.

    `sink_options` contains `topic` and the kafka.* options, which both sinks accept.
    """

    bootstrap_servers: str
    source_topic: str
    rows_per_batch: int
    sink_format: str
    sink_options: Mapping[str, str]
    checkpoint: str

    def command(self) -> list[str]:
        """Return the command line that runs this job."""
        return [sys.executable, "-m", "oncelog_demo.enriching", json.dumps(asdict(self))]


def enrich(spark: SparkSession, records: DataFrame, lookups: Lookups) -> DataFrame:
    """Return columns key and value: each flight with its airline, destination airport and aircraft.

    All joins are left joins with small broadcast tables. So no record is dropped or moved to another
    partition.
    """
    from pyspark.sql import functions as f

    enriched = records.select("key", f.from_json(f.col("value").cast("string"), VALUE_SCHEMA).alias("flight"))
    enriched = enriched.select("key", "flight.*")
    for column, table in lookups.items():
        enriched = enriched.join(f.broadcast(spark.createDataFrame(table)), column, "left")
    return enriched.select("key", f.to_json(f.struct(*ENRICHED_COLUMNS)).alias("value"))


def run(job: Job) -> None:
    """Enrich all records now in the topic, in micro-batches of `rows_per_batch`."""
    from oncelog_devtools.spark_connector import add_connector

    from oncelog.spark.session import local_session

    # `local[2, 4]` allows four attempts per task, Spark's default on a cluster. With the default of local
    # mode, one attempt, Spark's own sink would fail on the faulty network.
    with local_session("oncelog demo: enriching", "local[2, 4]", is_short=True) as spark:
        if job.sink_format == "kafka":
            add_connector(spark)
        records = (
            spark.readStream.format("oncelog")
            .option("kafka.bootstrap.servers", job.bootstrap_servers)
            .option("subscribe", job.source_topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(job.rows_per_batch))
            .load()
        )
        query = (
            enrich(spark, records, load_lookups())
            .writeStream.format(job.sink_format)
            .options(**job.sink_options)
            .option("checkpointLocation", job.checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()


if __name__ == "__main__":
    run(Job(**json.loads(sys.argv[1])))
