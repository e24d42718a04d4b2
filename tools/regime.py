#!/usr/bin/env python3
"""Run a command several times as if on a worse machine, and print how each run ended.

    tools/regime.py quota 5 make test    # at most half a core, by a control group of Linux; needs root
    tools/regime.py busy 5 make test     # beside two busy loops per core
    tools/regime.py quiet 5 make test    # without other work

The output of each run goes to out/regime-REGIME-N.log. The exit code is 1 if a run failed.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

QUOTA_CORES = 0.5
PERIOD_US = 100_000
LOOPS_PER_CORE = 2
CGROUPS = Path("/sys/fs/cgroup")
Join = Callable[[], None]
"""A function that a new process calls to join the regime."""


@contextmanager
def quota() -> Iterator[Join]:
    """Make a control group that may use half a core. Raises OSError without the permission to make one."""
    quota_us = int(QUOTA_CORES * PERIOD_US)
    if (CGROUPS / "cgroup.controllers").exists():
        group, limits = CGROUPS / f"oncelog-{os.getpid()}", {"cpu.max": f"{quota_us} {PERIOD_US}"}
    else:  # version 1 of control groups
        group = CGROUPS / "cpu" / f"oncelog-{os.getpid()}"
        limits = {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": f"{quota_us}"}
    group.mkdir()
    try:
        for name, value in limits.items():
            (group / name).write_text(value)

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        yield join
    finally:
        group.rmdir()


@contextmanager
def busy() -> Iterator[Join]:
    """Keep two busy loops per core running."""
    count = LOOPS_PER_CORE * (os.cpu_count() or 1)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield lambda: None
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def quiet() -> Iterator[Join]:
    """Change nothing."""
    yield lambda: None


REGIMES = {"quota": quota, "busy": busy, "quiet": quiet}


def run_once(command: list[str], join: Join, log: Path) -> tuple[bool, str]:
    """Run the command. Return whether it passed, and a line with its result, wall time and processor time."""
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("wb") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=join).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wall_s = time.monotonic() - begin
    summary = re.findall(r"^.*\b\d+ (?:passed|failed)\b.*$", log.read_text(errors="replace"), re.MULTILINE)
    last = summary[-1].strip("= ") if summary else "no summary of pytest"
    return code == 0, f"exit code {code}, {wall_s:.0f} s, {cpu_s:.0f} s of processor time: {last}"


def main() -> int:
    if len(sys.argv) < 4 or sys.argv[1] not in REGIMES or not sys.argv[2].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    name, count, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    out = Path("out")
    out.mkdir(exist_ok=True)
    failed = 0
    with REGIMES[name]() as join:
        for number in range(1, count + 1):
            log = out / f"regime-{name}-{number}.log"
            passed, line = run_once(command, join, log)
            failed += not passed
            print(f"{name} {number} of {count}: {line} ({log})", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
