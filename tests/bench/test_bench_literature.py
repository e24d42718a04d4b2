"""Repeat the articles' measurements at a tiny size on one node of Apache Kafka; check fields and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oncelog_bench import literature
from oncelog_bench.framework import figure
from oncelog_bench.page import write_page


@pytest.fixture(scope="module")
def result(kafka_class_path: str) -> dict[str, Any]:
    done: list[int] = []
    taken = literature.measure(literature.QUICK, done.append)
    assert done == list(range(1, literature.QUICK.samples_count + 1))
    copied: dict[str, Any] = json.loads(json.dumps(taken))
    return copied


def test_every_client_is_measured_in_every_mode(result: dict[str, Any]) -> None:
    for client in literature.QUICK.clients:
        for mode in literature.MODES:
            for metric in literature.METRICS:
                value = figure(result, metric.name, client=client, mode=mode)
                # The Java client prints whole milliseconds, so a short time may be 0.
                assert value is not None and (value > 0 or metric.name.endswith("_ms")), (
                    client,
                    mode,
                    metric,
                )


def test_the_page_puts_each_claim_beside_what_was_measured(result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "literature.json").write_text(json.dumps(result))
    write_page(tmp_path / "page.md", tmp_path)
    text = (tmp_path / "page.md").read_text()
    for claim in literature.CLAIMS:
        (row,) = (line for line in text.splitlines() if f"| {claim.what} | {claim.said} |" in line)
        assert row.count("%") >= len(literature.QUICK.clients)


def test_a_claim_without_a_figure_is_shown_as_a_dash() -> None:
    medians = [
        {"client": "java", "mode": "acks=all", "records_per_s": 200.0, "p50_ms": 0.0},
        {"client": "java", "mode": "idempotent", "records_per_s": 190.0, "p50_ms": 1.0},
    ]
    shown = [literature._change({"medians": medians}, claim, "java") for claim in literature.CLAIMS]
    assert shown == ["5.0 %", "-", "-5.0 %", "-", "-", "-"]
