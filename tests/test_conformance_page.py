"""docs/conformance.md agrees with the stored results."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from support.tool import load_tool

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("conformance")


def test_the_page_is_fresh(tool: ModuleType) -> None:
    text = tool.PAGE.read_text()
    assert text == tool.page(text, tool.stored()), "run .venv/bin/python tools/conformance.py"


def test_every_broker_has_a_column_or_a_reason_for_having_none(tool: ModuleType) -> None:
    results = tool.stored()
    assert len(results) == len(tool.BROKERS)
    for result in results:
        if "missing" in result:
            assert f"could not be checked on {result['date']}: {result['missing']}" in tool.PAGE.read_text()
        else:
            assert f"{result['title']} {result['version']}" in tool.PAGE.read_text()
            assert result["date"] in tool.PAGE.read_text()
