"""Times and durations as text: `1h`, `PT1H`, `2026-11-28T10:00`, milliseconds since 1970."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
# At most nine digits: a longer number is a typing error, and int() of thousands of digits is slow.
_SHORT = re.compile(r"(?:[0-9]{1,9}(?:ms|[smhdw]))+")
_PART = re.compile(r"([0-9]+)(ms|[smhdw])")
_ISO = re.compile(
    r"P(?:(?P<w>[0-9]{1,9})W)?(?:(?P<d>[0-9]{1,9})D)?"
    r"(?:T(?=[0-9])(?:(?P<h>[0-9]{1,9})H)?(?:(?P<m>[0-9]{1,9})M)?(?:(?P<s>[0-9]{1,9}(?:\.[0-9]{1,3})?)S)?)?"
)
_EPOCH_MS = re.compile(r"(?![0-9]{8}$)[0-9]{1,18}")
"""Milliseconds since 1970. Eight digits do not match, because they are a date in ISO 8601."""
_TIME_EXAMPLES = "1h (an hour ago), 2026-11-28T10:00, now, or milliseconds since 1970"

Time = datetime | timedelta | int | str
"""A time as an argument: milliseconds since 1970, a datetime, a timedelta before now, or a text."""


def parse_duration(text: str) -> int:
    """Parse a duration such as `90s`, `1h30m` or, in ISO 8601, `PT1H30M`, and return it in ms. Raises
    ValueError.
    """
    if _SHORT.fullmatch(text):
        return sum(int(count) * _UNITS_MS[unit] for count, unit in _PART.findall(text))
    found = _ISO.fullmatch(text)
    parts = {unit: count for unit, count in found.groupdict().items() if count} if found else {}
    if not parts:
        raise ValueError(f"{text!r} is not a duration such as 90s, 1h30m, 7d or PT1H")
    return sum(round(float(count) * _UNITS_MS[unit]) for unit, count in parts.items())


def parse_time(text: str, now_ms: int) -> int:
    """Parse a time and return it in ms since 1970. A duration such as `1h` means that long before `now_ms`.

    A date and time without a UTC offset is local time. Times before 1970 become 0. Raises ValueError.
    """
    if text == "now":
        return now_ms
    if _EPOCH_MS.fullmatch(text):
        return int(text)
    try:
        return max(now_ms - parse_duration(text), 0)
    except ValueError:
        pass
    try:
        return max(int(datetime.fromisoformat(text).timestamp() * 1000), 0)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is not a time such as {_TIME_EXAMPLES}") from None


def time_ms_of(time: Time, now_ms: int) -> int:
    """Return a `Time` in ms since 1970. A text is parsed by `parse_time`. Raises ValueError.

    A timedelta is subtracted from `now_ms`. Times before 1970 become 0.
    """
    if isinstance(time, str):
        return parse_time(time, now_ms)
    if isinstance(time, timedelta):
        return max(now_ms - time // timedelta(milliseconds=1), 0)
    if isinstance(time, datetime):
        return max(int(time.timestamp() * 1000), 0)
    if isinstance(time, int) and not isinstance(time, bool) and 0 <= time < 1 << 63:
        return time
    raise ValueError(f"{time!r} is not a time such as {_TIME_EXAMPLES}")
