"""examples/pipelines/enrich.py in its own process, with the orders that it gets and the expected result.

`python -m support.spark.enrich_cluster` runs the example with a transaction per micro-batch instead of one
per task.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from oncelog import Admin, Consumer, NewTopic, Producer, TopicPartition
from support import ROOT, TESTS
from support.spark.worker_python import spark_python
from support.topics import wait_for_markers

EXAMPLE = ROOT / "examples" / "pipelines" / "enrich.py"
PARTITIONS = 3
MAX_OFFSETS = 20_000
SUBMIT = "--driver-memory 512m --conf spark.executor.memory=512m --conf spark.ui.enabled=false pyspark-shell"
CUSTOMERS = {"c0": {"name": "Ann", "country": "SE"}, "c1": {"name": "Bob", "country": "FR"}}


def create_topics(servers: str, *names: str, replicas: int = 1) -> None:
    configs = {"min.insync.replicas": replicas - 1} if replicas > 1 else {}
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topics([NewTopic(name, PARTITIONS, replicas, configs) for name in names])


def order(number: int) -> dict[str, Any]:
    return {"id": str(number), "customer": f"c{number % 3}", "cents": number * 7}


def send_orders(producer: Producer, topic: str, numbers: range) -> None:
    for number in numbers:
        producer.send(topic, json.dumps(order(number)).encode(), key=b"%d" % number)


def expected(count: int) -> Counter[bytes]:
    """Return the values that the target topic must contain."""
    enriched = (row | CUSTOMERS.get(row["customer"], {}) for row in map(order, range(count)))
    return Counter(json.dumps(row, separators=(",", ":")).encode() for row in enriched)


def read_values(servers: str, topic: str) -> Counter[bytes]:
    """Return the committed values of a topic, each with the number of its records."""
    values: Counter[bytes] = Counter()
    with Consumer({"bootstrap.servers": servers}) as consumer:
        tps = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        wait_for_markers(servers, tps, consumer)
        for tp, end in consumer.end_offsets(tps).items():
            for batch in consumer.fetch_range(tp, 0, end):
                values.update(batch["value"].to_pylist())
    return values


def launch_forward(
    directory: Path, master: str, servers: str, source: str, target: str, *options: str
) -> subprocess.Popen[bytes]:
    """Start the example with its checkpoint and its output (`log`) in `directory`.

    `options`: --follow (run until stopped), --atomic (a transaction per micro-batch).
    """
    customers = directory / "customers.csv"
    rows = (f"{key},{known['name']},{known['country']}\n" for key, known in CUSTOMERS.items())
    customers.write_text("customer,name,country\n" + "".join(rows))
    environment = {
        **os.environ,
        "PYTHONPATH": str(TESTS),
        "PYSPARK_PYTHON": spark_python(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": f"--master {master} {SUBMIT}",
        "BOOTSTRAP_SERVERS": servers,
        "SOURCE": source,
        "TARGET": target,
        "CUSTOMERS": str(customers),
        "CHECKPOINT": str(directory / "checkpoint"),
        "MAX_OFFSETS": str(MAX_OFFSETS),
        "TRIGGER": "1 second" if "--follow" in options else "availableNow",
    }
    program = ["-m", "support.spark.enrich_cluster"] if "--atomic" in options else [str(EXAMPLE)]
    with (directory / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, *program], env=environment, stdout=log, stderr=log)


def enrich_atomically() -> None:
    """Write the rows of the example with `write_atomic`."""
    from pyspark.sql import SparkSession

    from oncelog.spark import write_atomic

    spec = importlib.util.spec_from_file_location("enrich", EXAMPLE)
    assert spec and spec.loader
    enrich = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(enrich)
    options = {"kafka.bootstrap.servers": os.environ["BOOTSTRAP_SERVERS"], "topic": os.environ["TARGET"]}

    def write(batch: Any, batch_id: int) -> None:
        write_atomic(batch, batch_id, options)

    frame = enrich.enriched(SparkSession.builder.getOrCreate(), os.environ)
    writer = frame.writeStream.foreachBatch(write).option("checkpointLocation", os.environ["CHECKPOINT"])
    trigger = os.environ["TRIGGER"]
    is_once = trigger == "availableNow"
    writer = writer.trigger(availableNow=True) if is_once else writer.trigger(processingTime=trigger)
    writer.start().awaitTermination()


if __name__ == "__main__":
    enrich_atomically()
