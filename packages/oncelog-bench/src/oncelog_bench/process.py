"""What another process has used: processor time and resident memory, from outside."""

from __future__ import annotations

import sys
import time
from typing import Any

from oncelog.errors import ConfigError

SETTLE_S = 3.0
_WINDOW_S = 0.1


def cpu_seconds(pid: int) -> float:
    """Processor seconds of all its threads so far, also those that ended."""
    if sys.platform == "linux":
        # The process's own clock (clock_getcpuclockid) counts nanoseconds; /proc counts ticks of 10 ms.
        return time.clock_gettime(~pid << 3 | 2)
    times = _process(pid).cpu_times()
    return float(times.user + times.system)


def tree_cpu_seconds(pid: int) -> float:
    """Processor seconds of a process and its descendants so far.

    Those that ended count too, unless their parent ended before them.
    """
    root = _process(pid)
    times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


def settle(pid: int) -> None:
    """Wait until the process rests (5 % of a core over 100 ms), at most SETTLE_S.

    A broker that has just made or deleted a topic goes on working after it has answered.
    """
    deadline = time.monotonic() + SETTLE_S
    used = cpu_seconds(pid)
    while time.monotonic() < deadline:
        time.sleep(_WINDOW_S)
        before, used = used, cpu_seconds(pid)
        if used - before < 0.05 * _WINDOW_S:
            return


def idle_cores(pid: int, seconds: float) -> float:
    """What it uses at rest, as a share of a core over `seconds`."""
    settle(pid)
    used = cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - used) / seconds


def rss_mb(pid: int) -> float:
    """Resident memory in 10^6 bytes."""
    return float(_process(pid).memory_info().rss) / 1e6


def _process(pid: int) -> Any:
    try:
        import psutil
    except ImportError:
        raise ConfigError("measuring a broker's process needs psutil: pip install psutil") from None
    return psutil.Process(pid)


def max_rss_bytes() -> int:
    """The most memory that this process has held."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS
