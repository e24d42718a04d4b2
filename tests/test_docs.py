"""Documents are right: generated pages are fresh, behaviours have tests, links lead somewhere."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType

import click
import pytest
from support.tool import load_tool

from oncelog.cli.main import cli
from oncelog.client.connection import core as connection_core
from oncelog.config import ADMIN, BROKER, CONSUMER, PRODUCER

ROOT = Path(__file__).parents[1]

# The ids of behaviours that must have a test. Ids are added to this list and never removed.
DUE_ROWS = [
    *(f"{kind}{number}" for kind, last in (("I", 30), ("T", 16), ("P", 8)) for number in range(1, last + 1)),
    "P10",
    "P11",
    "P12",
]

FINDINGS = ROOT / "docs" / "internals" / "findings.md"

DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))


behaviours = load_tool("behaviours")


@functools.cache
def _tests_by_row() -> dict[str, list[str]]:
    """Read all test files once, when a test first needs the result, and not during collection."""
    return behaviours.collect()


def test_behaviours_page_is_fresh() -> None:
    page = (ROOT / "docs" / "behaviours.md").read_text()
    assert page == behaviours.render(_tests_by_row()), "run: make behaviours"


def test_markers_name_known_rows() -> None:
    assert set(_tests_by_row()) <= set(behaviours.load_rows()[1])


@pytest.mark.parametrize("row", DUE_ROWS)
def test_due_row_has_a_test(row: str) -> None:
    assert behaviours.is_proved(_tests_by_row().get(row, [])), f"no test of make test is marked {row!r}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (path.parent / target).exists()] == []


def _anchors(text: str) -> set[str]:
    """Return the anchors that GitHub and MkDocs generate from the headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_headings(path: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        if "://" not in target and page.suffix == ".md" and anchor not in _anchors(page.read_text()):
            dead.append(target)
    assert dead == []


def test_findings_have_ids_of_their_own() -> None:
    ids = re.findall(r"^\| ([A-Z]\d+\w?) \|", FINDINGS.read_text(), re.MULTILINE)
    assert len(ids) == len(set(ids)) > 100


def test_rows_of_findings_have_the_columns_of_their_table() -> None:
    """Markdown drops superfluous cells at the end of a row, so an extra cell would hide the last one,
    which names the guard.
    """
    columns, wrong = None, []
    for line in FINDINGS.read_text().splitlines():
        if not line.startswith("|"):
            columns = None
            continue
        count = len(re.findall(r"(?<!\\)\|", line)) - 1
        columns = columns or count
        wrong += [line[:60]] if count != columns else []
    assert wrong == []


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == version
    assert version == connection_core.CLIENT_SOFTWARE_VERSION


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_tests_that_documents_name_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)::(?:\w+::)?(\w+)`", path.read_text())
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (test := ROOT / "tests" / file).exists() or f"def {name}(" not in test.read_text()
    ]
    assert missing == []


def test_tests_that_comments_of_the_source_name_exist() -> None:
    """A comment that explains odd code names the test that guards it, so a rename must not break the name."""
    tests = [path for folder in ("tests", "packages") for path in (ROOT / folder).rglob("*.py")]
    known = {path.stem for path in tests}
    known |= {name for path in tests for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"\b(test_\w+)\b", path.read_text())
    }
    assert len(named) > 150
    assert sorted((path, name) for path, name in named if name not in known) == []


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "docs/glossary.md"])
def test_files_of_the_source_that_a_guide_names_exist(name: str) -> None:
    named = set(re.findall(r"`([\w.-]+/[\w./-]*\.py)`", (ROOT / name).read_text()))
    roots = [ROOT, ROOT / "src" / "oncelog"]
    assert len(named) > 30
    assert [file for file in sorted(named) if not any((root / file).exists() for root in roots)] == []


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


def _fenced(path: Path, *languages: str) -> list[str]:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in blocks if language in languages]


def _commands_of(path: Path) -> set[str]:
    """Yield every `oncelog ...` command of a document, from its blocks of shell commands and from its
    text.
    """
    lines = [
        line
        for block in _fenced(path, "console", "sh", "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    found = {line.partition("#")[0] for line in lines}
    found |= set(re.findall(r"`(oncelog [^`]+)`", path.read_text().replace("\n", " ")))
    starts = re.compile(r"(?:^|\| ?)(?:\$ )?(?:\.venv/bin/)?oncelog ([a-z].*)")
    return {match[1] for line in found if (match := starts.search(line.strip()))}


def _check_command(text: str) -> None:
    """Find the command and parse its options, without their values. Raises click's errors."""
    words = shlex.split(re.split(r" [|&>]|;", text)[0])
    command: click.Command = cli
    context = click.Context(cli, info_name="oncelog")
    while isinstance(command, click.Group) and words:
        name = words.pop(0).rstrip(",")
        if name.isupper():
            return  # a word in capitals is a placeholder for any command
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no command {name!r}")
        command = found
        context = click.Context(command, info_name=name, parent=context)
    if not isinstance(command, click.Group):
        command.make_parser(context).parse_args(words)


def test_documents_have_commands_to_check() -> None:
    assert sum(len(_commands_of(path)) for path in DOCUMENTS) > 60


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_documents_exist_with_their_options(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return  # this page describes versions that had other commands
    wrong = []
    for text in sorted(_commands_of(path)):
        try:
            _check_command(text)
        except (click.UsageError, ValueError) as error:
            wrong.append(f"{text}: {getattr(error, 'message', error)}")
    assert wrong == []


def _has(module: ModuleType, name: str) -> bool:
    """Return True if the module has an attribute of this name, or a submodule that is not imported yet."""
    return hasattr(module, name) or importlib.util.find_spec(f"{module.__name__}.{name}") is not None


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_in_documents_compiles_and_imports_what_is_there(path: Path) -> None:
    for block in _fenced(path, "python"):
        # "...start()" stands for a chain of calls.
        for node in ast.walk(ast.parse(re.sub(r"\.{3,4}(?=\w)", ".", block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oncelog"):
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not _has(module, name.name)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_settings_in_property_files_of_documents_exist(path: Path) -> None:
    for block in _fenced(path, "properties"):
        keys = [line.partition("=")[0].strip() for line in block.splitlines() if "=" in line]
        known = [table for table in (BROKER, ADMIN, PRODUCER, CONSUMER) if all(map(table.get, keys))]
        assert known or all(key.startswith("listener.name.") or BROKER.get(key) for key in keys), keys
