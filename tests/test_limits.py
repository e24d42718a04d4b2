"""The documentation of each limit states the default that the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from oncelog.limits import DEFAULT_LIMITS, Limits

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "limits.md"


def test_every_limit_is_documented_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", PAGE.read_text(), re.MULTILINE)
    documented = {name: int(default.replace(",", "")) for name, default in rows}
    assert documented == {field.name: getattr(DEFAULT_LIMITS, field.name) for field in fields(Limits)}
