"""The check of a client's idea of who leads (KIP-320), the same for every API that reads."""

from __future__ import annotations

from oncelog.errors import FencedLeaderEpoch, UnknownLeaderEpoch
from oncelog.log.partition import Partition


def check_leader_epoch(partition: Partition, current_leader_epoch: int) -> None:
    """-1 is not checked. Raises FencedLeaderEpoch for an older epoch, UnknownLeaderEpoch for a newer."""
    if current_leader_epoch == -1 or current_leader_epoch == partition.leader_epoch:
        return
    text = f"the client's leader epoch is {current_leader_epoch}, the partition's {partition.leader_epoch}"
    raise (
        FencedLeaderEpoch(text) if current_leader_epoch < partition.leader_epoch else UnknownLeaderEpoch(text)
    )
