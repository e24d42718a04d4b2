"""Taste as failing tests: the import law, calls banned outside the edge, the size of functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "oncelog"
MODULES = sorted(SOURCE.rglob("*.py"))

# room -> rooms it may import (besides itself). A file directly under oncelog/ is its own room.
BASE = {"types", "errors", "settings", "config", "limits"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "settings": {"errors"},
    "config": {"settings"},
    "limits": set(),
    "rules": {"types", "errors", "limits"},
    "wire": {"types", "errors"},
    "log": BASE | {"rules", "wire"},
    "broker": BASE | {"rules", "wire", "log"},
    "client": BASE | {"rules", "wire"},
}
PURE_ROOMS = {"rules", "wire", "log", "broker", "client"}
BANNED_IN_PURE = {"time", "random", "asyncio", "socket", "os", "threading", "uuid", "selectors", "subprocess"}

MAX_FUNCTION_LINES = 60


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "oncelog":
                yield from (f"oncelog.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_import_law(path: Path) -> None:
    room = room_of(path)
    names = set(imports_of(ast.parse(path.read_text())))
    if room in MAY_IMPORT:
        rooms = {name.split(".")[1] for name in names if name.startswith("oncelog.")}
        assert rooms - MAY_IMPORT[room] - {room} == set()
    if room in PURE_ROOMS:
        assert {name.split(".")[0] for name in names} & BANNED_IN_PURE == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"
