"""Java .properties files, by the rules of `java.util.Properties.load`, as in Kafka's tools.

One difference: a file is read as UTF-8. If it is not valid UTF-8, it is read as ISO 8859-1, Java's only
encoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from oncelog.errors import ConfigError

_BLANKS = " \t\f"
_ENTRY = re.compile(r"((?:\\.|[^\\ \t\f=:])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.?)", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_properties(path: Path) -> dict[str, str]:
    """Return the settings in a file.

    Raises ConfigError, whose text has the line number. The text does not quote the line, because the line may
    contain a password and error texts end up in logs. Guard: test_an_error_does_not_show_a_password.
    """
    properties: dict[str, str] = {}
    for number, line in _logical_lines(_text(path)):
        entry = _ENTRY.fullmatch(line)
        # The pattern always matches: both key and value may be empty.
        assert entry is not None
        try:
            key, value = map(_unescaped, entry.groups())
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if not key:
            raise ConfigError(f"{path}, line {number}: expected key=value")
        # Kafka strips white space at the end of each value, even of passwords.
        properties[key] = value.strip()
    return properties


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, line joined with its continuations). Skip comments and empty lines."""
    pending, first = "", 0
    # Do not use str.splitlines, which also splits at form feeds and at characters beyond ASCII.
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        line = raw.lstrip(_BLANKS)
        if not pending:
            # `pending` is also "" after a line that is only a backslash. So a comment is skipped after such a
            # line too.
            if not line or line[0] in "#!":
                continue
            first = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            pending += line[:-1]
            continue
        yield first, pending + line
        pending = ""
    if pending:
        yield first, pending


def _unescaped(text: str) -> str:
    """Replace escapes such as \\t, and drop the backslash before any other character. Raises ValueError for
    an invalid \\uXXXX.
    """

    def replaced(escape: re.Match[str]) -> str:
        what = escape[1]
        if what == "u":
            raise ValueError("\\u needs four hexadecimal digits; a backslash is written as two")
        return chr(int(what[1:], 16)) if len(what) > 1 else _CONTROL.get(what, what)

    found = _ESCAPE.sub(replaced, text)
    try:
        # Java writes a character beyond U+FFFF as two escapes.
        return found.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise ValueError("\\u stands for half of a surrogate pair") from None
