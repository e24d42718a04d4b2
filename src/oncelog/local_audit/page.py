"""An audit's result as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from oncelog.audit.result import AuditFinding, AuditResult
from oncelog.html_report import page, table, verdict
from oncelog.local_audit.table_result import TableAuditResult, TableFinding

_SHOWN = ("topic", "partition", "base_offset", "last_offset", "other_offset", "producer_id", "producer_epoch")
_TABLE_SHOWN = ("topic", "partition", "base_offset", "last_offset")
_SEQUENCES = ("first_sequence", "last_sequence")


def render_audit(result: AuditResult, what: str, summary: Sequence[str]) -> str:
    """Return the HTML page of an audit.

    `what` names the audited topics or paths. `summary` contains lines of plain text, the verdict last.
    """
    parts = [
        f"<h1>Audit of {escape(what)}</h1>",
        verdict(summary[-1], is_good=result.verdict == "clean"),
        *[f"<p>{escape(line)}</p>" for line in summary[:-1]],
    ]
    if result.findings:
        parts += ["<h2>Violations</h2>", table(map(_row, result.findings))]
    if result.notes:
        parts += ["<h2>Notes</h2>", table(map(_row, result.notes))]
    counts = [{"partition": str(tp), **asdict(totals)} for tp, totals in sorted(result.partitions.items())]
    parts += ["<h2>Totals by partition</h2>", table(counts)]
    return page(f"Oncelog: audit of {what}", parts)


def _row(finding: AuditFinding) -> dict[str, Any]:
    values = asdict(finding)
    # Numbers in a table get thousands separators. Offsets and ids must not have them, so they become text.
    shown = {name: None if values[name] is None else str(values[name]) for name in _SHOWN}
    first, last = (values[name] for name in _SEQUENCES)
    sequences = None if first is None else f"{first} to {last}"
    return {
        "kind": finding.kind,
        **shown,
        "sequences": sequences,
        "key": finding.key,
        "what": finding.explanation,
    }


def render_table_audit(result: TableAuditResult, what: str) -> str:
    """Return the page of an audit of a table. `what` names the table and the topics."""
    summary = result.summary()
    parts = [
        f"<h1>Audit of {escape(what)}</h1>",
        verdict(summary[-1], is_good=result.verdict == "clean"),
        *[f"<p>{escape(line)}</p>" for line in summary[:-1]],
    ]
    if result.findings:
        parts += ["<h2>Violations</h2>", table(map(_table_row, result.findings))]
    if result.partitions:
        counts = [
            {"partition": str(tp), **asdict(totals)} for tp, totals in sorted(result.partitions.items())
        ]
        parts += ["<h2>Totals by partition</h2>", table(counts)]
    return page(f"Oncelog: audit of {what}", parts)


def _table_row(finding: TableFinding) -> dict[str, Any]:
    values = asdict(finding)
    # Numbers in a table get thousands separators, which offsets must not have.
    shown = {name: None if values[name] is None else str(values[name]) for name in _TABLE_SHOWN}
    return {
        "kind": finding.kind,
        **shown,
        "rows": finding.rows,
        "files": ", ".join(finding.files),
        "key": finding.key,
        "what": finding.explanation,
    }
