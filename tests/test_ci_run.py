"""`.ci/run`: each part of `make test-all` runs once, even if another part has failed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = "tests/rules/test_rules_sequence.py"
MAKE = """#!/bin/sh
echo "$1" >> parts
echo "options: $2"
echo "$1: tests"
case " $FAILING " in *" $1 "*)
    echo "make: *** [Makefile:1: $1] Error 1" >&2
    exit 2 ;;
esac
"""


@pytest.mark.parametrize("failing", ["", "test-optimized", "test", "test-full", "test test-full"])
def test_each_part_runs_once_and_pytest_has_the_last_line(tmp_path: Path, failing: str) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "sed", "mkdir", "dirname"):  # without apt-get, nothing is installed
        path = shutil.which(name)
        assert path is not None
        (programs / name).symlink_to(path)
    (programs / "make").write_text(MAKE)
    (programs / "make").chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    done = subprocess.run(
        [tmp_path / ".ci" / "run"],
        env={"PATH": str(programs), "FAILING": failing, "CI_SECONDS": "4800"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    parts = (tmp_path / "parts").read_text().split()
    test_all = re.search(r"^test-all: ([\w -]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert test_all is not None and sorted(parts) == sorted(test_all[1].split())
    assert done.stdout.splitlines()[-1] == f"{parts[-1]}: tests"
    assert done.stdout.count("--durations=30") == len(parts)
    limits = re.findall(r"--stop-after=(\d+)\n", done.stdout)
    assert len(limits) == 1 and 0 < int(limits[0]) <= 4800, "only the last part has a time limit"
    assert (done.returncode != 0) == bool(failing)


@pytest.mark.parametrize(("seconds", "result"), [(0, "2 skipped"), (3600, "2 passed")])
def test_tests_that_begin_after_the_time_limit_are_skipped_and_counted(seconds: int, result: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"--stop-after={seconds}", "-k", "wraps", FILE],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and result in done.stdout
    assert ("2 tests were not run: the time of --stop-after is over" in done.stdout) == (seconds == 0)
