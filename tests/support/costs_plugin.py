"""`pytest --costs=FILE`: write each test's wall time and processor time to a file, and print the sums.

Processor time includes all child processes, ended or running, such as Spark's JVM or Apache Kafka's. A
fixture's time is added to the first test that requests it. On a busy machine, processor times remain
comparable and wall times do not.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

SLOWEST = 30
DIRECTORIES_AND_FILES = 25


def processor_seconds() -> float:
    """Return the processor time in seconds of this process and of all its descendants."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for process in _descendants():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def _descendants() -> list[psutil.Process]:
    """Return all processes that descend from this one.

    psutil reads every process of the machine for that, which takes 3 ms or more after each test. On Linux,
    the children of each thread are listed in /proc.
    """
    if not Path("/proc/self/task").is_dir():
        return psutil.Process().children(recursive=True)
    found, parents = list[psutil.Process](), [os.getpid()]
    while parents:
        for child in _children(parents.pop()):
            with suppress(psutil.Error):
                found.append(psutil.Process(child))
                parents.append(child)
    return found


def _children(process: int) -> list[int]:
    children = list[int]()
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            children += map(int, thread.read_text().split())
    return children


class Measure:
    """Measures each test in the process that runs it, and sends the times with the test's last report."""

    def __init__(self) -> None:
        self._processor = processor_seconds()
        self._wall = time.monotonic()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, None]:
        outcome = yield
        if call.when != "teardown":
            return
        processor, wall = processor_seconds(), time.monotonic()
        # If a child ended and was not waited for, its time is missing from the second sum. So the difference
        # may be negative.
        cost = {"processor": max(0.0, processor - self._processor), "wall": wall - self._wall}
        self._processor, self._wall = processor, wall
        outcome.get_result().user_properties.append(("cost", cost))


class Costs:
    """Collects the times of all processes, writes them to a file, and prints the sums."""

    def __init__(self, path: Path) -> None:
        # One line as each test ends, so that a run that is stopped keeps its measurements.
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = path.open("w", buffering=1)
        self._tests: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, cost in report.user_properties:
            if name == "cost" and report.when == "teardown":
                assert isinstance(cost, dict)
                self._tests.append({"test": report.nodeid, **cost})
                self._lines.write(json.dumps(self._tests[-1]) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._lines.close()
        terminalreporter.section("costs")
        for line in summary(self._tests):
            terminalreporter.write_line(line)


def summary(tests: list[dict[str, Any]]) -> list[str]:
    """Return lines with the sums for directories and files, and the most expensive tests."""
    lines = [_line("all", tests)]
    for title, group in (("directory", _directory), ("file", _file)):
        lines.append(f"by {title}:")
        lines += [_line(name, part) for name, part in _grouped(tests, group)[:DIRECTORIES_AND_FILES]]
    lines.append(f"the {SLOWEST} most expensive tests:")
    dearest = sorted(tests, key=lambda test: -float(test["processor"]))[:SLOWEST]
    return lines + [_line(test["test"], [test]) for test in dearest]


def _grouped(
    tests: list[dict[str, Any]], group: Callable[[str], str]
) -> list[tuple[str, list[dict[str, Any]]]]:
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for test in tests:
        parts[group(test["test"])].append(test)
    return sorted(parts.items(), key=lambda part: -sum(test["processor"] for test in part[1]))


def _directory(test: str) -> str:
    return str(Path(_file(test)).parent)


def _file(test: str) -> str:
    return test.partition("::")[0]


def _line(name: str, tests: list[dict[str, Any]]) -> str:
    processor, wall = (sum(test[key] for test in tests) for key in ("processor", "wall"))
    return f"{processor:9.2f} s processor {wall:9.2f} s wall {len(tests):6d} tests  {name}"
