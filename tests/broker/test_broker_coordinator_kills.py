"""Kill the broker at each append of a request to a coordinator: the next start finds all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from support.fuzz.targets import NOW_MS, open_node

from oncelog.broker.dispatch import handle
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.log.partition import Partition
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import RequestHeader
from oncelog.wire.message import Message
from oncelog.wire.messages import (
    DeleteGroupsRequest,
    EndTxnRequest,
    HeartbeatRequest,
    InitProducerIdRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    OffsetDeleteRequest,
    SyncGroupRequest,
)
from oncelog.wire.records import NewRecord

PARTITIONS = [TopicPartition("t", index) for index in range(3)]
_APPEND = Partition.append


def offset(value: int) -> CommittedOffset:
    return CommittedOffset(value, -1, "", NOW_MS, -1, -1)


class Kill(BaseException):
    """Raised in place of an append, to end the broker's process there."""


def begun(node: BrokerState) -> ProducerIdAndEpoch:
    """Begin a transaction with records in three partitions and offsets of group g, and return its
    producer.
    """
    node.topics.create("t", len(PARTITIONS), {}, NOW_MS)
    node.groups.offsets.commit("g", {tp: offset(1) for tp in PARTITIONS}, NOW_MS)
    entry = node.transactions.init("x", None, 60_000, NOW_MS).entry
    who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    kept_in = node.groups.offsets_partition("g", NOW_MS)
    node.transactions.add_partitions("x", who, [*PARTITIONS, kept_in], NOW_MS)
    for tp in PARTITIONS:
        batch = build_batch(
            [NewRecord(NOW_MS, None, b"value")],
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            base_sequence=0,
            is_transactional=True,
        )
        node.topics.partition(tp)[1].append(memoryview(batch), origin=Origin.CLIENT, now_ms=NOW_MS)
    node.groups.offsets.commit_pending("g", who, {tp: offset(7) for tp in PARTITIONS[:2]}, NOW_MS)
    return who


def ask(node: BrokerState, message: Message, version: int) -> Any:
    header = RequestHeader(message.api.key, version, 1, "c", 0)
    return handle(node, Request(1, header, message, "/127.0.0.1"), NOW_MS)


def end(is_commit: bool, version: int) -> Callable[[BrokerState, ProducerIdAndEpoch], None]:
    def run(node: BrokerState, who: ProducerIdAndEpoch) -> None:
        message = EndTxnRequest(
            transactional_id="x",
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            committed=is_commit,
        )
        assert ask(node, message, version).error_code == 0

    return run


def fence(node: BrokerState, who: ProducerIdAndEpoch) -> None:
    message = InitProducerIdRequest(
        transactional_id="x", transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )
    assert ask(node, message, 5).error_code == 51


def delete_group(node: BrokerState, who: ProducerIdAndEpoch) -> None:
    assert ask(node, DeleteGroupsRequest(groups_names=["g"]), 2).results[0].error_code == 0


def delete_offset(node: BrokerState, who: ProducerIdAndEpoch) -> None:
    row = OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=0)
    topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(name="t", partitions=[row])
    message = OffsetDeleteRequest(group_id="g", topics=[topic])
    assert ask(node, message, 0).error_code == 0


def join_and_sync(node: BrokerState, who: ProducerIdAndEpoch) -> None:
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")
    request = JoinGroupRequest(
        group_id="j",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=60_000,
        member_id="",
        protocol_type="consumer",
        protocols=[protocol],
    )
    answers: list[Any] = []
    ask(node, request, 3).add_done_callback(answers.append)
    node.groups.tick(NOW_MS + 3_000)
    (joined,) = answers
    share = SyncGroupRequest.SyncGroupRequestAssignment(member_id=joined.member_id, assignment=b"share")
    sync = SyncGroupRequest(
        group_id="j", generation_id=joined.generation_id, member_id=joined.member_id, assignments=[share]
    )
    synced: list[Any] = []
    ask(node, sync, 3).add_done_callback(synced.append)
    assert synced[0].error_code == 0


def state_after_start(disk: MemoryDisk) -> dict[str, Any]:
    """Start a broker on the disk, and return its state, without the ids and offsets that differ from run to
    run.
    """
    node = open_node(disk)
    groups, offsets = node.groups, node.groups.offsets
    state = {
        "classic": [
            (group_id, group.state, group.generation_id, len(group.members))
            for group_id in sorted(groups.group_ids())
            if (group := groups.get(group_id)) is not None
        ],
        "committed": {tp: committed.offset for tp, committed in offsets.of("g").items()},
        "pending": set(offsets.pending_of("g")),
        "transactions": [
            (entry.transactional_id, entry.state, entry.producer_epoch) for entry in node.transactions.all()
        ],
    }
    node.log_manager.release()
    return state


def state_after_kill(
    run: Callable[[BrokerState, ProducerIdAndEpoch], None],
    append_count: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[dict[str, Any], bool]:
    """Run a request. Kill the broker before append number `append_count`, unless that is None.

    Return the state after the next start, and True if the broker responded before the kill.
    """
    disk, appended = MemoryDisk(), 0
    node = open_node(disk)
    who = begun(node)

    def append(self: Partition, *args: Any, **how: Any) -> Any:
        nonlocal appended
        if appended == append_count:
            raise Kill
        appended += 1
        return _APPEND(self, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Partition, "append", append)
        try:
            run(node, who)
        except Kill:
            is_answered = False
        else:
            is_answered = True
    node.log_manager.release()
    return state_after_start(disk), is_answered


@pytest.mark.parametrize(
    "run",
    [end(True, 4), end(False, 4), end(True, 5), fence, delete_group, delete_offset, join_and_sync],
    ids=["commit", "abort", "commit 5", "fence", "delete group", "delete offset", "join and sync"],
)
def test_a_kill_at_any_append_leaves_a_request_undone_or_done(
    run: Callable[[BrokerState, ProducerIdAndEpoch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = state_after_kill(lambda node, who: None, None, monkeypatch)
    after, _ = state_after_kill(run, None, monkeypatch)
    assert before != after
    is_answered, append_count = False, 0
    while not is_answered:
        state, is_answered = state_after_kill(run, append_count, monkeypatch)
        # The first append stores the decision. After it, a start completes the request. Without it, nothing
        # has changed.
        assert state == (after if append_count else before)
        append_count += 1
    assert append_count > 1


def flush(node: BrokerState) -> None:
    while node.flush_queue.has_waiters:
        for partition in node.flush_queue.take_due():
            partition.flush()
            node.flush_queue.complete(partition, None)


@pytest.mark.parametrize("is_full", [False, True], ids=["power loss", "full disk"])
def test_a_static_member_gets_its_new_id_only_after_it_is_stored(is_full: bool) -> None:
    """A member that got an id which was not stored would get FENCED_INSTANCE_ID, a fatal error, after a
    restart.
    """
    disk = MemoryDisk()
    node = open_node(disk)
    node.groups.topic.ensure(NOW_MS).flush_messages = 1
    joining = JoinGroupRequest(
        group_id="j",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=60_000,
        group_instance_id="i",
        protocol_type="consumer",
        protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    first: list[Any] = []
    ask(node, joining, 5).add_done_callback(first.append)
    node.groups.tick(NOW_MS + 3_000)
    (joined,) = first
    share = SyncGroupRequest.SyncGroupRequestAssignment(member_id=joined.member_id, assignment=b"share")
    sync = SyncGroupRequest(
        group_id="j",
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        group_instance_id="i",
        assignments=[share],
    )
    synced: list[Any] = []
    ask(node, sync, 3).add_done_callback(synced.append)
    flush(node)
    assert [answer.error_code for answer in synced] == [0]
    if is_full:
        disk.capacity_bytes = disk.used_bytes()
    again: list[Any] = []
    ask(node, joining, 5).add_done_callback(again.append)
    if is_full:
        assert [answer.error_code for answer in again] == [16]
        return
    assert not again
    flush(node)
    (rejoined,) = again
    assert rejoined.error_code == 0 and rejoined.member_id != joined.member_id
    node = open_node(disk.after_power_loss(Random(1)))
    beat = HeartbeatRequest(
        group_id="j",
        generation_id=rejoined.generation_id,
        member_id=rejoined.member_id,
        group_instance_id="i",
    )
    assert ask(node, beat, 3).error_code == 0


def test_a_group_that_is_deleted_while_an_earlier_state_waits_for_its_sync_stays_deleted() -> None:
    disk = MemoryDisk()
    node = open_node(disk)
    node.groups.topic.ensure(NOW_MS).flush_messages = 1

    def join_and_leave() -> None:
        protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")
        request = JoinGroupRequest(
            group_id="j",
            session_timeout_ms=10_000,
            rebalance_timeout_ms=60_000,
            member_id="",
            protocol_type="consumer",
            protocols=[protocol],
        )
        answers: list[Any] = []
        ask(node, request, 3).add_done_callback(answers.append)
        node.groups.tick(NOW_MS + 3_000)
        assert ask(node, LeaveGroupRequest(group_id="j", member_id=answers[0].member_id), 1).error_code == 0

    join_and_leave()  # the leave is stored, but not synced yet
    disk.capacity_bytes = disk.used_bytes()
    join_and_leave()  # the disk is full, so this leave is not stored and the broker must try again later
    disk.capacity_bytes = None
    assert isinstance(ask(node, DeleteGroupsRequest(groups_names=["j"]), 2), PendingResponse)
    flush(node)
    node.log_manager.release()
    assert not open_node(disk).groups.has("j")
