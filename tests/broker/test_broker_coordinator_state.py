"""Coordinators' state over restarts: memory equals a replay of the log, also after deletions."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from errno import EIO, ENOSPC
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.broker import RawClient
from support.wait import set_wall_clock

from oncelog.broker.coordinators.internal_topic import InternalTopic
from oncelog.broker.coordinators.offsets import Offsets
from oncelog.broker.dispatch import handle
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.broker.state_file import write_state
from oncelog.broker.topics import topics as topics_module
from oncelog.broker.topics.topics import FILE_NAME, NewTopic, Topics
from oncelog.config import BROKER
from oncelog.errors import KafkaStorageError, NotCoordinator, StorageError
from oncelog.log import partition as log_partition
from oncelog.log.manager import LogManager
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.runtime.clock import Clock
from oncelog.server.embedded import Broker, open_node
from oncelog.types import TopicPartition
from oncelog.wire.frames import RequestHeader
from oncelog.wire.message import Message
from oncelog.wire.messages import (
    ConsumerGroupHeartbeatRequest,
    DeleteGroupsRequest,
    DeleteTopicsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
)

HOUR_MS = 3_600_000
TOPICS, GROUPS, IDS = ("t", "u"), ("g", "h"), ("x", "y")


def state_of(node: BrokerState) -> dict[str, Any]:
    """Return the coordinators' state, without the parts that Apache Kafka does not keep over a restart
    either.

    Those parts are the timers and the previous epoch. A client repeats a request with the previous epoch if
    the response was lost.
    """
    offsets, consumers = node.groups.offsets, node.groups.consumers
    return {
        "topics": sorted((topic.name, topic.topic_id, len(topic.partitions)) for topic in node.topics.all()),
        "groups": sorted(node.groups.group_ids()),
        "classic": sorted(
            (group_id, group.state, group.generation_id, sorted(group.members))
            for group_id in node.groups.group_ids()
            if (group := node.groups.get(group_id)) is not None
        ),
        "committed": {group: dict(offsets.of(group)) for group in sorted(offsets._committed)},
        "pending": {key: dict(groups) for key, groups in sorted(offsets._pending.items())},
        "consumers": {
            group_id: (group.epoch, group.assignment_epoch, group.members, group.targets)
            for group_id in sorted(consumers.ids())
            if (group := consumers.get(group_id)) is not None
        },
        "transactions": sorted(entry._replace(last_producer_epoch=-1) for entry in node.transactions.all()),
    }


def offset(value: int, now_ms: int = 0) -> CommittedOffset:
    return CommittedOffset(value, -1, "", now_ms, -1, -1)


def offset_rows(kind: Any, topic: str, **fields: Any) -> list[Any]:
    rows = kind.__dict__
    topic_type = next(rows[name] for name in rows if name.endswith("RequestTopic"))
    partition_type = next(rows[name] for name in rows if name.endswith("RequestPartition"))
    return [topic_type(name=topic, partitions=[partition_type(partition_index=0, **fields)])]


def full(*_: Any) -> Any:
    raise NotCoordinator("no room")


class CoordinatorState(RuleBasedStateMachine):
    """Random requests of every kind that changes the coordinators' state.

    A restart after any of them must change nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="coordinators-"))
        self.settings = BROKER.parse(
            {
                "offsets.topic.num.partitions": 2,
                "transaction.state.log.num.partitions": 2,
                "group.coordinator.rebalance.protocols": "classic,consumer",
            }
        )
        self.now_ms = Clock().now_ms()
        self.node = self._open()
        self.producers: dict[str, ProducerIdAndEpoch] = {}
        self.epochs: dict[str, int] = {}

    def _open(self) -> BrokerState:
        clock = Clock()
        set_wall_clock(clock, max(self.now_ms - clock.now_ms(), 0))
        return open_node(self.directory, self.settings, clock)

    def teardown(self) -> None:
        self.node.log_manager.release()
        shutil.rmtree(self.directory)

    def ask(self, message: Message, version: int) -> Any:
        header = RequestHeader(message.api.key, version, 1, "test", 0)
        return handle(self.node, Request(1, header, message), self.now_ms)

    @initialize()
    def make_topics(self) -> None:
        for name in TOPICS:
            self.node.topics.create(name, 1, {}, self.now_ms)

    @rule(group=st.sampled_from(GROUPS), topic=st.sampled_from(TOPICS), value=st.integers(0, 99))
    def commit(self, group: str, topic: str, value: int) -> None:
        rows = offset_rows(OffsetCommitRequest, topic, committed_offset=value)
        self.ask(OffsetCommitRequest(group_id=group, generation_id_or_member_epoch=-1, topics=rows), 8)

    @rule(name=st.sampled_from(IDS))
    def init(self, name: str) -> None:
        answer = self.ask(InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000), 4)
        if not answer.error_code:
            self.producers[name] = ProducerIdAndEpoch(answer.producer_id, answer.producer_epoch)

    @rule(
        name=st.sampled_from(IDS),
        group=st.sampled_from(GROUPS),
        topic=st.sampled_from(TOPICS),
        value=st.integers(0, 99),
    )
    def commit_in_transaction(self, name: str, group: str, topic: str, value: int) -> None:
        if name not in self.producers:
            self.init(name)
        who = self.producers.get(name)
        if who is None:
            return
        rows = offset_rows(TxnOffsetCommitRequest, topic, committed_offset=value)
        message = TxnOffsetCommitRequest(
            transactional_id=name, group_id=group, producer_id=who[0], producer_epoch=who[1], topics=rows
        )
        self.ask(message, 5)

    @rule(name=st.sampled_from(IDS), is_commit=st.booleans())
    def end(self, name: str, is_commit: bool) -> None:
        if name in self.producers:
            who = self.producers[name]
            message = EndTxnRequest(
                transactional_id=name, producer_id=who[0], producer_epoch=who[1], committed=is_commit
            )
            answer = self.ask(message, 5)
            if not answer.error_code:
                self.producers[name] = ProducerIdAndEpoch(answer.producer_id, answer.producer_epoch)

    @rule(group=st.sampled_from(GROUPS), epoch=st.sampled_from([0, -1]))
    def beat(self, group: str, epoch: int) -> None:
        message = ConsumerGroupHeartbeatRequest(
            group_id=group,
            member_id="m",
            member_epoch=epoch,
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=["t"],
            topic_partitions=[],
        )
        self.ask(message, 1)

    @rule(group=st.sampled_from(GROUPS), topic=st.sampled_from(TOPICS))
    def delete_offset(self, group: str, topic: str) -> None:
        self.ask(OffsetDeleteRequest(group_id=group, topics=offset_rows(OffsetDeleteRequest, topic)), 0)

    @rule(group=st.sampled_from(GROUPS))
    def delete_group(self, group: str) -> None:
        self.ask(DeleteGroupsRequest(groups_names=[group]), 2)

    @rule(topic=st.sampled_from(TOPICS), is_made_again=st.booleans(), is_log_full=st.booleans())
    def delete_topic(self, topic: str, is_made_again: bool, is_log_full: bool) -> None:
        if self.node.topics.get(topic) is not None:
            with pytest.MonkeyPatch.context() as patch:
                if is_log_full:
                    patch.setattr(InternalTopic, "append", full)
                (result,) = self.ask(DeleteTopicsRequest(topic_names=[topic]), 5).responses
            assert result.error_code == 0
            assert not any(
                at.topic == topic for group in GROUPS for at in self.node.groups.offsets.partitions_of(group)
            )
        if is_made_again and self.node.topics.get(topic) is None:
            self.node.topics.create(topic, 1, {}, self.now_ms)

    @rule(hours=st.sampled_from([1, 24 * 8]))
    def let_time_pass(self, hours: int) -> None:
        self.now_ms += hours * HOUR_MS
        self.node.transactions.abort_timed_out(self.now_ms)
        self.node.transactions.expire(self.now_ms)
        self.node.groups.expire(self.now_ms)

    @rule()
    def flush(self) -> None:
        for partition in self.node.flush_queue.take_due():
            partition.flush()
            self.node.flush_queue.complete(partition, None)

    @invariant()
    def a_restart_changes_nothing(self) -> None:
        before = state_of(self.node)
        self.node.log_manager.release()
        self.node = self._open()
        assert state_of(self.node) == before


TestCoordinatorState = pytest.mark.behaviour("T15")(CoordinatorState.TestCase)
CoordinatorState.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# Deleted topics and their offsets

AT = TopicPartition("t", 0)


class Crash(Exception):
    """Raised in place of a call, to end the broker's process there."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Create a data directory with a topic, a committed offset, and an offset that is pending in a
    transaction.
    """
    node = opened(tmp_path)
    node.topics.create("t", 1, {}, 0)
    node.groups.offsets.commit("g", {AT: offset(100)}, 0)
    node.groups.offsets.commit_pending("h", ProducerIdAndEpoch(7, 0), {AT: offset(200)}, 0)
    node.log_manager.release()
    return tmp_path


def opened(directory: Path) -> BrokerState:
    return open_node(directory, BROKER.parse({}), Clock())


def delete_topic(node: BrokerState) -> int:
    header = RequestHeader(DeleteTopicsRequest.api.key, 5, 1, "test", 0)
    answer = handle(node, Request(1, header, DeleteTopicsRequest(topic_names=["t"])), 0)
    return int(answer.responses[0].error_code)  # type: ignore[union-attr]


def offsets_of(node: BrokerState) -> dict[str, list[int]]:
    """Return the topic's committed offsets as they would be if the open transaction committed."""
    for index, producer_id in list(node.groups.offsets._pending):
        node.groups.offsets.on_marker(index, producer_id, True)
    found = {group: node.groups.offsets.of(group) for group in sorted(node.groups.offsets.groups())}
    return {group: [each.offset for each in offsets.values()] for group, offsets in found.items()}


def flush(node: BrokerState) -> None:
    for partition in node.flush_queue.take_due():
        partition.flush()
        node.flush_queue.complete(partition, None)


def delete_and_flush(node: BrokerState) -> None:
    delete_topic(node)
    flush(node)


def crash_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: int) -> None:
    """Let the process die at call number `calls` of the method, before the method does anything."""
    method: Callable[..., Any] = getattr(owner, name)
    left = calls

    def crashing(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise Crash
        return method(*arguments, **named)

    monkeypatch.setattr(owner, name, crashing)


@pytest.mark.behaviour("T15", "I16")
@pytest.mark.parametrize(
    ("owner", "name", "calls", "is_deleted"),
    [
        (Topics, "_save", 1, False),
        (Topics, "_remove_directories", 1, True),
        (Topics, "_save", 2, True),
        (Offsets, "delete_topics", 1, True),
        (InternalTopic, "append", 1, True),
        (InternalTopic, "append", 2, True),
        (Topics, "forget_deletions", 1, True),
        (Topics, "_save", 3, True),
    ],
    ids=str,
)
def test_a_topic_goes_with_its_offsets_or_not_at_all(
    directory: Path, owner: type, name: str, calls: int, is_deleted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened(directory)
    with monkeypatch.context() as patch:
        crash_at(patch, owner, name, calls)
        with pytest.raises(Crash):
            delete_and_flush(node)
    node.log_manager.release()
    for _ in range(2):
        node = opened(directory)
        if not is_deleted:
            assert offsets_of(node) == {"g": [100], "h": [200]}
        elif node.topics.get("t") is None:
            node.topics.create("t", 1, {}, 0)
            assert offsets_of(node) == {}
            node.groups.offsets.commit("g", {AT: offset(1)}, 0)
        else:
            assert offsets_of(node) == {"g": [1]}
        node.log_manager.release()


def test_offsets_that_a_full_disk_keeps_do_not_count_for_the_next_topic_of_that_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened(directory)
    with monkeypatch.context() as patch:
        patch.setattr(InternalTopic, "append", full)
        assert delete_topic(node) == 0
    node.topics.create("t", 1, {}, 0)
    assert offsets_of(node) == {}
    node.groups.offsets.commit("g", {AT: offset(1)}, 0)
    node.log_manager.release()
    node = opened(directory)
    assert offsets_of(node) == {"g": [1]}


@pytest.mark.behaviour("T15")
@pytest.mark.parametrize("is_committed_again", [True, False])
def test_a_topic_deleted_twice_leaves_nothing_of_its_first_life(
    directory: Path, is_committed_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened(directory)
    with monkeypatch.context() as patch:
        patch.setattr(InternalTopic, "append", full)
        assert delete_topic(node) == 0
    node.topics.create("t", 1, {}, 0)
    if is_committed_again:
        node.groups.offsets.commit("another", {AT: offset(1)}, 0)
    delete_and_flush(node)
    node.topics.create("t", 1, {}, 0)
    node.groups.offsets.commit("third", {AT: offset(2)}, 0)
    node.log_manager.release()
    for _ in range(2):
        node = opened(directory)
        assert offsets_of(node) == {"third": [2]}
        flush(node)
        node.log_manager.release()
    assert "offsets_to_delete" not in (directory / FILE_NAME).read_text()


@pytest.mark.behaviour("T15")
def test_two_deletions_of_a_name_are_forgotten_once_the_tombstones_of_both_are_on_the_disk(
    directory: Path,
) -> None:
    node = opened(directory)
    assert delete_topic(node) == 0
    node.topics.create("t", 1, {}, 0)
    node.groups.offsets.commit("another", {AT: offset(1)}, 0)
    assert delete_topic(node) == 0
    newest = node.groups.topic.partition_of("another")
    waiting = node.flush_queue.take_due()
    for partition in sorted(waiting, key=lambda each: each.topic_partition.partition != newest):
        assert "offsets_to_delete" in (directory / FILE_NAME).read_text()
        partition.flush()
        node.flush_queue.complete(partition, None)
    assert len(waiting) > 1
    assert "offsets_to_delete" not in (directory / FILE_NAME).read_text()


@pytest.mark.parametrize("is_started_on_a_full_disk", [True, False])
def test_a_topic_whose_files_could_not_be_removed_does_not_come_back(
    directory: Path, is_started_on_a_full_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(ENOSPC, "no room")

    def refused(*_: Any) -> None:
        raise StorageError("no room")

    node = opened(directory)
    with monkeypatch.context() as patch:
        patch.setattr(LogManager, "_rename_deleted", no_room)
        assert delete_topic(node) == 0
        node.topics.create("another", 1, {}, 0)
        with pytest.raises(KafkaStorageError, match="could not be removed yet"):
            node.topics.create("t", 1, {}, 0)
    node.log_manager.release()
    if is_started_on_a_full_disk:
        with monkeypatch.context() as patch:
            patch.setattr(LogManager, "_rename_deleted", no_room)
            patch.setattr(topics_module, "write_state", refused)
            node = opened(directory)
            assert node.topics.get("t") is None
            node.log_manager.release()
    node = opened(directory)
    assert node.topics.get("t") is None
    node.topics.create("t", 1, {}, 0)
    node.groups.offsets.commit("g", {AT: offset(1)}, 0)
    assert offsets_of(node) == {"g": [1]}
    flush(node)
    node.log_manager.release()
    node = opened(directory)
    assert offsets_of(node) == {"g": [1]}


@pytest.mark.parametrize("is_started", [True, False])
def test_a_topic_that_could_not_be_made_or_removed_does_not_prevent_a_start(
    directory: Path, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(EIO, "the disk failed")

    node = opened(directory)
    with monkeypatch.context() as patch:
        patch.setattr(LogManager, "_rename_deleted", broken)
        patch.setattr(type(node.log_manager.disk), "sync_directory", broken)
        with pytest.raises((KafkaStorageError, StorageError, OSError)):
            node.topics.create("new", 2, {}, 0)
        with pytest.raises(KafkaStorageError, match="could not be removed yet"):
            node.topics.create("new", 2, {}, 0)
    if is_started:
        node.log_manager.release()
        node = opened(directory)
        assert node.topics.get("new") is None
    node.topics.create("new", 2, {}, 0)
    node.log_manager.release()
    assert opened(directory).topics.get("new") is not None


@pytest.mark.parametrize("last", [0, 1])
def test_a_partition_that_could_not_be_opened_or_removed_does_not_prevent_a_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Regression: the failed creation left a directory with the topic's id. After a kill, the second start
    refused that directory.
    """
    settle = log_partition._settle_epochs

    def broken(disk: Any, name: str, *rest: Any) -> Any:
        if name == f"new-{last}":
            raise OSError(EIO, "the disk failed")
        return settle(disk, name, *rest)

    def kept(*_: Any) -> None:
        raise OSError(EIO, "the disk failed")

    node = opened(directory)
    with monkeypatch.context() as patch:
        patch.setattr(log_partition, "_settle_epochs", broken)
        patch.setattr(type(node.log_manager.disk), "remove_tree", kept)
        patch.setattr(LogManager, "_rename_deleted", kept)
        with pytest.raises(StorageError):
            node.topics.create("new", 3, {}, 0)
        assert (directory / f"new-{last}").exists()
        with pytest.raises(KafkaStorageError, match="could not be removed yet"):
            node.topics.create("new", 3, {}, 0)
    for _ in range(2):
        node.log_manager.release()
        node = opened(directory)
        assert not list(directory.glob("new-*"))
    node.topics.create("new", 3, {}, 0)
    node.log_manager.release()
    assert opened(directory).topics.get("new") is not None


@pytest.mark.behaviour("T15")
def test_a_disk_that_fills_up_during_a_deletion_keeps_no_offsets(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def once(disk: Any, name: str, text: str) -> None:
        nonlocal written
        written += 1
        if written > 1:
            raise StorageError("no room")
        write_state(disk, name, text)

    node = opened(directory)
    with monkeypatch.context() as patch:
        patch.setattr(topics_module, "write_state", once)
        assert delete_topic(node) == 0
    assert offsets_of(node) == {}
    node.topics.create("t", 1, {}, 0)
    node.groups.offsets.commit("g", {AT: offset(1)}, 0)
    node.log_manager.release()
    node = opened(directory)
    assert node.topics.get("t") is not None
    assert offsets_of(node) == {"g": [1]}


def test_many_topics_are_deleted_in_as_many_steps_as_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test counts the writes of the file of topics and the scans over all offsets."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return counted

    names = [f"many-{number}" for number in range(50)]
    node = opened(directory)
    node.topics.create_all([NewTopic(name, 1, {}) for name in names], 0)
    node.groups.offsets.commit("g", {TopicPartition(name, 0): offset(1) for name in names}, 0)
    steps = []
    for deleted in (["t"], names):
        with monkeypatch.context() as patch:
            patch.setattr(topics_module, "write_state", counting("writes", topics_module.write_state))
            patch.setattr(Offsets, "_of_topics", counting("looks", Offsets._of_topics))
            header = RequestHeader(DeleteTopicsRequest.api.key, 5, 1, "test", 0)
            answer = handle(node, Request(1, header, DeleteTopicsRequest(topic_names=deleted)), 0)
            assert {response.error_code for response in answer.responses} == {0}  # type: ignore[union-attr]
            flush(node)
        steps.append(dict(counts))
        counts.clear()
    assert steps[0] == steps[1] == {"writes": 3, "looks": 1}
    assert offsets_of(node) == {}
    assert node.topics.offsets_to_delete == {}


def test_a_deletion_is_forgotten_once_its_tombstones_are_on_the_disk(directory: Path) -> None:
    node = opened(directory)
    assert delete_topic(node) == 0
    assert "offsets_to_delete" in (directory / FILE_NAME).read_text()
    flush(node)
    assert "offsets_to_delete" not in (directory / FILE_NAME).read_text()
    assert node.topics.offsets_to_delete == {}


@pytest.mark.parametrize("is_log_full", [False, True])
def test_offsets_of_a_recreated_topic_are_deleted_with_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, is_log_full: bool
) -> None:
    """With the old offsets, readers of a new topic of the same name would skip its first records."""
    node = opened(directory)
    with monkeypatch.context() as patch:
        if is_log_full:
            patch.setattr(InternalTopic, "append", full)
        assert delete_topic(node) == 0
    node.topics.create("t", 1, {}, 0)
    node.groups.offsets.commit("i", {AT: offset(1)}, 0)
    node.log_manager.release()
    node = opened(directory)
    assert offsets_of(node) == {"i": [1]}
    flush(node)
    assert node.topics.offsets_to_delete == {}
    assert delete_topic(node) == 0
    node.topics.create("t", 1, {}, 0)
    assert offsets_of(node) == {}
    flush(node)
    node.log_manager.release()
    assert offsets_of(opened(directory)) == {}


def test_topics_without_offsets_leave_nothing_to_delete(directory: Path) -> None:
    node = opened(directory)
    node.topics.create("other", 1, {}, 0)
    topic = node.topics.get("other")
    assert topic is not None
    node.topics.delete([topic])
    assert node.topics.offsets_to_delete == {}


# Over sockets


def committed_offset(client: RawClient, group: str, topic: str) -> int:
    wanted = OffsetFetchRequest.OffsetFetchRequestGroup(
        group_id=group,
        topics=[OffsetFetchRequest.OffsetFetchRequestTopics(name=topic, partition_indexes=[0])],
    )
    (found,) = client.ask(OffsetFetchRequest(groups=[wanted]), 8).groups
    return int(found.topics[0].partitions[0].committed_offset)


def commit_plainly(client: RawClient, group: str, topic: str) -> None:
    rows = offset_rows(OffsetCommitRequest, topic, committed_offset=5)
    message = OffsetCommitRequest(group_id=group, generation_id_or_member_epoch=-1, topics=rows)
    assert client.ask(message, 8).topics[0].partitions[0].error_code == 0


def begin(client: RawClient, name: str, group: str, topic: str) -> EndTxnRequest:
    """Begin a transaction that commits offset 100 for the group, and return the EndTxn request that commits
    it.
    """
    init = client.ask(InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000), 4)
    message = TxnOffsetCommitRequest(
        transactional_id=name,
        group_id=group,
        producer_id=init.producer_id,
        producer_epoch=init.producer_epoch,
        topics=offset_rows(TxnOffsetCommitRequest, topic, committed_offset=100),
    )
    assert client.ask(message, 5).topics[0].partitions[0].error_code == 0
    return EndTxnRequest(
        transactional_id=name,
        producer_id=init.producer_id,
        producer_epoch=init.producer_epoch,
        committed=True,
    )


@pytest.mark.behaviour("T15", "T6")
@pytest.mark.parametrize("deleted", ["topic", "offset", "group", "group with pending offsets only"])
def test_an_offset_deleted_during_a_transaction_does_not_come_back_with_its_commit(
    deleted: str, tmp_path: Path
) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        if "only" not in deleted:
            commit_plainly(client, "g", "t")
        end = begin(client, "x", "g", "t")
        if deleted == "topic":
            client.ask(DeleteTopicsRequest(topic_names=["t"]), 5)
            client.create_topic("t")
        elif deleted == "offset":
            rows = offset_rows(OffsetDeleteRequest, "t")
            answer = client.ask(OffsetDeleteRequest(group_id="g", topics=rows), 0)
            assert answer.topics[0].partitions[0].error_code == 0
        else:
            assert client.ask(DeleteGroupsRequest(groups_names=["g"]), 2).results[0].error_code == 0
        assert client.ask(end, 5).error_code == 0
        assert committed_offset(client, "g", "t") == -1
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert committed_offset(client, "g", "t") == -1
