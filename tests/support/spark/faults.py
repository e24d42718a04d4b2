"""Streaming queries with one fault per micro-batch, and the rows that each fault loses and doubles.

A query runs in legs. Each leg starts the program `support.spark.sink_program`, which meets the leg's faults.
The last fault of a leg kills the program. Rows are numbered, so each lost or doubled row belongs to a fault.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyspark
from oncelog_devtools.apache_kafka import ApacheKafka, free_ports

from oncelog import Consumer, TopicPartition
from oncelog.testing.proxy import Proxy, Rule
from support import TESTS
from support.spark.topics import create_topic, fill
from support.spark.worker_python import spark_python
from support.topics import wait_for_markers
from support.wait import attempts

SOURCE_PARTITIONS, TARGET_PARTITIONS = 2, 4
LANE_ROWS = 60
"""Number of rows that a micro-batch has in one partition of the source. They fill three Arrow batches."""
VALUE_BYTES = 200
PATIENCE_S = 1200.0

SINKS = {"lane": '`format("oncelog")`', "batch": "`write_atomic`", "kafka": "Spark's own sink"}
BROKERS = {"ours": "our broker", "apache": "Apache Kafka"}
CALM = "nothing"
FAULTS = {
    CALM: "no fault",
    "task raises": "the task raises in the middle of its rows",
    "worker": "the task's Python worker is killed in the middle of its rows",
    "executor": "the executor is killed in the middle of a task's rows",
    "driver before write": "the driver is killed, before the first row",
    "driver in write": "the driver is killed, one task done and one in the middle of its rows",
    "driver before commit": "the driver is killed, all tasks done",
    "driver in commit": "the driver is killed, the sink's commit done and Spark's not",
    "driver after commit": "the driver is killed, Spark's commit done",
    "speculation": "a task is overtaken by its speculated copy, and writes on",
    "query stopped": "`query.stop()` in the middle of a task's rows, and started again",
    "broker": "the broker is killed in the middle of a task's rows, and started again",
    "answers lost": "answers to what the sink sends are lost, their connections cut",
}


class Leg(NamedTuple):
    """A start of the program. `master` is local, cluster, or speculating (a cluster with speculation)."""

    master: str
    faults: tuple[str, ...]


LEGS = (
    Leg("local", (CALM, "driver before write")),
    Leg("local", ("driver in write",)),
    Leg("local", ("driver before commit",)),
    Leg("local", ("driver in commit",)),
    Leg("speculating", ("speculation", "driver after commit")),
    Leg("cluster", (CALM, "task raises", "worker", "executor", "query stopped", "broker", "answers lost")),
)
"""All legs with their faults. Each fault belongs to the micro-batch with the same number.

The micro-batch after "driver after commit" has no fault, because it shows the damage of that fault.
"""


@dataclass(frozen=True)
class Query:
    """A sink and a broker, by their keys in SINKS and BROKERS."""

    sink: str
    broker: str
    legs: tuple[Leg, ...] = LEGS

    @property
    def faults(self) -> list[str]:
        """The fault of each micro-batch."""
        return [fault for leg in self.legs for fault in leg.faults]

    @property
    def partition_rows(self) -> int:
        return LANE_ROWS * len(self.faults)

    def fault_of(self, number: int) -> str:
        """Return the fault of row `number`'s micro-batch.

        A micro-batch without a fault counts for the last fault before it, because it would show that fault's
        damage.
        """
        met = self.faults[: number % self.partition_rows // LANE_ROWS + 1]
        return next((fault for fault in reversed(met) if fault != CALM), CALM)

    def __str__(self) -> str:
        return f"{self.sink}-{self.broker}" + ("" if self.legs == LEGS else "-quick")


class Row(NamedTuple):
    """A stored row. `number` is its number in the source."""

    partition: int
    offset: int
    number: int


@dataclass(frozen=True)
class Outcome:
    """The result of a query: committed rows, all rows, and the files that its faults left."""

    query: Query
    servers: str
    topic: str
    rows: list[Row]
    all_rows: int
    files: Mapping[str, str]
    cuts: int

    def lost_and_doubled(self, fault: str) -> tuple[int, int]:
        """Return the number of rows of the fault's micro-batches that are missing, and the number stored
        again.
        """
        times = Counter(row.number for row in self.rows)
        wanted = [n for n in range(SOURCE_PARTITIONS * self.query.partition_rows)]
        mine = [times[n] for n in wanted if self.query.fault_of(n) == fault]
        return mine.count(0), sum(count - 1 for count in mine if count)

    @property
    def has_order(self) -> bool:
        """Return True if each target partition has the rows of each source partition in order.

        The streaming sink keeps this order. After a shuffle, no order is promised.
        """
        last: dict[tuple[int, int], int] = {}
        for row in sorted(self.rows):
            way = row.number // self.query.partition_rows, row.partition
            if last.get(way, -1) >= row.number:
                return False
            last[way] = row.number
        return True


class Killable(Protocol):
    """A broker that the test can kill."""

    @property
    def bootstrap_servers(self) -> str: ...


def run(query: Query, broker: Killable, directory: Path) -> Outcome:
    """Run the query with all its faults. Raises AssertionError with the end of Spark's log if it does not
    finish.
    """
    servers, topic = broker.bootstrap_servers, f"{query}.out"
    create_topic(servers, f"{query}.in", partitions=SOURCE_PARTITIONS)
    create_topic(servers, topic, partitions=TARGET_PARTITIONS)
    rows = query.partition_rows
    for partition in range(SOURCE_PARTITIONS):
        fill(servers, f"{query}.in", partition * rows, rows, partition, size_bytes=VALUE_BYTES)
    faults = directory / "faults"
    faults.mkdir(parents=True)
    options = {
        "sink": query.sink,
        "source": f"{query}.in",
        "topic": topic,
        "checkpoint": str(directory / "checkpoint"),
        "faults": str(faults),
        "rows": SOURCE_PARTITIONS * LANE_ROWS,
    }
    first = 0
    with Proxy(servers) as proxy:
        options["bootstrap"] = proxy.bootstrap_servers
        for leg in query.legs:
            plan = {str(first + n): fault for n, fault in enumerate(leg.faults)}
            first += len(plan)
            with _master(leg.master, directory) as conf:
                ended = _run_program({**options, "plan": plan, "conf": conf}, _on_broker(plan, broker, proxy))
            is_killed = leg.faults[-1].startswith("driver")
            log = (directory / "spark.log").read_text(errors="replace")[-6000:]
            assert ended == (-signal.SIGKILL if is_killed else 0), f"{leg} ended with {ended}:\n{log}"
        cuts = sum(event.fate == "cut" for event in proxy.events)
    found = _read(servers, topic, "read_committed")
    files = {path.name: path.read_text() for path in faults.iterdir()}
    return Outcome(query, servers, topic, found, len(_read(servers, topic, "read_uncommitted")), files, cuts)


def _run_program(options: Mapping[str, Any], on_broker: dict[str, Callable[[], None]]) -> int | None:
    """Run the program, and return its exit code.

    `on_broker` maps numbers of micro-batches to functions. A function is called when the program reports that
    batch's fault.
    """
    faults = Path(options["faults"])
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYSPARK_PYTHON": spark_python()}
    command = [sys.executable, "-m", "support.spark.sink_program", json.dumps(options)]
    with open(faults.parent / "spark.log", "ab") as log:
        program = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in attempts(lambda: f"{command} has not ended", PATIENCE_S, step_s=0.05):
            if (ended := program.poll()) is not None:
                return ended
            for number in [n for n in on_broker if (faults / f"happened-{n}").exists()]:
                on_broker.pop(number)()
                (faults / f"answered-{number}").touch()
    finally:
        program.kill()
        program.wait()


def _on_broker(plan: Mapping[str, str], broker: Any, proxy: Proxy) -> dict[str, Callable[[], None]]:
    def restart() -> None:
        node = broker.nodes[0] if isinstance(broker, ApacheKafka) else broker
        node.kill()
        node.start()

    def lose_answers() -> None:
        for api in (
            "Produce",
            "TxnOffsetCommit",
            "EndTxn",
            "AddOffsetsToTxn",
            "OffsetCommit",
            "InitProducerId",
        ):
            proxy.add(Rule(action="cut", api=api, nth=1))

    done = {"broker": restart, "answers lost": lose_answers}
    return {number: done[fault] for number, fault in plan.items() if fault in done}


def _read(servers: str, topic: str, isolation: str) -> list[Row]:
    tps = [TopicPartition(topic, n) for n in range(TARGET_PARTITIONS)]
    rows = []
    with Consumer({"bootstrap.servers": servers, "isolation.level": isolation}) as consumer:
        if isolation == "read_committed":
            wait_for_markers(servers, tps, consumer)
        for at, end in consumer.end_offsets(tps).items():
            for piece in consumer.fetch_range(at, 0, end):
                columns = (piece.column(name).to_pylist() for name in ("offset", "key", "value"))
                for offset, key, value in zip(*columns, strict=True):
                    number = int(key[1:])
                    assert value == (b"v%d" % number).ljust(VALUE_BYTES, b".")
                    rows.append(Row(at.partition, offset, number))
    return rows


# Spark masters

_LIGHT = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options that let these short-lived JVMs start fast."""
_CONF = {
    "spark.driver.extraJavaOptions": _LIGHT,
    "spark.executor.extraJavaOptions": _LIGHT,
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20",
    # A small buffer, so that rows before the fault are already on their way to the sink.
    "spark.buffer.size": "1024",
    "spark.python.task.killTimeout": "10s",
}
_SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1",
    "spark.speculation.minTaskRuntime": "2s",
}


@contextmanager
def _master(kind: str, directory: Path) -> Iterator[dict[str, str]]:
    if kind == "local":
        yield {**_CONF, "spark.master": "local[2,4]"}
        return
    with _cluster(directory) as master:
        yield {**_CONF, "spark.master": master, **(_SPECULATION if kind == "speculating" else {})}


@contextmanager
def _cluster(directory: Path) -> Iterator[str]:
    """Start a master and two workers with a core each.

    Spark starts a speculative copy only on another host, so the workers have two host names.
    """
    home = Path(pyspark.__file__).parent
    port, *pages = free_ports(4)
    master = f"spark://127.0.0.1:{port}"
    work = directory / "work"
    main = "org.apache.spark.deploy"
    commands = [[f"{main}.master.Master", "--host", "127.0.0.1", "--port", f"{port}"]]
    for host in ("127.0.0.2", "127.0.0.3"):
        has = ["--cores", "1", "--memory", "600m", "--work-dir", str(work), master]
        commands.append([f"{main}.worker.Worker", "--host", host, *has])
    environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m"}
    environment["SPARK_DAEMON_JAVA_OPTS"] = _LIGHT
    environment |= {"PYTHONPATH": str(TESTS), "PYSPARK_PYTHON": spark_python()}
    environment.pop("SPARK_LOCAL_IP", None)
    (directory / "spark.properties").write_text("spark.master.rest.enabled false\n")
    nodes = []
    try:
        for page, (name, *arguments) in zip(pages, commands, strict=True):
            common = ["--webui-port", f"{page}", "--properties-file", str(directory / "spark.properties")]
            command = [str(home / "bin" / "spark-class"), name, *common, *arguments]
            with open(directory / "cluster.log", "ab") as log:
                nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        yield master
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait()
        shutil.rmtree(work, ignore_errors=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of docs/spark.md: lost and doubled rows of each fault and query."""
    names = [f"{SINKS[outcome.query.sink]}, {BROKERS[outcome.query.broker]}" for outcome in outcomes]
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    for fault, meaning in FAULTS.items():
        cells = ["{}/{}".format(*outcome.lost_and_doubled(fault)) for outcome in outcomes]
        lines.append(f"| {meaning} | {' | '.join(cells)} |")
    return "\n".join(lines)
