"""The page docs/benchmarks.md, rendered from the results' JSON files: a marked section per measurement.

One more section contains the table of targets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oncelog_bench.framework import NAMES, Metric, Result, load, targets_of

HEADER = """\
# Benchmarks

Each section is written by the command it names, from the JSON file it names; do not edit between the marks.
Figures hold for the machine described beside them; compare ratios, not machines.
"""
TARGETS_SECTION = "targets"


def write_page(page: Path, results: Path) -> None:
    """Render every measurement with a JSON file in `results`, and the table of targets."""
    for name in NAMES:
        if (results / f"{name}.json").exists():
            _write_section(page, results / f"{name}.json", name)
    put_section(page, TARGETS_SECTION, targets_text(target_rows(results)))


def _write_section(page: Path, file: Path, name: str) -> None:
    measurement, result = load(name), json.loads(file.read_text())
    parts = [measurement.section(result).strip()]
    draw = getattr(measurement, "picture", None)
    if draw is not None:
        picture = page.with_name(f"benchmarks-{name}.svg")
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(draw(result))
        parts.append(f"![{measurement.SUMMARY}]({picture.name})")
    parts += [f"Left out: {side} ({reason})." for side, reason in result.get("left_out", {}).items()]
    source = os.path.relpath(file, page.parent)
    parts.append(f"`oncelog bench {name}`, [raw samples]({source}). {machine_line(result['machine'])}")
    put_section(page, name, "\n\n".join(parts))


def put_section(page: Path, name: str, text: str) -> None:
    """Replace the section `name` of the page, or insert it in the order of NAMES.

    The section is marked by comments `<!-- begin NAME -->` and `<!-- end NAME -->`. Other text is kept.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    old = page.read_text() if page.exists() else HEADER
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    following = re.compile("|".join(f"<!-- begin {later} -->" for later in _after(name)) or r"\Z")
    if pattern.search(old):
        new = pattern.sub(lambda _: section, old)
    elif later := following.search(old):
        head, tail = old[: later.start()].rstrip(), old[later.start() :]
        new = f"{head}\n\n{section}\n" + (f"\n{tail}" if tail else "")
    else:
        new = f"{old.rstrip()}\n\n{section}\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(new)


def _after(name: str) -> Sequence[str]:
    order = (TARGETS_SECTION, *NAMES)
    return order[order.index(name) + 1 :] if name in order else ()


def machine_line(machine: Mapping[str, Any]) -> str:
    """Return a sentence that describes the machine on which the figures were measured."""
    return (
        f"Measured on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, {machine['system']}, Python {machine['python']}, "
        f"oncelog {machine['packages']['oncelog']}; generators and brokers share the cores."
    )


def number(value: float | None) -> str:
    """Format a number: three significant digits below 100, else a whole number. None becomes a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percentage(value: float, *, is_signed: bool = False) -> str:
    """Format a difference in percent, which is measured no more exactly than to a tenth."""
    return f"{value:{'+' if is_signed else ''},.1f}"


def markdown_table(
    rows: Sequence[Mapping[str, Any]], *, by: Mapping[str, str], side: str, metrics: Sequence[Metric]
) -> str:
    """Format rows of `framework.compare` as Markdown, with ratios in bold.

    `by` maps a field to its heading. A metric that no row has gets no column.
    """
    shown = [metric for metric in metrics if any(metric.name in row for row in rows)]
    headings = [*by.values(), side, *(metric.heading for metric in shown)]
    lines = ["| " + " | ".join(headings) + " |", "| --- |" + " --- |" * len(by) + " ---: |" * len(shown)]
    for row in rows:
        is_ratio = " / " in row[side]
        show = _ratio if is_ratio else number
        cells = [row[side], *(show(row.get(metric.name)) for metric in shown)]
        lines.append("| " + " | ".join([*(_cell(row[name]) for name in by), *cells]) + " |")
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"**{value:.2f}**" if value >= 0.1 else f"**{value:.2g}**"


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def range_of_ratios(result: Result, ratio: str, metric: str, words: str, *, side: str = "broker") -> str:
    """Return a sentence with the minimum and maximum of `metric` over all rows named `ratio`."""
    values = [row[metric] for row in result["medians"] if row[side] == ratio and metric in row]
    ours, _, other = ratio.partition(" / ")
    if not values:
        return f"No ratio of {words}: {other} was not measured beside {ours}."
    low, high = number(min(values)), number(max(values))
    spread = f"{low} to {high}" if len(values) > 1 else low
    return f"In {words}, {ours} comes to {spread} times {other}."


def target_rows(results: Path) -> list[dict[str, Any]]:
    """Return a row per target: name, limit, measured figure, and whether it is met (None: not measured)."""
    rows = []
    for name in NAMES:
        file = results / f"{name}.json"
        result = json.loads(file.read_text()) if file.exists() else None
        for target in targets_of(load(name)):
            measured = target.measured(result) if result else None
            bound = "at least" if target.is_minimum else "at most"
            rows.append(
                {
                    "target": target.what,
                    "wanted": f"{bound} {target.limit:g} {target.unit}",
                    "measured": None if measured is None else f"{number(measured)} {target.unit}",
                    "met": None if measured is None else target.is_met(measured),
                    "measurement": name,
                }
            )
    return rows


def targets_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of targets."""
    words = {True: "met", False: "**missed**", None: "not measured"}
    met, missed = (sum(row["met"] is verdict for row in rows) for verdict in (True, False))
    lines = [
        "## Targets",
        "",
        f"Of {len(rows)} targets {met} are met, {missed} missed, {len(rows) - met - missed} not measured.",
        "Ratios are medians of the ratios of interleaved pairs; `oncelog bench targets` renders this table",
        "from the results without measuring. [Missed targets](internals/performance.md) says what stands in",
        "the way of each.",
        "",
        "| target | wanted | measured | | by |",
        "| --- | --- | ---: | --- | --- |",
    ]
    for row in rows:
        link = f"`oncelog bench {row['measurement']}`"
        cells = [row["target"], row["wanted"], row["measured"] or "-", words[row["met"]], link]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
