"""Code that the measurements of producer and consumer clients share."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oncelog_bench.curves import Chart, draw_curves, lines_of
from oncelog_bench.framework import Metric, Result

METRICS = (
    Metric("records_per_s", "records/s", True),
    Metric("mb_per_s", "MB/s", True),
    Metric("cpu_us_per_record", "client CPU us/record"),
    Metric("rss_mb", "client MB"),
)

_PACKAGES = {"confluent-kafka": "confluent_kafka", "aiokafka": "aiokafka", "kafka-python": "kafka"}


@dataclass(frozen=True, slots=True)
class Report:
    """The time, processor time and memory that a client process took for its records."""

    records: int
    seconds: float
    cpu_seconds: float
    max_rss_bytes: int

    def figures(self, record_bytes: int) -> dict[str, float]:
        """Return the figures that METRICS lists. `record_bytes` is the size of each record."""
        return {
            "records_per_s": self.records / self.seconds,
            "mb_per_s": self.records * record_bytes / self.seconds / 1e6,
            "cpu_us_per_record": self.cpu_seconds / self.records * 1e6,
            "rss_mb": self.max_rss_bytes / 1e6,
        }


def installed(clients: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the installed clients, and a map from the other clients to the reason why they are left out.

    A client's name begins with the name of its package.
    """
    missing = {
        name: f"{name} is not installed"
        for name in clients
        if (package := _PACKAGES.get(name.split(" ")[0])) and importlib.util.find_spec(package) is None
    }
    return [name for name in clients if name not in missing], missing


def draw_by_size(title: str, result: Result, where: Mapping[str, Any]) -> str:
    """Return an SVG of records per second and processor time by record size, for rows that match `where`."""
    charts = [
        Chart(
            heading, "record bytes", heading, lines_of(result, "record_bytes", name, side="client", **where)
        )
        for name, heading, _ in (METRICS[0], METRICS[2])
    ]
    return draw_curves(title, charts)
