"""Wait until group coordinators know new topics.

On Apache Kafka, the partitions of a new topic can be read before group coordinators know the topic. Each
partition of `__consumer_offsets` has a coordinator that learns of the topic separately. A test whose group
must get partitions immediately waits here first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oncelog.conform.values import ERROR_NAMES
from oncelog.errors import CoordinatorLoadInProgress, CoordinatorNotAvailable, NotCoordinator
from support.wait import attempts

NOT_READY = {error.code for error in (CoordinatorLoadInProgress, CoordinatorNotAvailable, NotCoordinator)}


def wait_until_groups_know(
    heartbeat: Callable[..., Any], group_id: str, partition_counts: Mapping[str, int]
) -> None:
    """Wait until a member of the consumer protocol would get all partitions of these topics.

    `heartbeat` sends a ConsumerGroupHeartbeat with the given fields, and returns the response. `group_id` is
    a new group whose coordinator is tested. `partition_counts` maps topics to their numbers of partitions.
    The member leaves the group at the end.
    """
    member = {"group_id": group_id, "member_id": "probe"}
    joining = {
        "rebalance_timeout_ms": 5_000,
        "subscribed_topic_names": list(partition_counts),
        "topic_partitions": [],
    }
    epoch, answers = 0, list[Any]()
    for _ in attempts(lambda: f"{group_id} is not given all partitions: {answers[-1]}", step_s=0.01):
        fields = joining if epoch == 0 else {"rebalance_timeout_ms": -1}
        answer = heartbeat(member_epoch=epoch, **member, **fields)
        answers.append(answer)
        if not answer.error_code:
            epoch = answer.member_epoch
            assigned = answer.assignment.topic_partitions if answer.assignment else []
            if sum(len(topic.partitions) for topic in assigned) >= sum(partition_counts.values()):
                break
        assert answer.error_code in {0, *NOT_READY}, f"{ERROR_NAMES[answer.error_code]}: {answer}"
    heartbeat(member_epoch=-1, rebalance_timeout_ms=-1, **member)
