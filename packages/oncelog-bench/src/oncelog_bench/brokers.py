"""The two brokers of a measurement, Oncelog and Apache Kafka. Both run all the time and get load in turns."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

from oncelog_devtools.apache_kafka import ApacheKafka, MissingDependency

from oncelog import compiled
from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.client.producer.blocking import Producer
from oncelog.errors import MisuseError
from oncelog.testing.broker_process import BrokerProcess
from oncelog.wire.header import HEADER_BYTES
from oncelog_bench.framework import COMPILED, KAFKA, OURS
from oncelog_bench.generators import run_child
from oncelog_bench.process import idle_cores, settle
from oncelog_bench.raw_produce import ProduceReport, ProduceSpec

SETTINGS = {"log.segment.delete.delay.ms": 0, "max.connections": 20_000}
"""Settings of both brokers. All other settings are the defaults.

With a deletion delay of 0, a sample's files are deleted before the operating system writes their pages to the
disk. The connection limit allows ten thousand measured connections and those of the load generator.
"""

KAFKA_HEAP_MB = 1_024
"""The heap size, in MiB, that Kafka's own start script sets."""

BROKERS = (OURS, KAFKA)
ALL_BROKERS = (OURS, COMPILED, KAFKA)
"""The brokers of measurements in which the broker's own processor time counts."""
RECORD_OVERHEAD_BYTES = 10
"""Approximate overhead in bytes of a record without key and headers, with a value of 100 bytes to 8 KB."""

_FILLED_AT_ONCE = 1_000

_numbers = itertools.count()
_kept: tuple[ExitStack, dict[str, Side]] | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """A running broker.

    `directory` contains the broker's data. `idle_cores` is its processor use when idle, as a fraction of a
    core. `run_tool` runs one of Apache Kafka's command-line tools; it is None for Oncelog.
    """

    name: str
    bootstrap_servers: str
    pid: int
    directory: Path
    admin: Admin
    run_tool: Callable[..., str] | None
    idle_cores: float = 0.0

    @contextmanager
    def topic(self, partitions: int, configs: Mapping[str, object] | None = None) -> Iterator[str]:
        """Create a new topic for the `with` block, and delete the topic afterwards.

        After the deletion, wait until the broker is idle again.
        """
        name = f"bench-{next(_numbers):06}"
        self.admin.create_topics([NewTopic(name, partitions, 1, configs or {})])
        yield name
        self.admin.delete_topics([name])
        settle(self.pid)

    def spec(self, topic: str, **sizes: object) -> ProduceSpec:
        """Return a ProduceSpec with this broker's address. `sizes` are its other fields."""
        return ProduceSpec(self.bootstrap_servers, self.pid, topic, **sizes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Sides:
    """The running brokers, and the reason for each broker that was left out."""

    every: Sequence[Side]
    left_out: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        return [side.name for side in self.every]

    def __getitem__(self, name: str) -> Side:
        return next(side for side in self.every if side.name == name)

    def run_tool(self, main_class: str, *arguments: str) -> str:
        """Run one of Kafka's command-line tools. `arguments` may name any broker's address.

        The tools belong to Apache Kafka's installation. Raises MisuseError if Apache Kafka is not running.
        """
        tool = next((side.run_tool for side in self.every if side.run_tool), None)
        if tool is None:
            raise MisuseError("Kafka's tools need Apache Kafka among the brokers")
        return tool(main_class, *arguments)


@contextmanager
def kept() -> Iterator[None]:
    """Keep the brokers that `running` starts until the `with` block ends.

    Later calls of `running` in the block reuse these warm brokers.
    """
    global _kept
    with ExitStack() as stack:
        _kept = stack, {}
        try:
            yield
        finally:
            _kept = None


@contextmanager
def running(names: Sequence[str], *, warm_up_seconds: float, are_fresh: bool = False) -> Iterator[Sides]:
    """Run the requested brokers for the `with` block. Without Java, leave out Apache Kafka, and without
    `make compile`, leave out COMPILED. Record the reason.

    With `are_fresh`, start new brokers even inside `kept`. A process keeps memory of earlier measurements, so
    a measurement of memory needs this.

    The warm-up makes Kafka's JVM compile the measured code. Three loads run for `warm_up_seconds` each: full
    batches, single records, and batches without sequence numbers. Oncelog compiles nothing, so each load runs
    on Oncelog for at most one second.
    """
    with ExitStack() as own:
        stack, started = (None if are_fresh else _kept) or (own, {})
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncelog-bench-")))
        left_out: dict[str, str] = {}
        for name in names:
            try:
                if name not in started:
                    side = _start(stack, name, root)
                    started[name] = _warmed(
                        side, warm_up_seconds if name == KAFKA else min(warm_up_seconds, 1.0)
                    )
            except MissingDependency as error:
                left_out[name] = str(error)
        yield Sides([started[name] for name in names if name in started], left_out)


def _start(stack: ExitStack, name: str, root: Path) -> Side:
    broker: BrokerProcess | ApacheKafka
    if name == KAFKA:
        (root / name).mkdir()
        broker = stack.enter_context(ApacheKafka(root / name, properties=SETTINGS, heap_mb=KAFKA_HEAP_MB))
    else:
        with _code_of(name):
            broker = stack.enter_context(BrokerProcess(root / name / "data", settings=SETTINGS))
    admin = stack.enter_context(Admin({"bootstrap.servers": broker.bootstrap_servers}))
    tool = None if isinstance(broker, BrokerProcess) else broker.run_tool
    return Side(name, broker.bootstrap_servers, broker.pid, root / name, admin, tool)


@contextmanager
def _code_of(name: str) -> Iterator[None]:
    """Let a broker that starts in the `with` block run the compiled modules if it is COMPILED.

    Raises MissingDependency if they are not compiled from the present sources.
    """
    if name == COMPILED and not isinstance(usable := compiled.read_usable("mypyc"), tuple):
        raise MissingDependency(f"{usable or 'nothing is compiled'}; run `make compile`")
    with patch.dict(os.environ):
        if name == COMPILED:
            os.environ.pop("ONCELOG_PURE_PYTHON", None)
        yield


def _warmed(side: Side, seconds: float) -> Side:
    full = {"batch_records": 15, "batches": 3}
    for sizes in (full, {"connections": 5}, {**full, "idempotence": False}):
        with side.topic(3) as topic:
            raw_produce(side.spec(topic, partitions=3, seconds=seconds, **sizes))
    return replace(side, idle_cores=idle_cores(side.pid, max(0.1, seconds / 5)))


def raw_produce(spec: ProduceSpec) -> ProduceReport:
    """Run the raw generator in a separate process."""
    return ProduceReport(**run_child("oncelog_bench.raw_produce", asdict(spec)))


def fill_topic(
    side: Side, topic: str, partitions: int, record_bytes: int, total_bytes: int, compression: str = "none"
) -> int:
    """Write values of about `total_bytes` in total, in batches of 16 KiB. Return the number of records."""
    values = [b"%08d" % index + bytes(record_bytes - 8) for index in range(_FILLED_AT_ONCE)]
    rounds = max(total_bytes // (record_bytes * len(values)), partitions)
    settings = {"bootstrap.servers": side.bootstrap_servers, "compression.type": compression}
    with Producer({**settings, "batch.size": 16_384, "linger.ms": 5}) as producer:
        for index in range(rounds):
            producer.send_many(topic, values, partition=index % partitions)
    return rounds * len(values)


def records_per_batch(record_bytes: int, batch_bytes: int = 16_384) -> int:
    """Return how many records fit into a batch of `batch_bytes`, at least one."""
    return max(1, (batch_bytes - HEADER_BYTES) // (record_bytes + RECORD_OVERHEAD_BYTES))
