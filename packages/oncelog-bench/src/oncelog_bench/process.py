"""Processor time and resident memory of another process, measured from outside."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import psutil

SETTLE_S = 3.0
_WINDOW_S = 0.1


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far, including its ended threads."""
    if sys.platform == "linux":
        # The process's CPU clock (clock_getcpuclockid) counts nanoseconds. /proc counts only ticks of 10 ms.
        return time.clock_gettime(~pid << 3 | 2)
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def tree_cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its descendants so far.

    A descendant that has ended counts too, unless its parent ended before it.
    """
    root = psutil.Process(pid)
    times = [root.cpu_times()]
    for process in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since the list was made
            times.append(process.cpu_times())
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


def settle(pid: int) -> None:
    """Wait until the process is idle (below 5 % of a core over 100 ms), but at most SETTLE_S seconds.

    After the response to a topic's creation or deletion, a broker continues to work.
    """
    deadline = time.monotonic() + SETTLE_S
    used = cpu_seconds(pid)
    while time.monotonic() < deadline:
        time.sleep(_WINDOW_S)
        before, used = used, cpu_seconds(pid)
        if used - before < 0.05 * _WINDOW_S:
            return


def idle_cores(pid: int, seconds: float) -> float:
    """Return the processor use of the idle process over `seconds`, as a fraction of a core."""
    settle(pid)
    used = cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - used) / seconds


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB (10^6 bytes)."""
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def max_rss_bytes() -> int:
    """Return the peak resident memory of this process."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux returns kilobytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
