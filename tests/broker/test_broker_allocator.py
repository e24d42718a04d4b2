"""A broker process returns the memory of large responses to the operating system."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys

import pytest
from support.broker import RawClient, batch, fetch_request, wait_until
from support.wait import pass_time

from oncelog import Broker
from oncelog.server import allocator

BEGIN = """
import sys
from oncelog.server.allocator import HeapTrimmer, tune_allocator

def resident_mb() -> float:
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

tuned = tune_allocator()  # not within an assertion: python -O would leave the call out
assert tuned == (sys.argv[1] == "tuned")
"""
HELD_AFTER_LARGE_BUFFERS = """
del [b"x" * 16_000_000][:]  # from here on, glibc's default places buffers of this size in the heap
before = resident_mb()
buffers = [(b"x" * 8_000_000, b"y" * 100_000) for _ in range(30)]
kept = [small for _, small in buffers]
peak = resident_mb()
del buffers
print(peak - before, resident_mb() - before)
"""
HELD_AFTER_TRIM = """
before = resident_mb()
buffers = [(b"x" * 1_000_000, b"y" * 100_000) for _ in range(240)]
kept = [small for _, small in buffers]
trimmer = HeapTrimmer()
trimmer.note(264_000_000)
peak = resident_mb()
del buffers
freed = resident_mb()
trimmer.note(0)
print(peak - before, freed - before, resident_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
@pytest.mark.parametrize(
    ("tuned", "least_mb", "most_mb"), [(True, 0, 20), (False, 200, 300)], ids=["tuned", "the environment's"]
)
def test_freed_buffers_return_to_the_operating_system(tuned: bool, least_mb: float, most_mb: float) -> None:
    """30 buffers of 8 MB are freed while small objects between them stay."""
    peak, held = numbers(HELD_AFTER_LARGE_BUFFERS, tuned)
    assert peak > 200 and least_mb <= held <= most_mb


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
@pytest.mark.parametrize("tuned", [True, False], ids=["tuned", "the environment's"])
def test_the_heap_is_trimmed_after_many_bytes_were_freed(tuned: bool) -> None:
    """240 buffers of 1 MB are freed while small objects of 24 MB between them stay."""
    peak, freed, held = numbers(HELD_AFTER_TRIM, tuned)
    assert peak > 200 and freed > 200
    assert (held < 40) if tuned else (held == freed)


def numbers(script: str, tuned: bool) -> list[float]:
    """Run `BEGIN` and a script in a Python process of its own, and return the numbers that it prints."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    if not tuned:
        environment["MALLOC_MMAP_THRESHOLD_"] = "33554432"
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, "tuned" if tuned else "not tuned"],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return [float(number) for number in done.stdout.split()]


def test_a_broker_trims_its_heap_after_unread_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(allocator, "_trims", [trims.append])
    with Broker() as broker, contextlib.ExitStack() as stack:
        with RawClient(broker.bootstrap_servers) as client:
            client.create_topic("bulk")
            for _ in range(16):
                assert client.produce("bulk", batch(bytes(900_000))).error_code == 0
        clients = [stack.enter_context(RawClient(broker.bootstrap_servers)) for _ in range(10)]
        for client in clients:
            client.send(fetch_request([("bulk", 0, 0)], partition_max_bytes=16_000_000), 12)
        assert broker._running is not None
        memory = broker._running.server.node.response_memory
        wait_until(lambda: memory.total_bytes > 64_000_000)
        pass_time(broker, 1)  # notes the bytes that are held
        assert trims == []
        for client in clients:
            client.socket.close()
        wait_until(lambda: trims == [0])
