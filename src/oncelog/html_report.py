"""Renders a report as one HTML file. The file uses no script, font or other external resource."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: #1f2933; background: #f4f6f8;
       max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: .2rem; } h2 { margin-top: 2.4rem; }
.verdict { padding: .8rem 1rem; border-radius: 8px; color: #fff; font-weight: 600; }
.good { background: #1b7f5c; } .bad { background: #c62f3b; }
table { border-collapse: collapse; background: #fff; border-radius: 8px; width: 100%; font-size: .92rem; }
th, td { padding: .4rem .7rem; text-align: right; border-bottom: 1px solid #e3e8ee; }
th:first-child, td:first-child { text-align: left; } code { font-size: .88em; }
svg { width: 100%; height: auto; border: 1px solid #e3e8ee; border-radius: 8px; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML document. `parts` are the contents of its body as HTML."""
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
    body = "\n".join(parts)
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n{body}\n</body></html>\n"


def verdict(text: str, *, is_good: bool) -> str:
    """Return a sentence on a green (good) or red background, as HTML."""
    return f"<p class='verdict {'good' if is_good else 'bad'}'>{escape(text)}</p>"


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return an HTML table with one column per key of the first row. Integers get thousands separators."""
    rows = list(rows)
    names: Sequence[str] = list(rows[0]) if rows else []
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(row[name]))}</td>" for name in names) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
