"""Replay the inputs that `make fuzz` starts from, and those that it has kept: none may break a parser."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.fuzz.seeds import seeds
from support.fuzz.targets import TARGETS

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from fuzz import ROOT, read_corpus

SOAK_SECONDS = 30 * 60


@pytest.mark.parametrize("name", TARGETS)
def test_no_kept_input_breaks_it(name: str) -> None:
    inputs = [*seeds(name), *read_corpus(name)]
    assert inputs
    for data in inputs:
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_no_damaged_input_breaks_it(name: str) -> None:
    rng, inputs = random.Random(name), [*seeds(name), *read_corpus(name)]
    for _ in range(200):
        raw = bytearray(rng.choice(inputs))
        for _ in range(rng.randrange(1, 4)):
            if raw:
                raw[rng.randrange(len(raw))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        TARGETS[name](bytes(raw))


@pytest.mark.soak
def test_half_an_hour_of_searching_finds_nothing() -> None:
    pytest.importorskip("atheris", reason="atheris is not installed: pip install 'oncelog[dev]'")
    seconds = str(SOAK_SECONDS // len(TARGETS))
    done = subprocess.run(
        [sys.executable, ROOT / "tools/fuzz.py", "--seconds", seconds],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-5_000:]
