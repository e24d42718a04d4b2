"""Two requests are handled in steps, and the second one starts after each possible step of the first.

For each of these starting points, the responses and the state must equal those of running the requests one
after the other, in either order. Memory must equal a replay of the log. Like a client, the test retries a
retriable error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import pytest
from oncelog_simulator.coordinator_state import after_resume, differences, live_state, replayed_state

from oncelog.broker.dispatch import handle
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import ConcurrentTransactions, CoordinatorNotAvailable, KafkaStorageError, NotCoordinator
from oncelog.limits import Limits
from oncelog.log.disk import Disk
from oncelog.log.manager import LogManager
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.entry import TransactionState
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import RequestHeader
from oncelog.wire.message import Message
from oncelog.wire.messages import (
    AddPartitionsToTxnRequest,
    ConsumerGroupHeartbeatRequest,
    CreateTopicsRequest,
    DeleteGroupsRequest,
    DeleteTopicsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
    WriteTxnMarkersRequest,
)
from oncelog.wire.records import NewRecord

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
LIMITS = Limits(
    request_step_elements=2, max_tombstones_per_batch=2, expire_step_entries=1, partitions_per_step=1
)
SETTINGS = BROKER.parse(
    {
        "num.partitions": 1,
        "offsets.topic.num.partitions": 1,
        "transaction.state.log.num.partitions": 1,
        "auto.create.topics.enable": False,
    }
)
COUNT = 4
PARTITIONS = [TopicPartition("t", index) for index in range(COUNT)]
TRY_AGAIN = {NotCoordinator.code, ConcurrentTransactions.code, CoordinatorNotAvailable.code}
"""Errors that every client retries."""


def open_node(disk: Disk, first_uuid: int) -> BrokerState:
    numbers = count(first_uuid)

    def new_uuid() -> bytes:
        return next(numbers).to_bytes(16, "big")

    manager = LogManager.open(disk, node_id=1, new_uuid=new_uuid, now_ms=NOW_MS, limits=LIMITS)
    return BrokerState(manager, SETTINGS, new_uuid=new_uuid, now_ms=NOW_MS)


class Client:
    """A node and its clients: a producer with transactional id `x`, and a consumer of group g."""

    def __init__(self, *, syncs: bool) -> None:
        self.node = node = open_node(MemoryDisk(), 1)
        node.topics.create("t", COUNT, {}, NOW_MS)
        node.topics.create("u", 1, {}, NOW_MS)
        self.topic_id = node.topics.get("t").topic_id  # type: ignore[union-attr]
        offsets = {tp: CommittedOffset(1, -1, "", NOW_MS, -1, -1) for tp in PARTITIONS}
        offsets[TopicPartition("u", 0)] = offsets[PARTITIONS[0]]
        node.groups.offsets.commit("g", offsets, NOW_MS)
        entry = node.transactions.init("x", None, 60_000, NOW_MS).entry
        self.who = who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
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
        pending = {tp: CommittedOffset(7, -1, "", NOW_MS, -1, -1) for tp in PARTITIONS[1:3]}
        node.groups.offsets.commit_pending("g", who, pending, NOW_MS)
        node.log_manager.background.on_added = lambda: None
        self.is_failing: Callable[[], bool] = lambda: False
        for topic in node.topics.all() if syncs else ():
            topic.flush_messages = 1

    @property
    def has_work(self) -> bool:
        return bool(self.node.log_manager.background) or self.node.flush_queue.has_waiters

    def step(self) -> bool:
        """Run one step, or else all requested syncs. Return False if no work is left."""
        background, flush_queue = self.node.log_manager.background, self.node.flush_queue
        if background:
            job = background.step()
            if job is not None:
                job()
            return True
        for partition in (taken := flush_queue.take_due()):
            try:
                if self.is_failing():
                    raise OSError("the disk failed")
                partition.flush()
            except (OSError, KafkaStorageError) as error:
                flush_queue.complete(partition, error)
            else:
                flush_queue.complete(partition, None)
        return bool(taken)

    def finish(self) -> None:
        while self.step():
            pass

    def ask(self, message: Message, version: int) -> Any:
        header = RequestHeader(message.api.key, version, 1, "c", 0)
        return handle(self.node, Request(1, header, message, "/127.0.0.1"), NOW_MS)


def rows(kind: Any, **fields: Any) -> list[Any]:
    return [kind(partition_index=tp.partition, **fields) for tp in PARTITIONS]


def commit_offsets(client: Client) -> Any:
    request = OffsetCommitRequest
    topic = request.OffsetCommitRequestTopic(
        name="t", partitions=rows(request.OffsetCommitRequestPartition, committed_offset=3)
    )
    return client.ask(request(group_id="g", generation_id_or_member_epoch=-1, topics=[topic]), 8)


def commit_offsets_by_id(client: Client) -> Any:
    request = OffsetCommitRequest
    topic = request.OffsetCommitRequestTopic(
        topic_id=client.topic_id, partitions=rows(request.OffsetCommitRequestPartition, committed_offset=4)
    )
    return client.ask(request(group_id="g", generation_id_or_member_epoch=-1, topics=[topic]), 10)


def commit_in_transaction(client: Client) -> Any:
    request, who = TxnOffsetCommitRequest, client.who
    topic = request.TxnOffsetCommitRequestTopic(
        name="t", partitions=rows(request.TxnOffsetCommitRequestPartition, committed_offset=9)
    )
    message = request(
        transactional_id="x",
        group_id="g",
        producer_id=who.producer_id,
        producer_epoch=who.producer_epoch,
        topics=[topic],
    )
    return client.ask(message, 5)


def delete_offsets(client: Client) -> Any:
    request = OffsetDeleteRequest
    topic = request.OffsetDeleteRequestTopic(name="t", partitions=rows(request.OffsetDeleteRequestPartition))
    return client.ask(request(group_id="g", topics=[topic]), 0)


def delete_groups(client: Client) -> Any:
    return client.ask(DeleteGroupsRequest(groups_names=["g"]), 2)


def fetch_offsets(client: Client) -> Any:
    group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=None)
    return client.ask(OffsetFetchRequest(groups=[group]), 9)


def delete_topic(client: Client) -> Any:
    return client.ask(DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name="t")]), 6)


def create_topic(client: Client) -> Any:
    topic = CreateTopicsRequest.CreatableTopic(
        name="t", num_partitions=COUNT, replication_factor=1, assignments=[], configs=[]
    )
    return client.ask(CreateTopicsRequest(topics=[topic], timeout_ms=1000), 7)


def add_partitions(client: Client) -> Any:
    request, who = AddPartitionsToTxnRequest, client.who
    topics = [
        request.AddPartitionsToTxnTopic(name="t", partitions=list(range(COUNT))),
        request.AddPartitionsToTxnTopic(name="u", partitions=[0]),
    ]
    message = request(
        v3_and_below_transactional_id="x",
        v3_and_below_producer_id=who.producer_id,
        v3_and_below_producer_epoch=who.producer_epoch,
        v3_and_below_topics=topics,
    )
    return client.ask(message, 3)


def end(client: Client, *, is_commit: bool, version: int) -> Any:
    message = EndTxnRequest(
        transactional_id="x",
        producer_id=client.who.producer_id,
        producer_epoch=client.who.producer_epoch,
        committed=is_commit,
    )
    return client.ask(message, version)


def commit(client: Client) -> Any:
    return end(client, is_commit=True, version=4)


def commit_and_raise_epoch(client: Client) -> Any:
    return end(client, is_commit=True, version=5)


def abort(client: Client) -> Any:
    return end(client, is_commit=False, version=4)


def fence(client: Client) -> Any:
    message = InitProducerIdRequest(
        transactional_id="x", transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
    )
    return client.ask(message, 5)


def write_markers(client: Client) -> Any:
    request, who = WriteTxnMarkersRequest, client.who
    topic = request.WritableTxnMarkerTopic(name="t", partition_indexes=list(range(COUNT)))
    marker = request.WritableTxnMarker(
        producer_id=who.producer_id,
        producer_epoch=who.producer_epoch,
        coordinator_epoch=0,
        transaction_result=False,
        topics=[topic],
    )
    return client.ask(request(markers=[marker]), 1)


def join_consumer_group(client: Client) -> Any:
    message = ConsumerGroupHeartbeatRequest(
        group_id="g",
        member_id="member",
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    return client.ask(message, 1)


def expire_offsets(client: Client) -> None:
    client.node.groups.expire(NOW_MS + 30 * DAY_MS)


def time_out(client: Client) -> None:
    client.node.transactions.abort_timed_out(NOW_MS + 60_001)


Action = Callable[[Client], Any]
ACTIONS: list[Action] = [
    commit_offsets, commit_offsets_by_id, commit_in_transaction, delete_offsets, delete_groups, fetch_offsets,
    delete_topic, create_topic, add_partitions, commit, commit_and_raise_epoch, abort, fence, write_markers,
    join_consumer_group, expire_offsets, time_out,
]  # fmt: skip


WRITERS: list[Action] = [
    commit_offsets, commit_offsets_by_id, commit_in_transaction, delete_offsets, delete_groups, commit,
    commit_and_raise_epoch, abort, fence, write_markers, join_consumer_group,
]  # fmt: skip
"""Requests whose responses wait for a sync."""


class Asked:
    """An action that was started. Its response is present once it is ready."""

    def __init__(self, client: Client, action: Action) -> None:
        self._answers: list[Any] = []
        answer = action(client)
        if isinstance(answer, PendingResponse):
            answer.add_done_callback(self._answers.append)
        else:
            self._answers.append(answer)

    @property
    def codes(self) -> tuple[int, ...]:
        (answer,) = self._answers
        return tuple(error_codes(answer))

    @property
    def offsets(self) -> dict[TopicPartition, int]:
        """Return the offsets of an OffsetFetch response."""
        (answer,) = self._answers
        return {
            TopicPartition(topic.name, row.partition_index): row.committed_offset
            for group in getattr(answer, "groups", ())
            for topic in group.topics
            for row in topic.partitions
        }


def error_codes(message: Any) -> Iterator[int]:
    """Yield every error code of a response."""
    if isinstance(message, list):
        for element in message:
            yield from error_codes(element)
        return
    for name in getattr(type(message), "__slots__", ()) if message is not None else ():
        value = getattr(message, name, None)
        if name == "error_code":
            yield value  # type: ignore[misc]
        elif isinstance(value, list) or hasattr(type(value), "__slots__"):
            yield from error_codes(value)


class Outcome(NamedTuple):
    """The error codes of both responses, the returned offsets, and the state afterwards."""

    codes: dict[str, set[int]]
    offsets: dict[TopicPartition, int]
    state: dict[str, Any]


def outcome(first: Action, second: Action, cut: int | None, failing_sync: int = 0) -> tuple[Outcome, bool]:
    """Return the outcome of two actions, and True if the first action had ended before the second one began.

    The second action starts after `cut` steps of the first one, or after its end if `cut` is None. With
    `failing_sync` above 0, coordinators' appends wait for a sync, and sync number `failing_sync` fails.
    """
    client = Client(syncs=failing_sync > 0)
    asked = {first: Asked(client, first)}
    steps = 0
    while client.step() if cut is None or steps < cut else False:
        steps += 1
    was_over = not client.has_work
    syncs = count(1)
    client.is_failing = lambda: next(syncs) == failing_sync
    asked[second] = Asked(client, second)
    client.finish()
    for action, request in list(asked.items()):
        if TRY_AGAIN.intersection(request.codes):
            asked[action] = Asked(client, action)
            client.finish()
    client.node.transactions.retry_markers(NOW_MS)
    client.finish()
    live = live_state(client.node)
    assert differences(live, replayed_state(client.node, NOW_MS)) == []
    codes = {action.__name__: set(request.codes) for action, request in asked.items()}
    told = {tp: offset for request in asked.values() for tp, offset in request.offsets.items()}
    return Outcome(codes, told, comparable(client.node, live)), was_over


def comparable(node: BrokerState, state: dict[str, dict[Any, Any]]) -> dict[str, Any]:
    """Return the state without record offsets, because these depend on the order of the requests."""
    topics = {topic.name: len(topic.partitions) for topic in node.topics.all() if not topic.is_internal}
    offsets = {
        kind: {key: value._replace(record_offset=0) for key, value in state[kind].items()}
        for kind in ("committed offsets", "pending offsets")
    }
    open_count = sum(p.open_transaction_count for _, p in node.topics.all_partitions())
    return state | offsets | {"topics": topics, "open transactions": open_count}


@cache
def serial(first: Action, second: Action) -> Outcome:
    return outcome(first, second, None)[0]


def is_one_after_the_other(found: Outcome, orders: list[Outcome], *, by_offset: bool) -> bool:
    """Return True if running the two requests one after the other, in either order, explains the outcome.

    Each error code and returned offset must occur in one of the orders, and the state must equal the state
    after one order. With `by_offset`, each offset of the state may come from a different order.
    """
    for name, codes in found.codes.items():
        if not codes <= orders[0].codes[name] | orders[1].codes[name]:
            return False
    for tp in found.offsets.keys() | orders[0].offsets.keys() | orders[1].offsets.keys():
        if found.offsets.get(tp) not in [order.offsets.get(tp) for order in orders]:
            return False
    if not by_offset:
        return found.state in [order.state for order in orders]
    kinds = "committed offsets", "pending offsets"
    rest = {kind: value for kind, value in found.state.items() if kind not in kinds}
    return any(rest.items() <= order.state.items() for order in orders) and all(
        found.state[kind].get(key) in [order.state[kind].get(key) for order in orders]
        for kind in kinds
        for key in {key for state in (found.state, *(order.state for order in orders)) for key in state[kind]}
    )


def pairs(first: Action) -> Iterator[Action]:
    """Yield the actions to combine with `first`.

    Leave out pairs with two versions of EndTxn, because a producer ends all its transactions with the same
    version. Also leave out expiry together with a deletion of offsets, because expiry then skips the group
    until its next round.
    """
    for second in ACTIONS:
        pair = {first, second}
        is_of_two_versions = commit_and_raise_epoch in pair and not pair.isdisjoint((commit, abort))
        is_for_next_round = pair == {expire_offsets, delete_offsets}
        if second is not first and not is_of_two_versions and not is_for_next_round:
            yield second


@pytest.mark.parametrize("first", ACTIONS, ids=lambda action: action.__name__)
def test_the_outcome_of_two_requests_in_steps_is_that_of_one_after_the_other(first: Action) -> None:
    for second in pairs(first):
        orders = [serial(first, second), serial(second, first)]
        for cut in count():
            found, was_over = outcome(first, second, cut)
            # Offsets expire one by one, so one of them may be as after one order, and the next as after the
            # other.
            by_offset = expire_offsets in (first, second)
            assert is_one_after_the_other(found, orders, by_offset=by_offset), (second.__name__, cut)
            if was_over:
                break


@pytest.mark.parametrize("first", ACTIONS, ids=lambda action: action.__name__)
def test_requests_in_steps_are_answered_and_memory_is_the_log_when_a_sync_fails(first: Action) -> None:
    for second in ACTIONS[ACTIONS.index(first) + 1 :]:
        for failing_sync in (1, 2):
            outcome(first, second, 1, failing_sync)


@pytest.mark.parametrize("action", WRITERS, ids=lambda action: action.__name__)
def test_no_request_is_acknowledged_whose_sync_failed(action: Action) -> None:
    client = Client(syncs=True)
    client.is_failing = lambda: True
    request = Asked(client, action)
    for _ in range(1_000):  # bounded, because the retries never end while all syncs fail
        if not client.step():
            break
    assert request.codes and 0 not in request.codes


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_the_next_start_finishes_what_a_kill_between_two_steps_left(action: Action) -> None:
    for cut in count():
        client = Client(syncs=False)
        Asked(client, action)
        steps = 0
        while steps < cut and client.step():
            steps += 1
        was_over, before = not client.has_work, live_state(client.node)
        client.node.log_manager.release()
        node = open_node(client.node.log_manager.disk, 1000)
        after = live_state(node)
        if action is not delete_topic:  # the start deletes the offsets that the deletion of the topic left
            assert differences(after_resume(before, after), after) == []
        assert differences(after, replayed_state(node, NOW_MS)) == []
        entry = node.transactions.get("x")
        assert entry is not None and not entry.state.is_prepared
        is_open = any(partition.open_transaction_count for _, partition in node.topics.all_partitions())
        assert not is_open or entry.state is TransactionState.ONGOING
        if was_over:
            break
