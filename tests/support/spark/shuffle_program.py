"""A batch write that loses shuffle files halfway, in its own process.

    python -m support.spark.shuffle_program MASTER SERVERS TOPIC DIRECTORY PLAN

Files in DIRECTORY report its progress.
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
    """Choose a task for each row: by its number, or at random, so that a second execution chooses
    differently.
    """
    (Path(directory) / f"dealt-{uuid.uuid4()}").touch()
    for batch in batches:
        numbers = batch["id"].to_pylist()
        lanes = [random.randrange(1000) if by_chance else number for number in numbers]
        values = [b"%d" % number for number in numbers]
        yield pa.RecordBatch.from_pydict({"value": pa.array(values), "lane": pa.array(lanes, pa.int64())})


def wait_for_word(batches: Iterable[pa.RecordBatch], *, directory: str) -> Iterator[pa.RecordBatch]:
    """Block all tasks but the first two until the test lets them continue."""
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
        partial(deal, directory=directory, by_chance=plan != "number"), "value binary, lane bigint"
    )
    if plan == "chance-by-id":  # as write_atomic shuffles its rows
        shuffled = dealt.repartitionById(TASKS, (dealt["lane"] % TASKS).cast("int"))
    else:
        shuffled = dealt.repartition(TASKS, "lane")
    held = shuffled.mapInArrow(partial(wait_for_word, directory=directory), "value binary, lane bigint")
    writer = held.select("value").write.format("oncelog").mode("append")
    writer.options(**{"kafka.bootstrap.servers": servers, "topic": topic, "writeId": plan}).save()


if __name__ == "__main__":
    main(*sys.argv[1:])
