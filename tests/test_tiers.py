"""Tests of the rule that assigns tests to tiers (tests/support/tiers_plugin.py), and of what the quick tier
proves.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from support.scheduler import group_of
from support.tiers_plugin import (
    COLLECTED,
    FULL_FIXTURES,
    findings,
    name_of,
    needs,
    shuffle,
    words_of_parameters,
)

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SAMPLE = """
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers


@pytest.fixture(scope="session")
def apache_kafka():
    return "localhost:9092"


@pytest.fixture
def cluster(apache_kafka):
    return apache_kafka


def test_plain():
    pass


def test_direct(apache_kafka):
    pass


def test_through_another(cluster):
    pass


@pytest.fixture
def spark():
    return "a session"


def test_with_a_session(spark):
    pass


@pytest.mark.parametrize("kind", ["ours", "apache"])
def test_parameter(request, kind):
    pass


@pytest.mark.full("takes a minute")
def test_marked():
    pass


@pytest.mark.soak
def test_soak(apache_kafka):
    pass


EXAMPLES = []


@settings(max_examples=80)
@given(integers(0, 10**9))
def test_property(number):
    EXAMPLES.append(number)


def test_examples():
    print("examples:", len(EXAMPLES))


def test_requests_by_name(request):
    request.getfixturevalue("apache_kafka")


def test_starts_a_jvm():
    subprocess.run(["/usr/bin/java", "-version"])
"""


def run_sample(tmp_path: Path, *options: str) -> str:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "conftest.py").write_text(
        "from support import tiers_plugin\n"
        "def pytest_addoption(parser): parser.addoption('--order-seed', type=int)\n"
        "def pytest_configure(config):\n"
        "    for name in ('quick', 'full', 'soak', 'property'):\n"
        "        config.addinivalue_line('markers', name)\n"
        "    config.pluginmanager.register(tiers_plugin.Tiers())\n"
    )
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:oncelog", *options]
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    return done.stdout


def collected(tmp_path: Path, expression: str) -> list[str]:
    output = run_sample(tmp_path, "--collect-only", "-q", "-m", expression)
    return re.findall(r"::(\S+)", output)


def test_fixtures_parameters_and_markers_decide_the_tier(tmp_path: Path) -> None:
    assert collected(tmp_path, "quick") == [
        "test_plain",
        "test_parameter[ours]",
        "test_property",
        "test_examples",
        "test_requests_by_name",
        "test_starts_a_jvm",
    ]
    assert collected(tmp_path, "full") == [
        "test_direct",
        "test_through_another",
        "test_with_a_session",
        "test_parameter[apache]",
        "test_marked",
    ]
    assert collected(tmp_path, "soak") == ["test_soak"]
    assert collected(tmp_path, "property") == ["test_property"]


def test_the_quick_tier_runs_a_quarter_of_the_examples_of_a_property(tmp_path: Path) -> None:
    assert "examples: 20" in run_sample(tmp_path, "-s", "-m", "quick")
    assert "examples: 80" in run_sample(tmp_path, "-s", "-m", "quick or property")


def test_a_quick_test_that_starts_or_requests_what_is_not_for_its_tier_fails(tmp_path: Path) -> None:
    output = run_sample(tmp_path, "-m", "quick")
    assert "2 failed, 4 passed" in output
    assert "Failed: a quick test requests the fixture apache_kafka" in output
    assert "Failed: a quick test starts java" in output


def test_words_of_parameters_leave_out_the_name() -> None:
    assert words_of_parameters("test_apache[a.md::title::v3::oncelog]") == {
        "a",
        "md",
        "title",
        "v3",
        "oncelog",
    }
    assert words_of_parameters("test_apache") == set()


def test_pytest_leaves_the_modules_of_oncelog_to_python() -> None:
    """Their asserts would take time to rewrite in each process, and would run under `python -OO`."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "oncelog"}
    assert "oncelog.errors" in modules
    assert [name for name in modules if isinstance(modules[name].__loader__, AssertionRewritingHook)] == []


def test_an_order_depends_on_its_seed_alone_and_keeps_files_together(request: pytest.FixtureRequest) -> None:
    items = list(request.config.stash[COLLECTED])
    one, other, third = list(items), items[::-1], list(items)
    shuffle(one, 1)
    shuffle(third, 2)
    assert sorted(map(id, one)) == sorted(map(id, items))
    files = [item.path for item in one]
    assert len(set(files)) == sum(1 for n, path in enumerate(files) if n == 0 or files[n - 1] != path)
    shuffle(other, 1)
    assert [item.path for item in other] == files


@pytest.fixture
def whole_suite(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Return every test of the suite with its tier.

    Skip the test if this run did not collect the whole suite.
    """
    items = request.config.stash[COLLECTED]
    if {item.path for item in items} != {*TESTS.rglob("test_*.py")}:
        pytest.skip("only a run over the whole of tests/ knows all tests: make test")
    return items


def test_no_quick_test_requests_a_fixture_of_the_full_tier(whole_suite: list[pytest.Item]) -> None:
    quick = [item for item in whole_suite if item.get_closest_marker("quick")]
    assert len(quick) > len(whole_suite) / 2
    assert [item.nodeid for item in quick if not FULL_FIXTURES.keys().isdisjoint(item.fixturenames)] == []  # type: ignore[attr-defined]


def test_one_process_runs_all_quick_tests_with_a_spark_session(whole_suite: list[pytest.Item]) -> None:
    """The scheduler does not know a test's fixtures. It finds tests with a Spark session by the text of their
    file.
    """
    quick = [item for item in whole_suite if item.get_closest_marker("quick")]
    with_session = [item.nodeid for item in quick if "spark" in item.fixturenames]  # type: ignore[attr-defined]
    assert {group_of(nodeid, is_quick=True) for nodeid in with_session} == {"spark"}


def test_every_row_and_finding_is_proved_in_the_quick_tier_as_far_as_one_process_can(
    whole_suite: list[pytest.Item],
) -> None:
    """A mark `full` or `soak` by hand must not remove the last quick test of a behaviour or a finding."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    guards: dict[str, list[str]] = defaultdict(list)  # a test may guard several findings
    for row, names in findings().items():
        for name in names:
            guards[name].append(row)
    for item in whole_suite:
        for mark in item.iter_markers("behaviour"):
            for row in mark.args:
                tests[row].append(item)
        for row in guards.get(name_of(item), ()):
            tests[row].append(item)
    unproved = [row for row, items in tests.items() if not any(map(_is_proof_for_quick, items))]
    assert unproved == []
    rows = tomllib.loads((ROOT / "docs" / "behaviours.toml").read_text())["rows"]
    assert set(rows) & set(tests), "no row has a test: are the markers still read?"


def _is_proof_for_quick(item: pytest.Item) -> bool:
    """Return True for a quick test, and for one that cannot be quick because it needs more than one
    process.
    """
    return item.get_closest_marker("quick") is not None or needs(item) is not None
