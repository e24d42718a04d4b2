"""Look-ups of offsets while partitions move to another broker, against a simulated cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.list_offsets import OffsetAt
from oncelog.client.consumer.offset_lookup import list_offsets
from oncelog.errors import UnknownTopicOrPartition
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.messages import ListOffsetsResponse

TP = TopicPartition("t", 0)


class MovingCluster:
    """A cluster in which the partition has moved from node 1 to node 2, or its topic has been deleted.

    The client's metadata still name node 1 as leader.
    """

    def __init__(self, *, is_deleted: bool) -> None:
        self.settings = {"request.timeout.ms": 30_000}
        self.requested_nodes: list[int] = []
        self._is_deleted, self._leader = is_deleted, cast("int | None", 1)
        self.metadata = SimpleNamespace(leader_of=lambda tp: self._leader, mark_stale=self._mark_stale)

    def _mark_stale(self, _: Any) -> None:
        self._leader = None

    def now_ms(self) -> float:
        return 0.0

    def retry_pause_ms(self, _: int) -> float:
        return 0.0

    async def leader(self, tp: TopicPartition, *, allow_auto_topic_creation: bool) -> int:
        assert not allow_auto_topic_creation
        if self._is_deleted:
            raise UnknownTopicOrPartition(f"topic {tp.topic!r} does not exist")
        self._leader = 2
        return 2

    async def request(self, node_id: int, _: Any, **__: Any) -> ListOffsetsResponse:
        self.requested_nodes.append(node_id)
        result = {"error_code": 0, "offset": 7, "timestamp": -1} if node_id == 2 else {"error_code": 3}
        row = ListOffsetsResponse.ListOffsetsPartitionResponse(partition_index=0, **result)
        return ListOffsetsResponse(
            topics=[ListOffsetsResponse.ListOffsetsTopicResponse(name="t", partitions=[row])]
        )


def look_up(cluster: MovingCluster) -> object:
    connection = cast(ClusterConnection, cluster)
    return asyncio.run(list_offsets(connection, {TP: "earliest"}, Isolation.READ_COMMITTED))[TP]


@pytest.mark.behaviour("T10")
def test_a_partition_that_was_moved_away_is_asked_for_again() -> None:
    """Regression: UNKNOWN_TOPIC_OR_PARTITION from the old leader ended a poll with an error."""
    cluster = MovingCluster(is_deleted=False)
    result = look_up(cluster)
    assert isinstance(result, OffsetAt) and result.offset == 7
    assert cluster.requested_nodes == [1, 2]


def test_a_topic_that_is_gone_is_looked_for_once() -> None:
    cluster = MovingCluster(is_deleted=True)
    assert isinstance(look_up(cluster), UnknownTopicOrPartition)
    assert cluster.requested_nodes == [1]
