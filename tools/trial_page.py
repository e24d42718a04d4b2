"""Write the measured table of docs/trial.md from the runs in docs/trial-runs.

`oncelog trial FILE -o json > docs/trial-runs/NAME.json` makes a run. `python tools/trial_page.py` then writes
the page. `python tools/trial_page.py merge NAME FILE...` replaces cells of a run by those of other runs of
the same pipeline.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from oncelog.trial.plan import CELLS, TargetKind, choose_cells

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

ORDER_OF_CELLS = [cell.name for cell in CELLS]
OWN_CLUSTER = "the embedded broker"

Rows = list[dict[str, Any]]


def load_runs() -> dict[str, Rows]:
    """Return the runs by name, in the order of the columns."""
    runs = {path.stem: json.loads(path.read_text()) for path in RUNS.glob("*.json")}
    names = sorted(runs, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return {name: runs[name] for name in names}


def possible_cells(facts: dict[str, str]) -> set[str]:
    """Return the names of the cells whose fault can happen with the target and the master of a run."""
    kind = TargetKind(facts["target"])
    return {cell.name for cell in choose_cells([], kind, has_spark_workers="master" in facts)}


def cell_text(cell: str, rows: Rows) -> str:
    """Return `LOST/DOUBLED` for a fault in a run, "failed", or `did not happen (LOST/DOUBLED)`. If it was not
    run, return "not run", or "-" if the fault cannot happen.
    """
    row = next((row for row in rows if row["cell"] == cell), None)
    if row is None:
        is_possible = cell in possible_cells(rows[0]["facts"]) or cell not in ORDER_OF_CELLS
        return "not run" if is_possible else "-"
    if row["lost"] is None or row["verdict"] == "failed":
        return "failed"
    if row["verdict"] == "cannot happen":
        return "-"
    figures = f"{row['lost']}/{row['doubled']}"
    return f"did not happen ({figures})" if row["happened"] == "no" else figures


def position_of(cell: str) -> int:
    """Return the position of a cell in the matrix, and the end of the matrix for an unknown cell."""
    return ORDER_OF_CELLS.index(cell) if cell in ORDER_OF_CELLS else len(ORDER_OF_CELLS)


def merged(rows: Rows, others: Rows) -> Rows:
    """Return the cells of a run, those of other runs in their place, in the order of the matrix.

    Raises ValueError if the runs differ in pipeline, target, rows, cluster or master.
    """
    names = ("pipeline", "target", "rows", "cluster", "master")
    kinds = {tuple(row["facts"].get(name) for name in names) for row in [*rows, *others]}
    if len(kinds) > 1:
        raise ValueError(f"these are runs of different pipelines: {sorted(map(str, kinds))}")
    cells = {row["cell"]: row for row in [*rows, *others]}
    return sorted(cells.values(), key=lambda row: position_of(row["cell"]))


def merge_files(name: str, files: list[str]) -> None:
    run = RUNS / f"{name}.json"
    rows = json.loads(run.read_text()) if run.exists() else []
    others = [row for file in files for row in json.loads(Path(file).read_text())]
    run.write_text(json.dumps(merged(rows, others), indent=2) + "\n")


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
    for cell in sorted(faults, key=position_of):
        texts = [cell_text(cell, rows) for rows in runs.values()]
        lines.append(f"| `{cell}`: {faults[cell]} | {' | '.join(texts)} |")
    lines += ["", "| run | rows | cluster | versions |", "| --- | --- | --- | --- |"]
    for rows in runs.values():
        facts = dict(rows[0]["facts"])
        head = head_of(facts)
        if "Oncelog" in facts:
            facts["Oncelog"] = " and ".join(sorted({row["facts"]["Oncelog"] for row in rows}))
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
    match sys.argv[1:]:
        case ["merge", name, *files]:
            merge_files(name, files)
    PAGE.write_text(page_with(render(load_runs()), PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
