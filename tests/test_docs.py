"""The documents say what is so: generated ones are fresh, due rows have tests, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

# Rows that must have a test already; the list only grows.
DUE_ROWS = [
    f"{kind}{number}" for kind, last in (("I", 29), ("T", 15), ("P", 5)) for number in range(1, last + 1)
]

FINDINGS = ROOT / "docs" / "internals" / "findings.md"

DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))


def _load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


behaviours = _load_tool("behaviours")
TESTS_BY_ROW = behaviours.collect()


def test_behaviours_page_is_fresh() -> None:
    page = (ROOT / "docs" / "behaviours.md").read_text()
    assert page == behaviours.render(TESTS_BY_ROW), "run: make behaviours"


def test_markers_name_known_rows() -> None:
    assert set(TESTS_BY_ROW) <= set(behaviours.load_rows()[1])


@pytest.mark.parametrize("row", DUE_ROWS)
def test_due_row_has_a_test(row: str) -> None:
    assert behaviours.is_proved(TESTS_BY_ROW.get(row, [])), f"no test of make test is marked {row!r}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (path.parent / target).exists()] == []


def test_findings_have_ids_of_their_own() -> None:
    ids = re.findall(r"^\| ([A-Z]\d+\w?) \|", FINDINGS.read_text(), re.MULTILINE)
    assert len(ids) == len(set(ids)) > 100


def test_guards_of_findings_exist() -> None:
    guards = re.findall(r"`([\w/]+\.py)::(?:\w+::)?(\w+)`", FINDINGS.read_text())
    missing = [
        f"{file}::{name}"
        for file, name in guards
        if not (path := ROOT / "tests" / file).exists() or f"def {name}(" not in path.read_text()
    ]
    assert missing == []


def test_collects_markers_of_modules_classes_and_parameters() -> None:
    source = """
pytestmark = pytest.mark.behaviour("I1")
class TestSome:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.behaviour("I2"))])
    def test_one(self, x): ...
def helper(): ...
"""
    tree = behaviours.ast.parse(source)
    marked = set(behaviours.marked_in(tree.body, "f", behaviours.module_ids(tree)))
    assert marked == {("I1", "f::TestSome::test_one"), ("I2", "f::TestSome::test_one")}
