"""The models of docs/model: what spin proves and refutes within seconds. `make model` runs all of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool_model", ROOT / "tools" / "model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model = _load_tool()
FAST = [run for run in model.PROOFS if run.is_fast]
FAST += {(run.model, run.refutes): run for run in model.CONTROLS if run.is_fast}.values()  # one per property


@pytest.fixture(scope="module")
def spin() -> None:
    """The model checker and the compiler that it needs."""
    if missing := model.missing():
        pytest.skip(str(missing))


@pytest.mark.usefixtures("spin")
@pytest.mark.parametrize(
    "run", FAST, ids=lambda run: f"{run.model}-{run.flags}-{run.refutes}".replace(" ", ",")
)
def test_as_expected(run: object) -> None:
    result = model.check(run)
    assert result.fits(run), result


def test_table_is_that_of_the_runs() -> None:
    page = (ROOT / "docs" / "model" / "README.md").read_text()
    for run in (*model.PROOFS, *model.CONTROLS):
        said = f"{run.refutes} refuted" if run.refutes else "proved"
        row = f"| {run.model} | {run.what} | `{run.flags}` | {said} |"
        assert row in page, "run: tools/model.py --write"
