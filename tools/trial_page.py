"""Write the measured table of docs/trial.md from the runs in docs/trial-runs.

`oncelog trial FILE -o json > docs/trial-runs/NAME.json` makes a run. `python tools/trial_page.py` then writes
the page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "trial.md"
RUNS = ROOT / "docs" / "trial-runs"
BEGIN, END = "<!-- runs: written by tools/trial_page.py -->\n", "<!-- end of runs -->"
ORDER = (
    "to_topic",
    "to_topic_standalone",
    "to_topic_apache_kafka",
    "kafka_sink",
    "kafka_sink_apache_kafka",
    "to_delta",
    "to_iceberg",
    "to_postgresql",
    "to_jdbc",
    "to_parquet",
    "to_sqlite",
)
"""Names of the runs in the first columns. Other runs follow in the order of their names."""

OWN_CLUSTER = "the embedded broker"

Rows = list[dict[str, Any]]


def load_runs() -> dict[str, Rows]:
    """Return the runs by name, in the order of the columns."""
    runs = {path.stem: json.loads(path.read_text()) for path in RUNS.glob("*.json")}
    names = sorted(runs, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return {name: runs[name] for name in names}


def cell_text(row: dict[str, Any] | None) -> str:
    """Return `LOST/DOUBLED` for a fault in a run, "not run", "failed", or `did not happen (LOST/DOUBLED)`."""
    if row is None:
        return "not run"
    if row["lost"] is None or row["verdict"] == "failed":
        return "failed"
    figures = f"{row['lost']}/{row['doubled']}"
    return f"did not happen ({figures})" if row["happened"] == "no" else figures


def head_of(facts: dict[str, str]) -> str:
    """Return the name of a run: the pipeline and its target, and any cluster that the trial did not start."""
    place = "" if facts["cluster"] == OWN_CLUSTER else f" on {facts['cluster'].partition(',')[0]}"
    master = f", master `{facts['master']}`" if "master" in facts else ""
    return f"`{facts['pipeline']}`, {facts['target']}{place}{master}"


def render(runs: dict[str, Rows]) -> str:
    """Return the generated part of the page, which stands between the comments BEGIN and END."""
    if not runs:
        return ""
    heads = [head_of(rows[0]["facts"]) for rows in runs.values()]
    lines = [f"| fault | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    faults = {row["cell"]: row["fault"] for rows in runs.values() for row in rows}
    for cell, fault in faults.items():
        texts = [cell_text(next((r for r in rows if r["cell"] == cell), None)) for rows in runs.values()]
        lines.append(f"| `{cell}`: {fault} | {' | '.join(texts)} |")
    lines += ["", "| run | rows | cluster | versions |", "| --- | --- | --- | --- |"]
    for rows in runs.values():
        facts = dict(rows[0]["facts"])
        head = head_of(facts)
        del facts["pipeline"], facts["target"]
        count, cluster = facts.pop("rows"), facts.pop("cluster")
        versions = ", ".join(f"{name} {value}" for name, value in facts.items())
        lines.append(f"| {head} | {count} | {cluster} | {versions} |")
    return "\n".join(lines) + "\n"


def page_with(part: str, page: str) -> str:
    """Return the page with `part` between the comments BEGIN and END."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + part + END + rest.partition(END)[2]


def main() -> int:
    PAGE.write_text(page_with(render(load_runs()), PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
