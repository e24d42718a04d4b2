"""What idempotence costs (row I24): throughput, latency, processor time and memory, off and on.

Everything but `enable.idempotence` is equal: acks=all, five requests in flight, linger, batch size.
Each sample has a fresh broker process on a fresh directory and a fresh load generator process. Off and
on alternate, and so does which of them comes first, so that a drift of the machine falls on both.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oncelog.bench.generators import Order, Report
from oncelog.bench.machine import describe_machine
from oncelog.dev.served import ServedBroker
from oncelog.errors import ConfigError, OncelogError

TOPIC = "bench"
CPU_TICK_SECONDS = 0.01
GENERATOR_TIMEOUT_S = 600.0

# As the Java client's defaults, so that the two clients differ in their code only.
SETTINGS = {
    "acks": "all",
    "max.in.flight.requests.per.connection": 5,
    "linger.ms": 5,
    "batch.size": 16_384,
    "compression.type": "none",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Size of the measurement. `repeats` pairs per client; the medians of fewer than five say little."""

    clients: tuple[str, ...]
    repeats: int = 5
    records: int = 200_000
    record_bytes: int = 1_024
    partitions: int = 3
    paced_per_s: int = 1_000
    paced_seconds: float = 4.0

    def samples(self) -> Iterator[tuple[int, str, bool]]:
        """(repeat, client, idempotence) in the order they run."""
        for repeat in range(self.repeats):
            for client in self.clients:
                first = repeat % 2 == 1
                yield repeat, client, first
                yield repeat, client, not first


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. Processor seconds are per GB (10^9 bytes) of record values, at full speed."""

    repeat: int
    client: str
    idempotence: bool
    mb_per_s: float
    records_per_s: float
    p50_ms: float
    p99_ms: float
    broker_cpu_s_per_gb: float
    client_cpu_s_per_gb: float
    broker_rss_mb: float
    client_rss_mb: float


METRICS = (
    ("records_per_s", "records/s", True),
    ("mb_per_s", "MB/s", True),
    ("p50_ms", "p50 ms", False),
    ("p99_ms", "p99 ms", False),
    ("broker_cpu_s_per_gb", "broker CPU s/GB", False),
    ("client_cpu_s_per_gb", "client CPU s/GB", False),
    ("broker_rss_mb", "broker MB", False),
    ("client_rss_mb", "client MB", False),
)
"""(field of Sample, heading, whether more is better)"""


def available_clients() -> tuple[str, ...]:
    """The load generators that are installed; ours always is."""
    return ("oncelog", "confluent-kafka") if importlib.util.find_spec("confluent_kafka") else ("oncelog",)


def measure(plan: Plan, on_sample: Callable[[int], None]) -> dict[str, Any]:
    """Run the plan; returns what goes into the JSON file. `on_sample` hears how many samples are done."""
    if importlib.util.find_spec("psutil") is None:
        raise ConfigError("measuring the broker's process needs psutil: pip install 'oncelog[dev]'")
    samples = []
    for repeat, client, idempotence in plan.samples():
        samples.append(_take(plan, repeat, client, idempotence))
        on_sample(len(samples))
    return {
        "measurement": "idempotence",
        "machine": describe_machine(),
        "plan": asdict(plan),
        "settings": SETTINGS,
        "samples": [asdict(sample) for sample in samples],
        "medians": medians(samples),
    }


def _take(plan: Plan, repeat: int, client: str, idempotence: bool) -> Sample:
    import psutil

    with tempfile.TemporaryDirectory(prefix="oncelog-bench-") as directory:
        broker = ServedBroker(Path(directory) / "broker", settings={"num.partitions": plan.partitions})
        with broker:
            process = psutil.Process(broker.pid)
            paced = round(plan.paced_per_s * plan.paced_seconds)
            slow = _generate(_order(plan, client, idempotence, broker, paced, plan.paced_per_s))
            cpu_before = _cpu_seconds(process)
            fast = _generate(_order(plan, client, idempotence, broker, plan.records, None))
            # Known to a tick of the kernel's clock only: a run shorter than one counts as one.
            broker_cpu = max(_cpu_seconds(process) - cpu_before, CPU_TICK_SECONDS)
            rss = process.memory_info().rss
    gigabytes = plan.records * plan.record_bytes / 1e9
    quantiles = statistics.quantiles(slow.latencies_ms, n=100, method="inclusive")
    return Sample(
        repeat=repeat,
        client=client,
        idempotence=idempotence,
        mb_per_s=gigabytes * 1000 / fast.seconds,
        records_per_s=plan.records / fast.seconds,
        p50_ms=quantiles[49],
        p99_ms=quantiles[98],
        broker_cpu_s_per_gb=broker_cpu / gigabytes,
        client_cpu_s_per_gb=fast.cpu_seconds / gigabytes,
        broker_rss_mb=rss / 1e6,
        client_rss_mb=fast.max_rss_bytes / 1e6,
    )


def _cpu_seconds(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _order(
    plan: Plan, client: str, idempotence: bool, broker: ServedBroker, records: int, rate: int | None
) -> Order:
    settings: dict[str, Any] = {
        **SETTINGS,
        "bootstrap.servers": broker.bootstrap_servers,
        "enable.idempotence": "true" if idempotence else "false",
    }
    if rate is not None:
        settings["linger.ms"] = 0
    return Order(client, settings, TOPIC, plan.partitions, records, plan.record_bytes, rate)


def _generate(order: Order) -> Report:
    command = [sys.executable, "-m", "oncelog.bench.generators", json.dumps(asdict(order))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GENERATOR_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise OncelogError(f"the load generator {order.client} failed:\n{error.stderr[-2000:]}") from None
    report = Report(**json.loads(done.stdout))
    if report.failed:
        raise OncelogError(f"{order.client}: {report.failed} records failed; nothing is measured that way")
    return report


def medians(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row per client and mode, and per client a row `on / off`: the median of the pairs' ratios."""
    rows: list[dict[str, Any]] = []
    for client in dict.fromkeys(sample.client for sample in samples):
        off = [s for s in samples if s.client == client and not s.idempotence]
        on = [s for s in samples if s.client == client and s.idempotence]
        pairs = list(zip(sorted(off, key=_repeat), sorted(on, key=_repeat), strict=True))
        for mode, group in (("off", off), ("on", on)):
            values = {name: statistics.median(getattr(s, name) for s in group) for name, _, _ in METRICS}
            rows.append({"client": client, "idempotence": mode, **values})
        ratios = {
            name: statistics.median(getattr(b, name) / getattr(a, name) for a, b in pairs)
            for name, _, _ in METRICS
        }
        rows.append({"client": client, "idempotence": "on / off", **ratios})
    return rows


def _repeat(sample: Sample) -> int:
    return sample.repeat
