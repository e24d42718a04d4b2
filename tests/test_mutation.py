"""Tests of tools/mutation.py: the changes that it makes to code, and the places where it makes them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

SAMPLE = """
LIMIT = 5

def is_low(value):
    if value < LIMIT:
        return True
    raise ValueError(f"too high by {value - LIMIT}")

class Box:
    def __repr__(self):
        return "box" * 2

    @property
    def size(self):
        return len(self.parts) + 1
"""


def tool(name: str = "mutation") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_each_operator_constant_and_statement_is_changed_once() -> None:
    assert [mutant.name for mutant in tool().mutants_of("sample", SAMPLE)] == [
        "sample <module>.LIMIT: `5` -> `6`",
        "sample is_low: `if value < LIMIT` -> `if not value < LIMIT`",
        "sample is_low: `value < LIMIT` -> `value <= LIMIT`",
        "sample is_low: `return True` -> `return None`",
        "sample is_low: `True` -> `False`",
        "sample is_low: `raise ValueError(f'too high by {value - LIMIT}')` -> `pass`",
        "sample Box.size: `return len(self.parts) + 1` -> `return None`",
        "sample Box.size: `len(self.parts) + 1` -> `len(self.parts) - 1`",
        "sample Box.size: `1` -> `2`",
    ]


@pytest.mark.parametrize(
    ("name", "expression", "before", "after"),
    [
        ("sample <module>.LIMIT: `5` -> `6`", "LIMIT", 5, 6),
        ("sample is_low: `True` -> `False`", "is_low(1)", True, False),
        ("sample Box.size: `1` -> `2`", "box.size", 1, 2),
    ],
)
def test_a_mutant_is_put_in_place_of_what_is_loaded(
    tmp_path: Path, name: str, expression: str, before: object, after: object
) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    mutation, loaded = tool(), ModuleType("sample")
    loaded.__file__ = str(path)
    exec(compile(SAMPLE, str(path), "exec"), vars(loaded))
    box = loaded.Box()
    box.parts = ()
    (mutant,) = (mutant for mutant in mutation.mutants_of("sample", SAMPLE) if mutant.name == name)
    assert eval(expression, vars(loaded) | {"box": box}) == before
    mutation.put_in_place(mutant, loaded, mutation.loaded_functions({str(path)}))
    assert eval(expression, vars(loaded) | {"box": box}) == after


def test_each_accepted_survivor_is_a_mutant_and_has_a_reason() -> None:
    mutation = tool()
    accepted = mutation.read_accepted((ROOT / "tools" / "equivalent_mutants.txt").read_text())
    modules = mutation.modules_of(sorted({name.split()[0] for name in accepted}))
    names = {
        mutant.name
        for module, path in modules.items()
        for mutant in mutation.mutants_of(module, path.read_text())
    }
    assert set(accepted) - names == set()
    assert all(accepted.values())


def test_the_score_counts_what_was_run_and_is_not_accepted() -> None:
    results = ["killed"] * 6 + ["timeout", "survived", "untested", "accepted", "not run"]
    row = tool().row_of("rules/sample", results, "abc")
    assert row == "| rules/sample | 10 of 11 | 6 | 1 | 1 | 1 | 1 | 77.8 % | abc |"


def test_the_lists_of_further_tests_name_modules_and_files_that_exist() -> None:
    mutation = tool()
    names = [*mutation.MORE_TESTS, *(file for files in mutation.MORE_TESTS.values() for file in files)]
    paths = [
        mutation.SOURCE / f"{name}.py" if not name.startswith("tests/") else ROOT / name for name in names
    ]
    assert [str(path) for path in paths if not path.exists()] == []
    assert [name for name in mutation.TEST_DIRECTORIES if not (ROOT / "tests" / name).is_dir()] == []


def test_the_mutants_of_the_differential_fuzzer_patch_what_exists() -> None:
    mutants = tool("differential_mutants").MUTANTS
    patched = [
        (mutant.name, owner, attribute) for mutant in mutants for owner, attribute, _ in mutant.patches
    ]
    assert [(name, attribute) for name, owner, attribute in patched if not hasattr(owner, attribute)] == []
