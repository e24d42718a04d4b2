"""The Spark session of a measurement, with Oncelog and Spark's Kafka connector, and the cost of a query."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oncelog_devtools.apache_kafka import MissingDependency
from oncelog_devtools.spark_connector import add_connector

from oncelog.spark.session import local_session
from oncelog_bench.process import tree_cpu_seconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local[2]"
CONNECTOR = "kafka connector"
"""The name of Spark's own connector in samples."""

DISCARDING = "discarding sink"
"""The name in samples of a sink in Python that writes nothing. It shows the minimum cost of a task of any
such sink.
"""

FORMATS = {CONNECTOR: "kafka", DISCARDING: "discarding"}
"""The data source format of a side. A side that is not in this map uses Oncelog's format."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running session, and the reason for each side that cannot run in it.

    `pid` is the JVM's process id.
    """

    spark: SparkSession
    pid: int
    left_out: Mapping[str, str]

    def sides(self, names: Sequence[str]) -> list[str]:
        return [side for side in names if side not in self.left_out]

    def timed(self, query: Callable[[], object]) -> tuple[float, float]:
        """Run a query. Return its seconds, and the processor seconds of the JVM and its Python workers."""
        began, cpu_began = time.perf_counter(), tree_cpu_seconds(self.pid)
        query()
        return time.perf_counter() - began, tree_cpu_seconds(self.pid) - cpu_began


@contextmanager
def spark_engine(sides: Sequence[str]) -> Iterator[Engine]:
    """Run a Spark session for the `with` block. If Spark's Kafka connector is requested but missing, leave it
    out, and record the reason.

    Raises ConfigError if PySpark or Java is missing.
    """
    with local_session("oncelog bench", MASTER) as spark:
        left_out: dict[str, str] = {}
        if DISCARDING in sides:
            from oncelog_bench.spark_floor import Discarding

            spark.dataSource.register(Discarding)
        if CONNECTOR in sides:
            try:
                add_connector(spark)
            except MissingDependency as error:
                left_out[CONNECTOR] = str(error)
        yield Engine(spark, spark._jvm.ProcessHandle.current().pid(), left_out)
