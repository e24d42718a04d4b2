"""A batch write whose shuffle files are lost in the middle, as a program of its own.

    python -m support.spark.shuffle_program MASTER SERVERS TOPIC DIRECTORY PLAN

Files in DIRECTORY tell how far it is.
"""

from __future__ import annotations

import random
import sys
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from support.wait import wait_until

ROWS, MAP_TASKS, TASKS = 600, 4, 6
PATIENCE_S = 300
GO_ON = "go-on"


def deal(batches: Iterable[pa.RecordBatch], *, directory: str, by_chance: bool) -> Iterator[pa.RecordBatch]:
    """Choose a lane for each row: by its number, or by chance and so otherwise in a second execution."""
    (Path(directory) / f"dealt-{uuid.uuid4()}").touch()
    for batch in batches:
        numbers = batch["id"].to_pylist()
        lanes = [random.randrange(1000) if by_chance else number for number in numbers]
        values = [b"%d" % number for number in numbers]
        yield pa.RecordBatch.from_pydict({"value": pa.array(values), "lane": pa.array(lanes, pa.int64())})


def wait_for_word(batches: Iterable[pa.RecordBatch], *, directory: str) -> Iterator[pa.RecordBatch]:
    """Hold all lanes but the first two back until the test says so."""
    from pyspark import TaskContext

    lane = TaskContext.get().partitionId()
    (Path(directory) / f"begun-{lane}").touch()
    if lane > 1:
        wait_until((Path(directory) / GO_ON).exists, PATIENCE_S)
    yield from batches


def main(master: str, servers: str, topic: str, directory: str, plan: str) -> None:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
    dealt = spark.range(0, ROWS, 1, MAP_TASKS).mapInArrow(
        partial(deal, directory=directory, by_chance=plan == "chance"), "value binary, lane bigint"
    )
    held = dealt.repartition(TASKS, "lane").mapInArrow(
        partial(wait_for_word, directory=directory), "value binary, lane bigint"
    )
    writer = held.select("value").write.format("oncelog").mode("append")
    writer.options(**{"kafka.bootstrap.servers": servers, "topic": topic, "writeId": plan}).save()


if __name__ == "__main__":
    main(*sys.argv[1:])
