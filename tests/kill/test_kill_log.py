"""Kills by SIGKILL of a process that appends to a real directory, and what the next process finds."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from support.log.partitions import TOPIC_ID, TP, batch, config, put

from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.server.disk import RealDisk
from oncelog.wire.batch import iter_batches, verify_crc

ROUNDS = 8
SEGMENT_BYTES = 20_000
PRODUCERS = 3

CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from support.log.partitions import TOPIC_ID, TP, batch, config, put
from oncelog.server.disk import RealDisk
from oncelog.log.manager import LogManager

manager = LogManager.open(RealDisk(sys.argv[1]), node_id=1, new_uuid=lambda: bytes(16), now_ms=0)
partition = manager.open_partition(TP, config(segment_bytes=int(sys.argv[3])), TOPIC_ID, 0)
entries = {state.producer_id: state.entry for state in partition.describe_producers()}
producers = int(sys.argv[4])
sequences = [entries[pid].last_sequence + 1 if pid in entries else 0 for pid in range(producers)]
print("ready", flush=True)
number = 0
while True:
    pid = number % producers
    count = 1 + number % 4
    value = bytes([number % 251]) * (number % 90)
    appended = put(partition, batch(sequences[pid], count, pid=pid, value=value))
    sys.stdout.write(f"{pid} {sequences[pid]} {count} {number % 251} {number % 90} {appended.base_offset}\\n")
    sys.stdout.flush()
    sequences[pid] += count
    number += 1
    if number % 50 == 0:
        partition.flush()
        manager.write_checkpoints()
"""


def _run_and_kill(directory: Path, acknowledgements: int) -> list[list[int]]:
    """Start a child that appends, read that many acknowledgements, and kill it. Return all lines that it
    printed.
    """
    helpers = str(Path(__file__).parents[1])
    arguments = [str(directory), helpers, str(SEGMENT_BYTES), str(PRODUCERS)]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        lines = [child.stdout.readline() for _ in range(acknowledgements)]
    finally:
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
        child.wait(timeout=200)
        child.stdout.close()
    assert child.returncode == -signal.SIGKILL
    # The last line may be incomplete. The child then did not finish reporting its batch, so it does not count
    # as acknowledged.
    lines += [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    return [[int(word) for word in line.split()] for line in lines]


@pytest.mark.behaviour("I17")
def test_nothing_acknowledged_is_lost_or_doubled_by_kill_9(tmp_path: Path) -> None:
    rng = Random(17)
    acknowledged: list[list[int]] = []
    for _ in range(ROUNDS):
        acknowledged += _run_and_kill(tmp_path, rng.randint(1, 400))
        manager = LogManager.open(RealDisk(tmp_path), node_id=1, new_uuid=lambda: bytes(16), now_ms=0)
        assert not manager.was_clean
        partition = manager.open_partition(TP, config(segment_bytes=SEGMENT_BYTES), TOPIC_ID, 0)
        _check_log(partition, acknowledged)
        _check_retries(partition, acknowledged)
        manager.release()
    assert len(acknowledged) > 1000


def _check_log(partition: Partition, acknowledged: list[list[int]]) -> None:
    """Check offsets of acknowledged batches, the sequences (each once, in order) and the checksums."""
    stored, ends, offset = {}, {}, 0
    while offset < partition.log_end_offset:
        found = partition.read(offset, 1 << 20)
        for position, header in iter_batches(found.records):
            assert header.base_offset == offset
            assert verify_crc(found.records, position, header.size_bytes)
            assert header.base_sequence == ends.get(header.producer_id, -1) + 1
            ends[header.producer_id] = header.last_sequence
            stored[header.base_offset] = found.records[position : position + header.size_bytes]
            offset = header.last_offset + 1
        assert offset == found.next_offset
    for pid, sequence, count, fill, size, base_offset in acknowledged:
        expected = batch(sequence, count, pid=pid, value=bytes([fill]) * size)
        assert stored[base_offset][16:] == expected[16:]


def _check_retries(partition: Partition, acknowledged: list[list[int]]) -> None:
    """Check that retries of a producer's last acknowledged batches get the original offsets.

    A broker remembers five batches. The last one may be stored without an acknowledgement, so only four are
    retried.
    """
    end = partition.log_end_offset
    for pid in range(PRODUCERS):
        mine = [line for line in acknowledged if line[0] == pid][-4:]
        for _, sequence, count, fill, size, base_offset in mine:
            again = put(partition, batch(sequence, count, pid=pid, value=bytes([fill]) * size))
            assert (again.is_duplicate, again.base_offset) == (True, base_offset)
    assert partition.log_end_offset == end


@pytest.mark.behaviour("I17")
def test_a_last_batch_torn_at_any_byte_is_removed_on_recovery(tmp_path: Path) -> None:
    _run_and_kill(tmp_path, 5)
    path = max((tmp_path / str(TP)).glob("*.log"))
    whole = path.read_bytes()
    batches = list(iter_batches(whole))
    position, last = batches[-1]
    for size in range(position, len(whole)):
        path.write_bytes(whole[:size])
        manager = LogManager.open(RealDisk(tmp_path), node_id=1, new_uuid=lambda: bytes(16), now_ms=0)
        partition = manager.open_partition(TP, config(segment_bytes=SEGMENT_BYTES), TOPIC_ID, 0)
        assert partition.log_end_offset == last.base_offset
        assert path.stat().st_size == position
        manager.release()
