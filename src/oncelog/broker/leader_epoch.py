"""The check of a client's leader epoch (KIP-320), which all APIs that read a partition use."""

from __future__ import annotations

from oncelog.errors import FencedLeaderEpoch, UnknownLeaderEpoch
from oncelog.log.partition import Partition


def check_leader_epoch(partition: Partition, current_leader_epoch: int) -> None:
    """Check the leader epoch in a request. The epoch -1 is accepted: it means that the client does not know
    the epoch.

    Raises FencedLeaderEpoch if the partition's epoch is higher, UnknownLeaderEpoch if it is lower.
    """
    if current_leader_epoch == -1 or current_leader_epoch == partition.leader_epoch:
        return
    text = (
        f"the client's leader epoch is {current_leader_epoch}, but the partition's is "
        f"{partition.leader_epoch}"
    )
    raise (
        FencedLeaderEpoch(text) if current_leader_epoch < partition.leader_epoch else UnknownLeaderEpoch(text)
    )
