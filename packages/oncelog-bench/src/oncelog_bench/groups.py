"""Time of a rebalance of a classic group, until every member has its new assignment, by number of members."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from oncelog_bench.brokers import BROKERS, Side, running
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
from oncelog_bench.join_worker import Report, WorkerSpec
from oncelog_bench.page import markdown_table, range_of_ratios

NAME = "groups"
SUMMARY = "Time of a group rebalance when a member joins or leaves, on our broker and Apache Kafka."
RATIO = f"{OURS} / {KAFKA}"
BY = {"members": "members"}
METRICS = (
    Metric("join_ms", "one joins ms"),
    Metric("leave_ms", "one leaves ms"),
    Metric("broker_cpu_ms", "broker CPU ms per rebalance"),
    Metric("generator_cpu_ms", "members' CPU ms per rebalance"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size. A sample has `rounds`; in each of them, one member joins and leaves again."""

    brokers: tuple[str, ...] = BROKERS
    members: tuple[int, ...] = (1, 10, 100)
    rounds: int = 10
    repeats: int = 5
    warm_up_seconds: float = 5.0
    warm_up_rounds: int = 50

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(self.members)


QUICK = Plan((OURS,), (1, 3), rounds=2, repeats=1, warm_up_seconds=0.1, warm_up_rounds=1)


def _ratio(metric: str, members: int) -> Any:
    return lambda result: figure(result, metric, broker=RATIO, members=members)


TARGETS = tuple(
    Target(
        f"rebalance to Apache Kafka's: {what}, {members} members",
        1.0,
        "times",
        False,
        _ratio(metric, members),
    )
    for members in Plan().members
    for metric, what in (("join_ms", "one joins"), ("leave_ms", "one leaves"))
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        for side in sides.every:
            _take(plan.members[len(plan.members) // 2], side, plan.warm_up_rounds)
        for repeat, members, name in interleaved(plan.members, sides.names, plan.repeats):
            taken = _take(members, sides[name], plan.rounds)
            samples.append({"repeat": repeat, "broker": name, "members": members, **taken})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=sides.left_out)


def _take(members: int, side: Side, rounds: int) -> dict[str, float]:
    partitions = members + 1
    with side.topic(partitions) as topic:
        spec = WorkerSpec(side.bootstrap_servers, side.pid, topic, partitions, members, rounds)
        report = Report(**run_child("oncelog_bench.join_worker", asdict(spec)))
    rebalances = 2 * rounds
    return {
        "join_ms": statistics.median(report.join_ms),
        "leave_ms": statistics.median(report.leave_ms),
        "broker_cpu_ms": report.broker_cpu_seconds * 1000 / rebalances,
        "generator_cpu_ms": report.cpu_seconds * 1000 / rebalances,
    }


def section(result: Result) -> str:
    """Return, as Markdown, the section on the time of rebalances by the number of members."""
    plan = result["plan"]
    return f"""\
## Rebalances

In a group of the classic protocol with a partition per member, one more member joins, all get new
assignments, it leaves, and the others get theirs. The time starts at its first request: a join, whose
response has only a member id, or a leave. It ends when the last member has its SyncGroup response. Members
are raw connections in one process that act like consumers with the assignor `range`. They learn of a
rebalance from heartbeats, which follow each other without pause, so the heartbeat interval (3 s by default)
adds nothing.
Medians of {plan["repeats"]} interleaved samples, each the median of {plan["rounds"]} rounds.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, RATIO, "join_ms", "the time of a join")}
{range_of_ratios(result, RATIO, "leave_ms", "the time of a leave")}
"""


def picture(result: Result) -> str:
    """Return an SVG of the time of a rebalance by the number of members."""
    charts = [
        Chart(metric.heading, "members", metric.heading, lines_of(result, "members", metric.name))
        for metric in METRICS[:3]
    ]
    return draw_curves("Rebalances of a group", charts)
