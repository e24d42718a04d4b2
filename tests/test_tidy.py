"""Taste as failing tests: the import law, banned calls, the size of functions, no clock in a test."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "oncelog"
MODULES = sorted(SOURCE.rglob("*.py"))
ALL_MODULES = [*MODULES, *sorted((ROOT / "packages").rglob("*.py"))]

# For each room (a folder of src/oncelog), the other rooms that it may import. A file directly in src/oncelog
# is a room too.
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
    "audit": BASE | {"rules", "wire"},
    "runtime": BASE,
    "server": BASE | {"rules", "wire", "log", "broker", "runtime", "compiled"},
    "client": BASE | {"rules", "wire", "runtime"},
    "conform": BASE | {"rules", "wire", "runtime", "client"},
    "schema_registry": BASE | {"runtime"},
}
PURE_ROOMS = {"rules", "wire", "log", "broker", "audit"}
CLIENT_IO = {
    "admin": {"aio", "blocking", "offset_reset", "request_router"},
    "connection": {"broker_connection", "broker_protocol", "cluster", "connector", "coordinator", "security"},
    "consumer": {
        "aio", "blocking", "fetcher", "offset_lookup", "partition_ends", "range_reader", "read_table",
    },
    "group": {
        "aio", "classic_member", "commits", "consumer_member", "coordinator_client", "membership",
        "rebalance_callbacks", "subscribed_topics",
    },
    "process": {"aio", "blocking"},
    "producer": {"aio", "arrow_encoding", "blocking", "delivery", "driver", "transaction_manager"},
}  # fmt: skip
"""Modules of clients that do I/O. All others are pure, and import none of them."""
BANNED_IN_PURE = {"time", "random", "asyncio", "socket", "os", "threading", "uuid", "selectors", "subprocess"}

MAX_FUNCTION_LINES = 60

TESTS = Path(__file__).parent
CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"}
MAY_USE_CLOCK = re.compile(
    rf"\b(?:sleep|{'|'.join(sorted(CLOCKS - {'time'}))})\b" r"|\btime\s*\.\s*time\b|\bfrom\s+time\b"
)
"""Text that each use of a clock contains. To parse the other files would take most of the time."""
READS_CLOCKS = {
    "support/wait.py": "here the waiting is done",
    "support/costs_plugin.py": "measures what tests cost",
    "support/time_limit_plugin.py": "skips tests that begin after the time limit of CI",
    "support/history/clients.py": "notes when calls begin and end, for the checker of histories",
    "support/pipeline/child_program.py": "a program of its own that a test kills",
    "kill/copier.py": "a program of its own that tests kill",
    "golden/kafka_directory.py": "captures what Apache Kafka writes; no test",
    "differential/runner.py": "lets time-outs run out on Apache Kafka",
    "support/spark/sink_program.py": "a program of its own that tests kill",
    "client/test_client_producer_unreachable.py": "the simulator's time",
    "sim/test_sim_disk.py": "the simulator's time",
    "sim/test_sim_durability.py": "the simulator's time",
    "sim/test_sim_parts.py": "the simulator's time",
    "sim/test_sim_regressions.py": "the simulator's time",
}
"""Test files that may sleep or read a clock, each with the reason."""


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def clock_uses(code: str) -> list[str]:
    """Return each line that calls sleep, reads a monotonic or processor clock, or compares `time.time()`."""
    if not MAY_USE_CLOCK.search(code):
        return []
    nodes = list(ast.walk(ast.parse(code)))
    compared = {inner for node in nodes if isinstance(node, ast.Compare) for inner in ast.walk(node)}
    # asyncio.sleep(0) is allowed: it lets the event loop run once and does not wait.
    yields = {node.func for node in nodes if isinstance(node, ast.Call) and _is_zero(node.args)}
    found = []
    for node in nodes:
        match node:
            case ast.ImportFrom(module="time" | "asyncio", names=names):
                is_clock = any(alias.name in {"sleep", *CLOCKS} for alias in names)
            case ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep"):
                is_clock = node not in yields
            case ast.Attribute(value=ast.Name(id="time"), attr="time" | "time_ns"):
                is_clock = node in compared
            case ast.Attribute(value=ast.Name(id="time"), attr=name):
                is_clock = name in CLOCKS
            case _:
                is_clock = False
        if is_clock:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


def _is_zero(arguments: list[ast.expr]) -> bool:
    return [getattr(argument, "value", None) for argument in arguments] == [0]


class Module(NamedTuple):
    """The imports and functions of a file."""

    imports: list[ast.Import | ast.ImportFrom]
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef]


@cache
def parsed(path: Path) -> Module:
    """Parse a file once for all tests. Only these nodes are kept, because a whole tree is large."""
    return module_of(path.read_text())


def module_of(code: str) -> Module:
    imports, functions = [], []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(node)
    return Module(imports, functions)


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "oncelog":
                yield from (f"oncelog.{alias.name}" for alias in node.names)
            else:
                yield node.module


SOURCE_ROOTS = [ROOT / "src", *sorted((ROOT / "packages").glob("*/src"))]


def module_files() -> dict[str, Path]:
    """Return every module of src and packages by its dotted name."""
    modules = {}
    for root in SOURCE_ROOTS:
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def modules_imported(nodes: Iterable[ast.AST], modules: Collection[str]) -> set[str]:
    """Return the modules that a file imports anywhere: at its top, under TYPE_CHECKING, in functions."""
    imported = set()
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            # In `from package import name`, `name` is a module or an attribute of the package.
            imported.add(name if name in modules else name.rpartition(".")[0])
    return imported.intersection(modules)


def import_circles(imports: Mapping[str, Collection[str]]) -> list[frozenset[str]]:
    """Return the sets of modules that import each other, directly or through others (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in sorted(imports[module]):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == order[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1 or module in imports[module]:
                circles.append(frozenset(component))

    for module in sorted(imports):
        if module not in order:
            visit(module)
    return circles


def test_at_most_two_modules_have_one_name() -> None:
    """Names should be distinct, because a traceback shows a file's name.

    `core`, `aio` and `blocking` are exceptions.
    """
    count = Counter(path.name for path in SOURCE.rglob("*.py"))
    for name in ("__init__.py", "core.py", "aio.py", "blocking.py"):
        del count[name]
    assert [name for name, files in count.items() if files > 2] == []


def test_no_module_is_in_an_import_circle() -> None:
    """Imports under TYPE_CHECKING and in functions count: a reader has to follow them too."""
    files = module_files()
    imports = {name: modules_imported(parsed(path).imports, files) for name, path in files.items()}
    circles = import_circles(imports)
    assert not circles, f"import circles: {[sorted(circle) for circle in circles]}"


def test_import_circles_are_found() -> None:
    imports = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": [], "e": ["e"], "f": ["a"]}
    assert sorted(map(sorted, import_circles(imports))) == [["a", "b", "c"], ["e"]]


def test_imports_under_type_checking_and_in_functions_are_found() -> None:
    code = """
import a.b
from a import c, name
if TYPE_CHECKING:
    from a.d import Name
def function():
    from e import name
"""
    modules = {"a", "a.b", "a.c", "a.d", "e", "f"}
    assert modules_imported(module_of(code).imports, modules) == modules - {"f"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_import_law(path: Path) -> None:
    room = room_of(path)
    names = set(imports_of(parsed(path).imports))
    if room in MAY_IMPORT:
        rooms = {name.split(".")[1] for name in names if name.startswith("oncelog.")}
        assert rooms - MAY_IMPORT[room] - {room} == set()
    if room != "cli":
        assert not any(name.split(".")[0].startswith("oncelog_") for name in names)
    is_pure = room in PURE_ROOMS
    if room == "client" and len(path.relative_to(SOURCE).parts) == 3:
        is_pure = path.stem not in CLIENT_IO[path.parent.name]
        with_io = {f"oncelog.client.{part}.{name}" for part, stems in CLIENT_IO.items() for name in stems}
        assert not is_pure or not names & with_io
    if is_pure:
        assert {name.split(".")[0] for name in names} & BANNED_IN_PURE == set()


@pytest.mark.parametrize("path", ALL_MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_short(path: Path) -> None:
    for node in parsed(path).functions:
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(TESTS.rglob("*.py")) if str(path.relative_to(TESTS)) not in READS_CLOCKS],
    ids=lambda path: str(path.relative_to(TESTS)),
)
def test_no_test_sleeps_or_reads_a_clock(path: Path) -> None:
    """A test waits for a condition with support/wait.py, so that a busy machine changes nothing."""
    assert clock_uses(path.read_text()) == [], "use tests/support/wait.py"


@pytest.mark.parametrize(
    ("code", "is_clock"),
    [
        ("import time\ntime.sleep(1)", True),
        ("import asyncio\nasyncio.sleep(0.1)", True),
        ("import asyncio\nasyncio.sleep(0)", False),
        ("from time import monotonic", True),
        ("from asyncio import sleep", True),
        ("import time\nstarted = time.monotonic()", True),
        ("import time\nassert time.time() < 5", True),
        ("import time\nexpires = time.time() + 300", False),
        ("load.work(time.sleep, 2)", True),
    ],
)
def test_uses_of_clocks_are_found(code: str, is_clock: bool) -> None:
    assert bool(clock_uses(code)) is is_clock
