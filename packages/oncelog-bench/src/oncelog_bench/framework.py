"""The framework of all measurements: their list, the format of results, and the comparison of two sides."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from oncelog.errors import ConfigError
from oncelog_bench.machine import describe_machine

NAMES = (
    "throughput",
    "single_records",
    "idempotence",
    "literature",
    "batch_cost",
    "latency",
    "durable",
    "transactions",
    "transactional",
    "read_committed",
    "groups",
    "fetch",
    "start",
    "producers",
    "consumers",
    "recovery",
    "coordinator",
    "producer_ids",
    "in_flight",
    "partitions",
    "hostile",
    "longest_wait",
    "spark_source",
    "spark_sink",
    "spark_lanes",
    "spark_audit",
    "cluster",
    "cluster_memory",
    "pipelines",
)
"""All measurements, in the order of docs/benchmarks.md."""

OURS, COMPILED, KAFKA = "oncelog", "oncelog (mypyc)", "apache-kafka"
"""The brokers' names in samples. COMPILED is Oncelog with the modules that `make compile` builds."""

Result = Mapping[str, Any]
"""The content of a measurement's JSON file: measurement, machine, plan, settings, left_out, samples, medians.
"""

Case = TypeVar("Case")

OnSample = Callable[[int], None]
"""A callback that receives the number of finished samples."""


class Metric(NamedTuple):
    """A figure of each sample: its key, its heading in tables, and which direction is better."""

    name: str
    heading: str
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A target of a measurement.

    `measured` returns the figure, or None if the samples for it are missing. `unit` is printed after the
    figure ("times", "s", "MB"). `limit` is a minimum if `is_minimum`, else a maximum.
    """

    what: str
    limit: float
    unit: str
    is_minimum: bool
    measured: Callable[[Result], float | None]

    def is_met(self, figure: float) -> bool:
        return figure >= self.limit if self.is_minimum else figure <= self.limit


class Measurement(Protocol):
    """A measurement module of this package. The package docstring describes its members.

    `picture` and `TARGETS` are optional, so read them with `getattr`.
    """

    NAME: str
    SUMMARY: str
    Plan: type[Any]
    QUICK: Any

    def measure(self, plan: Any, on_sample: OnSample) -> dict[str, Any]: ...

    def section(self, result: Result) -> str: ...


def load(name: str) -> Measurement:
    """Return the measurement of that name."""
    return cast(Measurement, importlib.import_module(f"oncelog_bench.{name}"))


def targets_of(measurement: Measurement) -> tuple[Target, ...]:
    return getattr(measurement, "TARGETS", ())


def plan_with(plan: Any, overrides: Mapping[str, str]) -> Any:
    """Return the plan with the fields in `overrides` changed. The values in `overrides` are texts. The items
    of a tuple are comma-separated.

    Raises ConfigError for a field that the plan does not have, and for a text of the wrong type.
    """
    sizes = {field.name: getattr(plan, field.name) for field in fields(plan)}
    changes = {}
    for name, text in overrides.items():
        if name not in sizes:
            raise ConfigError(f"{name} is not a size of this measurement; choose one of {', '.join(sizes)}")
        try:
            changes[name] = _like(sizes[name], text)
        except ValueError as error:
            raise ConfigError(f"{name}={text!r}: {error}") from error
    return replace(plan, **changes)


def _like(value: Any, text: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_like(value[0], part.strip()) for part in text.split(","))
    return type(value)(text)


def result_of(
    name: str,
    plan: Any,
    samples: Sequence[Any],
    medians: Sequence[Mapping[str, Any]],
    *,
    settings: Mapping[str, Any] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the content of a result file: the samples, their medians, and how they were measured.

    `samples` are dicts or dataclasses. `left_out` maps a side that was not measured to the reason.
    """
    return {
        "measurement": name,
        "machine": describe_machine(),
        "plan": asdict(plan),
        "settings": dict(settings or {}),
        "left_out": dict(left_out or {}),
        "samples": [sample if isinstance(sample, Mapping) else asdict(sample) for sample in samples],
        "medians": [dict(row) for row in medians],
    }


def compare(
    samples: Sequence[Mapping[str, Any]],
    *,
    by: Sequence[str],
    side: str,
    base: str,
    metrics: Sequence[Metric],
) -> list[dict[str, Any]]:
    """Return median rows and rows of ratios, per group of samples with equal `by` fields.

    Each value of the field `side` has a row of medians. Each value other than `base` also has a row named
    `value / base`, which contains the medians of the pairs' ratios. A pair is two samples of one group with
    the same `repeat`. Missing figures are left out.
    """
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys(tuple(sample[name] for name in by) for sample in samples):
        group = [sample for sample in samples if tuple(sample[name] for name in by) == key]
        head = dict(zip(by, key, strict=True))
        sides = {
            value: {s["repeat"]: s for s in group if s[side] == value}
            for value in dict.fromkeys(s[side] for s in group)
        }
        rows += [{**head, side: value, **_medians(taken, metrics)} for value, taken in sides.items()]
        if base in sides:
            rows += [
                {**head, side: f"{value} / {base}", **_ratios(taken, sides[base], metrics)}
                for value, taken in sides.items()
                if value != base
            ]
    return rows


def _medians(taken: Mapping[int, Mapping[str, Any]], metrics: Sequence[Metric]) -> dict[str, float]:
    figures = ((m.name, [s[m.name] for s in taken.values() if s.get(m.name) is not None]) for m in metrics)
    return {name: statistics.median(values) for name, values in figures if values}


def _ratios(
    taken: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]], metrics: Sequence[Metric]
) -> dict[str, float]:
    pairs = [(sample, base[repeat]) for repeat, sample in taken.items() if repeat in base]
    ratios = {}
    for metric in metrics:
        values = [
            a[metric.name] / b[metric.name] for a, b in pairs if a.get(metric.name) and b.get(metric.name)
        ]
        if values:
            ratios[metric.name] = statistics.median(values)
    return ratios


def figure(result: Result, metric: str, **where: Any) -> float | None:
    """Return the figure `metric` of the first median row that matches `where`; None if there is none."""
    for row in result["medians"]:
        if all(row.get(name) == value for name, value in where.items()):
            return cast("float | None", row.get(metric))
    return None


def interleaved(cases: Iterable[Case], sides: Sequence[str], repeats: int) -> Iterator[tuple[int, Case, str]]:
    """Yield (repeat, case, side) for every sample, repeat by repeat and case by case.

    The samples of a case follow each other directly, and each repeat begins with another side. So a change of
    the machine's speed during the run affects all sides equally.
    """
    cases = list(cases)
    for repeat in range(repeats):
        start = repeat % max(len(sides), 1)
        for case in cases:
            for side in (*sides[start:], *sides[:start]):
                yield repeat, case, side
