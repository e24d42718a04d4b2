"""Write docs/behaviours.md: every row of docs/behaviours.toml with the tests marked `behaviour("<row>")`.

The tests are parsed, not imported. So the tool needs no Java and no broker, and takes less than a second.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS_FILE = ROOT / "docs" / "behaviours.toml"
PAGE_FILE = ROOT / "docs" / "behaviours.md"

PREAMBLE = """\
# Behaviours, and the tests that prove them

`make behaviours` generates this page from `docs/behaviours.toml` and the tests' `behaviour(...)` markers; do not edit.
A behaviour is proved as long as `make test-all` is green. That runs all tests below except those marked (soak), which
`make soak` runs. `make test` runs a test of each behaviour that one process can prove. A behaviour without a test is
not built yet.
"""

Marked = tuple[str, str]
"""A pair: the id of a behaviour, and the name of a test that proves it.

A test's name is `file::[Class::]function`, followed by SOAK if only `make soak` runs it.
"""
SOAK = " (soak)"


def load_rows() -> tuple[dict[str, str], dict[str, str]]:
    """Return the titles of sections by letter, and the behaviours' statements by id, in the file's order."""
    data = tomllib.loads(ROWS_FILE.read_text())
    return data["sections"], data["rows"]


def marker_ids(node: ast.AST) -> Iterator[str]:
    """Yield the ids of every `pytest.mark.behaviour("I1", ...)` call inside `node`."""
    for call in ast.walk(node):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "behaviour"
        ):
            for argument in call.args:
                if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                    raise SystemExit(f"line {call.lineno}: behaviour() takes row ids as plain strings")
                yield argument.value


def module_ids(tree: ast.Module) -> set[str]:
    """Return the ids of a `pytestmark = ...` at the top of a test file.

    The ids apply to all tests of the file.
    """
    return {row for mark in _module_marks(tree) for row in marker_ids(mark)}


def _module_marks(tree: ast.Module) -> Iterator[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
        ):
            yield node.value


def marked_in(body: list[ast.stmt], prefix: str, inherited: set[str]) -> Iterator[Marked]:
    """Yield the marked tests in the body of a module or class. The `inherited` ids apply to all of them."""
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        ids = inherited | {i for decorator in node.decorator_list for i in marker_ids(decorator)}
        name = f"{prefix}::{node.name}"
        suffix = SOAK if any(_is_soak(decorator) for decorator in node.decorator_list) else ""
        if isinstance(node, ast.ClassDef):
            yield from marked_in(node.body, name, ids)
        elif node.name.startswith("test"):
            yield from ((row, name + suffix) for row in ids)


def _is_soak(mark: ast.AST) -> bool:
    return isinstance(mark, ast.Attribute) and mark.attr == "soak"


def collect(tests: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Return the sorted names of the tests of each behaviour, from all test files."""
    found: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        prefix = path.relative_to(ROOT).as_posix()
        is_soak = any(_is_soak(node) for mark in _module_marks(tree) for node in ast.walk(mark))
        for row, name in marked_in(tree.body, prefix, module_ids(tree)):
            found.setdefault(row, []).append(name.removesuffix(SOAK) + SOAK if is_soak else name)
    return {row: sorted(names) for row, names in found.items()}


def render(tests_by_row: dict[str, list[str]]) -> str:
    """Return the text of docs/behaviours.md."""
    sections, rows = load_rows()
    parts = [PREAMBLE]
    for letter, title in sections.items():
        ids = [row for row in rows if row.rstrip("0123456789") == letter]
        proved = sum(1 for row in ids if is_proved(tests_by_row.get(row, [])))
        parts.append(f"\n## {letter}. {title}: {proved} of {len(ids)} proved\n")
        for row in ids:
            tests = tests_by_row.get(row, [])
            status = f"{len(tests)} test{'s' if len(tests) != 1 else ''}" if tests else "no test yet"
            parts.append(f"\n**{row}** {rows[row]} *{status}*\n")
            if tests:
                parts.append("\n" + "".join(f"- {_shown(name)}\n" for name in tests))
    return "".join(parts)


def is_proved(tests: list[str]) -> bool:
    """Return True if `make test-all` runs at least one of the tests, that is, if not all are soak tests."""
    return any(not name.endswith(SOAK) for name in tests)


def _shown(name: str) -> str:
    plain = name.removesuffix(SOAK)
    return f"`{plain}`{name[len(plain) :]}"


def main() -> int:
    tests_by_row = collect()
    unknown = sorted(set(tests_by_row) - set(load_rows()[1]))
    if unknown:
        print(f"markers name behaviours that docs/behaviours.toml does not have: {unknown}", file=sys.stderr)
        return 1
    PAGE_FILE.write_text(render(tests_by_row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
