"""docs/guides/coming-from.md names only classes and methods that exist. Both columns of its tables are
checked: the library that users come from, and this one.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import oncelog
import oncelog.aio

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "coming-from.md").read_text()
MODULES = {"confluent-kafka": "confluent_kafka", "kafka-python": "kafka", "aiokafka": "aiokafka"}


def _rows() -> Iterator[tuple[str, str, str]]:
    for section in PAGE.split("\n## ")[1:]:
        library = section.partition("\n")[0]
        for theirs, ours in re.findall(r"^\| (`[\w.]+`) \| ([^|]+) \|", section, re.MULTILINE):
            yield library, theirs.strip("`"), ours.strip("`")


def _exists(module: object, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


@pytest.mark.parametrize("library", MODULES)
def test_the_calls_of_the_tables_exist(library: str) -> None:
    rows = [(theirs, ours) for name, theirs, ours in _rows() if name == library]
    assert len(rows) >= 8
    module = importlib.import_module(MODULES[library])
    assert [theirs for theirs, _ in rows if not _exists(module, theirs)] == []
    assert [ours for _, ours in rows if ours != "nothing" and not _exists(oncelog, ours)] == []
