"""The format strings of `oncelog consume -f`, with the letters of kcat."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from oncelog.types import Record

Part = bytes | Callable[[Record], bytes]

_TOKEN = re.compile(r"%(.?)|\\(x[0-9a-fA-F]{2}|.?)|([^%\\]+)", re.DOTALL)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


def _headers(record: Record) -> bytes:
    pairs = (
        name.encode(errors="replace") + b"=" + (b"NULL" if value is None else value)
        for name, value in record.headers
    )
    return b",".join(pairs)


def _length(data: bytes | None) -> bytes:
    return b"-1" if data is None else b"%d" % len(data)


LETTERS: Mapping[str, Callable[[Record], bytes]] = {
    "t": lambda record: record.topic.encode(),
    "p": lambda record: b"%d" % record.partition,
    "o": lambda record: b"%d" % record.offset,
    "k": lambda record: record.key or b"",
    "s": lambda record: record.value or b"",
    "v": lambda record: record.value or b"",
    "h": _headers,
    "T": lambda record: b"%d" % record.timestamp_ms,
    "K": lambda record: _length(record.key),
    "S": lambda record: _length(record.value),
}
"""The letters after `%`. `v` is rpk's letter for the value, all others are kcat's."""


def parse_format(text: str) -> list[Part]:
    """Split a format string. Return its parts: bytes to print unchanged, and functions that return a record's
    field as bytes.

    `%%` is a percent sign. The escapes are \\n, \\t, \\r, \\0, \\\\ and \\xHH. Raises ValueError for an
    unknown letter or escape.
    """
    parts: list[Part] = []
    for letter, escape, plain in _TOKEN.findall(text):
        if plain:
            # Restore bytes of the command line that are not UTF-8, which Python decodes to surrogates.
            parts.append(os.fsencode(plain))
        elif escape:
            parts.append(_unescaped(escape))
        elif letter == "%":
            parts.append(b"%")
        elif letter in LETTERS:
            parts.append(LETTERS[letter])
        elif letter:
            known = ", ".join(f"%{known}" for known in LETTERS)
            raise ValueError(f"%{letter} has no meaning; use {known}, or %% for a percent sign")
        else:
            raise ValueError(f"{text!r} ends in the middle of a letter or escape; use %% or \\\\")
    return parts


def unescape(text: str) -> bytes:
    """Return text as bytes, with the escapes of format strings replaced; `%` has no meaning here. Raises
    ValueError for an unknown escape.
    """
    parts = parse_format(text.replace("%", "%%"))
    return b"".join(part for part in parts if isinstance(part, bytes))


def _unescaped(escape: str) -> bytes:
    if escape in _ESCAPES:
        return _ESCAPES[escape]
    if escape[0] == "x" and len(escape) == 3:
        return bytes([int(escape[1:], 16)])
    raise ValueError(f"\\{escape} is not an escape; use \\n, \\t, \\r, \\0, \\\\ or \\xHH")


def render(parts: list[Part], record: Record) -> bytes:
    """Return a record as text. A null key or value is empty, and its length is -1, as in kcat."""
    return b"".join(part if isinstance(part, bytes) else part(record) for part in parts)
