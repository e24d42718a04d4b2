"""A broker process returns the memory of large responses to the operating system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

HELD_AFTER_LARGE_BUFFERS = """
import sys
from oncelog.server.allocator import tune_allocator

def resident_mb() -> float:
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

tuned = tune_allocator()  # not within an assertion: python -O would leave the call out
assert tuned == (sys.argv[1] == "tuned")
del [b"x" * 16_000_000][:]  # from here on, glibc's default places buffers of this size in the heap
before = resident_mb()
buffers = [(b"x" * 8_000_000, b"y" * 100_000) for _ in range(30)]
kept = [small for _, small in buffers]
peak = resident_mb()
del buffers
print(peak - before, resident_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
@pytest.mark.parametrize(
    ("tuned", "least_mb", "most_mb"), [(True, 0, 20), (False, 200, 300)], ids=["tuned", "the environment's"]
)
def test_freed_buffers_return_to_the_operating_system(tuned: bool, least_mb: float, most_mb: float) -> None:
    """30 buffers of 8 MB are freed while small objects between them stay."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    if not tuned:
        environment["MALLOC_MMAP_THRESHOLD_"] = "33554432"
    done = subprocess.run(
        [sys.executable, "-c", HELD_AFTER_LARGE_BUFFERS, "tuned" if tuned else "not tuned"],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    peak, held = map(float, done.stdout.split())
    assert peak > 200 and least_mb <= held <= most_mb
