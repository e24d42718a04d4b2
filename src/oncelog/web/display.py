"""Texts of numbers, times and record data on the pages. No I/O."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

MAX_SHOWN_BYTES = 4_096
"""The maximum number of bytes of a key, value or header that a page shows."""
LINE_CHARS = 90
SCHEMA_ID_BYTES = 5
MAX_GROWTH, MAX_GROWN_CHARS = 5, 1_000
"""JSON is shown unindented if its indented form has more than 5 times the data's length and 1,000 characters.
"""
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s"\[\]{},:]+')


def page_path(kind: str, name: str) -> str:
    """Return the address of the page of a group or a transactional id.

    Slashes are escaped, because a browser would open "/groups/b" for "/groups/a/../b". A browser even treats
    "%2e%2e" as "..", so the names "." and ".." go into the query instead. Guard:
    test_a_name_with_dots_and_slashes_has_a_page_of_its_own.
    """
    quoted = quote(name, safe="")
    return f"/{kind}/?id={quoted}" if name in ("", ".", "..") else f"/{kind}/{quoted}"


def time_text(timestamp_ms: int | None) -> str:
    """Return a time as ISO 8601 in UTC; a dash if it is unknown."""
    if timestamp_ms is None or timestamp_ms < 0:
        return "–"
    try:
        return (
            datetime.fromtimestamp(timestamp_ms / 1000, UTC)
            .isoformat(" ", "seconds" if timestamp_ms % 1000 == 0 else "milliseconds")
            .replace("+00:00", "Z")
        )
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)


def number_text(value: float | None) -> str:
    """Return a number with thousands separators; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def bytes_text(size: float | None) -> str:
    """Return a size in a unit that keeps the number short; a dash for None."""
    if size is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            return f"{size:,.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def duration_text(milliseconds: float | None) -> str:
    """Return a duration in its one or two largest units, such as "2 h 5 min"; a dash for None."""
    if milliseconds is None:
        return "–"
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    seconds = int(milliseconds / 1000)
    if seconds < 60:
        return f"{milliseconds / 1000:.3g} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 86_400:
        return f"{seconds // 3600} h {seconds % 3600 // 60} min"
    return f"{seconds // 86_400} d {seconds % 86_400 // 3600} h"


def data_text(data: bytes | None, max_bytes: int = MAX_SHOWN_BYTES) -> dict[str, Any]:
    """Return how a page shows a key or a value: `kind`, `text`, `line`, `note`, and `size` in bytes.

    `kind` is "null", "json" (indented), "text" or "hex". `line` is a short form without line breaks. `note`
    says what is not shown, or names the schema id of Confluent's wire format.
    """
    if data is None:
        return {"kind": "null", "text": "null", "line": "null", "note": "", "size": 0}
    note = "" if len(data) <= max_bytes else f"the first {max_bytes:,} of {len(data):,} bytes"
    shown = data[:max_bytes]
    if len(data) > SCHEMA_ID_BYTES and data[0] == 0:
        schema = f"schema id {int.from_bytes(data[1:SCHEMA_ID_BYTES], 'big')} in Confluent's wire format"
        note = f"{schema}; {note}" if note else schema
    if not note and data[:1] in (b"{", b"["):
        text = _indented_json(data)
        if text is not None:
            return _shown("json", text, " ".join(data.decode().split()), "", data)
    shown_text = _as_text(shown, is_cut=len(data) > max_bytes)
    if shown_text is not None:
        return _shown("text", shown_text, " ".join(shown_text.split()), note, data)
    return _shown("hex", _hex(shown), shown[:LINE_CHARS].hex(" "), note, data)


def _shown(kind: str, text: str, line: str, note: str, data: bytes) -> dict[str, Any]:
    short = line if len(line) <= LINE_CHARS else line[:LINE_CHARS] + "…"
    return {"kind": kind, "text": text, "line": short, "note": note, "size": len(data)}


def _indented_json(data: bytes) -> str | None:
    """Return a JSON text with line breaks and indents; None for other data, and if it would grow too much.

    The tokens stay as they are stored. `json.dumps` would print other numbers (1e999 as Infinity), drop
    repeated names, and turn "\\ud800" into a character that no page can contain. It would also print a value
    with 900 levels of nesting in up to 900 times its size. Guard: test_json_is_shown_with_the_stored_tokens.
    """
    try:
        text = data.decode()
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    parts: list[str] = []
    level = size = 0
    previous = ""
    for token in _JSON_TOKEN.findall(text):
        if token in ("]", "}"):
            level -= 1
            before = "" if previous in ("[", "{") else "\n" + "  " * level
        elif previous in ("[", "{", ","):
            before = "\n" + "  " * level
        else:
            before = " " if previous == ":" else ""
        level += token in ("[", "{")
        size += len(before) + len(token)
        if size > max(MAX_GROWTH * len(data), MAX_GROWN_CHARS):
            return None
        parts += (before, token)
        previous = token
    return "".join(parts)


def _as_text(data: bytes, *, is_cut: bool) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if not is_cut or len(data) - error.start >= 4:
            return None
        text = data[: error.start].decode()  # a character was cut in two
    return text if all(char.isprintable() or char in "\n\r\t" for char in text) else None


def _hex(data: bytes) -> str:
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in row)
        lines.append(f"{start:04x}  {row.hex(' '):<47}  {shown}")
    return "\n".join(lines)
