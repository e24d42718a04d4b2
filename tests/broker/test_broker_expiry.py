"""Many groups, transactional ids and transactions expire in steps.

Between the steps, clients use some of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.groups.node import GroupNode, commit, create

from oncelog.broker.coordinators import transactions
from oncelog.errors import TopicAlreadyExists
from oncelog.limits import DEFAULT_LIMITS
from oncelog.wire.messages import (
    AddPartitionsToTxnRequest,
    DeleteTopicsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)

COUNT, STEP = 9, 2
DAY_MS = 86_400_000


class SteppedNode(GroupNode):
    """A node whose background tasks run only when the test runs them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.limits = replace(DEFAULT_LIMITS, expire_step_entries=STEP, max_tombstones_per_batch=STEP)
        self.restart()
        self.ask(create("t"), 5)
        self.node.log_manager.background.on_added = lambda: None

    def step(self) -> bool:
        """Do one step; return False when there is nothing left to do."""
        background = self.node.log_manager.background
        if len(background) and (job := background.step()) is not None:
            job()
        return bool(len(background))

    def init(self, transactional_id: str) -> Any:
        asked = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=1_000)
        (answer,) = self.ask(asked, 5)
        assert answer.error_code == 0
        return answer

    def begin(self, transactional_id: str) -> Any:
        """Open a transaction; return its producer."""
        who = self.init(transactional_id)
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name="t", partitions=[0])
        asked = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=who.producer_id,
            v3_and_below_producer_epoch=who.producer_epoch,
            v3_and_below_topics=[topic],
        )
        (answer,) = self.ask(asked, 3)
        assert answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code == 0
        return who


@pytest.fixture
def node() -> SteppedNode:
    return SteppedNode()


def rounds_of(node: SteppedNode, size: Any) -> list[int]:
    """Run the current round to its end, and return how many items each step removed."""
    took = []
    goes_on = True
    while goes_on:
        before = size()
        goes_on = node.step()
        took.append(before - size())
    return took


def test_groups_expire_a_few_in_a_step_and_those_in_use_stay(node: SteppedNode) -> None:
    groups = node.node.groups
    for index in range(COUNT):
        node.ask(commit(f"g{index}", 5, generation_id_or_member_epoch=-1), 7)
    node.now_ms += 8 * DAY_MS
    groups.expire(node.now_ms)
    assert len(list(groups.group_ids())) == COUNT
    node.step()
    (used, *_) = groups.group_ids()
    node.ask(commit(used, 6, generation_id_or_member_epoch=-1), 7)
    groups.expire(node.now_ms)  # a second round must not repeat the work of the one that is still running
    took = rounds_of(node, lambda: len(list(groups.group_ids())))
    assert max(took) <= STEP
    assert sum(took) == COUNT - STEP - 1
    assert list(groups.group_ids()) == [used]
    groups.expire(node.now_ms + 8 * DAY_MS)
    rounds_of(node, lambda: 0)
    assert not list(groups.group_ids())


def test_groups_expire_in_the_order_in_which_they_were_created(node: SteppedNode) -> None:
    """Regression: groups expired in the order of a set, so two runs of one simulator seed could differ."""
    names = [f"{group}-{index}" for index in range(COUNT) for group in ("b", "a")]
    for name in names:
        node.ask(commit(name, 5, generation_id_or_member_epoch=-1), 7)
    assert list(node.node.groups.group_ids()) == names


def test_transactional_ids_expire_a_few_in_a_step_and_those_in_use_stay(node: SteppedNode) -> None:
    transactions = node.node.transactions
    for index in range(COUNT):
        node.init(f"x{index}")
    node.now_ms += 8 * DAY_MS
    transactions.expire(node.now_ms)
    assert len(list(transactions.all())) == COUNT
    node.step()
    used = max(entry.transactional_id for entry in transactions.all())
    node.init(used)
    took = rounds_of(node, lambda: len(list(transactions.all())))
    assert max(took) <= STEP
    assert [entry.transactional_id for entry in transactions.all()] == [used]


def test_transactions_time_out_a_few_in_a_step_and_none_that_was_ended_meanwhile(node: SteppedNode) -> None:
    transactions = node.node.transactions
    who = {name: node.begin(name) for name in (f"x{index}" for index in range(COUNT))}

    def open_ids() -> set[str]:
        return {entry.transactional_id for entry in transactions.all() if entry.state.label == "Ongoing"}

    node.now_ms += 2_000
    transactions.abort_timed_out(node.now_ms)
    assert len(open_ids()) == COUNT
    node.step()
    ended = max(open_ids())
    (answer,) = node.ask(
        EndTxnRequest(
            transactional_id=ended,
            producer_id=who[ended].producer_id,
            producer_epoch=who[ended].producer_epoch,
            committed=True,
        ),
        4,
    )
    assert answer.error_code == 0
    took = rounds_of(node, lambda: len(open_ids()))
    assert max(took) <= STEP
    assert not open_ids()
    labels = {entry.transactional_id: entry.state.label for entry in transactions.all()}
    assert labels.pop(ended) == "CompleteCommit"
    assert set(labels.values()) == {"CompleteAbort"}


@pytest.mark.parametrize("check", ["is_timed_out", "is_expired"])
def test_idle_transactional_ids_are_looked_at_a_few_in_a_step(
    node: SteppedNode, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1452: with 300,000 ids, each search for expired ones blocked all clients for 0.2 s."""
    coordinator = node.node.transactions
    for index in range(COUNT):
        node.init(f"x{index}")
    looked, original = 0, getattr(transactions, check)

    def counted(*arguments: Any) -> bool:
        nonlocal looked
        looked += 1
        return bool(original(*arguments))

    monkeypatch.setattr(transactions, check, counted)
    (coordinator.abort_timed_out if check == "is_timed_out" else coordinator.expire)(node.now_ms)
    assert looked == 0
    took = rounds_of(node, lambda: -looked)
    assert max(took) == STEP and sum(took) == COUNT


def test_a_broker_that_is_closed_does_not_finish_the_round_first(node: SteppedNode) -> None:
    transactions, groups = node.node.transactions, node.node.groups
    for index in range(COUNT):
        node.init(f"x{index}")
        node.ask(commit(f"g{index}", 5, generation_id_or_member_epoch=-1), 7)
    node.now_ms += 8 * DAY_MS
    transactions.expire(node.now_ms)
    groups.expire(node.now_ms)
    node.step()
    node.step()
    left = len(list(transactions.all())), len(list(groups.group_ids()))
    assert left == (COUNT - STEP, COUNT - STEP)
    node.restart()
    assert (len(list(node.node.transactions.all())), len(list(node.node.groups.group_ids()))) == left


@pytest.mark.parametrize(("groups", "partitions"), [(COUNT, 1), (1, COUNT)])
def test_a_deleted_topics_offsets_go_a_few_in_a_step_and_its_name_is_free_after_that(
    node: SteppedNode, groups: int, partitions: int
) -> None:
    def held() -> int:
        offsets = node.node.groups.offsets
        return sum(len(offsets.of(group)) for group in offsets.groups())

    def make() -> int:
        made = node.ask(create("many", COUNT), 5)
        while not made:
            node.step()
        return int(made[0].topics[0].error_code)

    assert make() == 0
    for group in range(groups):
        for partition in range(partitions):
            asked = commit(f"g{group}", 5, "many", generation_id_or_member_epoch=-1)
            asked.topics[0].partitions[0].partition_index = partition
            node.ask(asked, 7)
    deleted = node.ask(DeleteTopicsRequest(topic_names=["many"]), 5)
    assert not deleted
    assert 0 < COUNT - held() <= STEP
    # The name stays taken until all offsets are removed, because readers of a new topic would start at
    # remaining offsets.
    assert make() == TopicAlreadyExists.code
    took = rounds_of(node, held)
    assert max(took) <= STEP
    assert held() == 0
    assert deleted[0].responses[0].error_code == 0
    assert make() == 0


def test_offsets_with_the_longest_retention_are_kept_over_restarts(node: SteppedNode) -> None:
    kept = commit("g", 5, generation_id_or_member_epoch=-1, retention_time_ms=2**63 - 1)
    (answer,) = node.ask(kept, 4)
    assert answer.topics[0].partitions[0].error_code == 0
    for _ in range(2):
        node.now_ms += 400 * DAY_MS
        node.node.groups.expire(node.now_ms)
        rounds_of(node, lambda: 0)
        assert [each.offset for each in node.node.groups.offsets.of("g").values()] == [5]
        node.restart()
