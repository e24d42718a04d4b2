"""`oncelog groups` against our broker and Apache Kafka, and Kafka's own tool against ours."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka, run_tool
from support.broker import wait_until
from support.cli import oncelog
from support.client import append, batch_of
from support.topics import new_topic, producer_of

from oncelog import Admin, Broker, Consumer, OffsetAndMetadata, TopicPartition
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import PartitionProducers
from oncelog.client.consumer.partition_ends import partition_ends
from oncelog.errors import TopicAuthorizationFailed

_numbers = itertools.count()
TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


def rows(*arguments: str, servers: str) -> list[dict[str, Any]]:
    got = oncelog("groups", *arguments, "-o", "json", servers=servers)
    assert got.code == 0, got.err
    found: list[dict[str, Any]] = json.loads(got.out)
    return found


def filled(servers: str) -> str:
    """Create a topic of two partitions with five records each, one second apart, from 2023-11-14T22:13:20Z
    on.
    """
    topic = new_topic(servers, 2)
    with producer_of(servers) as producer:
        for number in range(10):
            at_ms = 1_700_000_000_000 + number // 2 * 1000
            producer.send(topic, b"%d" % number, partition=number % 2, timestamp_ms=at_ms)
    return topic


def reader(servers: str, group: str) -> Consumer:
    config = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}
    return Consumer(config, enable_auto_commit=False, heartbeat_interval_ms=100, client_id="r")


def read_and_commit(consumer: Consumer, topic: str, count: int) -> None:
    consumer.subscribe([topic])
    got = 0
    while got < count:
        got += len(consumer.poll(0.5))
    consumer.commit()


def test_a_group_is_listed_described_and_deleted(servers: str) -> None:
    group, topic = f"cli-{os.getpid()}-{next(_numbers)}", filled(servers)
    with reader(servers, group) as consumer:
        read_and_commit(consumer, topic, 10)
        with producer_of(servers) as producer:
            producer.send(topic, b"more", partition=1)
        (listed,) = [
            row for row in rows("list", "--state", "Stable", servers=servers) if row["group"] == group
        ]
        assert listed["protocol_type"] == "consumer"
        told = rows("describe", group, servers=servers)
        assert [(row["partition"], row["offset"], row["end_offset"], row["lag"]) for row in told] == [
            (0, 5, 5, 0),
            (1, 5, 6, 1),
        ]
        (member,) = rows("describe", group, "--members", servers=servers)
        assert member["client"] == "r" and member["member"] == told[0]["member"]
        assert member["partitions"].split() == [f"{topic}-0", f"{topic}-1"]
        busy = oncelog("groups", "delete", group, "--yes", servers=servers)
        assert busy.code == 1 and "NON_EMPTY_GROUP" in busy.err
        reset = ["groups", "reset-offsets", group, "--topic", topic, "--to-earliest", "--yes"]
        busy = oncelog(*reset, servers=servers)
        assert busy.code == 1 and "UNKNOWN_MEMBER_ID" in busy.err and "members" in busy.err

    dry = oncelog("groups", "delete", group, servers=servers)
    assert "would delete" in dry.out and "2 committed offsets" in dry.out
    assert len(rows("describe", group, servers=servers)) == 2
    done = oncelog("groups", "delete", group, "--yes", servers=servers)
    assert done.code == 0 and f"deleted {group}" in done.out
    assert all(row["group"] != group for row in rows("list", servers=servers))


def stuck_group(servers: str, topic: str, offset: int = 0) -> str:
    """Commit an offset of partition 0 for a new group, and return the group's id."""
    group = f"stuck-{os.getpid()}-{next(_numbers)}"
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.alter_group_offsets(group, {TopicPartition(topic, 0): OffsetAndMetadata(offset)})
    return group


@pytest.mark.behaviour("T14")
def test_lag_counts_to_the_high_watermark_while_a_transaction_is_open(
    servers: str, kafka_class_path: str
) -> None:
    topic = new_topic(servers)
    group, name = stuck_group(servers, topic), f"open-{topic}"
    with producer_of(servers, transactional_id=name) as producer:
        producer.init_transactions()
        with producer.transaction():
            for value in (b"a", b"b"):
                producer.send(topic, value).result(60)
            (row,) = rows("describe", group, servers=servers)
            told = run_tool(TOOL, "--bootstrap-server", servers, "--describe", "--group", group)
            described = oncelog("topics", "describe", topic, "-o", "json", servers=servers)
    # Apache Kafka answers before the markers are written.
    wait_until(lambda: rows("describe", group, servers=servers)[0]["stable_end_offset"] == 3)
    (closed,) = rows("describe", group, servers=servers)
    assert (row["offset"], row["end_offset"], row["lag"], row["stable_end_offset"]) == (0, 2, 2, 0)
    assert row["held_back_by"].startswith(f"{name} (producer id ") and row["hanging"].startswith("no: ")
    (line,) = [line.split() for line in told.splitlines() if line.startswith(group)]
    assert line[1:6] == [topic, "0", "0", "2", "2"], "the numbers of kafka-consumer-groups.sh"
    (part,) = json.loads(described.out)
    same = ("end_offset", "stable_end_offset", "held_back_by", "hanging")
    assert {key: part[key] for key in same} == {key: row[key] for key in same}
    assert (closed["end_offset"], closed["lag"]) == (3, 3)
    assert closed["held_back_by"] is closed["hanging"] is None


@pytest.mark.behaviour("T14")
def test_a_hanging_transaction_is_named_beside_the_group_that_it_holds_up(kafka_class_path: str) -> None:
    with Broker(config={"transaction.partition.verification.enable": False}) as broker:
        servers = broker.bootstrap_servers
        topic = new_topic(servers)
        lost = batch_of(b"x", b"y", producer_id=77, producer_epoch=3, base_sequence=0, is_transactional=True)
        append(servers, TopicPartition(topic, 0), lost, transactional_id="gone")
        (row,) = rows("describe", stuck_group(servers, topic), servers=servers)
        assert (row["end_offset"], row["lag"], row["stable_end_offset"]) == (2, 2, 0)
        assert row["held_back_by"] == "producer id 77, epoch 3"
        assert row["hanging"].startswith("yes: no coordinator knows producer id 77")
        (ahead,) = rows("describe", stuck_group(servers, topic, 1), servers=servers)
        assert (ahead["offset"], ahead["lag"]) == (1, 1), "a read_uncommitted group"
        table = oncelog("groups", "describe", row["group"], servers=servers)
        assert "STABLE END OFFSET" in table.out and "HELD BACK BY" in table.out


def test_an_offset_outside_the_log_gets_a_remark(ours: str) -> None:
    topic = filled(ours)
    group = stuck_group(ours, topic, 17)
    told = oncelog("groups", "describe", group, servers=ours)
    assert f"{topic}-0: offset 17 is above the end offset 5" in told.err
    (row,) = rows("describe", group, servers=ours)
    assert row["lag"] == -12, "as kafka-consumer-groups.sh"
    with Admin({"bootstrap.servers": ours}) as admin:
        admin.delete_records({TopicPartition(topic, 0): 3})
    told = oncelog("groups", "describe", stuck_group(ours, topic, 1), servers=ours)
    assert f"{topic}-0: offset 1 is below the start offset 3" in told.err


@pytest.mark.parametrize(
    ("way", "wanted"),
    [
        (("--to-earliest",), [0, 0]),
        (("--to-latest",), [5, 5]),
        (("--to-offset", "0"), [0, 0]),  # R1064: 0 was taken for a missing option
        (("--to-offset", "3"), [3, 3]),
        (("--to-offset", "30"), [5, 5]),
        (("--shift-by", "0"), [5, 5]),
        (("--shift-by", "-2"), [3, 3]),
        (("--shift-by", "9"), [5, 5]),
        (("--to-datetime", "1969-12-31T23:59:59.999Z"), [0, 0]),
        (("--to-datetime", "2023-11-14T22:13:22Z"), [2, 2]),
        (("--to-datetime", "2030-01-01T00:00:00Z"), [5, 5]),
    ],
)
def test_offsets_are_reset(ours: str, way: tuple[str, ...], wanted: list[int]) -> None:
    group, topic = f"reset-{next(_numbers)}", filled(ours)
    with reader(ours, group) as consumer:
        read_and_commit(consumer, topic, 10)
    planned = rows("reset-offsets", group, "--topic", topic, *way, servers=ours)
    assert [(row["offset"], row["new_offset"]) for row in planned] == [(5, each) for each in wanted]
    assert [row["offset"] for row in rows("describe", group, servers=ours)] == [5, 5]
    rows("reset-offsets", group, "--topic", topic, *way, "--yes", servers=ours)
    assert [row["offset"] for row in rows("describe", group, servers=ours)] == wanted


def held(servers: str, group: str) -> dict[TopicPartition, int]:
    with Admin({"bootstrap.servers": servers}) as admin:
        return {tp: found.offset for tp, found in sorted(admin.group_offsets(group).items())}


def test_single_partitions_are_reset_by_a_duration(servers: str) -> None:
    group, topic = f"single-{os.getpid()}-{next(_numbers)}", filled(servers)
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    with producer_of(servers) as producer:
        producer.send(topic, b"new", partition=1)
    reset = ["reset-offsets", group, "--yes"]
    rows(*reset, "--topic", topic, "--to-latest", servers=servers)
    assert held(servers, group) == {zero: 5, one: 6}
    rows(*reset, "--topic", f"{topic}:1", "--by-duration", "PT1H", servers=servers)
    assert held(servers, group) == {zero: 5, one: 5}, "the record of the last hour is read again"
    rows(*reset, "--topic", f"{topic}:0,1", "--shift-by", "-1", servers=servers)
    assert held(servers, group) == {zero: 4, one: 4}
    rows(*reset, "--all-topics", "--to-earliest", servers=servers)
    assert held(servers, group) == {zero: 0, one: 0}


def test_a_plan_is_exported_and_imported(servers: str, tmp_path: Path) -> None:
    group, topic = f"plan-{os.getpid()}-{next(_numbers)}", filled(servers)
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    reset = ["groups", "reset-offsets", group]
    assert oncelog(*reset, "--topic", topic, "--to-offset", "3", "--yes", servers=servers).code == 0
    exported = oncelog(*reset, "--all-topics", "--to-current", "--export", servers=servers)
    assert exported.out == f"{topic},0,3\n{topic},1,3\n" and "nothing is changed" in exported.err
    path = tmp_path / "plan.csv"
    path.write_text(f"{topic},1,99\n{group},{topic},0,1\nother,{topic},5,1\n")
    imported = oncelog(*reset, "--from-file", str(path), "--yes", "--export", servers=servers)
    assert imported.out == f"{topic},0,1\n{topic},1,5\n", "offsets beyond the end are the end"
    assert held(servers, group) == {zero: 1, one: 5}
    for text in (b"x,y\n", b"\xff"):
        path.write_bytes(text)
        wrong = oncelog(*reset, "--from-file", str(path), servers=servers)
        assert wrong.code == 1 and str(path) in wrong.err


def test_kafka_consumer_groups_reads_and_writes_the_same_plans(
    ours: str, kafka_class_path: str, tmp_path: Path
) -> None:
    group, topic = f"tool-{next(_numbers)}", filled(ours)
    path = tmp_path / "plan.csv"
    reset = ["groups", "reset-offsets", group, "--topic", topic, "--to-offset", "2", "--export"]
    path.write_text(oncelog(*reset, servers=ours).out)
    theirs = ["--bootstrap-server", ours, "--reset-offsets", "--group", group]
    run_tool(TOOL, *theirs, "--from-file", str(path), "--execute")
    assert list(held(ours, group).values()) == [2, 2]
    told = run_tool(TOOL, *theirs, "--all-topics", "--shift-by", "1", "--export", "--dry-run")
    plan = [line for line in told.splitlines() if topic in line]
    path.write_text("\n".join(plan))
    reset = ["groups", "reset-offsets", group, "--from-file", str(path), "--yes"]
    assert oncelog(*reset, servers=ours).code == 0
    assert list(held(ours, group).values()) == [3, 3]


def test_all_groups_are_described_with_totals(servers: str) -> None:
    topic = filled(servers)
    one, two = stuck_group(servers, topic, 1), stuck_group(servers, topic, 5)
    told = [row for row in rows("describe", "--all", servers=servers) if row["group"] in (one, two)]
    assert [(row["group"], row["partition"], row["lag"]) for row in told] == sorted(
        [(one, 0, 4), (two, 0, 0)]
    )
    totals = {row["group"]: row for row in rows("describe", one, two, "--totals", servers=servers)}
    assert {group: row["lag"] for group, row in totals.items()} == {one: 4, two: 0}
    assert totals[one] == {
        "group": one, "state": "Empty", "members": 0, "partitions": 1, "lag": 4, "held_back": 0
    }  # fmt: skip
    for wrong in ([], [one, "--all"], [one, "--members", "--totals"]):
        assert oncelog("groups", "describe", *wrong, servers=servers).code == 2


def test_offsets_of_a_group_are_deleted_only_with_yes(servers: str) -> None:
    group, topic = f"forget-{os.getpid()}-{next(_numbers)}", filled(servers)
    rows("reset-offsets", group, "--topic", topic, "--to-offset", "2", "--yes", servers=servers)
    dry = oncelog("groups", "delete-offsets", group, f"{topic}:1", servers=servers)
    assert dry.code == 0 and "nothing is deleted; repeat with --yes" in dry.err
    assert len(held(servers, group)) == 2
    rows("delete-offsets", group, f"{topic}:1", "--yes", servers=servers)
    assert held(servers, group) == {TopicPartition(topic, 0): 2}
    again = oncelog("groups", "delete-offsets", group, f"{topic}:1", "--yes", servers=servers)
    assert again.code == 1 and f"has no committed offset of {topic}:1" in again.err


def test_offsets_of_a_topic_that_is_read_are_not_deleted(ours: str) -> None:
    group, topic = f"reads-{next(_numbers)}", filled(ours)
    with reader(ours, group) as consumer:
        read_and_commit(consumer, topic, 10)
        busy = oncelog("groups", "delete-offsets", group, topic, "--yes", servers=ours)
    assert busy.code == 1 and "GROUP_SUBSCRIBED_TO_TOPIC" in busy.err
    assert len(held(ours, group)) == 2


def test_offsets_of_a_new_group_are_reset_on_apache_kafka(apache_kafka: ApacheKafka) -> None:
    servers = apache_kafka.bootstrap_servers
    group, topic = f"reset-{os.getpid()}-{next(_numbers)}", filled(servers)
    rows("reset-offsets", group, "--topic", topic, "--to-offset", "2", "--yes", servers=servers)
    with reader(servers, group) as consumer:
        held = consumer.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)])
    assert [found.offset for found in held.values() if found] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "use exactly one of"),
        (("--to-earliest", "--to-latest"), "use exactly one of"),
        (("--to-offset", "0", "--to-latest"), "use exactly one of"),
        (("--to-datetime", "yesterday"), "yesterday"),
        (("--to-offset", "-1"), "-1"),
        (("--by-duration", "an hour"), "'an hour' is not a duration"),
        (("--to-latest", "--all-topics"), "use exactly one of --topic, --all-topics and --from-file"),
        (("--from-file", __file__), "use exactly one of --topic, --all-topics and --from-file"),
    ],
)
def test_wrong_options_of_reset_offsets_are_usage_errors(
    ours: str, arguments: tuple[str, ...], said: str
) -> None:
    topic = filled(ours)
    got = oncelog("groups", "reset-offsets", "g", "--topic", topic, *arguments, servers=ours)
    assert got.code == 2 and said in got.err


def test_kafka_consumer_groups_agrees(ours: str, kafka_class_path: str) -> None:
    group, topic = f"tool-{next(_numbers)}", filled(ours)
    server = ["--bootstrap-server", ours]
    with reader(ours, group) as consumer:
        read_and_commit(consumer, topic, 10)
        assert group in run_tool(TOOL, *server, "--list").split()
        told = run_tool(TOOL, *server, "--describe", "--group", group)
        lines = [line.split() for line in told.splitlines() if line.startswith(group)]
        assert sorted(line[1:6] for line in lines) == [
            [topic, "0", "5", "5", "0"],
            [topic, "1", "5", "5", "0"],
        ]
        members = run_tool(TOOL, *server, "--describe", "--group", group, "--members")
        assert [line.split()[4] for line in members.splitlines() if line.startswith(group)] == ["2"]
        state = run_tool(TOOL, *server, "--describe", "--group", group, "--state")
        assert "Stable" in state and "range" in state
    reset = ["--reset-offsets", "--group", group, "--topic", topic, "--to-offset", "1", "--execute"]
    assert topic in run_tool(TOOL, *server, *reset)
    assert [row["offset"] for row in rows("describe", group, servers=ours)] == [1, 1]
    run_tool(TOOL, *server, "--delete-offsets", "--group", group, "--topic", topic)
    assert rows("describe", group, servers=ours) == []
    run_tool(TOOL, *server, "--delete", "--group", group)
    assert all(row["group"] != group for row in rows("list", servers=ours))


def test_one_topic_that_may_not_be_seen_hides_no_other_holder(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, hidden = new_topic(ours), new_topic(ours)
    describe = AsyncAdmin.describe_producers

    async def refuse_one(
        self: AsyncAdmin, tps: list[TopicPartition], *, raise_errors: bool = True
    ) -> dict[TopicPartition, PartitionProducers]:
        found = await describe(self, tps, raise_errors=raise_errors)
        error = TopicAuthorizationFailed(hidden)
        found |= {tp: PartitionProducers(tp, error=error) for tp in found if tp.topic == hidden}
        if raise_errors and any(producers.error for producers in found.values()):
            raise error
        return found

    monkeypatch.setattr(AsyncAdmin, "describe_producers", refuse_one)
    with producer_of(ours, transactional_id=f"holder-{os.getpid()}") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        for topic in (seen, hidden):
            producer.send(topic, b"a").result(60)
        with Admin({"bootstrap.servers": ours}) as admin:
            ends = partition_ends(admin, [TopicPartition(topic, 0) for topic in (seen, hidden)])
        told = {tp.topic: str(end.held_by) for tp, end in ends.items()}
    assert told[seen].startswith(f"holder-{os.getpid()} (producer id ")
    assert told[hidden] == "an open transaction"
