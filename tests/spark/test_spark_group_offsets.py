"""commitOffsetsToGroup: tools show the lag of a query, and no failure of these commits ends or changes the
query.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.cli import oncelog
from support.client import free_port
from support.spark.topics import Collected, create_topic, fill, read_stream

from oncelog import Admin, Consumer
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.errors import ConfigError
from oncelog.spark.source import group_offsets
from oncelog.spark.source.group_offsets import GroupOffsets
from oncelog.spark.source.offset_ranges import Position
from oncelog.types import TopicPartition

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P1"), pytest.mark.timeout(300)]


@pytest.fixture(params=["shared_broker", "apache_kafka"], ids=["ours", "apache"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).bootstrap_servers)


def committed(bootstrap: str, group: str) -> dict[int, int]:
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        return {tp.partition: kept.offset for tp, kept in admin.group_offsets(group).items()}


def lag(bootstrap: str, group: str) -> list[int]:
    described = oncelog("groups", "describe", group, "-o", "json", servers=bootstrap)
    assert described.code == 0, described.err
    return [row["lag"] for row in json.loads(described.out)]


def test_the_group_has_the_offsets_of_every_finished_micro_batch(
    spark: Any, bootstrap: str, topic: str, checkpoint: str
) -> None:
    """The offsets must include the last micro-batch of a run, although Spark does not call the source's
    commit() for it.
    """
    create_topic(bootstrap, topic, partitions=2)
    fill(bootstrap, topic, 0, 30, 0)
    fill(bootstrap, topic, 0, 10, 1)
    group = f"lag-{topic}"
    stream = read_stream(
        spark,
        bootstrap,
        subscribe=topic,
        startingOffsets="earliest",
        maxOffsetsPerTrigger=20,
        commitOffsetsToGroup=group,
    )

    class FailsInSecond(Collected):
        def take(self, frame: Any, batch_id: int) -> None:
            if batch_id == 1:
                raise RuntimeError("the sink is down")
            super().take(frame, batch_id)

    with pytest.raises(Exception, match="the sink is down"):
        FailsInSecond().run(stream, checkpoint)
    assert committed(bootstrap, group) == {0: 15, 1: 5}, "only the first micro-batch is finished"
    assert lag(bootstrap, group) == [15, 5]

    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.alter_group_offsets(group, {TopicPartition(topic, 0): 29})
    rest = Collected()
    rest.run(stream, checkpoint)
    assert rest.offsets(0) == list(range(15, 30)), "the group is never read back"
    assert committed(bootstrap, group) == {0: 30, 1: 10}
    assert lag(bootstrap, group) == [0, 0]


def test_a_query_whose_group_has_members_is_refused_before_it_reads(
    spark: Any, bootstrap: str, topic: str, checkpoint: str
) -> None:
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 5)
    group, collected = f"busy-{topic}", Collected()
    stream = read_stream(
        spark, bootstrap, subscribe=topic, startingOffsets="earliest", commitOffsetsToGroup=group
    )
    settings = {"bootstrap.servers": bootstrap, "client.id": "reports", "auto.offset.reset": "earliest"}
    with Consumer(settings, group_id=group) as consumer:
        consumer.subscribe([topic])
        assert consumer.poll(timeout=60)
        with pytest.raises(Exception, match=r"the group has 1 members .*reports at ") as raised:
            collected.run(stream, checkpoint)
    assert "a group that only this query uses" in str(raised.value)
    assert collected.batches == []


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_that_joins_later_stops_only_the_commits(
    bootstrap: str, topic: str, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 5)
    tp, name = TopicPartition(topic, 0), f"later-{topic}"
    settings: dict[str, object] = {"bootstrap.servers": bootstrap, "auto.offset.reset": "earliest"}
    group = GroupOffsets(name, settings)
    try:
        group.refuse_members()
        group.commit(Position({tp: 2}), 0)
        assert committed(bootstrap, name) == {0: 2}
        with Consumer(
            {**settings, "group.protocol": protocol, "enable.auto.commit": False}, group_id=name
        ) as consumer:
            consumer.subscribe([topic])
            assert consumer.poll(timeout=60)
            with pytest.raises(ConfigError, match="has 1 members"):
                group.refuse_members()
            group.commit(Position({tp: 3}), 10)
            group.commit(Position({tp: 4}), 20)
        assert committed(bootstrap, name) == {0: 2}
        group.commit(Position({tp: 5}), 60_010)
        assert committed(bootstrap, name) == {0: 5}
    finally:
        group.close()
    failures = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert len(failures) == 1 and "commit 1 in a row failed (1 since the query started)" in failures[0]
    assert "are committed again, after 1 failures" in caplog.text


def test_a_cluster_that_does_not_answer_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {
        "bootstrap.servers": f"127.0.0.1:{asyncio.run(free_port())}",
        "oncelog.bootstrap.timeout.ms": 0,
    }
    group = GroupOffsets("nobody", settings)
    group.refuse_members()
    group.commit(Position({TopicPartition("t", 0): 2}), 0)
    group.commit(Position({TopicPartition("t", 0): 2}), 60_000)
    group.close()
    assert "commitOffsetsToGroup=nobody: the group cannot be described" in caplog.text
    assert "commit 2 in a row failed (2 since the query started)" in caplog.text


def test_a_call_that_does_not_end_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*_arguments: object) -> None:
        await asyncio.Event().wait()

    for name in ("describe_groups", "alter_group_offsets"):
        monkeypatch.setattr(AsyncAdmin, name, never)
    monkeypatch.setattr(group_offsets, "MAX_COMMIT_MS", 1)
    group = GroupOffsets("slow", {"bootstrap.servers": "127.0.0.1:1"})
    group.refuse_members()
    group.commit(Position({TopicPartition("t", 0): 2}), 0)
    group.close()
    assert "the group cannot be described: not finished" in caplog.text
    assert "commit 1 in a row failed" in caplog.text
