"""Throughput of a transactional producer compared with an idempotent one, on both brokers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from oncelog_bench import clients
from oncelog_bench.brokers import BROKERS, Side, raw_produce, records_per_batch, running
from oncelog_bench.curves import Chart, draw_curves, lines_of
from oncelog_bench.framework import (
    KAFKA,
    OURS,
    Metric,
    OnSample,
    Result,
    Target,
    compare,
    figure,
    interleaved,
    result_of,
)
from oncelog_bench.generators import run_child
from oncelog_bench.page import markdown_table, number, range_of_ratios
from oncelog_bench.raw_transactions import TransactionReport, TransactionSpec
from oncelog_bench.transactions_worker import SETTINGS, WorkerSpec

NAME = "transactional"
SUMMARY = (
    "Cost of transactions in throughput, against an idempotent producer, on our broker and Apache Kafka."
)
RAW = "raw"
IDEMPOTENT, BY_TIME, BY_RECORDS = "idempotent", "commit by time", "commit by records"
RATIO = f"{OURS} / {KAFKA}"
BY = {"generator": "generator", "record_bytes": "record bytes", "mode": "mode"}
BY_BROKER = {"generator": "generator", "record_bytes": "record bytes", "broker": "broker"}
METRICS = (
    Metric("records_per_s", "records/s", True),
    Metric("mb_per_s", "MB/s", True),
    Metric("cpu_us_per_batch", "broker CPU µs per batch"),
    Metric("cpu_s_per_gb", "broker CPU s/GB"),
)


class Case(NamedTuple):
    generator: str
    record_bytes: int
    mode: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size. `generators` are RAW and keys of `transactions_worker.CLIENTS`."""

    brokers: tuple[str, ...] = BROKERS
    generators: tuple[str, ...] = (RAW, "oncelog")
    record_bytes: tuple[int, ...] = (100, 1_024)
    commit_ms: float = 100.0
    commit_records: int = 10_000
    partitions: int = 3
    seconds: float = 2.0
    repeats: int = 5
    warm_up_seconds: float = 5.0

    def cases(self) -> Iterator[Case]:
        for generator in self.generators:
            for record_bytes in self.record_bytes:
                for mode in (IDEMPOTENT, BY_TIME, BY_RECORDS):
                    yield Case(generator, record_bytes, mode)

    def commits(self, mode: str) -> dict[str, Any]:
        """Return the fields of a WorkerSpec that set when transactions of this mode are committed."""
        every: dict[str, dict[str, Any]] = {
            BY_TIME: {"commit_ms": self.commit_ms},
            BY_RECORDS: {"commit_records": self.commit_records},
        }
        return every.get(mode, {})

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(list(self.cases()))


QUICK = Plan((OURS,), record_bytes=(1_024,), commit_ms=20, seconds=0.1, repeats=1, warm_up_seconds=0.1)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    known, without = clients.installed(plan.generators)
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        for side in sides.every:
            _warm_up(plan, side)
        cases = [case for case in plan.cases() if case.generator in known]
        for repeat, case, name in interleaved(cases, sides.names, plan.repeats):
            taken = _take(plan, case, sides[name], plan.seconds)
            samples.append({"repeat": repeat, "broker": name, **case._asdict(), **taken})
            on_sample(len(samples))
    by_mode = compare(samples, by=list(BY_BROKER), side="mode", base=IDEMPOTENT, metrics=METRICS)
    by_broker = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    rows = by_mode + [row for row in by_broker if row["broker"] == RATIO]
    return result_of(NAME, plan, samples, rows, settings=SETTINGS, left_out={**sides.left_out, **without})


def _warm_up(plan: Plan, side: Side) -> None:
    """Warm up the transaction coordinator, because the warm-up of `running` has no transactions."""
    seconds = plan.warm_up_seconds / 2 if side.name == KAFKA else 0.1
    for mode in (BY_TIME, BY_RECORDS):
        _take(plan, Case(RAW, plan.record_bytes[0], mode), side, seconds)


def _take(plan: Plan, case: Case, side: Side, seconds: float) -> dict[str, float]:
    with side.topic(plan.partitions) as topic:
        if case.generator == RAW:
            return _raw(plan, case, side, topic, seconds)
        spec = WorkerSpec(
            case.generator, side.bootstrap_servers, topic, plan.partitions, case.record_bytes, seconds,
            **plan.commits(case.mode),
        )  # fmt: skip
        report = clients.Report(**run_child("oncelog_bench.transactions_worker", asdict(spec)))
        return report.figures(case.record_bytes)


def _raw(plan: Plan, case: Case, side: Side, topic: str, seconds: float) -> dict[str, float]:
    produce = side.spec(
        topic,
        seconds=seconds,
        record_bytes=case.record_bytes,
        batch_records=records_per_batch(case.record_bytes),
        batches=plan.partitions,
        partitions=plan.partitions,
    )
    if case.mode == IDEMPOTENT:
        report: Any = raw_produce(produce)
    else:
        spec = TransactionSpec(produce, **plan.commits(case.mode))
        report = TransactionReport(**run_child("oncelog_bench.raw_transactions", asdict(spec)))
    gigabytes = report.records * case.record_bytes / 1e9
    return {
        "records_per_s": report.records / report.seconds,
        "mb_per_s": gigabytes * 1000 / report.seconds,
        "cpu_us_per_batch": report.broker_cpu_seconds / report.batches * 1e6,
        "cpu_s_per_gb": report.broker_cpu_seconds / gigabytes,
    }


def section(result: Result) -> str:
    """Return, as Markdown, the section on the share of idempotent throughput that a transactional producer
    reaches.
    """
    plan = result["plan"]
    by_broker = [row for row in result["medians"] if row["broker"] == RATIO]
    by_mode = [row for row in result["medians"] if row["broker"] != RATIO]
    beside = f"\n{markdown_table(by_broker, by=BY, side='broker', metrics=METRICS)}\n" if by_broker else ""
    return f"""\
## Throughput in transactions

A producer sends as much as it can in {plan["seconds"]:g} s to {plan["partitions"]} partitions in batches of
16 KB: idempotent, or in transactions that end every {plan["commit_ms"]:g} ms ("{BY_TIME}")
or every {plan["commit_records"]:,} records ("{BY_RECORDS}"). Each transaction waits for all responses before
its end, and for the response to that; only committed records count. The raw generator keeps five requests in
flight and is light enough to saturate the broker. `oncelog` is our producer (`send_many`), which is the
bottleneck itself. Medians of {plan["repeats"]} interleaved samples; `x / {IDEMPOTENT}` is the share of
throughput that remains.

{markdown_table(by_mode, by=BY_BROKER, side="mode", metrics=METRICS)}
{beside}
**What this shows.** {_kept(result)} {range_of_ratios(result, RATIO, "records_per_s", "records/s")}
"""


def _kept(result: Result) -> str:
    """Return a sentence on the share of its idempotent throughput that each broker keeps."""
    sentences = []
    rows = [row for row in result["medians"] if row["mode"].endswith(f" / {IDEMPOTENT}")]
    for broker, generator in dict.fromkeys((row["broker"], row["generator"]) for row in rows):
        shares = [
            row["records_per_s"] * 100
            for row in rows
            if (row["broker"], row["generator"]) == (broker, generator)
        ]
        low, high = number(min(shares)), number(max(shares))
        kept = f"{broker} keeps {low} to {high} % of its idempotent throughput"
        sentences.append(f"{kept} (generator {generator})")
    return "In transactions " + "; ".join(sentences) + "."


def picture(result: Result) -> str:
    """Return an SVG of MB/s by record size, with a chart per generator and mode."""
    cases = dict.fromkeys((row["generator"], row["mode"]) for row in result["medians"])
    charts = [
        Chart(
            f"{generator}, {mode}",
            "record bytes",
            "MB/s",
            lines_of(result, "record_bytes", "mb_per_s", generator=generator, mode=mode),
        )
        for generator, mode in cases
        if " / " not in mode
    ]
    return draw_curves("Throughput without and with transactions", charts)


def _ratio(mode: str, record_bytes: int) -> Any:
    return lambda result: figure(
        result, "records_per_s", broker=RATIO, generator=RAW, record_bytes=record_bytes, mode=mode
    )


TARGETS = tuple(
    Target(
        f"throughput in transactions to Apache Kafka's: raw, {text} records, {mode}",
        1.0,
        "times",
        True,
        _ratio(mode, record_bytes),
    )
    for record_bytes, text in ((100, "100 B"), (1_024, "1 KB"))
    for mode in (BY_TIME, BY_RECORDS)
)
