"""The models of docs/model: the proofs and refutations that spin finds within seconds.

`make model` runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tool import load_tool

ROOT = Path(__file__).parents[1]


model = load_tool("model")
FAST = [run for run in model.PROOFS if run.is_fast]
# Add one quick control for each property of a model. A control is a run that must refute the property.
FAST += {(run.model, run.refutes): run for run in model.CONTROLS if run.is_fast}.values()


@pytest.fixture(scope="module")
def spin() -> None:
    """Skip the test unless the model checker and the C compiler that it needs are installed."""
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
