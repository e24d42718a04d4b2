"""Break a rule on purpose, and see whether the simulator notices: how tight its net is.

Each mutant patches one function of the product and is played on seeds until one is found that violates
something. Exit code 0 when every mutant is caught that can be, else 1. `--write` puts the table into
docs/internals/simulation.md, `--seeds N` bounds the search, names choose some.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oncelog.sim.mutants import MUTANTS, NOT_CAUGHT
from oncelog.sim.mutants.mutant import search

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "simulation.md"
BEGIN, END = "<!-- mutants -->", "<!-- /mutants -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    rows, missed = [], 0
    for mutant in chosen:
        found = search(mutant, options.seeds)
        missed += found is None
        seed, rule = found or ("-", f"not caught: {NOT_CAUGHT.get(mutant.name, 'why?')}")
        rows.append(f"| {mutant.name} | {seed} | {rule} |")
        print(rows[-1], flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    if options.write:
        write_table(rows)
    return 1 if missed > len([each for each in chosen if each.name in NOT_CAUGHT]) else 0


def write_table(rows: list[str]) -> None:
    """Into the page, between its two marks."""
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    head = ["| broken rule | first seed | what it violates |", "| --- | ---: | --- |"]
    PAGE.write_text(before + "\n".join([BEGIN, *head, *rows, END]) + after)


if __name__ == "__main__":
    sys.exit(main())
