"""The figures that articles on Kafka's idempotent producer give, measured on a cluster of Apache Kafka.

The cluster, the record size and the settings are those of the articles: three nodes with three replicas, and
records of 1 KB. Each client first sends at full speed for throughput and processor time. Then it sends at an
even pace for latency, because records wait in the client's own queue at full speed. The claims and their
sources are in CLAIMS.
"""

from __future__ import annotations

import importlib.util
import resource
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from oncelog_devtools.apache_kafka import ApacheKafka, MissingDependency

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog_bench.brokers import KAFKA_HEAP_MB
from oncelog_bench.framework import Metric, OnSample, Result, compare, figure, interleaved, result_of
from oncelog_bench.generators import WorkerSpec, generate
from oncelog_bench.page import markdown_table, percentage
from oncelog_bench.process import cpu_seconds, rss_mb
from oncelog_bench.throughput import read_perf_test

NAME = "literature"
SUMMARY = "Figures of articles on idempotence, measured on three nodes of Apache Kafka with three clients."
JAVA, CONFLUENT, OURS = "java", "confluent-kafka", "oncelog"
BASE = "acks=all"

MODES: dict[str, dict[str, str]] = {
    "acks=1": {"acks": "1", "enable.idempotence": "false"},
    BASE: {"acks": "all", "enable.idempotence": "false"},
    "idempotent": {"acks": "all", "enable.idempotence": "true"},
}

# These are the Java client's defaults. With equal settings, the clients differ only in their code.
SETTINGS: dict[str, Any] = {
    "max.in.flight.requests.per.connection": 5,
    "linger.ms": 5,
    "batch.size": 16_384,
    "compression.type": "none",
}


def available_clients() -> tuple[str, ...]:
    """Return the clients to measure. Java's client comes with Apache Kafka, so it is always included."""
    return (JAVA, CONFLUENT, OURS) if importlib.util.find_spec("confluent_kafka") else (JAVA, OURS)


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size. Each sample at full speed takes about `seconds`.

    `calibration_records` are sent first, to find the number of records for that time. These records also warm
    up client and brokers.
    """

    clients: tuple[str, ...] = field(default_factory=available_clients)
    nodes: int = 3
    repeats: int = 5
    seconds: float = 10.0
    calibration_records: int = 50_000
    record_bytes: int = 1_000
    partitions: int = 3
    paced_per_s: int = 1_000
    paced_seconds: float = 10.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.clients) * len(MODES)


QUICK = Plan(
    clients=(JAVA, OURS), nodes=1, repeats=1, seconds=0.3, calibration_records=2_000, paced_seconds=0.5
)

METRICS = (
    Metric("records_per_s", "records/s", True),
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
    Metric("broker_cpu_us_per_record", "brokers' CPU us/record"),
    Metric("client_cpu_us_per_record", "client CPU us/record"),
    Metric("broker_rss_mb", "brokers' MB"),
)


class Claim(NamedTuple):
    """A figure of an article: the change of `metric` from mode `base` to `mode`, in percent."""

    source: str
    what: str
    said: str
    metric: str
    mode: str
    base: str


_KOREAN, _CHINESE = "Korean article on the idempotent producer", "Chinese article on its mechanism"
_RATE, _CPU, _RSS = "records_per_s", "broker_cpu_us_per_record", "broker_rss_mb"
CLAIMS = (
    Claim(_KOREAN, "idempotence lowers throughput by", "3 to 5 %", _RATE, "idempotent", BASE),
    Claim(_KOREAN, "acks=all lowers throughput by", "10 to 20 %", _RATE, BASE, "acks=1"),
    Claim(_CHINESE, "idempotence changes messages/s", "50,000 to 45,000: -10 %", _RATE, "idempotent", BASE),
    Claim(_CHINESE, "idempotence changes latency", "15 to 18 ms: +20 %", "p50_ms", "idempotent", BASE),
    Claim(_CHINESE, "idempotence changes CPU use", "20 to 25 %: +25 %", _CPU, "idempotent", BASE),
    Claim(_CHINESE, "idempotence changes memory", "100 to 120 MB: +20 %", _RSS, "idempotent", BASE),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file. Without Java, take none."""
    samples: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    try:
        with ApacheKafka(nodes=plan.nodes, heap_mb=KAFKA_HEAP_MB) as kafka:
            for repeat, client, mode in interleaved(plan.clients, tuple(MODES), plan.repeats):
                head = {"repeat": repeat, "client": client, "mode": mode}
                samples.append({**head, **_take(plan, kafka, client, MODES[mode])})
                on_sample(len(samples))
    except MissingDependency as error:
        left_out["apache-kafka"] = str(error)
    rows = compare(samples, by=["client"], side="mode", base=BASE, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, settings=SETTINGS, left_out=left_out)


def _take(plan: Plan, kafka: ApacheKafka, client: str, mode: Mapping[str, str]) -> dict[str, float]:
    settings = {**SETTINGS, **mode, "bootstrap.servers": kafka.bootstrap_servers}
    topic = "literature"
    with Admin({"bootstrap.servers": kafka.bootstrap_servers}) as admin:
        admin.create_topics([NewTopic(topic, plan.partitions, min(plan.nodes, 3), {})])
        try:
            warm = _send(plan, kafka, client, settings, topic, plan.calibration_records, None)
            records = max(round(warm["records_per_s"] * plan.seconds), plan.calibration_records)
            nodes_before = sum(cpu_seconds(node.pid) for node in kafka.nodes)
            fast = _send(plan, kafka, client, settings, topic, records, None)
            nodes_cpu = sum(cpu_seconds(node.pid) for node in kafka.nodes) - nodes_before
            paced = round(plan.paced_per_s * plan.paced_seconds)
            slow = _send(plan, kafka, client, settings, topic, paced, plan.paced_per_s)
        finally:
            admin.delete_topics([topic])
    return {
        **fast,
        "p50_ms": slow["p50_ms"],
        "p99_ms": slow["p99_ms"],
        "broker_cpu_us_per_record": nodes_cpu / records * 1e6,
        "broker_rss_mb": sum(rss_mb(node.pid) for node in kafka.nodes),
    }


def _send(
    plan: Plan,
    kafka: ApacheKafka,
    client: str,
    settings: Mapping[str, Any],
    topic: str,
    records: int,
    rate_per_s: int | None,
) -> dict[str, float]:
    """Send in a new process, and return the client's figures.

    Use the latencies only with a pace (`rate_per_s`): at full speed, records wait in the client's queue.
    """
    if client == JAVA:
        return _send_java(plan, kafka, settings, topic, records, rate_per_s)
    spec = WorkerSpec(client, dict(settings), topic, plan.partitions, records, plan.record_bytes, rate_per_s)
    report = generate(spec)
    figures = {
        "records_per_s": records / report.seconds,
        "client_cpu_us_per_record": report.cpu_seconds / records * 1e6,
    }
    if report.latencies_ms:
        quantiles = statistics.quantiles(report.latencies_ms, n=100, method="inclusive")
        figures |= {"p50_ms": quantiles[49], "p99_ms": quantiles[98]}
    return figures


def _send_java(
    plan: Plan,
    kafka: ApacheKafka,
    settings: Mapping[str, Any],
    topic: str,
    records: int,
    rate_per_s: int | None,
) -> dict[str, float]:
    """Run kafka-producer-perf-test, and return its figures. Its processor time includes the JVM's start."""
    sizes = ["--topic", topic, "--num-records", str(records), "--record-size", str(plan.record_bytes)]
    sizes += ["--throughput", str(rate_per_s or -1), "--producer-props"]
    before = _children_cpu_seconds()
    printed = kafka.run_tool(
        "org.apache.kafka.tools.ProducerPerformance",
        *sizes,
        *(f"{key}={value}" for key, value in settings.items()),
        timeout_s=600.0,
    )
    figures = read_perf_test(printed, plan.record_bytes)
    return {
        "records_per_s": figures["mb_per_s"] * 1e6 / plan.record_bytes,
        "p50_ms": figures["p50_ms"],
        "p99_ms": figures["p99_ms"],
        "client_cpu_us_per_record": (_children_cpu_seconds() - before) / records * 1e6,
    }


def _children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def section(result: Result) -> str:
    """Return, as Markdown, the section on the articles' figures and the measured ones."""
    plan = result["plan"]
    settings = ", ".join(f"`{key}={value}`" for key, value in result["settings"].items())
    table = markdown_table(result["medians"], by={"client": "client"}, side="mode", metrics=METRICS)
    return f"""\
## Statements of the articles

{plan["nodes"]} nodes of Apache Kafka {result["machine"].get("apache-kafka", "")} with
{plan["partitions"]} partitions and {min(plan["nodes"], 3)} replicas, and {plan["record_bytes"]:,}-byte
records. Each sample sends at full speed for about {plan["seconds"]:g} s, after a warm-up. Latency is that of
{plan["paced_per_s"]:,} records a second. Medians of {plan["repeats"]} interleaved samples; rows with a slash
are medians of the pairs' ratios. The Java client is `kafka-producer-perf-test`, whose processor time
includes the start of its JVM, and whose latencies are whole milliseconds. Equal for all: {settings}. The
modes set `acks` and `enable.idempotence`; `idempotent` has `acks=all`.

{table}

What two of the articles claim, and what the clients show here ({", ".join(plan["clients"])}):

{_claims_table(result)}

**What this shows.** The articles do not name their machines. Here all nodes and the client share
{result["machine"]["cores"]} cores, so ratios can be compared, and absolute figures cannot.
"""


def _claims_table(result: Result) -> str:
    clients = result["plan"]["clients"]
    lines = ["| source | claim | the source says | " + " | ".join(clients) + " |"]
    lines.append("| --- | --- | --- |" + " ---: |" * len(clients))
    for claim in CLAIMS:
        cells = [_change(result, claim, client) for client in clients]
        lines.append(f"| {claim.source} | {claim.what} | {claim.said} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _change(result: Result, claim: Claim, client: str) -> str:
    """Return the measured change from the claim's base mode, in percent."""
    after = figure(result, claim.metric, client=client, mode=claim.mode)
    before = figure(result, claim.metric, client=client, mode=claim.base)
    if not after or not before:
        return "-"
    percent = (after / before - 1) * 100
    if claim.what.endswith("by"):
        return f"{percentage(-percent)} %"
    return f"{percentage(percent, is_signed=True)} %"
