"""docs/benchmarks.md: each measurement owns a marked section of it, rendered from its JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oncelog.bench.idempotence import METRICS
from oncelog.demo.svg import BLUE, INK, MUTED, VIOLET, Svg

HEADER = """\
# Benchmarks

Each section is written by the command it names, from the JSON file it names; do not edit between the marks.
Figures hold for the machine described beside them; compare ratios, not machines.
"""


def put_section(page: Path, name: str, text: str) -> None:
    """Replace the section `name` of the page, or append it; the rest stays as it is."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    old = page.read_text() if page.exists() else HEADER
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if pattern.search(old):
        new = pattern.sub(lambda _: section, old)
    else:
        new = f"{old.rstrip()}\n\n{section}\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(new)


def idempotence_section(result: Mapping[str, Any], *, picture: str, source: str) -> str:
    """The I24 section. `picture` and `source`: paths as the page links to them."""
    plan, machine = result["plan"], result["machine"]
    memory_gb = machine["memory_bytes"] / 1e9
    settings = ", ".join(f"`{key}={value}`" for key, value in result["settings"].items())
    return f"""\
## What idempotence costs

`oncelog bench idempotence` ({source}). {plan["record_bytes"]:,}-byte records, {plan["partitions"]}
partitions, {plan["records"]:,} records a run at full speed, then latency at {plan["paced_per_s"]:,}
records a second with `linger.ms=0`. Off and on alternate, each on a fresh broker and in a fresh process;
medians of {plan["repeats"]} pairs, and `on / off` is the median of the pairs' ratios.
Equal for all: {settings}.

{_markdown_table(result)}

![Idempotence off and on]({picture})

Measured on {machine["processor"]}, {machine["cores"]} cores, {memory_gb:.0f} GB, {machine["system"]},
Python {machine["python"]}; the load generator shares the cores with the broker.
"""


def _markdown_table(result: Mapping[str, Any]) -> str:
    headings = ["client", "idempotence", *(heading for _, heading, _ in METRICS)]
    lines = ["| " + " | ".join(headings) + " |", "| --- | --- |" + " ---: |" * len(METRICS)]
    for row in result["medians"]:
        ratio = row["idempotence"] == "on / off"
        cells = [f"{row[name]:.3f}" if ratio else _figure(row[name]) for name, _, _ in METRICS]
        lines.append("| " + " | ".join([row["client"], row["idempotence"], *cells]) + " |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def idempotence_picture(result: Mapping[str, Any]) -> str:
    """A pair of bars (off, on) per metric and client, each pair on its own scale."""
    rows = {(row["client"], row["idempotence"]): row for row in result["medians"]}
    clients = list(dict.fromkeys(client for client, _ in rows))
    left, pair, column = 150.0, 42.0, 380.0
    svg = Svg(left + column * len(clients), 76 + pair * len(METRICS), "Idempotence off and on")
    svg.rect(14, 12, 12, 12, MUTED, rx=2)
    svg.text(32, 22, "off", size=12)
    svg.rect(66, 12, 12, 12, BLUE, rx=2)
    svg.text(84, 22, "on", size=12)
    for index, client in enumerate(clients):
        svg.text(left + column * index, 50, client, size=14, bold=True)
    for line, (name, heading, more_is_better) in enumerate(METRICS):
        y = 64 + pair * line
        svg.text(left - 12, y + 14, heading, size=12, anchor="end")
        svg.text(
            left - 12,
            y + 28,
            "more is better" if more_is_better else "less is better",
            size=9,
            fill=MUTED,
            anchor="end",
        )
        for index, client in enumerate(clients):
            values = [rows[client, mode][name] for mode in ("off", "on")]
            ratio = rows[client, "on / off"][name]
            _pair(svg, left + column * index, y, values, ratio)
    return svg.render()


def _pair(svg: Svg, x: float, y: float, values: list[float], ratio: float) -> None:
    longest = max(values) or 1.0
    for offset, (value, colour) in enumerate(zip(values, (MUTED, BLUE), strict=True)):
        length = 190 * value / longest
        svg.rect(x, y + 15 * offset, max(length, 1.5), 12, colour, rx=2)
        svg.text(x + length + 6, y + 15 * offset + 10, _figure(value), size=10, fill=INK)
    svg.text(x + 262, y + 18, f"× {ratio:.2f}", size=12, fill=VIOLET, bold=True)
