"""An audit's result as a page for people who were not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from oncelog.html_report import page, table, verdict
from oncelog.spark.audit.result import AuditFinding, AuditResult

_SHOWN = ("topic", "partition", "base_offset", "last_offset", "other_offset", "producer_id", "producer_epoch")
_SEQUENCES = ("first_sequence", "last_sequence")


def render_audit(result: AuditResult, what: str, summary: Sequence[str]) -> str:
    """The whole page. `what` was audited; `summary` are lines of plain text."""
    parts = [
        f"<h1>Audit of {escape(what)}</h1>",
        verdict(summary[-1], is_good=result.verdict == "clean"),
        *[f"<p>{escape(line)}</p>" for line in summary[:-1]],
    ]
    if result.findings:
        parts += ["<h2>Violations</h2>", table(map(_row, result.findings))]
    if result.notes:
        parts += ["<h2>Worth knowing</h2>", table(map(_row, result.notes))]
    counts = [{"partition": str(tp), **asdict(totals)} for tp, totals in sorted(result.partitions.items())]
    parts += ["<h2>What was seen</h2>", table(counts)]
    return page(f"Oncelog: audit of {what}", parts)


def _row(found: AuditFinding) -> dict[str, Any]:
    values = asdict(found)
    # As text: offsets and ids are names, not amounts, so they get no thousands separators.
    shown = {name: None if values[name] is None else str(values[name]) for name in _SHOWN}
    first, last = (values[name] for name in _SEQUENCES)
    sequences = None if first is None else f"{first} to {last}"
    return {"kind": found.kind, **shown, "sequences": sequences, "key": found.key, "what": found.explanation}
