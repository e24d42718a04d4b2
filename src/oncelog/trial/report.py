"""The result of a trial: rows for tables and JSON, and one HTML file with a timeline of each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from oncelog.html_report import page, table, verdict
from oncelog.trial.judgement import Verdict
from oncelog.trial.run import Mark, MarkKind, Outcome

COLUMNS = ("cell", "fault", "happened", "lost", "doubled", "verdict")
WIDE = ("found", "starts", "seconds", "detail", "error")

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _LINE_Y = 960, 96, 20, 20, 46
_COLOURS = {
    MarkKind.FEED: "#2a6fb8",
    MarkKind.COMMIT: "#1b7f5c",
    MarkKind.FAULT: "#c62f3b",
    MarkKind.NOTE: "#d98c00",
}
_LEGEND = (
    (MarkKind.FEED, "rows sent"),
    (MarkKind.COMMIT, "micro-batch committed"),
    (MarkKind.FAULT, "fault"),
    (MarkKind.NOTE, "remark"),
)


def row_of(outcome: Outcome) -> dict[str, Any]:
    """Return the result of a cell as plain values, for a table or JSON."""
    counts = outcome.counts
    return {
        "cell": outcome.cell.name,
        "fault": outcome.cell.fault,
        "happened": _happened(outcome),
        "lost": counts.lost if counts else None,
        "doubled": counts.doubled if counts else None,
        "verdict": outcome.verdict.value,
        "found": counts.found if counts else None,
        "foreign": counts.foreign if counts else None,
        "lost_examples": list(counts.lost_examples) if counts else [],
        "doubled_examples": list(counts.doubled_examples) if counts else [],
        "starts": outcome.starts,
        "seconds": round(outcome.seconds, 1),
        "detail": outcome.detail or None,
        "error": outcome.error,
    }


def _happened(outcome: Outcome) -> str:
    if outcome.cell.is_calm or outcome.verdict is Verdict.IMPOSSIBLE:
        return "-"
    return "yes" if outcome.has_happened else "no"


def summary_text(outcomes: Sequence[Outcome]) -> str:
    """Return one sentence about the whole trial."""
    by_verdict = {kind: [o for o in outcomes if o.verdict is kind] for kind in Verdict}
    if violated := by_verdict[Verdict.VIOLATED]:
        lost = sum(o.counts.lost for o in violated if o.counts)
        doubled = sum(o.counts.doubled for o in violated if o.counts)
        return (
            f"{len(violated)} of {len(outcomes)} runs lost or doubled rows: {lost} lost, {doubled} doubled."
        )
    open_runs = by_verdict[Verdict.FAILED] + by_verdict[Verdict.NOT_REACHED]
    if open_runs:
        names = ", ".join(o.cell.name for o in open_runs)
        return f"No row was lost or doubled, but these runs prove nothing: {names}."
    runs = f"all {len(outcomes)} runs" if len(outcomes) > 1 else "the only run"
    which = "every fault that can happen did so" if by_verdict[Verdict.IMPOSSIBLE] else "every fault happened"
    return f"Each row is in the target once, in {runs}, and {which}."


def render_report(outcomes: Sequence[Outcome], facts: Mapping[str, str]) -> str:
    """Return the whole report as HTML. `facts` has the options of the trial, and versions."""
    is_good = all(outcome.verdict in (Verdict.CLEAN, Verdict.IMPOSSIBLE) for outcome in outcomes)
    rows = [{name: row_of(outcome)[name] for name in COLUMNS} for outcome in outcomes]
    parts = [
        f"<h1>Trial of {escape(facts.get('pipeline', 'a pipeline'))}</h1>",
        verdict(summary_text(outcomes), is_good=is_good),
        table(rows),
        table([{"fact": name, "value": value} for name, value in facts.items()]),
        f"<p>On the timelines: {_legend()}. A bar is the life of a driver.</p>",
    ]
    for outcome in outcomes:
        parts += _run_parts(outcome)
    return page("oncelog trial", parts)


def _legend() -> str:
    return ", ".join(
        f"<span style='color:{_COLOURS[kind]}'>&#9679;</span> {escape(words)}" for kind, words in _LEGEND
    )


def _run_parts(outcome: Outcome) -> Iterator[str]:
    yield f"<h2>{escape(outcome.cell.name)}: {escape(outcome.verdict.value)}</h2>"
    yield f"<p>Fault: {escape(outcome.cell.fault)}.</p>"
    for text in (outcome.detail, outcome.error):
        if text:
            yield f"<p>{escape(text)}</p>"
    yield timeline(outcome.marks, outcome.seconds)
    yield table({"event": mark.text, "second": f"{mark.at_s:.2f}"} for mark in outcome.marks)


def timeline(marks: Sequence[Mark], seconds: float) -> str:
    """Return the marks of a run on a time axis, as SVG. The text of a mark is its tooltip."""
    scale = (_WIDTH - _LEFT - _RIGHT) / max(seconds, 1e-3)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' "
        "aria-label='timeline of the run' font-family='system-ui, sans-serif' font-size='12'>",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='#ffffff'/>",
    ]
    for begin, end in driver_lives(marks, seconds):
        width = max(1.0, (end - begin) * scale)
        parts.append(
            f"<rect x='{_LEFT + begin * scale:.1f}' y='{_LINE_Y - 8}' width='{width:.1f}' height='16' "
            "rx='4' fill='#d9e2ec'/>"
        )
    for mark in marks:
        if mark.kind in _COLOURS:
            parts.append(_dot(mark, _LEFT + mark.at_s * scale))
    parts.append(f"<text x='{_LEFT}' y='{_HEIGHT - 10}' fill='#66788a'>0 s</text>")
    parts.append(
        f"<text x='{_WIDTH - _RIGHT}' y='{_HEIGHT - 10}' text-anchor='end' fill='#66788a'>"
        f"{seconds:.1f} s</text>"
    )
    return "".join(parts) + "</svg>"


def _dot(mark: Mark, x: float) -> str:
    radius = 7 if mark.kind is MarkKind.FAULT else 4
    return (
        f"<circle cx='{x:.1f}' cy='{_LINE_Y}' r='{radius}' fill='{_COLOURS[mark.kind]}'>"
        f"<title>{mark.at_s:.2f} s: {escape(mark.text)}</title></circle>"
    )


def driver_lives(marks: Sequence[Mark], seconds: float) -> list[tuple[float, float]]:
    """Return the start and end time of each driver process. The last one may run until the end of the run."""
    lives, begin = [], None
    for mark in marks:
        if mark.kind is MarkKind.START:
            begin = mark.at_s
        elif mark.kind is MarkKind.END and begin is not None:
            lives.append((begin, mark.at_s))
            begin = None
    return lives if begin is None else [*lives, (begin, seconds)]
