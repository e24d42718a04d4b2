"""Mutants of the code that handles requests in steps, writes markers, and checks the values of clients."""

from __future__ import annotations

import asyncio
import operator
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from oncelog import errors
from oncelog.broker.coordinators import groups, transactions
from oncelog.broker.coordinators.offsets import Offsets
from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.broker.handlers import list_groups, list_transactions, offset_commit, offset_fetch
from oncelog.broker.stepwise import ResponseSlots, run_work
from oncelog.client import arguments
from oncelog.client.connection import cluster
from oncelog.client.connection.broker_protocol import BrokerProtocol
from oncelog.client.connection.security import tls_failed
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.group.consumer_member import ConsumerMember
from oncelog.client.producer import aio as producer_aio
from oncelog.client.producer.batch import BatchResult
from oncelog.client.producer.driver import no_room_error
from oncelog.errors import (
    GroupIdNotFound,
    MisuseError,
    NonEmptyGroup,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from oncelog.rules.groups.classic import GroupState
from oncelog.rules.security.authorization import ResourceType
from oncelog.server.connection import Connection
from oncelog_simulator.mutants.mutant import ClientMutant, Mutant, false, nothing, true


def _respond_in_one_step(slots: Any, work: Any, **options: Any) -> Any:
    return run_work(work)


class _NeverRaised(Exception):
    """An exception that is never raised. It replaces NotCoordinator in an `except` clause."""


def _delete_as_it_was(self: Any, group_id: str, budget: Any, now_ms: int) -> Any:
    """Delete a group even if it has expired during the deletion."""
    group, consumers = self.get(group_id), self.consumers.get(group_id)
    if not self.has(group_id):
        raise GroupIdNotFound(f"there is no group {group_id!r}")
    if (group and group.state is not GroupState.EMPTY) or (consumers and consumers.members):
        raise NonEmptyGroup(f"group {group_id!r} has members")
    with self.topic.reserved(group_id):
        written = yield from self.delete_offsets(
            group_id, self.offsets.partitions_of(group_id), budget, now_ms
        )
        if group is not None:
            written = self._write_tombstone(group, now_ms)
        if consumers is not None:
            written = self.consumers.write_tombstones(group_id, now_ms)
    return written


def _code_by_name(self: Any, name: str, topic_id: bytes) -> int:
    """Check only the topic's current name, instead of the name that its id had when the request arrived."""
    if not name and topic_id:
        return UnknownTopicId.code
    if not self._request.is_authorized(ResourceType.TOPIC, name):
        return TopicAuthorizationFailed.code
    self._topics[name] = self._state.topics.get(name)
    return UnknownTopicOrPartition.code if self._topics[name] is None else 0


def _limit_of_a_request(self: Any, error: Any, patience_ms: float | None) -> float:
    if isinstance(error, UnknownTopicOrPartition) and patience_ms is not None:
        return patience_ms
    return float(self._settings["request.timeout.ms"])


async def _wait_for(waiting: Any, timeout_s: float) -> Any:
    """Wait like `asyncio.wait_for` of Python 3.11, which loses a cancellation that arrives with the
    result.
    """
    future = asyncio.ensure_future(waiting)
    try:
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
    except asyncio.CancelledError:
        if future.done():
            return future.result()
        future.cancel()
        raise
    if not done:
        future.cancel()
        raise TimeoutError
    return future.result()


async def _wait_for_room(self: Any, driver: Any, size_bytes: int) -> None:
    core = driver.core
    if core.can_append(size_bytes):
        return
    deadline = driver.now_ms() + self.options.max_block_ms
    core.room_waiter_count += 1
    try:
        while not core.can_append(size_bytes):
            driver.wake()
            left_s = (deadline - driver.now_ms()) / 1000
            try:
                await _wait_for(driver.next_completion(), max(left_s, 0))
            except TimeoutError:
                raise no_room_error(self.options) from None
    finally:
        core.room_waiter_count -= 1


async def _await_news(self: Any, deadline_ms: float) -> Any:
    timeout_s = max(deadline_ms - self._cluster.now_ms(), 0) / 1000
    self._news.clear()
    if not self._is_prepared:
        with suppress(TimeoutError):
            await _wait_for(self._news.wait(), timeout_s)
            return await _AWAIT_NEWS(self, self._cluster.now_ms())
        return False
    return await _AWAIT_NEWS(self, deadline_ms)


def _call_all(self: Any, listener: Any) -> None:
    """Call all listeners, including those that other threads registered."""
    self._listeners.append(listener)
    if self.is_done:
        for raised in self._call_listeners():
            raise raised


def _any_number(value: Any, largest: int, what: str) -> int:
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise MisuseError(f"{what} must be an int, not {value!r}")
    return operator.index(value)


def _take_as_incomplete(self: Any, call: Any) -> bool:
    """Count a request that waits for a response slot as an incomplete request, which may time out."""
    is_taken = _TAKE(self, call)
    owner = getattr(call, "__self__", None)
    if not is_taken and isinstance(owner, Connection):
        owner.reader.incomplete_since_ms = owner.active_ms
    return is_taken


@contextmanager
def _named(rows: Any) -> Iterator[None]:
    """Within the `with` block, let a commit look topics up by their names even if the request has ids."""
    has_ids, rows._has_ids = rows._has_ids, False
    try:
        yield
    finally:
        rows._has_ids = has_ids


def _drop_by_name(self: Any) -> bool:
    with _named(self):
        return _DROP_DELETED(self)


def _code_of_a_new_topic(self: Any, name: str, topic_id: bytes) -> int:
    if name and self._state.topics.get(name) is None:
        with _named(self):
            return _TOPIC_CODE(self, name, topic_id)
    return _TOPIC_CODE(self, name, topic_id)


def _group_by_name(node: Any, request: Any, requested: Any, is_stable: bool, budget: Any) -> Any:
    """Fetch offsets by the topic names that the ids had, and return the ids that these names have now."""
    group = yield from _FETCH_GROUP(node, request, requested, is_stable, budget)
    names = {bytes(topic.topic_id): topic.name for topic in requested.topics or () if topic.name}
    for result in group.topics:
        name = names.get(bytes(result.topic_id), "")
        topic = node.topics.get(name)
        if topic is None or result.name:
            continue
        committed = node.groups.offsets.of(requested.group_id)
        result.name, result.topic_id = name, topic.topic_id
        for row in result.partitions:
            row.error_code = 0
            row.committed_offset = getattr(committed.get((name, row.partition_index)), "offset", -1)
    return group


def _settle_the_dead(self: Any, group: Any, now_ms: int) -> None:
    """Publish a group's changes even if the group was deleted."""
    if group.is_unused:
        if self._groups.get(group.group_id) is group:
            del self._groups[group.group_id]
        return
    if group.is_unsaved:
        self._save(group, now_ms)
    self._schedule(group, now_ms)


def _forget_newer(self: Any, before: Any, now_ms: int) -> Any:
    """Forget the record offsets of all deleted topic names, even if a topic was created again meanwhile."""
    left = yield from _DELETE_TOPICS(self, before, now_ms)
    for topic in before.keys() - left:
        self._indexes.pop(topic, None)
    return left


def _text_of_any_tls_error(self: Any, exc: Any) -> Any:
    return tls_failed(self.core.peer, exc) if isinstance(exc, ssl.SSLError) else _LOST_TEXT(self, exc)


_TAKE, _LOST_TEXT = ResponseSlots.try_acquire, BrokerProtocol._lost_error
_DROP_DELETED, _TOPIC_CODE = offset_commit.CommitRows._drop_deleted, offset_commit.CommitRows._topic_code
_FETCH_GROUP = offset_fetch._group
_DELETE_TOPICS = Offsets.delete_topics
_AWAIT_NEWS = ConsumerMember._await_news
_CANCELLED = "client/test_client_cancelled_in_time.py"
_STEPS = "broker/test_broker_steps.py"
MUTANTS: list[Mutant | ClientMutant] = [
    Mutant(
        "a marker that failed is written again everywhere",
        ((transactions, "is_pending_flush", true),),
        findings=("R253",),
        guards=(
            "broker/test_broker_transactions.py::test_only_a_marker_whose_fate_is_unknown_is_written_again",
        ),
    ),
    ClientMutant(
        "a restored backup fences nobody",
        "backup",
        (),
        ((TransactionCoordinator, "fence_all", nothing),),
        findings=("R260",),
        guards=(
            "operations/test_operations_backup.py::"
            "test_a_producer_from_after_a_backup_is_not_taken_for_a_new_one",
        ),
    ),
    Mutant(
        "a first send waits for a broker for request.timeout.ms",
        ((cluster.ClusterConnection, "_limit_ms", _limit_of_a_request),),
        "takeover",
        findings=("R261",),
        guards=(
            "client/test_client_producer_unreachable.py::"
            "test_send_waits_for_a_broker_for_max_block_ms_and_not_for_request_timeout_ms",
        ),
    ),
    ClientMutant(
        "a cancellation that comes with the result is lost",
        "asyncio",
        ("producer", "consumer"),
        (
            (producer_aio.AsyncProducer, "_wait_for_room", _wait_for_room),
            (ConsumerMember, "_await_news", _await_news),
        ),
        findings=("R270",),
        guards=(
            f"{_CANCELLED}::test_a_send_that_is_cancelled_as_room_comes_takes_no_record",
            f"{_CANCELLED}::test_a_poll_that_is_cancelled_as_a_notification_comes_ends",
        ),
    ),
    ClientMutant(
        "a late listener calls those of other threads",
        "blocking",
        ("producer",),
        ((BatchResult, "add_listener", _call_all),),
        findings=("R271",),
        guards=(
            "client/test_client_callbacks_end.py::"
            "test_listening_to_a_settled_outcome_calls_no_other_listener",
        ),
    ),
    Mutant(
        "any number is accepted as an offset",
        ((arguments, "_checked_int", _any_number),),
        findings=("R272",),
        guards=("client/test_client_arguments.py::test_an_invalid_offset_is_refused_before_it_is_sent",),
    ),
    ClientMutant(
        "an error of an abandoned position is raised",
        "unsynced",
        (),
        ((ConsumerCore, "_is_stale", false),),
        findings=("R341",),
        guards=("client/test_client_consumer_core.py::test_an_error_is_forgotten_once_its_position_is_left",),
    ),
    Mutant(
        "groups and transactions are listed in one step",
        (
            (list_groups, "respond_in_steps", _respond_in_one_step),
            (list_transactions, "respond_in_steps", _respond_in_one_step),
        ),
        "deletions",
        findings=("R284",),
        guards=(f"{_STEPS}::test_lists_of_many_groups_and_transactional_ids_let_others_have_their_turn",),
    ),
    Mutant(
        "offsets expire after the end of time",
        ((offset_commit, "INT64_MAX", 1 << 70),),
        "hostile",
        findings=("R285",),
        guards=(
            "broker/test_broker_expiry.py::test_offsets_with_the_longest_retention_are_kept_over_restarts",
        ),
    ),
    Mutant(
        "a group that is being deleted ends a list of groups",
        ((list_groups, "NotCoordinator", _NeverRaised),),
        "deletions",
        findings=("R286",),
        guards=(f"{_STEPS}::test_lists_of_many_groups_and_transactional_ids_let_others_have_their_turn",),
    ),
    Mutant(
        "a group that ended while it was deleted is deleted twice",
        ((groups.GroupCoordinator, "delete", _delete_as_it_was),),
        "deletions",
        findings=("R322",),
        guards=(f"{_STEPS}::test_a_group_that_expires_while_it_is_deleted_in_steps_is_deleted",),
    ),
    Mutant(
        "a topic's id is looked up once for all steps of a commit",
        ((offset_commit.CommitRows, "_topic_code", _code_by_name),),
        "deletions",
        findings=("R323",),
        guards=(f"{_STEPS}::test_offsets_named_by_the_id_of_a_deleted_topic_are_not_those_of_a_new_one",),
    ),
    Mutant(
        "texts of errors quote long names whole",
        ((errors, "MAX_MESSAGE_CHARACTERS", 1 << 16),),
        "hostile",
        findings=("R1555",),
        guards=("broker/test_broker_group_state.py::test_the_text_about_an_unknown_group_fits_its_response",),
    ),
    Mutant(
        "a large request that waits for its place counts as incomplete",
        ((ResponseSlots, "try_acquire", _take_as_incomplete),),
        "hostile",
        findings=("R370",),
        guards=(
            "broker/test_broker_connections.py::test_large_requests_wait_as_bytes_while_many_are_under_way",
        ),
    ),
    Mutant(
        "a commit by id names a topic that is deleted meanwhile",
        (
            (offset_commit.CommitRows, "_drop_deleted", _drop_by_name),
            (offset_commit.CommitRows, "_topic_code", _code_of_a_new_topic),
        ),
        "deletions",
        findings=("R377",),
        guards=(
            "broker/test_broker_interleavings.py::"
            "test_the_outcome_of_two_requests_in_steps_is_that_of_one_after_the_other",
        ),
    ),
    Mutant(
        "offsets fetched by id are answered with the id of a new topic",
        ((offset_fetch, "_group", _group_by_name),),
        "deletions",
        findings=("R378",),
        guards=(f"{_STEPS}::test_offsets_fetched_by_the_id_of_a_deleted_topic_are_not_those_of_a_new_one",),
    ),
    Mutant(
        "a deleted group is stored again when an earlier sync ends",
        ((groups.GroupCoordinator, "publish_changes", _settle_the_dead),),
        "deletions",
        findings=("R380",),
        guards=(
            "broker/test_broker_coordinator_kills.py::"
            "test_a_group_that_is_deleted_while_an_earlier_state_waits_for_its_sync_stays_deleted",
        ),
    ),
    Mutant(
        "an old deletion forgets where a new topic's offsets stand",
        ((Offsets, "delete_topics", _forget_newer),),
        "deletions",
        findings=("R420",),
        guards=(
            "broker/test_broker_coordinator_state.py::test_offsets_of_a_recreated_topic_are_deleted_with_it",
        ),
    ),
    ClientMutant(
        "a broken TLS connection counts as having sent nothing",
        "asyncio",
        (),
        ((BrokerProtocol, "_lost_error", _text_of_any_tls_error),),
        findings=("R445",),
        guards=("security/test_security_tls.py::test_a_damaged_tls_record_leaves_the_outcome_unknown",),
    ),
]
"""The mutants in the order of the findings that they reintroduce."""
NOT_CAUGHT: dict[str, str] = {
    "a marker that failed is written again everywhere": "a second marker violates nothing",
    "a cancellation that comes with the result is lost": (
        "needs a cancellation in the turn of the loop in which a result comes: no seed of the first 296"
    ),
    "any number is accepted as an offset": "the applications commit offsets of records only",
    "groups and transactions are listed in one step": "no workload has as many groups as take long",
    "offsets expire after the end of time": (
        "a drawn field is near 2^63 too rarely: none of the first 102 seeds of hostile clients"
    ),
    "a group that is being deleted ends a list of groups": "nobody lists groups",
    "a group that ended while it was deleted is deleted twice": (
        "needs a member id that nobody uses, and a deletion in steps as it expires: no seed of the first 48"
    ),
    "a topic's id is looked up once for all steps of a commit": "our clients name topics by name",
    "a large request that waits for its place counts as incomplete": (
        "needs eight large requests under way for a minute: none of the first 20 seeds of hostile clients"
    ),
    "a commit by id names a topic that is deleted meanwhile": "our clients name topics by name",
    "offsets fetched by id are answered with the id of a new topic": "our clients name topics by name",
    "a deleted group is stored again when an earlier sync ends": (
        "needs a full disk between two states of a group, and its deletion before the first one is synced:"
        " no seed of the first 20"
    ),
    "a broken TLS connection counts as having sent nothing": "TLS is not played",
    "an old deletion forgets where a new topic's offsets stand": (
        "seed 69 noticed it before the product changed: not searched since"
    ),
    "a late listener calls those of other threads": (
        "seed 1324 noticed it before the product changed: not searched since"
    ),
}
"""Mutants that no seed catches, with the reason."""
