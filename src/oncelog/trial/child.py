"""The process of a pipeline under trial: `python -m oncelog.trial.child CONTROL_DIRECTORY [STRIKE]`.

It runs the code of `oncelog pipeline run` (pipeline/child.py). With STRIKE, it adds `fault_point` to the
query.
"""

from __future__ import annotations

import sys
from pathlib import Path

from oncelog.pipeline import child
from oncelog.trial.fault_point import instrument
from oncelog.trial.plan import Strike


def main(arguments: list[str]) -> None:
    """Run the job that standard input describes."""
    if len(arguments) > 1:
        instrument(Path(arguments[0]), Strike(arguments[1]))
    child.main()


if __name__ == "__main__":
    main(sys.argv[1:])
