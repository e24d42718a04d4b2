"""Workloads that are drawn separately: hostile clients, pipelining producers, the sink, `write_atomic`, and
the loader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from random import Random

import pytest
from oncelog_simulator import hostile_clients
from oncelog_simulator.event_loop import Process
from oncelog_simulator.faults import BATCH_HEAD_BYTES, CRC_FROM, harm_batches
from oncelog_simulator.file_loads import KINDS, FileList
from oncelog_simulator.hostile_clients import CallCounter, draw_request, draw_worst
from oncelog_simulator.runtime import EPOCH_NS
from oncelog_simulator.simulation import run_scenario, scenario_for
from oncelog_simulator.sink_tasks import Source
from oncelog_simulator.world import World

from oncelog.wire.batch import build_batch
from oncelog.wire.frames import decode_request
from oncelog.wire.records import NewRecord

QUICK = {
    "hostile": (2, 11),
    "pipelined": (1, 10),
    "lanes": (5, 10),
    "atomic": (1, 10),
    "loaded": (1, 4, 10),
    "takeover": (7, 11),
    "timed": (1, 10),
}
"""For each workload, the seeds among the first twelve with the most kinds of events in their timelines."""
MORE = {name: [seed for seed in range(12) if seed not in seeds] for name, seeds in QUICK.items()}


@pytest.mark.parametrize(
    ("workload", "seeds"),
    [
        *(pytest.param(*each, id=f"quick-{each[0]}") for each in QUICK.items()),
        *(
            pytest.param(*each, id=f"more-{each[0]}", marks=pytest.mark.full("more seeds"))
            for each in MORE.items()
        ),
    ],
)
def test_nothing_is_violated(workload: str, seeds: Collection[int]) -> None:
    for seed in seeds:
        assert run_scenario(scenario_for(seed, workload=workload)).violations == []


def test_a_workload_that_is_asked_for_leaves_the_rest_of_a_seed_as_it_is() -> None:
    plain, more = scenario_for(3), scenario_for(3, workload="hostile")
    assert (plain.broker, plain.senders) == (more.broker, more.senders)
    assert set(plain.faults) < set(more.faults)


def test_offsets_are_kept_where_deletions_of_offsets_are_checked() -> None:
    """Regression (seed 40591): a setting for the workload `lanes` let offsets expire in runs of
    `deletions`.
    """
    scenario = scenario_for(40591)
    assert {"lanes", "deletions"} <= set(scenario.workloads)
    assert "offsets.retention.minutes" not in scenario.broker


def test_drawn_requests_can_be_read() -> None:
    rng = Random(1)
    for _ in range(300):
        decode_request(draw_request(rng))


def test_worst_requests_are_as_large_as_asked_for() -> None:
    rng = Random(1)
    sizes = [len(draw_worst(rng, 4_000).body) for _ in range(30)]
    assert max(sizes) > 3_000


def test_a_step_with_too_many_calls_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_clients, "MAX_CALLS_A_STEP", 100)
    world = World(1)
    counter = CallCounter(world, "broker")
    counter.step(Process("other"), lambda: [len("") for _ in range(200)] and None)
    counter.step(Process("broker"), lambda: [len("") for _ in range(50)] and None)
    assert world.violations == []
    counter.step(Process("broker"), lambda: [len("") for _ in range(200)] and None)
    assert len(world.violations) == 1


def test_flips_change_one_bit_that_the_checksum_covers() -> None:
    batch = bytes(build_batch([NewRecord(0, None, b"value")]))
    data = b"before" + batch + b"after"
    rng = Random(1)
    for _ in range(50):
        harmed = harm_batches(data, rng=rng, percent=100)
        (position,) = [n for n, (one, other) in enumerate(zip(data, harmed, strict=True)) if one != other]
        assert len(b"before") + CRC_FROM <= position < len(b"before") + len(batch)
        assert (data[position] ^ harmed[position]).bit_count() == 1
    assert harm_batches(data, rng=rng, percent=0) == data
    assert len(batch) > BATCH_HEAD_BYTES


def test_a_source_counts_what_was_given() -> None:
    source = Source()
    source.add("query", 0, [[b"a"], [b"b"]])
    source.add("query", 1, [[b"c"]])
    source.commit("query", 0)
    assert list(source.check(Counter([b"a", b"b"]))) == []
    assert list(source.check(Counter([b"a", b"b", b"c"]))) == []
    assert list(source.check(Counter([b"a", b"a", b"b"]))) == ["b'a' is there 2 times"]
    assert list(source.check(Counter([b"a", b"c"]))) == ["b'b' is there 0 times"]
    assert list(source.check(Counter([b"a", b"b", b"x"]))) == ["b'x' was never given"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_what_is_expected_of_them(kind: str) -> None:
    files = FileList(kind, [0, 3])
    try:
        files.add(2, is_first=True)
        files.grow(files.names[0])
        assert [path.stat().st_mtime_ns for path in files.paths] == [EPOCH_NS] * 3
        assert files.tokens() == [
            b"t003-000-",
            b"t003-001-",
            b"t003-002-",
            b"t002-000-",
            b"t002-001-",
            b"t002-002-",
        ]
    finally:
        files.remove()
