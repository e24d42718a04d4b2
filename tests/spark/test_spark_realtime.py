"""A query in Spark's real-time mode, with Spark's own Kafka sink, is killed. Provenance finds the repeated
records, and they are dropped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.spark.topics import create_topic
from support.topics import producer_of
from support.wait import wait_until

import oncelog
from oncelog import Consumer, ProvenanceFilter, TopicPartition
from oncelog.audit.result import ProvenanceTotals
from oncelog.local_audit import audit_topic

pytestmark = [
    pytest.mark.spark,
    pytest.mark.behaviour("P11"),
    pytest.mark.timeout(900),
    pytest.mark.full("Spark's own Kafka connector, and drivers in processes of their own"),
]

TESTS = Path(__file__).parents[1]
PATIENCE_S = 240.0
PARTITIONS = 3


@contextmanager
def driver(options: dict[str, object], log: Path) -> Iterator[None]:
    """Run a driver in another process. At the end, kill the driver and its JVM."""
    command = [sys.executable, "-m", "support.spark.realtime_program", json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "SPARK_LOCAL_IP": "127.0.0.1"}
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        yield
        assert process.poll() is None, log.read_text()[-2000:]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write(servers: str, topic: str, first: int, end: int) -> None:
    with producer_of(servers) as producer:
        for n in range(first, end):
            producer.send(topic, b"%d" % n, key=b"k%d" % (n % 97))


def distinct_values(servers: str, tps: list[TopicPartition]) -> list[int]:
    distinct = ProvenanceFilter()
    values = []
    with Consumer({"bootstrap.servers": servers, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign(tps)
        ends = consumer.end_offsets(tps)
        for tp in tps:
            distinct.start(tp)
        while any(distinct.committable(tp).offset < ends[tp] for tp in tps):
            values += [int(record.value) for record in consumer.poll() if distinct.accept(record)]
    return sorted(values)


def test_repetitions_after_kills_of_the_driver_are_dropped_by_provenance(
    shared_broker: oncelog.Broker, topic: str, connector_jar_files: list[str], tmp_path: Path
) -> None:
    servers, target = shared_broker.bootstrap_servers, f"{topic}-target"
    for name in (topic, target):
        create_topic(servers, name, partitions=PARTITIONS)
    options = {"bootstrap": servers, "source": topic, "target": target}
    options |= {"checkpoint": str(tmp_path / "checkpoint"), "jars": connector_jar_files}
    tps = [TopicPartition(target, partition) for partition in range(PARTITIONS)]

    log = tmp_path / "driver.log"
    written = copies = 0
    with Consumer({"bootstrap.servers": servers}) as consumer:

        def is_copied() -> bool:
            return sum(consumer.end_offsets(tps).values()) >= copies

        for count in (1000, 500, 300):
            write(servers, topic, written, written + count)
            written += count
            copies += written
            with driver(options, log):
                wait_until(is_copied, PATIENCE_S, what=lambda: log.read_text()[-2000:])
    assert (written, copies) == (1800, 4300)
    result = audit_topic(servers, target, distinct="provenance")
    assert result.provenance == ProvenanceTotals(4300, 1800, 2500, 0, 0, 0, 0)
    assert result.provenance.is_filter_exact and result.finding_count == 2500
    assert {finding.kind for finding in result.findings} == {"repeated_record"}
    assert distinct_values(servers, tps) == list(range(1800))
