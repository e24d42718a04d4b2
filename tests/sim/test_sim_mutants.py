"""Check that docs/internals/mutants.md lists every mutant, and that each finding has a mutant or a reason for
none.
"""

from __future__ import annotations

import inspect
import re
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
from oncelog_simulator.mutants import MUTANTS, NOT_CAUGHT
from oncelog_simulator.mutants.findings import OUT_OF_REACH, reason_of
from oncelog_simulator.mutants.mutant import search
from support.tool import load_tool

ALL = {mutant.name: mutant for mutant in MUTANTS}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("mutants")


def test_the_page_has_every_broken_rule(tool: ModuleType) -> None:
    page = tool.PAGE.read_text()
    for mutant in MUTANTS:
        assert f"| {mutant.name} |" in page, "run: tools/mutants.py --write with this name"


def test_a_mutant_that_no_seed_catches_has_a_reason(tool: ModuleType) -> None:
    assert {mutant.name for mutant in MUTANTS}.difference(tool.seeds_of(tool.PAGE.read_text())) == {
        *NOT_CAUGHT
    }


def test_a_mutant_that_no_seed_catches_has_a_guard_that_exists() -> None:
    guards = {name: ALL[name].guards for name in NOT_CAUGHT}
    assert [name for name, tests in guards.items() if not tests] == []
    for guard in chain.from_iterable(guards.values()):
        path, _, name = guard.partition("::")
        assert re.search(rf"\bdef {name}\(", (ROOT / "tests" / path).read_text()), guard


def test_every_patch_replaces_something_and_takes_its_arguments() -> None:
    """A patch of a missing name raises AttributeError.

    A patch with too few parameters raises TypeError, which any seed "catches". Earlier, two patches had a
    missing name, and three had too few parameters.
    """
    bad = []
    for mutant in MUTANTS:
        for owner, attribute, instead in (*mutant.patches, *getattr(mutant, "world", ())):
            original = inspect.getattr_static(owner, attribute, None)
            if original is None:
                bad.append(f"{mutant.name}: there is no {attribute}")
            elif inspect.isfunction(original) and inspect.isfunction(instead):
                parameters = inspect.signature(original).parameters.values()
                names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
                options = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
                try:
                    inspect.signature(instead).bind(*names, **options)
                except TypeError as error:
                    bad.append(f"{mutant.name}: {attribute}: {error}")
    assert bad == []


@pytest.mark.full("starts pytest twice")
def test_a_guard_fails_with_its_mutant_and_else_passes(tool: ModuleType) -> None:
    sound = ALL["older markers are accepted"]
    assert tool.run_guards([sound]) == 0
    assert tool.run_guards([sound._replace(guards=("sim/test_sim_mutants.py::test_nothing",))]) == 1


def test_nothing() -> None:
    """Pass always. The test above names this test as the guard of a mutant, and must report that it misses
    the mutant.
    """


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in ALL if name not in NOT_CAUGHT])
def test_every_broken_rule_is_noticed(tool: ModuleType, name: str) -> None:
    known = tool.seeds_of(tool.PAGE.read_text())[name]
    assert search(ALL[name], chain([known], range(400))) is not None


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_guard_fails_with_its_mutant(tool: ModuleType) -> None:
    assert tool.run_guards(MUTANTS) == 0


def test_every_finding_has_a_mutant_or_a_reason(tool: ModuleType) -> None:
    known = tool.findings_of(tool.FINDINGS.read_text())
    put_back = {finding for mutant in MUTANTS for finding in mutant.findings}
    undecided = [each for each in known if each not in put_back and reason_of(each) is None]
    assert undecided == [], (
        "name them in a mutant or in packages/oncelog-simulator/src/oncelog_simulator/mutants/findings.py"
    )


def test_reasons_are_given_once_and_for_findings_without_a_mutant(tool: ModuleType) -> None:
    known = tool.findings_of(tool.FINDINGS.read_text())
    put_back = {finding for mutant in MUTANTS for finding in mutant.findings}
    listed = [finding for findings in OUT_OF_REACH.values() for finding in findings.split()]
    assert len(listed) == len(set(listed)) and put_back.isdisjoint(listed)
    assert put_back.union(listed) <= known.keys()


def test_the_table_of_findings_is_fresh(tool: ModuleType) -> None:
    page = tool.PAGE.read_text()
    lines = [*tool.FINDING_HEAD, *tool.finding_rows()]
    assert page == tool.with_table(page, tool.FINDING_MARKS, lines), "run: tools/mutants.py --findings"
