"""Each pair of features that change a topic is used on one topic, in any order, with kills in between.

`LogMachine` compares the records that readers see, and the producers' state, with its model.
docs/internals/limits.md has the table of the pairs, and a test checks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from support.log.partitions import TP
from support.log.state_machine import HOUR_MS, KEYS, RETENTION_BYTES, LogMachine, NewBatch

from oncelog.limits import Limits
from oncelog.log.checkpoint import INDEX_STARTS, INDEXED_OFFSETS
from oncelog.types import Compression

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "limits.md"
SMALL = Limits(
    max_compaction_keys=3,
    compaction_step_items=2,
    index_run_entries=2,
    max_drops_per_step=1,
    scan_chunk_bytes=100,
    scan_first_chunk_bytes=61,
    scan_block_headers=2,
    max_producers_at_work=2,
    producer_shard_entries=2,
    snapshot_every_bytes=300,
)


def retain_by_size(machine: LogMachine, rng: Random) -> bool:
    before = machine.model.start
    machine.retain()
    return machine.model.start > before


def retain_by_time(machine: LogMachine, rng: Random) -> bool:
    before = machine.model.start
    machine.pass_time(ms=6 * HOUR_MS, is_rolled=True, is_flushed=False)
    machine.retain()
    return machine.model.start > before


def compact(machine: LogMachine, rng: Random) -> bool:
    before = machine.partition.cleaner.cleaned_to
    machine.compact(is_rolled=True, is_finished=rng.random() < 0.7)
    return machine.partition.cleaner.cleaned_to > before


def delete_records(machine: LogMachine, rng: Random) -> bool:
    before = machine.model.start
    machine.delete_records(back=rng.randrange(12))
    return machine.model.start > before


def delete_and_create(machine: LogMachine, rng: Random) -> bool:
    had_records = machine.model.end > 0
    machine.delete_and_create_the_topic()
    return had_records


def end_transactions(machine: LogMachine, rng: Random) -> bool:
    """Commit one transaction, abort one, and leave one open."""
    began = [NewBatch(pid, [b"a"], b"v", 0, "begin", Compression.NONE) for pid in (1, 2, 3)]
    ended = [
        NewBatch(pid, [b"a"], b"v", 0, how, Compression.NONE) for pid, how in ((1, "abort"), (2, "commit"))
    ]
    machine.produce(wanted=began + ended)
    return any(batch.is_commit is False for batch in machine.model.batches)


def take_over(machine: LogMachine, rng: Random) -> bool:
    """Stop, change the directory to one that Apache Kafka could have left, and start."""
    machine.stop(machine.limits)
    disk = machine.disk
    names = [f"{TP}/{name}" for name in disk.list(str(TP))]
    ours = [name for name in names if name.endswith(".producers")]
    ours += [name for name in names if name.endswith(".txnindex") and not disk.read(name)]
    ours += [name for name in (INDEXED_OFFSETS, INDEX_STARTS) if disk.exists(name)]
    for name in ours:
        disk.remove(name)
    machine.start_after_stop()
    return bool(ours)


FEATURES: dict[str, Callable[[LogMachine, Random], bool]] = {
    "retention by size": retain_by_size,
    "retention by time": retain_by_time,
    "compaction": compact,
    "DeleteRecords": delete_records,
    "deletion and re-creation": delete_and_create,
    "transactions": end_transactions,
    "takeover": take_over,
}
"""The features by name. Each function uses its feature, and returns True if it had an effect."""
PAIRS = list(combinations(FEATURES, 2))


def produce(machine: LogMachine, rng: Random) -> None:
    machine.produce(
        wanted=[
            NewBatch(rng.randrange(4), rng.choices(KEYS, k=2), b"w" * 30, 0, "plain", Compression.NONE)
            for _ in range(16)
        ]
    )


@pytest.mark.behaviour("I6", "I7", "I17")
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_features_work_on_one_topic(pair: tuple[str, str]) -> None:
    effects: Counter[str] = Counter()
    for seed in range(4):
        play(pair, Random(seed), effects)
    assert min(effects[name] for name in pair) >= 2, effects


def play(pair: tuple[str, str], rng: Random, effects: Counter[str]) -> None:
    machine = LogMachine()
    machine.begin_process(
        limits=SMALL,
        policy="compact,delete" if "compaction" in pair else "delete",
        flush_messages=rng.choice((1, 2**63 - 1)),
        retention_bytes=RETENTION_BYTES if "retention by size" in pair else -1,
    )
    for _ in range(6):
        produce(machine, rng)
        for name in rng.sample(pair, 2):
            effects[name] += FEATURES[name](machine, rng)
            if rng.random() < 0.3:
                machine.pass_time(ms=60_000, is_rolled=rng.random() < 0.5, is_flushed=rng.random() < 0.5)
            if rng.random() < 0.3:
                machine.checkpoint(is_finished=rng.random() < 0.5)
            if rng.random() < 0.3:
                machine.end_process(seed=rng.choice((None, rng.randrange(1_000))))
            machine.offsets_agree()
            machine.check_views()
            machine.check_producers()
    machine.teardown()


def test_the_page_of_limits_names_the_test_of_each_pair() -> None:
    test = "log/test_log_pairs.py::test_two_features_work_on_one_topic"
    rows = [f"| {first} | {second} | `{test}[{first}+{second}]` |" for first, second in PAIRS]
    assert "\n".join(rows) in PAGE.read_text(), "\n".join(rows)
