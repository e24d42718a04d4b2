"""Change one operator, constant or statement of a module at a time, and check that a quick test fails.

The tests are collected once. A first run records which functions each test calls. Each mutant runs in a fork
of the process that collected the tests. The fork replaces the code of one function, or the value of one name
of the module. It runs only the tests that call the function, cheapest first, until one fails.

    make mutants MODULES="log/recovery rules/transactions" SECONDS=600
    .venv/bin/python tools/mutation.py rules/idempotence/append --tests tests/rules/test_rules_append.py

A module is a path below src/oncelog without `.py`, or a directory. Each module runs in its own process.
Without `--tests`, the test files of a module are those that import it, have its name, or are in MORE_TESTS.
tools/equivalent_mutants.txt lists the accepted survivors, each with a reason. `--seconds` counts from the end
of the first run. `--write` updates the rows in docs/internals/mutation.md.

The exit code is 0 if each mutant was killed or is accepted, 1 if some survived, and 2 if the time ran out.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import pickle
import random
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "oncelog"
PAGE = ROOT / "docs" / "internals" / "mutation.md"
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.txt"
MARKS = "<!-- mutation -->", "<!-- /mutation -->"
TEST_DIRECTORIES = ("rules", "wire", "log", "broker", "client", "faults", "load", "spark", "security")
"""The folders of tests/ in which the test files of a module are searched."""
MORE_TESTS = {
    "log/cleaner": ["tests/broker/test_broker_compaction.py"],
    "log/index": ["tests/log/test_log_recovery.py", "tests/log/test_log_time_index.py"],
    "log/recovery": ["tests/log/test_log_partition.py", "tests/log/test_log_crash.py"],
    "log/snapshot": ["tests/log/test_log_partition.py", "tests/log/test_log_recovery.py"],
    "audit/findings": ["tests/rules/test_rules_audit.py"],
    "audit/sequences": ["tests/rules/test_rules_audit.py"],
    "audit/transaction_outcomes": ["tests/rules/test_rules_audit.py"],
    "rules/groups/classic": ["tests/broker/test_broker_groups.py"],
    "rules/groups/committed_offsets": [
        "tests/broker/test_broker_groups.py",
        "tests/broker/test_broker_expiry.py",
    ],
    "rules/groups/consumer": ["tests/broker/test_broker_groups.py"],
    "rules/idempotence/markers": ["tests/log/test_log_partition.py"],
    "rules/security/scram": ["tests/security/test_security_sasl.py"],
    "rules/transactions/client_session": ["tests/client/test_client_transactions.py"],
    "rules/transactions/coordinator": ["tests/broker/test_broker_transactions.py"],
    "rules/transactions/entry": ["tests/broker/test_broker_transactions.py"],
    "rules/transactions/hanging": ["tests/client/test_client_admin_broker.py"],
}
"""More test files for some modules: those that neither import the module nor have its name."""
MAX_TEST_SECONDS = 5.0
"""Processor seconds for the tests of one mutant. Its most expensive tests beyond this limit are skipped."""
CPU_FACTOR, CPU_EXTRA = 5, 3
"""A mutant times out after CPU_FACTOR times its tests' usual processor time plus CPU_EXTRA seconds."""
WALL_FACTOR, WALL_EXTRA = 30, 60

MODULE_LEVEL = "<module>"
KILLED, TIMEOUT, EQUAL = "killed", "timeout", "accepted"
SURVIVED, UNTESTED, LEFT = "survived", "untested", "not run"


# The mutations.

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NOT_MUTATED = {"__repr__", "__str__", "__rich__"}
"""Names of functions that are not mutated. Only people read their results, so no test needs to check them."""


@dataclass(frozen=True)
class Mutant:
    """A changed node of a module's syntax tree."""

    module: str
    """Path of the module below src/oncelog, without `.py`."""
    function: str
    """The qualified name of the outermost function. For a constant: MODULE_LEVEL and the constant's name."""
    line: int
    change: str
    """The original source and its replacement, as `SOURCE` -> `REPLACEMENT`."""
    number: int
    """Number of this change among equal changes of one function, from 1."""
    tree: ast.Module = field(repr=False, compare=False)
    node: ast.AST = field(repr=False, compare=False)
    replacement: ast.AST = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        again = f" #{self.number}" if self.number > 1 else ""
        return f"{self.module} {self.function}: {self.change}{again}"


def mutants_of(module: str, source: str) -> Iterator[Mutant]:
    """Yield each mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    seen: Counter[tuple[str, str]] = Counter()
    for node, function, line in _mutable_nodes(tree):
        before = _text(node)
        for replacement in _replacements(node):
            change = f"`{before}` -> `{_text(replacement)}`"
            seen[function, change] += 1
            yield Mutant(module, function, line, change, seen[function, change], tree, node, replacement)


def _text(node: ast.AST) -> str:
    """Return a node's source in one line. A statement with a body is shortened to its first line."""
    match node:
        case ast.match_case(pattern=pattern, guard=guard):
            return f"case {ast.unparse(pattern)}" + (f" if {ast.unparse(guard)}" if guard else "")
        case ast.If(test=test):
            return f"if {ast.unparse(test)}"
        case ast.While(test=test):
            return f"while {ast.unparse(test)}"
        case ast.Match(cases=cases):
            return "; ".join(_text(case) for case in cases)
        case ast.comprehension():
            return ast.unparse(node).strip()
    return " ".join(ast.unparse(node).split())


def _mutable_nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield the nodes that may be changed, each with its line and the name of its function or constant."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield from _walk(value, f"{MODULE_LEVEL}.{name}", value.lineno)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield from _walk(value, f"{MODULE_LEVEL}.{name}", value.lineno)
            case _:
                yield from _within(statement, "")


def _within(statement: ast.stmt, prefix: str) -> Iterator[tuple[ast.AST, str, int]]:
    if isinstance(statement, ast.ClassDef):
        for child in statement.body:
            yield from _within(child, f"{prefix}{statement.name}.")
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name not in _NOT_MUTATED:
        for child in statement.body:
            yield from _walk(child, prefix + statement.name, child.lineno)


def _walk(node: ast.AST, function: str, line: int) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield a node and the nodes below it, except annotations, decorators, asserts and texts of errors."""
    if isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    line = getattr(node, "lineno", line)
    yield node, function, line
    if isinstance(node, ast.Raise | ast.JoinedStr):
        # Do not go below `raise` and f-strings: texts are not mutated, and an exception's arguments are
        # texts.
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child, function, line)


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the replacements of a node, one for each mutant."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for index, op in enumerate(ops):
                changed = [*ops[:index], _COMPARISONS[type(op)](), *ops[index + 1 :]]
                yield ast.Compare(left, changed, comparators)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            yield ast.BinOp(left, _OPERATORS[type(op)](), right)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.comprehension(target=target, iter=values, ifs=ifs, is_async=is_async):
            for index in range(len(ifs)):
                yield ast.comprehension(target, values, [*ifs[:index], *ifs[index + 1 :]], is_async)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Name(id=name) if name in _NAMES:
            yield ast.Name(_NAMES[name], ast.Load())
    yield from _replacements_of_statements(node)


def _replacements_of_statements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.If(test=test, body=body, orelse=orelse):
            yield ast.If(_negated(test), body, orelse)
        case ast.While(test=test, body=body, orelse=orelse):
            yield ast.While(_negated(test), body, orelse)
        case ast.AugAssign(target=target, op=op, value=value):
            if type(op) in _OPERATORS:
                yield ast.AugAssign(target, _OPERATORS[type(op)](), value)
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if not _is_falsy(value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call(func=ast.Name(id="assert_never"))):
            return
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case ast.Match(subject=subject, cases=cases) if len(cases) > 1:
            for index in range(len(cases)):
                if not _never_happens(cases[index]):
                    yield ast.Match(subject, [*cases[:index], *cases[index + 1 :]])
        case ast.match_case(pattern=pattern, guard=ast.expr(), body=body):
            yield ast.match_case(pattern, None, body)


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _is_falsy(node: ast.AST) -> bool:
    """Return True for None and False. Callers treat them equally, so replacing one by the other tests
    nothing.
    """
    return isinstance(node, ast.Constant) and node.value in (None, False)


def _never_happens(case: ast.match_case) -> bool:
    return "assert_never" in ast.unparse(case.body[-1])


# Applying a mutant to the loaded module, in a fork that ends afterwards.


class _Replace(ast.NodeTransformer):
    def __init__(self, node: ast.AST, replacement: ast.AST) -> None:
        self._node, self._replacement = node, replacement

    def visit(self, node: ast.AST) -> Any:
        if node is self._node:
            return (
                ast.copy_location(self._replacement, node) if hasattr(node, "lineno") else self._replacement
            )
        return self.generic_visit(node)


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects of the functions and methods in a module or class, without nested functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and "<locals>" not in constant.co_qualname:
            yield constant
            yield from codes_of(constant)


def put_in_place(mutant: Mutant, loaded: ModuleType, functions: dict[CodeType, list[FunctionType]]) -> None:
    """Apply a mutant in this process: replace the code of its function, or the value of its constant.

    Raises LookupError or ValueError if that is impossible.
    """
    path = str(loaded.__file__)
    mutated = _Replace(mutant.node, mutant.replacement).visit(mutant.tree)
    ast.fix_missing_locations(mutated)
    name = mutant.function.removeprefix(f"{MODULE_LEVEL}.")
    if name != mutant.function:
        for statement in mutated.body:
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            if isinstance(targets[0], ast.Name) and targets[0].id == name:
                value = eval(compile(ast.Expression(statement.value), path, "eval"), vars(loaded))
                _rebind(loaded, name, value)
        return
    changed = {
        (code.co_qualname, code.co_firstlineno): code for code in codes_of(compile(mutated, path, "exec"))
    }
    replaced = 0
    for code, owners in functions.items():
        if code.co_filename == path and code.co_qualname == mutant.function:
            for function in owners:
                function.__code__ = changed[code.co_qualname, code.co_firstlineno]
                replaced += 1
    if not replaced:
        raise LookupError(mutant.function)


def _rebind(loaded: ModuleType, name: str, value: Any) -> None:
    old = vars(loaded)[name]
    if isinstance(old, type) or type(value) is not type(old) or value == old:
        raise ValueError(name)
    if isinstance(old, dict | set):
        old.clear()
        old.update(value)
    elif isinstance(old, list):
        old[:] = value
    for module in [loaded, *sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is old and not isinstance(old, dict | set | list):
            setattr(module, name, value)


def loaded_functions(paths: set[str]) -> dict[CodeType, list[FunctionType]]:
    """Return all loaded functions of these files, by their code, also those behind decorators and
    properties.
    """
    functions: dict[CodeType, list[FunctionType]] = {}
    for value in gc.get_objects():
        if isinstance(value, FunctionType) and value.__code__.co_filename in paths:
            functions.setdefault(value.__code__, []).append(value)
    return functions


# The tests, collected once and run in forks.

RAN, FAILED, NOT_POSSIBLE = 0, 1, 3
"""Exit codes of a fork: all tests passed, a test failed, the mutant cannot be applied."""


@dataclass
class Baseline:
    """The result of the first run of all tests."""

    seconds: dict[int, float]
    """Each test's processor time in seconds, by the test's index."""
    calls: dict[tuple[str, str], set[int]]
    """The indices of the tests that call a function. The key is the function's file and qualified name."""
    failed: list[str]


class Runner:
    """A pytest plugin that runs mutants instead of pytest's own loop over the tests."""

    def __init__(
        self,
        modules: dict[str, Path],
        seconds: float,
        jobs: int,
        accepted: dict[str, str],
        max_mutants: int | None = None,
    ) -> None:
        self.modules = modules
        self.seconds = seconds
        self.max_mutants = max_mutants
        self.deadline = 0.0
        self.jobs = jobs
        self.accepted = accepted
        self.results: dict[Mutant, str] = {}
        self.baseline = Baseline({}, {}, [])
        self._items: list[pytest.Item] = []
        self._on_failure: Callable[[str], None] = lambda nodeid: None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        # Load the profile before test modules are imported, because their Hypothesis settings inherit from
        # the profile that is loaded at that time.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", deadline=None, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("a test module could not be collected")
        self._items = session.items
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all forks
        functions = loaded_functions({str(path) for path in self.modules.values()})
        gc.collect()
        # Without gc.freeze(), the garbage collector of each fork would write to all objects, and so copy the
        # memory that forks share.
        gc.freeze()
        self.baseline = self._first_run()
        self.deadline = time.monotonic() + self.seconds
        self._run_mutants(functions)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._on_failure(report.nodeid)

    def _run_items(self, indices: list[int]) -> Iterator[int]:
        """Run the tests. Yield the index of each test before it runs."""
        for position, index in enumerate(indices):
            item = self._items[index]
            following = self._items[indices[position + 1]] if position + 1 < len(indices) else None
            yield index
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _first_run(self) -> Baseline:
        """Run all tests in a fork. Return the processor time and the called functions of each."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _be_quiet()
            with os.fdopen(writing, "wb") as stream:
                pickle.dump(self._measure(), stream)
            os._exit(RAN)
        os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            text = stream.read()
        os.waitpid(pid, 0)
        if not text:
            raise RuntimeError("the first run of the tests ended early")
        result: Baseline = pickle.loads(text)
        return result

    def _measure(self) -> Baseline:
        baseline = Baseline({}, {}, [])
        paths = {str(path) for path in self.modules.values()}
        names: dict[CodeType, tuple[str, str] | None] = {}
        now: set[CodeType] = set()

        def note(frame: Any, event: str, _argument: Any) -> None:
            if event == "call":
                now.add(frame.f_code)

        self._on_failure = baseline.failed.append
        sys.setprofile(note)
        threading.setprofile(note)
        before, last = time.process_time(), -1

        def close() -> None:
            baseline.seconds[last] = time.process_time() - before
            for code in now:
                if code not in names:
                    is_ours = code.co_filename in paths
                    names[code] = (
                        (code.co_filename, code.co_qualname.split(".<locals>")[0]) if is_ours else None
                    )
                if name := names[code]:
                    baseline.calls.setdefault(name, set()).add(last)

        for index in self._run_items(list(range(len(self._items)))):
            if last >= 0:
                close()
            now.clear()
            before, last = time.process_time(), index
        if last >= 0:
            close()
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        return baseline

    def _tests_of(self, mutant: Mutant) -> list[int]:
        """Return the tests that call a mutant's function, cheapest first, for at most MAX_TEST_SECONDS.

        For a constant, return the tests that call any function of its file. Tests that fail without a mutant
        are left out.
        """
        path = str(self.modules[mutant.module])
        if mutant.function.startswith(MODULE_LEVEL):
            indices = set().union(
                *(tests for (file, _), tests in self.baseline.calls.items() if file == path)
            )
        else:
            indices = self.baseline.calls.get((path, mutant.function), set())
        failed = set(self.baseline.failed)
        chosen, seconds = [], 0.0
        for index in sorted(indices, key=lambda index: (self.baseline.seconds[index], index)):
            seconds += self.baseline.seconds[index]
            if seconds > MAX_TEST_SECONDS and chosen:
                break
            if self._items[index].nodeid not in failed:
                chosen.append(index)
        return chosen

    def _run_mutants(self, functions: dict[CodeType, list[FunctionType]]) -> None:
        mutants = [
            mutant for module, path in self.modules.items() for mutant in mutants_of(module, path.read_text())
        ]
        # Run the mutants in a fixed random order, so that they are a sample of all if the time runs out.
        random.Random(0).shuffle(mutants)
        for mutant in mutants[self.max_mutants :] if self.max_mutants is not None else []:
            self.results[mutant] = LEFT
        mutants = mutants[: self.max_mutants]
        loaded = {module: sys.modules.get(f"oncelog.{module.replace('/', '.')}") for module in self.modules}
        running: dict[int, Fork] = {}
        try:
            for mutant in mutants:
                while len(running) >= self.jobs:
                    self._collect(running)
                tests, module = self._tests_of(mutant), loaded[mutant.module]
                if mutant.name in self.accepted:
                    self.results[mutant] = EQUAL
                elif time.monotonic() > self.deadline:
                    self.results[mutant] = LEFT
                elif not tests or module is None:
                    self.results[mutant] = UNTESTED
                else:
                    fork = self._start(mutant, module, functions, tests)
                    running[fork.pipe] = fork
            while running:
                self._collect(running)
        finally:
            for fork in running.values():
                _end_group(fork.pid)

    def _start(
        self,
        mutant: Mutant,
        module: ModuleType,
        functions: dict[CodeType, list[FunctionType]],
        tests: list[int],
    ) -> Fork:
        seconds = sum(self.baseline.seconds[index] for index in tests)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.setpgid(0, 0)
            limit = int(seconds * CPU_FACTOR) + CPU_EXTRA
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _be_quiet()
            self._on_failure = lambda nodeid: os._exit(FAILED)
            try:
                put_in_place(mutant, module, functions)
            except Exception:
                os._exit(NOT_POSSIBLE)
            try:
                for _ in self._run_items(tests):
                    pass
            except BaseException:
                os._exit(FAILED)
            os._exit(RAN)
        os.close(writing)
        return Fork(mutant, pid, reading, time.monotonic() + seconds * WALL_FACTOR + WALL_EXTRA)

    def _collect(self, running: dict[int, Fork]) -> None:
        """Wait until a fork ends or times out, and record its result."""
        first = min(fork.deadline for fork in running.values())
        ended, _, _ = select.select(list(running), [], [], max(0.0, first - time.monotonic()))
        late = [pipe for pipe, fork in running.items() if fork.deadline < time.monotonic()]
        for pipe in {*ended, *late}:
            fork = running.pop(pipe)
            os.close(pipe)
            if pipe not in ended:
                os.kill(fork.pid, signal.SIGKILL)
            _, status = os.waitpid(fork.pid, 0)
            _end_group(fork.pid)
            code = os.waitstatus_to_exitcode(status)
            if code == NOT_POSSIBLE:
                continue
            by_code = {RAN: SURVIVED, FAILED: KILLED, -signal.SIGXCPU: TIMEOUT, -signal.SIGKILL: TIMEOUT}
            self.results[fork.mutant] = by_code.get(code, KILLED)


@dataclass(frozen=True)
class Fork:
    """A process that runs the tests of one mutant."""

    mutant: Mutant
    pid: int
    pipe: int
    """The read end of a pipe. It becomes readable when the process ends; nothing is ever written to it."""
    deadline: float


def _be_quiet() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def _end_group(pid: int) -> None:
    """Kill the processes that the tests of a fork left running in its process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


# The command.


def modules_of(names: list[str]) -> dict[str, Path]:
    """Return the files of the modules with these names. A directory stands for all its modules."""
    files: dict[str, Path] = {}
    for name in names:
        path = SOURCE / name
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        files |= {
            str(file.relative_to(SOURCE).with_suffix("")): file for file in found if file.stem != "__init__"
        }
    return files


def read_accepted(text: str) -> dict[str, str]:
    """Return the reason for each accepted survivor, by its name. Each line of `text` is `name | reason`."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, _, reason in (line.rpartition(" | ") for line in lines)}


HEAD = ["| module | mutants | killed | time-out | accepted | survived | no test | score | commit |"]
HEAD += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]


def row_of(module: str, results: list[str], commit: str) -> str:
    count = Counter(results)
    judged = len(results) - count[EQUAL] - count[LEFT]
    score = f"{100 * (count[KILLED] + count[TIMEOUT]) / judged:.1f} %" if judged else "-"
    run = f"{len(results) - count[LEFT]} of {len(results)}" if count[LEFT] else str(len(results))
    cells = [run, *(str(count[result]) for result in (KILLED, TIMEOUT, EQUAL, SURVIVED, UNTESTED)), score]
    return f"| {module} | " + " | ".join([*cells, commit]) + " |"


def write_rows(rows: dict[str, str]) -> None:
    """Replace the rows of these modules in the table of docs/internals/mutation.md."""
    text = PAGE.read_text()
    before, rest = text.split(MARKS[0])
    table, after = rest.split(MARKS[1])
    old = {line.split("|")[1].strip(): line for line in table.strip().splitlines()[2:]}
    lines = [row for _, row in sorted((old | rows).items())]
    PAGE.write_text(before + "\n".join([MARKS[0], *HEAD, *lines, MARKS[1]]) + after)


def tests_of(module: str) -> list[str]:
    """Return the test files that import a module, have its name, or are in MORE_TESTS."""
    dotted = re.compile(rf"oncelog\.{module.replace('/', '.')}\b")
    directory, stem = module.split("/")[0], module.split("/")[-1]
    # Skip the Spark tests for modules of rules/, because they would start a Spark session for each module.
    names = [name for name in TEST_DIRECTORIES if directory != "rules" or name != "spark"]
    files = [file for name in names for file in sorted((ROOT / "tests" / name).glob("test_*.py"))]
    named = re.compile(rf"test_{directory}_{stem}(_|$)")
    chosen = [file for file in files if named.match(file.stem) or dotted.search(file.read_text())]
    return sorted({str(file.relative_to(ROOT)) for file in chosen} | set(MORE_TESTS.get(module, [])))


def run_each(modules: list[str], options: argparse.Namespace) -> int:
    """Run each module in its own process. Each process gets a share of the remaining time."""
    until, worst = time.monotonic() + options.seconds, 0
    for index, module in enumerate(modules):
        share = max(1.0, (until - time.monotonic()) / (len(modules) - index))
        command = [sys.executable, __file__, module, f"--seconds={share}", f"--jobs={options.jobs}"]
        command += [f"--max-mutants={options.max_mutants}"] * (options.max_mutants is not None)
        command += ["--write"] * options.write + (["--tests", *options.tests] if options.tests else [])
        worst = max(worst, subprocess.run(command, check=False).returncode)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=["rules"])
    parser.add_argument("--tests", nargs="*")
    parser.add_argument("--seconds", type=float, default=1_800.0)
    parser.add_argument("--max-mutants", type=int, help="run a random sample of this size of each module")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="write the rows of these modules into the page")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ["ONCELOG_PURE_PYTHON"] = "1"  # A compiled function has no code object to replace.
    modules = modules_of(options.modules)
    if len(modules) > 1:
        return run_each(list(modules), options)
    (module,) = modules
    tests = options.tests or tests_of(module)
    if not tests:
        print(f"no test file for {module}")
        return 0
    accepted = read_accepted(EQUIVALENT.read_text())
    runner = Runner(modules, options.seconds, options.jobs, accepted, options.max_mutants)
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["-o", "addopts=--import-mode=importlib", "-p", "no:terminal", "-p", "no:cacheprovider"]
        arguments += [f"--basetemp={directory}/tests", "--timeout=0", "-m", "quick and not spark", *tests]
        pytest.main(arguments, plugins=[runner])
    return report(runner, options.write)


def report(runner: Runner, write: bool) -> int:
    results = sorted(runner.results.items(), key=lambda pair: (pair[0].module, pair[0].line, pair[0].change))
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h %cs"], capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = {
        module: row_of(module, [result for mutant, result in results if mutant.module == module], commit)
        for module in runner.modules
        if any(mutant.module == module for mutant in runner.results)
    }
    for nodeid in runner.baseline.failed:
        print(f"fails without a mutant, not used: {nodeid}")
    for mutant, result in results:
        if result in (SURVIVED, UNTESTED):
            print(f"{result:9} {mutant.line:4} {mutant.name}")
    names = {mutant.name for mutant in runner.results}
    stale = [name for name in runner.accepted if name.split()[0] in runner.modules and name not in names]
    for name in stale:
        print(f"no such mutant any more, in {EQUIVALENT.name}: {name}")
    print("\n".join([*HEAD, *rows.values()]))
    if write:
        write_rows(rows)
    found = {result for _, result in results}
    if LEFT in found:
        return 2
    return 1 if found & {SURVIVED, UNTESTED} or stale or not results else 0


if __name__ == "__main__":
    sys.exit(main())
