"""Break a rule on purpose, and check that the simulator finds a violation.

Each mutant patches one function of the product. The simulator runs one seed after the other until a check
fails: first the seed in the table of docs/internals/mutants.md, then those from 0. `--afresh` starts at 0.
The exit code is 0 if every mutant is caught or has a reason why it cannot be caught, else 1.

`--write` updates the rows of the chosen mutants; names on the command line choose them. `--seeds N` and
`--seconds N` limit the search for each mutant.

`--guards` runs the guard tests of the chosen mutants, each with its mutant applied. The exit code is 0 if all
of these tests fail, else 1.

`--findings` simulates nothing. It writes the second table of the page, which says how a return of each
finding of findings.md would be noticed: by a mutant, or by tests of other kinds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from oncelog_simulator.mutants import MUTANTS, NOT_CAUGHT
from oncelog_simulator.mutants.findings import reason_of
from oncelog_simulator.mutants.mutant import ClientMutant, Mutant, search

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "internals"
PAGE, FINDINGS = DOCS / "mutants.md", DOCS / "findings.md"
IN_PLACE = "ONCELOG_MUTANT"
"""The environment variable with the name of the mutant that is applied before a guard test runs."""
GUARD_RESULTS = {0: "passes", 1: "fails"}
"""A map from exit codes of pytest to results of a guard test."""
MUTANT_MARKS = "<!-- mutants -->", "<!-- /mutants -->"
FINDING_MARKS = "<!-- findings -->", "<!-- /findings -->"
MUTANT_HEAD = ["| broken rule | findings | caught at seed | what it violates |", "| --- | --- | ---: | --- |"]
FINDING_HEAD = ["| finding | mutant | other means | why no mutant |", "| --- | --- | --- | --- |"]
_ROW = re.compile(r"^\| (?P<name>[^|]+) \| [^|]* \| (?P<seed>\d+|-) \| [^|]* \|$", re.MULTILINE)
_FINDING = re.compile(r"^\| (?P<ids>[A-Z]\d+[a-z]?(?:, [A-Z]\d+[a-z]?)*) \|(?P<cells>.*)\|$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3_600.0)
    parser.add_argument("--afresh", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--findings", action="store_true")
    parser.add_argument("--guards", action="store_true")
    options = parser.parse_args()
    if options.findings:
        write_findings()
        return 0
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.guards:
        return run_guards(chosen)
    known = {} if options.afresh else seeds_of(PAGE.read_text())
    missed = 0
    for mutant in chosen:
        seeds = candidates(known.get(mutant.name), options.seeds, options.seconds)
        found = search(mutant, seeds)
        missed += found is None and mutant.name not in NOT_CAUGHT
        seed, rule = found or ("-", by_guards(mutant))
        row = f"| {mutant.name} | {' '.join(mutant.findings)} | {seed} | {rule} |"
        print(row, flush=True)
        if options.write:
            write_row(mutant.name, row)
    if options.write:
        write_findings()
    print(f"{missed} of {len(chosen)} are not caught, and no reason is known")
    return 1 if missed else 0


def by_guards(mutant: Mutant | ClientMutant) -> str:
    """Return the last cell of the row of a mutant that no seed catches: its guard tests and the reason."""
    names = ", ".join(f"`{guard}`" for guard in mutant.guards)
    return f"{names or 'not caught'}; {NOT_CAUGHT.get(mutant.name, 'why?')}"


def run_guards(chosen: list[Mutant | ClientMutant]) -> int:
    """Run each guard test with its mutant applied. Return 0 if all of them fail, else 1."""
    passed = 0
    for mutant, guard in [(owner, guard) for owner in chosen for guard in owner.guards]:
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {IN_PLACE: mutant.name, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "mutants"]
        command.append(f"tests/{guard}")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        passed += done.returncode != 1
        print(f"{GUARD_RESULTS.get(done.returncode, 'cannot run')}: {guard} ({mutant.name})")
        print(*re.findall(r"^E  .*", done.stdout, re.MULTILINE)[:2], sep="\n", flush=True)
        if done.returncode not in GUARD_RESULTS:
            print(done.stdout[-2_000:], done.stderr[-2_000:])
    print(f"{passed} guards do not fail")
    return 1 if passed else 0


def pytest_sessionstart() -> None:
    """Apply the mutant that the environment variable IN_PLACE names, before pytest imports the tests.

    `run_guards` loads this file as a plugin of pytest.
    """
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == os.environ[IN_PLACE]]
    for owner, attribute, instead in mutant.patches:
        patch.object(owner, attribute, instead, **_created(owner, attribute)).start()


def _created(owner: object, attribute: str) -> dict[str, bool]:
    return {} if hasattr(owner, attribute) else {"create": True}


def candidates(first: int | None, count: int, seconds: float) -> Iterator[int]:
    """Yield the seeds to simulate: `first`, then 0 to `count` - 1. Stop when `seconds` have passed."""
    end_s = time.monotonic() + seconds
    for seed in itertools.chain([] if first is None else [first], range(count)):
        if time.monotonic() > end_s:
            return
        yield seed


def seeds_of(page: str) -> dict[str, int]:
    """Return, by mutant, the seed that caught it according to the page."""
    return {row["name"]: int(row["seed"]) for row in _ROW.finditer(page) if row["seed"] != "-"}


def write_row(name: str, row: str) -> None:
    """Write a mutant's row into the page, and remove the rows of mutants that no longer exist."""
    page = PAGE.read_text()
    rows = {found["name"]: found[0] for found in _ROW.finditer(page)} | {name: row}
    ordered = [rows[mutant.name] for mutant in MUTANTS if mutant.name in rows]
    PAGE.write_text(with_table(page, MUTANT_MARKS, [*MUTANT_HEAD, *ordered]))


def write_findings() -> None:
    """Write the table of findings. Raises ValueError if a finding has neither a mutant nor a reason."""
    PAGE.write_text(with_table(PAGE.read_text(), FINDING_MARKS, [*FINDING_HEAD, *finding_rows()]))


def with_table(page: str, marks: tuple[str, str], lines: list[str]) -> str:
    """Return the page with `lines` in place of the lines between the two marks."""
    begin, end = marks
    before, rest = page.split(begin)
    return "\n".join([before + begin, *lines, end]) + rest.split(end)[1]


def finding_rows() -> list[str]:
    """Return a row for each finding. Raises ValueError if a finding has neither a mutant nor a reason."""
    seeds = seeds_of(PAGE.read_text())
    mutants: dict[str, list[str]] = {}
    for mutant in MUTANTS:
        where = f"seed {seeds[mutant.name]}" if mutant.name in seeds else "guard test"
        for finding in mutant.findings:
            mutants.setdefault(finding, []).append(f"{mutant.name} ({where})")
    rows = []
    for finding, cells in findings_of(FINDINGS.read_text()).items():
        reason = reason_of(finding)
        if finding not in mutants and reason is None:
            raise ValueError(
                f"{finding} has no mutant: name it in one, or in mutants/findings.py with a reason"
            )
        names = "; ".join(mutants.get(finding, []))
        rows.append(f"| {finding} | {names} | {means_of(cells)} | {'' if names else reason} |")
    return rows


def findings_of(page: str) -> dict[str, str]:
    """Return the cells after the id in each row of findings.md, by the finding's id."""
    return {finding: row["cells"] for row in _FINDING.finditer(page) for finding in row["ids"].split(", ")}


def means_of(cells: str) -> str:
    """Return the kinds of tests, other than mutants, that guard against a finding.

    `cells` is the finding's row, which names its tests.
    """
    kinds = {
        "differential fuzzer, scenario": "test_interop_conformance.py",
        "state machine": "Machine::",
        "pairs of features": "test_broker_pairs.py",
        "worst requests": "test_broker_worst_requests.py",
        "takeover from Kafka": "test_operations_takeover.py",
        "model": "_model.py",
        "failing system calls": "test_log_os_faults.py",
        "browser": "test_web_browser.py",
    }
    found = [kind for kind, mark in kinds.items() if mark in cells]
    return ", ".join(found) or "guard test"


if __name__ == "__main__":
    sys.exit(main())
