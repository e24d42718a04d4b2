"""Groups with the assignors sticky and cooperative-sticky, also together with librdkafka, and subscriptions
by pattern.
"""

from __future__ import annotations

import asyncio
import re
import threading

import aiokafka
import confluent_kafka
import pytest
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from support.groups.members import SECONDS, Reader, fill, member, wait_for
from support.topics import new_topic
from support.wait import until

from oncelog import Admin, Consumer, NewTopic, TopicPartition
from oncelog.errors import MisuseError

COOPERATIVE = {"partition_assignment_strategy": "cooperative-sticky", "enable_auto_commit": False}
STICKY = {"partition_assignment_strategy": "sticky", "enable_auto_commit": False}


def assigned(reader: Reader) -> set[int]:
    return {tp.partition for tp in reader.consumer.assignment()}


def test_only_what_moves_is_given_back(servers: str, group: str) -> None:
    """A second and a third member join and leave; nothing is lost or read twice."""
    topic = new_topic(servers, 6)
    first = Reader(member(servers, group, **COOPERATIVE), topic)
    wait_for(lambda: first.events == [("assigned", 6)])
    fill(servers, topic, 0, 60, 6)
    wait_for(lambda: len(first.values) == 60)
    second = Reader(member(servers, group, **COOPERATIVE), topic)
    wait_for(lambda: len(assigned(first)) == len(assigned(second)) == 3)
    kept = assigned(first), assigned(second)
    third = Reader(member(servers, group, **COOPERATIVE), topic)
    readers = [first, second, third]
    wait_for(lambda: [len(assigned(reader)) for reader in readers] == [2, 2, 2])
    assert assigned(first) < kept[0]
    assert assigned(second) < kept[1]
    fill(servers, topic, 60, 60, 6)
    wait_for(lambda: sum(len(reader.values) for reader in readers) == 120)
    kept = assigned(first), assigned(second)
    third.stop(commits=True)
    wait_for(lambda: len(assigned(first)) == len(assigned(second)) == 3)
    assert assigned(first) > kept[0]
    assert assigned(second) > kept[1]
    fill(servers, topic, 120, 60, 6)
    wait_for(lambda: sum(len(reader.values) for reader in readers) == 180)
    revoked = [count for kind, count in first.events if kind == "revoked"]
    assert revoked == [3, 1], "once for each that joined, and only what moved"
    for reader in (first, second):
        reader.stop()
    assert sorted(value for reader in readers for value in reader.values) == list(range(180))


def test_kept_partitions_are_read_while_the_group_rebalances(servers: str, group: str) -> None:
    """One member does not join and so delays the rebalance. The other member continues to read."""
    topic = new_topic(servers, 2)
    slow = member(servers, group, max_poll_interval_ms=600_000, **COOPERATIVE)
    with slow:
        slow.subscribe(topic)
        wait_for(lambda: slow.poll(0.1) == [] and len(slow.assignment()) == 2)
        reader = Reader(member(servers, group, **COOPERATIVE), topic)
        wait_for(lambda: slow.poll(0.1) == [] and len(slow.assignment()) == len(assigned(reader)) == 1)
        third = Reader(member(servers, group, **COOPERATIVE), topic)
        fill(servers, topic, 0, 40, 2)
        wait_for(lambda: len(reader.values) == 20)
    third.stop()
    reader.stop()


def test_sticky_members_get_back_what_they_had(servers: str, group: str) -> None:
    topic = new_topic(servers, 6)
    first = Reader(member(servers, group, **STICKY), topic)
    wait_for(lambda: first.events == [("assigned", 6)])
    second = Reader(member(servers, group, **STICKY), topic)
    wait_for(lambda: len(assigned(first)) == len(assigned(second)) == 3)
    kept = assigned(first), assigned(second)
    third = Reader(member(servers, group, **STICKY), topic)
    readers = [first, second, third]
    wait_for(lambda: [len(assigned(reader)) for reader in readers] == [2, 2, 2])
    assert assigned(first) < kept[0]
    assert assigned(second) < kept[1]
    third.stop()
    wait_for(lambda: len(assigned(first)) == len(assigned(second)) == 3)
    for reader in (first, second):
        reader.stop()
    assert first.events[:2] == [("assigned", 6), ("revoked", 6)]


class Foreign:
    """A cooperative member of librdkafka in its own thread."""

    def __init__(self, servers: str, group: str, topic: str) -> None:
        self.consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": servers, "group.id": group, "heartbeat.interval.ms": 100,
             "partition.assignment.strategy": "cooperative-sticky", "session.timeout.ms": 6_000,
             "auto.offset.reset": "earliest", "enable.auto.commit": False}
        )  # fmt: skip
        self.revoked: list[int] = []
        self.values: list[int] = []
        self.share: set[int] = set()
        self._stop = threading.Event()
        self.consumer.subscribe([topic], on_revoke=self._revoked)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _revoked(
        self, consumer: confluent_kafka.Consumer, share: list[confluent_kafka.TopicPartition]
    ) -> None:
        self.revoked.append(len(share))
        if self.values:
            consumer.commit(asynchronous=False)
        consumer.incremental_unassign(share)

    def _run(self) -> None:
        while not self._stop.is_set():
            message = self.consumer.poll(0.05)
            if message is not None and not message.error():
                self.values.append(int(message.value()))
            self.share = {tp.partition for tp in self.consumer.assignment()}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(SECONDS)
        self.consumer.close()


@pytest.mark.parametrize("leader", ["ours", "librdkafka"])
def test_a_cooperative_group_with_librdkafka(servers: str, group: str, leader: str) -> None:
    """Either member may lead, and each gives back only the partitions that move."""
    topic = new_topic(servers, 6)
    if leader == "ours":
        ours = Reader(member(servers, group, **COOPERATIVE), topic)
        wait_for(lambda: len(assigned(ours)) == 6)
        other = Foreign(servers, group, topic)
    else:
        other = Foreign(servers, group, topic)
        wait_for(lambda: len(other.share) == 6)
        ours = Reader(member(servers, group, **COOPERATIVE), topic)
    wait_for(lambda: len(other.share) == len(assigned(ours)) == 3)
    fill(servers, topic, 0, 60, 6)
    wait_for(lambda: len(ours.values) + len(other.values) == 60)
    third = Reader(member(servers, group, **COOPERATIVE), topic)
    wait_for(lambda: len(other.share) == len(assigned(ours)) == len(assigned(third)) == 2)
    if leader == "ours":
        assert [count for kind, count in ours.events if kind == "revoked"] == [3, 1]
        assert other.revoked == [1]
    else:
        assert other.revoked == [3, 1]
        assert [count for kind, count in ours.events if kind == "revoked"] == [1]
    fill(servers, topic, 60, 60, 6)
    everyone = (ours, other, third)
    wait_for(lambda: sum(len(reader.values) for reader in everyone) == 120)
    assert sorted(value for reader in everyone for value in reader.values) == list(range(120))
    other.stop()
    wait_for(lambda: len(assigned(ours)) == len(assigned(third)) == 3)
    ours.stop()
    third.stop()


@pytest.mark.parametrize("leader", ["ours", "aiokafka"])
def test_a_sticky_group_with_aiokafka(servers: str, group: str, leader: str) -> None:
    topic = new_topic(servers, 4)

    async def work() -> None:
        other = aiokafka.AIOKafkaConsumer(
            topic,
            bootstrap_servers=servers,
            group_id=group,
            heartbeat_interval_ms=100,
            partition_assignment_strategy=[StickyPartitionAssignor],
        )

        async def until_shared(ours: int, theirs: int) -> None:
            await until(lambda: (len(assigned(reader)), len(other.assignment())) == (ours, theirs))

        if leader == "aiokafka":
            await other.start()
        reader = await asyncio.to_thread(lambda: Reader(member(servers, group, **STICKY), topic))
        if leader == "ours":
            await until_shared(4, 0)
            await other.start()
        await until_shared(2, 2)
        kept = assigned(reader)
        await other.stop()
        await asyncio.to_thread(wait_for, lambda: len(assigned(reader)) == 4)
        assert assigned(reader) > kept
        await asyncio.to_thread(reader.stop)

    asyncio.run(work())


def test_a_cooperative_static_member_comes_back(servers: str, group: str) -> None:
    """The static member's restart moves no partition, and the other member's listener is not notified."""
    topic = new_topic(servers, 4)
    other = Reader(member(servers, group, group_instance_id="other", **COOPERATIVE), topic)
    wait_for(lambda: len(assigned(other)) == 4)
    mine = Reader(member(servers, group, group_instance_id="mine", **COOPERATIVE), topic)
    wait_for(lambda: len(assigned(other)) == len(assigned(mine)) == 2)
    # The second rebalance, which gives the two partitions to `mine`, may end for `other` a little later.
    events = [("assigned", 4), ("revoked", 2), ("assigned", 0), ("assigned", 0)]
    wait_for(lambda: other.events == events)
    share = assigned(mine)
    mine.stop()
    again = Reader(member(servers, group, group_instance_id="mine", **COOPERATIVE), topic)
    wait_for(lambda: assigned(again) == share)
    assert other.events == events
    other.stop()
    again.stop()


def test_another_subscription_gives_back_the_topics_it_leaves(servers: str, group: str) -> None:
    left, kept, new = (new_topic(servers, 2) for _ in range(3))
    events: list[tuple[str, set[str]]] = []

    def note(kind: str) -> object:
        return lambda share: events.append((kind, {tp.topic for tp in share}))

    callbacks = {f"on_{kind}": note(kind) for kind in ("assigned", "revoked")}
    with member(servers, group, **COOPERATIVE) as consumer:
        consumer.subscribe([left, kept], **callbacks)  # type: ignore[arg-type]
        wait_for(lambda: consumer.poll(0.1) == [] and len(consumer.assignment()) == 4)
        consumer.subscribe([kept, new], **callbacks)  # type: ignore[arg-type]
        wait_for(lambda: consumer.poll(0.1) == [] and len(events) == 3)
        assert {tp.topic for tp in consumer.assignment()} == {kept, new}
        assert events == [("assigned", {left, kept}), ("revoked", {left}), ("assigned", {new})]


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_new_topics_that_match_a_pattern_are_read(servers: str, group: str, strategy: str) -> None:
    """New matching topics are found automatically. The pattern must match the whole name."""
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topics([NewTopic(f"{group}-a", 1), NewTopic(f"{group}-b-not", 1)])
        settings = {"metadata_max_age_ms": 200, "partition_assignment_strategy": strategy}
        with member(servers, group, **settings) as consumer:
            consumer.subscribe(pattern=re.escape(group) + "-[a-z]")

            def reads(*names: str) -> bool:
                consumer.poll(0.1)
                return consumer.assignment() == [TopicPartition(f"{group}-{name}", 0) for name in names]

            wait_for(lambda: reads("a"))
            admin.create_topics([NewTopic(f"{group}-c", 1)])
            wait_for(lambda: reads("a", "c"))
            admin.delete_topics([f"{group}-a"])
            wait_for(lambda: reads("c"))
            consumer.unsubscribe()
            assert consumer.assignment() == []


def test_a_pattern_may_match_nothing_yet(servers: str, group: str) -> None:
    with member(servers, group, metadata_max_age_ms=200) as consumer:
        consumer.subscribe(pattern=f"{group}-.*")
        assert consumer.poll(0.5) == []
        with Admin({"bootstrap.servers": servers}) as admin:
            admin.create_topics([NewTopic(f"{group}-x", 1)])
        fill(servers, f"{group}-x", 0, 3, 1)
        seen: list[bytes | None] = []
        wait_for(lambda: seen.extend(record.value for record in consumer.poll(0.1)) or len(seen) == 3)


def test_an_invalid_pattern_is_refused(ours: str, group: str) -> None:
    with Consumer({"bootstrap.servers": ours, "group.id": group}) as consumer:
        with pytest.raises(MisuseError, match="not a regular expression"):
            consumer.subscribe(pattern="(")
        with pytest.raises(MisuseError, match="not to both"):
            consumer.subscribe(["topic"], pattern="topic")


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("between", ["nothing", "names"])
def test_a_member_that_subscribes_to_another_pattern_reads_what_that_matches(
    servers: str, group: str, protocol: str, between: str
) -> None:
    """Regression: with the consumer protocol, the new pattern was looked up only after metadata.max.age.ms.

    Until then the member read nothing.
    """
    first, second = new_topic(servers), new_topic(servers)
    with member(servers, group, group_protocol=protocol) as consumer:

        def reads(topic: str) -> bool:
            consumer.poll(0.1)
            return consumer.assignment() == [TopicPartition(topic, 0)]

        consumer.subscribe(pattern=first)
        wait_for(lambda: reads(first))
        consumer.subscribe(pattern=first)
        consumer.poll(0.1)
        wait_for(lambda: reads(first))
        if between == "names":
            consumer.subscribe(second)
            wait_for(lambda: reads(second))
            consumer.subscribe(pattern=first)
            wait_for(lambda: reads(first))
        consumer.subscribe(pattern=second)
        wait_for(lambda: reads(second))


def test_a_member_that_closes_while_others_do_not_join_commits_what_it_read(servers: str, group: str) -> None:
    """Regression: on their connection, the member's commit waited for the response to its JoinGroup. That
    response waited for a member that did not poll.
    """
    topic = new_topic(servers, 2)
    fill(servers, topic, 0, 10, 2)

    def one() -> Consumer:
        made = member(servers, group, partition_assignment_strategy="cooperative-sticky")
        made.subscribe(topic)
        return made

    with one() as busy, one() as leaver, one() as third:
        wait_for(lambda: not busy.poll(0.1) and not leaver.poll(0.1) and len(leaver.assignment()) == 1)
        [tp] = leaver.assignment()
        # The third member causes a rebalance. `busy` does not poll any more, so the rebalance cannot end.
        session = leaver._async._group
        assert session is not None
        wait_for(lambda: not third.poll(0.1) and not leaver.poll(0.1) and session.protocol.is_rebalancing)
        fill(servers, topic, 10, 10, 2)
        wait_for(lambda: bool(leaver.poll(0.1)) or leaver.position(tp) == 10)
        position = leaver.position(tp)
        leaver.close()
        with member(servers, group) as asking:
            stored = asking.committed(tp)[tp]
        assert stored is not None
        assert stored.offset == position > 5
