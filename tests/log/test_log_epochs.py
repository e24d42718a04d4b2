"""The leader epochs of a partition, in particular those that Apache Kafka has stored."""

from __future__ import annotations

from random import Random

import pytest
from support.log.partitions import TP, batch, open_partition, put

from oncelog.log.checkpoint import LEADER_EPOCHS, encode_checkpoint
from oncelog.log.partition import Partition
from oncelog.testing.memory_disk import MemoryDisk

PATH = f"{TP}/{LEADER_EPOCHS}"


def _kafkas(*epochs: str) -> MemoryDisk:
    """Return a disk with ten records, as Apache Kafka leaves it after a clean stop."""
    disk = MemoryDisk()
    partition = open_partition(disk)
    for _ in range(10):
        put(partition, batch())
    partition.close(0)
    disk.replace(PATH, encode_checkpoint(epochs))
    return disk.after_kill()


def _taken_over(disk: MemoryDisk, log_start_offset: int = 0) -> Partition:
    return open_partition(
        disk, clean_shutdown=True, recovery_point=10, log_start_offset=log_start_offset, topic_id=None
    )


@pytest.mark.parametrize("log_start_offset", [0, 10])
def test_a_takeover_keeps_the_latest_leader_epoch(log_start_offset: int) -> None:
    """Kafka's epoch rises with every start, also if no record follows. It fell to that of the last record, or
    to 0. Java's consumers that had seen the latest one ignored the metadata, and waited for good.
    """
    disk = _kafkas("3 0", "7 10")
    for number in range(3):
        partition = _taken_over(disk, log_start_offset)
        assert partition.leader_epoch == 7
        assert partition.end_offset_for_epoch(7) == (7, 10 + number)
        if not log_start_offset:
            assert partition.end_offset_for_epoch(3) == (3, 10)
        put(partition, batch())
        partition.close(0)
        disk = disk.after_kill()


def test_an_epoch_above_the_log_end_begins_there() -> None:
    disk = _kafkas("3 0", "7 8", "9 15")
    partition = _taken_over(disk)
    assert partition.leader_epoch == 9
    assert partition.end_offset_for_epoch(7) == (7, 10)


def test_a_power_loss_after_a_takeover_keeps_the_leader_epochs() -> None:
    """The file was replaced without a sync, so a power loss could leave an empty one. Consumers that had read
    records of Kafka's epochs were sent back by `auto.offset.reset`.
    """
    whole = _kafkas("3 0", "7 8", "9 15")
    for seed in range(30):
        disk = whole.after_kill()
        _taken_over(disk)
        partition = open_partition(disk.after_power_loss(Random(seed)), recovery_point=10, topic_id=None)
        assert partition.end_offset_for_epoch(3) == (3, 8)


def test_an_epoch_that_no_batch_can_have_is_damage() -> None:
    """Regression: a damaged file had an epoch above 2147483647. Every append failed then."""
    partition = _taken_over(_kafkas(f"{2**31} 0"))
    put(partition, batch())
    assert partition.leader_epoch < 2**31
