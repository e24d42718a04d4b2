"""The rule that decides which tier a test belongs to. docs/internals/testing.md explains it.

    quick   `make test`: everything that is in no other tier
    full    `make test-all` runs it besides the quick tests: needs another server, language, JVM or a browser,
            is in a directory of such tests, uses a Spark session and guards against no finding, or is marked
            `full` because it takes long
    soak    `make soak`: marked `soak`

A quick property of Hypothesis also gets the marker `property`: the quick tier runs it with a quarter of its
examples, and `make test-full` with all of them.

Each collected test gets the marker `quick` or `full`, so `pytest -m quick` selects a tier. A test states what
it needs by the fixtures it requests and by the words of its parameters. `Tiers` fails a quick
test that requests or starts something else while it runs.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

TESTS = Path(__file__).parents[1]
FINDINGS = TESTS.parent / "docs" / "internals" / "findings.md"
FULL_FIXTURES = {
    "apache_kafka": "Apache Kafka",
    "kafka_class_path": "Apache Kafka's class path",
    "franz_go": "Go",
    "kafkajs": "Node",
    "browser": "a browser",
    "spin": "the model checker and a compiler",
    "spark_cluster": "a Spark cluster",
    "connector_jar_files": "the jars of Spark's own Kafka connector, from Maven Central",
    "spark_connector": "Spark's own Kafka connector, from Maven Central",
    "postgresql": "a PostgreSQL server",
    "postgresql_jar": "the JDBC driver of PostgreSQL, from Maven Central",
    "connect_server": "a server of Spark Connect",
    "outcome_of": "a Spark driver in a process of its own",
}
"""Fixtures that only tests of the full tier may request, directly or through another fixture."""

FULL_PARAMETERS = {"apache": "Apache Kafka", "database": "a PostgreSQL server"}
"""Words in parameter ids that stand for a fixture of the full tier. A test with such a parameter gets the
fixture by getfixturevalue.
"""

MIN_EXAMPLES = 10
FULL_PROGRAMS = {"java", "javac", "mvn", "go", "node", "npm", "chromium", "spin", "gcc"}
"""Programs that a quick test must not start. Its one JVM is that of the fixture `spark`."""

FULL_DIRECTORIES = {
    "bench": "measures other brokers and clients",
    "dev": "starts clusters of Apache Kafka and Spark",
    "kill": "kills processes",
    "pipeline": "supervises processes with a Spark session each",
}
"""Directories under tests/ whose tests need more than one process, each with the reason."""


def needs(item: pytest.Item) -> str | None:
    """Return the reason why a test cannot be in the quick tier, or None."""
    directory = item.path.parent.name
    if directory in FULL_DIRECTORIES:
        return FULL_DIRECTORIES[directory]
    for fixture in getattr(item, "fixturenames", ()):
        if fixture in FULL_FIXTURES:
            return FULL_FIXTURES[fixture]
    for word in words_of_parameters(item.name):
        if word in FULL_PARAMETERS:
            return FULL_PARAMETERS[word]
    return None


def is_costly(item: pytest.Item) -> bool:
    """Return True for a test with a Spark session that guards against no finding.

    A query takes half a second of processor time, and tests without Spark prove the same decisions.
    """
    return "spark" in getattr(item, "fixturenames", ()) and name_of(item) not in guards()


def name_of(item: pytest.Item) -> str:
    """Return a test's name without parameters, as the page of findings writes it: `log/test_a.py::test_b`."""
    path = item.path.relative_to(TESTS) if item.path.is_relative_to(TESTS) else item.path
    return f"{path}::{item.nodeid.partition('::')[2].partition('[')[0]}"


@cache
def findings() -> dict[str, list[str]]:
    """Return the tests that guard against each finding, by the id of its row in FINDINGS."""
    names = {}
    for line in FINDINGS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(r"[A-Z]\d+.*", cells[0]):
            names[cells[0]] = re.findall(r"`([\w/]+\.py::[\w:]+)`", cells[-1])
    return names


@cache
def guards() -> frozenset[str]:
    """Return the tests that guard against any finding."""
    return frozenset(name for names in findings().values() for name in names)


def words_of_parameters(test_name: str) -> set[str]:
    """Return the words of a test's parameter ids: `test_a[apache-3]` gives `apache` and `3`."""
    _, _, parameters = test_name.partition("[")
    return set(re.findall(r"[a-z0-9]+", parameters))


def set_tiers(items: list[pytest.Item]) -> None:
    """Add the marker `quick` or `full` to each test that is not marked `soak`."""
    for item in items:
        if item.get_closest_marker("soak"):
            continue
        is_marked_full = item.get_closest_marker("full") is not None
        reason = needs(item) or ("uses a Spark session" if is_costly(item) else None)
        if reason is not None and not is_marked_full:
            item.add_marker(pytest.mark.full(reason))
        elif not is_marked_full:
            item.add_marker("quick")
            if is_property(item):
                item.add_marker("property")


def is_property(item: pytest.Item) -> bool:
    """Return True for a test of Hypothesis: a function with @given, or a state machine."""
    return isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)


def reduce_examples(items: list[pytest.Item]) -> None:
    """Reduce the number of examples of each Hypothesis test to a quarter, but not below MIN_EXAMPLES."""
    functions, machines = set(), set()
    for item in items:
        if isinstance(item, pytest.Function) and is_property(item):
            is_machine = isinstance(getattr(item.cls, "settings", None), settings)
            machines.add(item.cls) if is_machine else functions.add(item.function)
    for machine in machines:
        machine.settings = _fewer(machine.settings)
    for function in functions:
        # @given and @settings keep the settings in this attribute, for which there is no public name.
        function._hypothesis_internal_use_settings = _fewer(function._hypothesis_internal_use_settings)


def _fewer(full: settings) -> settings:
    return settings(full, max_examples=min(full.max_examples, max(MIN_EXAMPLES, full.max_examples // 4)))


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Put the files, and the tests within each file, into an order that only depends on the seed."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    order = sorted(files)
    rng = random.Random(seed)
    rng.shuffle(order)
    for path in order:
        rng.shuffle(files[path])
    items[:] = [item for path in order for item in files[path]]


COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""Every collected test, before the choice of a tier drops any."""


class Tiers:
    """Sets the tiers. Fails a quick test that requests a fixture or starts a program of the full tier."""

    def __init__(self) -> None:
        self._running: pytest.Item | None = None
        self._start_process = subprocess.Popen.__init__

    def pytest_sessionstart(self) -> None:
        start, check = self._start_process, self._check_command

        def checked(process: Any, args: Any, *others: Any, **options: Any) -> None:
            check(args)
            start(process, args, *others, **options)

        subprocess.Popen.__init__ = checked  # type: ignore[method-assign]

    def pytest_sessionfinish(self) -> None:
        subprocess.Popen.__init__ = self._start_process  # type: ignore[method-assign]

    # First, before -m drops tests, and before pytest groups tests by their fixtures.
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        set_tiers(items)
        config.stash[COLLECTED] = list(items)
        if config.option.markexpr == "quick":
            reduce_examples(items)
        seed = config.getoption("--order-seed")
        if seed is not None:
            shuffle(items, seed)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._running = item
        try:
            return (yield)
        finally:
            self._running = None

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.argname in FULL_FIXTURES:
            self._fail_if_quick(f"requests the fixture {fixturedef.argname}")

    def _check_command(self, args: Any) -> None:
        program = args if isinstance(args, str | bytes | os.PathLike) else next(iter(args), "")
        name = Path(os.fsdecode(program)).name
        if name in FULL_PROGRAMS:
            self._fail_if_quick(f"starts {name}")

    def _fail_if_quick(self, deed: str) -> None:
        if self._running is not None and self._running.get_closest_marker("quick"):
            pytest.fail(
                f"a quick test {deed}: request a fixture of the full tier in the test's signature, or mark "
                "it `full` with the reason (docs/internals/testing.md)"
            )
