"""Tests of rules/limits/connections.py: deadlines by tables/connections.txt, limits and memory budgets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.errors import ConfigError
from oncelog.rules.limits.connections import (
    CloseReason,
    ConnectionActivity,
    ConnectionLimiter,
    Deadlines,
    MemoryBudget,
    Phase,
    Usage,
    expired_deadline,
    parse_overrides,
    slowest_first,
    usable_descriptors,
)

TABLE = Path(__file__).parents[1] / "tables" / "connections.txt"
DEADLINES = Deadlines(handshake=10, authentication=30, request=60, idle=600, linger=5)
NOW_MS = 1_000
MB = 1 << 20


def rows() -> Iterator[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    for line in lines[1:]:
        yield [cell.strip() for cell in line.split("|")]


@pytest.mark.parametrize("row", list(rows()), ids=" ".join)
def test_deadlines_follow_the_table(row: list[str]) -> None:
    phase, opened, active, request, waiting, expected = row
    request_ms = None if request == "-" else int(request)
    standing = ConnectionActivity(Phase[phase], int(opened), int(active), request_ms, waiting == "yes")
    found = expired_deadline(standing, DEADLINES, NOW_MS)
    assert (found.value if found else "-") == expected


def test_negative_timeouts_never_expire() -> None:
    never = Deadlines(handshake=10, authentication=30, request=-1, idle=-1, linger=5)
    assert expired_deadline(ConnectionActivity(Phase.AUTHENTICATED, 0, 0, 0), never, 10**12) is None


def test_connections_are_limited_in_total_and_by_address() -> None:
    admission = ConnectionLimiter(4, 2, {"b": 1, "c": 0})

    def enter(address: str, descriptor: int | None = None) -> CloseReason | None:
        bound = admission.enter(address, descriptor=descriptor, descriptor_limit=1_000)
        if bound is not None:
            admission.leave(address)
        return bound

    assert [enter("a"), enter("a"), enter("a")] == [None, None, CloseReason.ADDRESS]
    assert [enter("b"), enter("b"), enter("c")] == [None, CloseReason.ADDRESS, CloseReason.ADDRESS]
    assert enter("d", 750) is CloseReason.DESCRIPTORS
    assert enter("d", 749) is None
    assert enter("e") is CloseReason.CONNECTIONS
    admission.leave("a")
    assert enter("e") is None
    for address in ("a", "b", "d", "e"):
        admission.leave(address)
    assert (admission.count, admission.counts) == (0, {})


def test_descriptors_are_kept_for_the_log() -> None:
    assert [usable_descriptors(limit) for limit in (256, 1_024, 20_000)] == [192, 768, 18_976]


def test_overrides_are_parsed() -> None:
    assert parse_overrides("") == {}
    assert parse_overrides("10.0.0.1:50, [::1]:200,::2:7") == {"10.0.0.1": 50, "::1": 200, "::2": 7}
    for wrong in ("10.0.0.1", "host:5", "10.0.0.1:many"):
        with pytest.raises(ConfigError, match=wrong):
            parse_overrides(wrong)


@pytest.mark.parametrize(
    ("budget", "excess_bytes", "gone"),
    [
        # For each connection: the bytes that it holds, and the bytes that it moved in how many milliseconds.
        ({"stalled": (MB, 0, 30_000), "quick": (50 * MB, 90 * MB, 30_000)}, 1, ["stalled"]),
        ({"stalled": (MB, 0, 30_000), "quick": (50 * MB, 90 * MB, 30_000)}, 2 * MB, ["stalled", "quick"]),
        ({"drips": (MB, 30, 30_000), "new": (60 * MB, 0, 0)}, 1, ["drips"]),
        ({"new": (10, 0, 0), "larger": (20, 0, 0)}, 1, ["larger"]),
        ({"new": (10, 0, 0)}, 0, []),
    ],
)
def test_the_slowest_go_first(
    budget: dict[str, tuple[int, int, int]], excess_bytes: int, gone: list[str]
) -> None:
    kept = {name: Usage(held, moved, 0, NOW_MS - ms) for name, (held, moved, ms) in budget.items()}
    assert slowest_first(kept.items(), excess_bytes, NOW_MS) == gone


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300), st.integers(0, 9_999)), max_size=60),
    st.integers(0, 1_000),
)
def test_held_memory_never_stays_above_the_limit(steps: list[tuple[int, int, int]], limit_bytes: int) -> None:
    budget: MemoryBudget[int] = MemoryBudget(limit_bytes)
    naive: dict[int, int] = {}
    for key, held_bytes, now_ms in steps:
        naive[key] = held_bytes
        if budget.update(key, held_bytes, held_bytes, now_ms):
            for gone in budget.eviction_candidates(now_ms):
                budget.release(gone)
                del naive[gone]
        assert budget.total_bytes == sum(naive.values()) <= limit_bytes
        assert (key in budget) == bool(naive.get(key))
        assert 0 <= (budget.response_budget() or 0) <= limit_bytes // 4


def test_a_negative_memory_budget_is_unlimited() -> None:
    budget: MemoryBudget[int] = MemoryBudget(-1)
    assert not budget.update(1, 10**12, 0, 0)
    assert budget.response_budget() is None
