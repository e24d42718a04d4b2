"""examples/spark_forward.py as a program of its own, the orders it is given, and what must come out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from helpers_producer import wait_for_markers

from oncelog import Admin, Consumer, NewTopic, Producer, TopicPartition

ROOT = Path(__file__).parents[1]
PARTITIONS = 3
SUBMIT = "--driver-memory 512m --conf spark.executor.memory=512m --conf spark.ui.enabled=false pyspark-shell"


def create_topics(servers: str, *names: str, replicas: int = 1) -> None:
    configs = {"min.insync.replicas": replicas - 1} if replicas > 1 else {}
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topics([NewTopic(name, PARTITIONS, replicas, configs) for name in names])


def order(number: int) -> dict[str, Any]:
    return {"id": number, "cents": number * 7}


def send_orders(producer: Producer, topic: str, numbers: range) -> None:
    for number in numbers:
        producer.send(topic, json.dumps(order(number)).encode(), key=b"%d" % number)


def expected(count: int) -> Counter[bytes]:
    """The values that must be in the target topic."""
    orders = map(order, range(count))
    taxed = ({**each, "tax": each["cents"] * 19 // 100} for each in orders)
    return Counter(json.dumps(each, separators=(",", ":")).encode() for each in taxed)


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
    """The example, its checkpoint and its output (`log`) in `directory`."""
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": SUBMIT,
    }
    command = [sys.executable, str(ROOT / "examples" / "spark_forward.py"), source, target]
    command += [str(directory / "checkpoint"), "--master", master, "--bootstrap-server", servers, *options]
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)
