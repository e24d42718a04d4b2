"""examples/pipelines/enrich.py as a program of its own, the orders it is given, and what must come out.

`python -m support.spark.enrich_cluster` runs it with a transaction per micro-batch instead of one per lane.
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
    """The values that must be in the target topic."""
    enriched = (each | CUSTOMERS.get(each["customer"], {}) for each in map(order, range(count)))
    return Counter(json.dumps(each, separators=(",", ":")).encode() for each in enriched)


def read_values(servers: str, topic: str) -> Counter[bytes]:
    """The committed values of a topic, and how often each is there."""
    found: Counter[bytes] = Counter()
    with Consumer({"bootstrap.servers": servers}) as consumer:
        places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        wait_for_markers(servers, places, consumer)
        for at, end in consumer.end_offsets(places).items():
            for batch in consumer.fetch_range(at, 0, end):
                found.update(batch["value"].to_pylist())
    return found


def launch_forward(
    directory: Path, master: str, servers: str, source: str, target: str, *options: str
) -> subprocess.Popen[bytes]:
    """The example, its checkpoint and its output (`log`) in `directory`.

    `options`: --follow (go on until stopped), --atomic (a transaction per micro-batch).
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
    """The example's frame, and `write_atomic`."""
    from pyspark.sql import SparkSession

    from oncelog.spark import write_atomic

    spec = importlib.util.spec_from_file_location("enrich", EXAMPLE)
    assert spec and spec.loader
    enrich = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(enrich)
    told = {"kafka.bootstrap.servers": os.environ["BOOTSTRAP_SERVERS"], "topic": os.environ["TARGET"]}

    def write(batch: Any, batch_id: int) -> None:
        write_atomic(batch, batch_id, told)

    frame = enrich.enriched(SparkSession.builder.getOrCreate(), os.environ)
    writer = frame.writeStream.foreachBatch(write).option("checkpointLocation", os.environ["CHECKPOINT"])
    trigger = os.environ["TRIGGER"]
    is_once = trigger == "availableNow"
    writer = writer.trigger(availableNow=True) if is_once else writer.trigger(processingTime=trigger)
    writer.start().awaitTermination()


if __name__ == "__main__":
    enrich_atomically()
