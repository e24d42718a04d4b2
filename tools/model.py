"""Check the models of docs/model with spin: all properties hold, and each broken variant violates one.

Exit code 0 if all results are as expected, 1 if not, 2 if spin or a C compiler is missing. `--fast` skips the
runs that take longer than about a second. `--write` writes the table of docs/model/README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).parents[1] / "docs" / "model"
COMPILE = ["gcc", "-w", "-DCOLLAPSE", "-DMEMLIM=1800", "-o", "pan", "pan.c"]
TIME_LIMIT_S = 900
ENDS = "ENDS"
"""The name of the liveness property: every run ends, and every record and transaction then has an outcome.

The other properties are assertions.
"""


class Run(NamedTuple):
    """One check of a model.

    `flags` are values for spin's option -D. `refutes` is the property that the run must violate. None means
    that all properties must hold.
    """

    model: str
    what: str
    flags: str
    refutes: str | None = None
    is_fast: bool = True


class Result(NamedTuple):
    """The result of a check. `said` is "proved", "refuted", or the error."""

    said: str
    state_count: int
    seconds: float

    def fits(self, run: Run) -> bool:
        return self.said == ("refuted" if run.refutes else "proved")


_ONE, _CALM = "A_TXNS=1 LATE=0 TIMEOUTS=0", "CRASHES=0 TIMEOUTS=0"

PROOFS = [
    Run("sequence", "five in flight, a crash", "N=6 TIMEOUTS=0", is_fast=False),
    Run("sequence", "delivery time-outs as well", "N=5", is_fast=False),
    Run("sequence", "the window moves on", "N=7 UNSENT=0 CRASHES=0 TIMEOUTS=0", is_fast=False),
    Run("sequence", "every fault, four batches", "N=4"),
    Run("sequence", "every run ends", "N=3 ENDS"),
    Run("sequence", "broker that remembers one batch after its restart", "N=4 REMEMBER_ONE WITHOUT=KNOWN"),
    Run("transaction", "every fault", "A_TXNS=1", is_fast=False),
    Run("transaction", "two transactions, a late request, a crash", "TIMEOUTS=0", is_fast=False),
    Run("transaction", "two transactions, a late request, a time-out", "CRASHES=0", is_fast=False),
    Run("transaction", "power loss", "POWER " + _ONE),
    Run("transaction", "power loss, a late request", "POWER A_TXNS=1 TIMEOUTS=0", is_fast=False),
    Run("transaction", "every run ends", "A_TXNS=1 TIMEOUTS=0 CRASHES=0 ENDS"),
    Run("transaction", "classic, lost answers, a crash", "CLASSIC PROMPT TIMEOUTS=0", is_fast=False),
    Run("transaction", "classic, a late record", "CLASSIC ONLY_RECORDS_LATE " + _CALM, is_fast=False),
    Run("visibility", "two producers", "LENGTH=6"),
    Run("visibility", "three producers", "IDS=3 LENGTH=6", is_fast=False),
]
CONTROLS = [
    Run("sequence", "no sequence check", "NO_SEQUENCE_CHECK N=4", "TWICE"),
    Run("sequence", "no sequence check", "NO_SEQUENCE_CHECK N=4", "ORDER"),
    Run("sequence", "older epochs are let in", "NO_EPOCH_CHECK N=4", "TWICE"),
    Run("sequence", "older epochs are let in", "NO_EPOCH_CHECK N=4", "ORDER"),
    Run("sequence", "acknowledged before it is durable", "ANSWER_EARLY N=3", "LOST"),
    Run("sequence", "numbers start again under the same epoch", "NO_BUMP N=4", "LOST"),
    Run("sequence", "numbers never start again", "NO_RESTART N=4", ENDS),
    Run("sequence", "numbers start again under a lower epoch", "EPOCH_FALLS N=4", "FENCE"),
    Run("sequence", "the first batch of an id is not alone", "FIRST_NOT_ALONE N=4", "ORDER"),
    Run("sequence", "six in flight, a client that always renumbers", "UNGUARDED LIMIT=6 N=7", "TWICE"),
    Run("sequence", "six in flight", "LIMIT=6 N=7 UNKNOWNS=1 UNSENT=0 " + _CALM, "KNOWN"),
    Run("sequence", "only unacknowledged ones count", "COUNT_UNACKNOWLEDGED N=7 UNSENT=0 " + _CALM, "KNOWN"),
    Run("sequence", "one batch remembered, always renumbers", "UNGUARDED REMEMBER_ONE N=4", "TWICE"),
    Run("sequence", "one batch remembered after a restart", "REMEMBER_ONE N=4", "KNOWN"),
    Run("transaction", "markers before the decision is durable", "EARLY_MARKERS POWER " + _ONE, "ATOMIC"),
    Run("transaction", "markers before the decision is durable", "EARLY_MARKERS POWER " + _ONE, "READ"),
    Run("transaction", "complete before the markers are durable", "EARLY_COMPLETION POWER " + _ONE, "ATOMIC"),
    Run("transaction", "answered before the decision is durable", "ANSWER_EARLY POWER " + _ONE, "OUTCOME"),
    Run("transaction", "answered before the decision is durable", "ANSWER_EARLY POWER " + _ONE, "LOST"),
    Run("transaction", "stored before it is durably added", "STORE_EARLY POWER " + _ONE, "CLOSED"),
    Run("transaction", "stored before it is durably added", "STORE_EARLY POWER " + _ONE, "ATOMIC"),
    Run("transaction", "no sequence check", "NO_SEQUENCE_CHECK A_TXNS=1 " + _CALM, "TWICE"),
    Run("transaction", "marker to one partition only", "ONE_MARKER " + _ONE, "ATOMIC"),
    Run("transaction", "successor without fencing", "NO_FENCING " + _ONE, "FENCED"),
    Run("transaction", "a crash forgets what was decided", "NO_RESUME " + _ONE, "CLOSED"),
    Run("transaction", "a crash turns commits into aborts", "ABORT_AT_START " + _ONE, "OUTCOME"),
    Run("transaction", "reading past the last stable offset", "READ_PAST_STABLE " + _ONE, "READ"),
    Run("transaction", "classic, a late EndTxn (KAFKA-17754)", "CLASSIC " + _CALM, "READ"),
    Run("transaction", "classic, a late EndTxn (KAFKA-17754)", "CLASSIC " + _CALM, "ATOMIC"),
    Run("transaction", "classic, a late EndTxn (KAFKA-17754)", "CLASSIC " + _CALM, "OUTCOME"),
    Run("transaction", "classic, a late record, the epoch kept after it",
        "CLASSIC ONLY_RECORDS_LATE NO_NEW_EPOCH " + _CALM, "READ"),
    Run("transaction", "classic, the coordinator is not asked",
        "CLASSIC ONLY_RECORDS_LATE NO_VERIFICATION " + _CALM, "CLOSED"),
    Run("visibility", "stable offset by the newest transaction", "NEWEST_OPEN", "STABLE"),
    Run("visibility", "reading past the last stable offset", "READ_PAST_STABLE", "READ"),
    Run("visibility", "no list of aborted transactions", "NO_ABORTED_LIST", "READ"),
    Run("visibility", "the index is searched too short", "STOP_EARLY", "READ"),
    Run("visibility", "an aborted producer stays aborted", "DROP_FOR_EVER", "LOST"),
]  # fmt: skip


def check(run: Run) -> Result:
    """Generate the checker with spin, compile it and run it in a temporary directory."""
    flags = [flag for flag in run.flags.split() if flag != ENDS]
    arguments = [f"-D{flag}" for flag in flags]
    compile_flags, pan_flags = ["-DSAFETY"], ["-E" if run.refutes else "-n"]
    # Do not optimize a checker that finds a violation: it runs for less time than the optimization takes.
    optimize = "-O0" if run.refutes else "-O2"
    if run.refutes == ENDS:
        arguments, pan_flags = [*arguments, "-DONLY=0"], ["-n"]
    elif run.refutes:
        arguments.append(f"-DONLY={run.refutes}")
    elif ENDS in run.flags:
        compile_flags, pan_flags = ["-DNP"], ["-n", "-l"]
    unknown = [flag for flag in flags if flag.split("=")[0] not in (MODELS / f"{run.model}.pml").read_text()]
    if unknown:
        return Result(f"the model has no {unknown}", 0, 0.0)
    with tempfile.TemporaryDirectory(prefix="oncelog-model-") as place:
        _call(["spin", "-a", *arguments, str(MODELS / f"{run.model}.pml")], place)
        _call([*COMPILE, optimize, *compile_flags], place)
        started = time.monotonic()
        text = _call(["./pan", "-m100000", *pan_flags], place)
        return _read(text, run, time.monotonic() - started)


def _call(command: list[str], place: str) -> str:
    done = subprocess.run(
        command,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        preexec_fn=lambda: os.nice(10),
    )
    if done.returncode and command[0] != "./pan":
        raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _read(text: str, run: Run, seconds: float) -> Result:
    states = re.search(r"(\d+) states, stored", text)
    errors = re.search(r"errors: (\d+)", text)
    found = re.search(r"^pan:\d+: (.*)", text, re.MULTILINE)
    if states is None or errors is None or ("Search not completed" in text and not run.refutes):
        said = found[1] if found else text[-200:]
    elif errors[1] == "0":
        said = "proved"
    elif found and found[1].startswith("invalid end state" if run.refutes == ENDS else "assertion violated"):
        said = "refuted"
    else:
        said = found[1] if found else "an error without a reason"
    return Result(said, int(states[1]) if states else 0, seconds)


def tabulate(runs: Iterable[Run], results: dict[Run, Result]) -> str:
    """Return a Markdown table of the runs with their results."""
    rows = ["| model | what | `-D` | result | states | seconds |", "| --- | --- | --- | --- | ---: | ---: |"]
    for run in runs:
        result = results[run]
        said = f"{run.refutes} refuted" if run.refutes and result.said == "refuted" else result.said
        rows.append(
            f"| {run.model} | {run.what} | `{run.flags}` | {said if result.fits(run) else f'**{said}**'}"
            f" | {result.state_count:,} | {result.seconds:.1f} |"
        )
    return "\n".join(rows)


def missing() -> str | None:
    """Return which tools are missing and the command that installs them, or None if none is missing."""
    gone = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    return f"not found: {', '.join(gone)}; on Debian: apt-get install {' '.join(gone)}" if gone else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if hint := missing():
        print(hint, file=sys.stderr)
        return 2
    proofs, controls = (
        [run for run in group if run.is_fast or not options.fast] for group in (PROOFS, CONTROLS)
    )
    runs = [*proofs, *controls]
    started = time.monotonic()
    with ThreadPoolExecutor(max_workers=2) as pool:
        longest_first = sorted(runs, key=lambda run: run.is_fast)
        results = dict(zip(longest_first, pool.map(check, longest_first), strict=True))
    tables = f"{tabulate(proofs, results)}\n\nBroken variants:\n\n{tabulate(controls, results)}"
    print(tables)
    wrong = [run for run in runs if not results[run].fits(run)]
    print(f"\n{len(runs)} runs in {time.monotonic() - started:.0f} seconds, {len(wrong)} not as expected")
    if options.write and not wrong:
        page = MODELS / "README.md"
        head, _, rest = page.read_text().partition("<!-- table -->\n")
        page.write_text(f"{head}<!-- table -->\n{tables}\n<!-- end -->{rest.partition('<!-- end -->')[2]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
