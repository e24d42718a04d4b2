"""Compare the state of the coordinators and of the node's small files in memory, on disk, and after a
restart.

A coordinator is a state machine over its log. So its state in memory must equal the state after a replay of
its log, at any moment between two requests. The state after a kill and a start must be the same. A replay
creates a second set of coordinators on the same node, which only read.

Three differences are correct, and no others:

- The last epoch of a transactional id is never stored, because Kafka's record has no field for it. A record
  of version 0 stores nothing of KIP-890.
- A classic group is stored when a generation is assigned or when the group becomes empty. During a rebalance
  the stored record belongs to an earlier generation.
- Offsets of a deleted topic may remain in the log if the disk refused their tombstones. They lie below the
  offsets in `oncelog-topics.json`, and the next start deletes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oncelog.broker.coordinators.groups import GroupCoordinator
from oncelog.broker.coordinators.internal_topic import InternalTopic
from oncelog.broker.coordinators.internal_topic_config import CONSUMER_OFFSETS
from oncelog.broker.coordinators.offsets import Offsets
from oncelog.broker.coordinators.producer_ids import stored_next_id
from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.broker.state import BrokerState
from oncelog.rules.groups.classic import ClassicGroup, GroupState
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.groups.consumer import ConsumerGroup
from oncelog.rules.transactions.entry import TransactionEntry, TransactionState
from oncelog.types import TopicPartition

State = dict[str, dict[Any, Any]]
"""State by kind and key. Parts of a group or transaction that have their own records have their own keys."""


class Metadata(NamedTuple):
    """The contents of the broker's small files, and topics whose partitions are not all created yet.

    `next_producer_id` is above all ids that were handed out; 0 if none was. `first_producer_id` is the id
    that this process hands out next.
    """

    topics: dict[str, tuple[bytes, int, dict[str, str]]]
    names_being_created: frozenset[str]
    settings: dict[str, Any]
    next_producer_id: int
    first_producer_id: int


def live_state(node: BrokerState) -> State:
    """Return the coordinators' state in memory."""
    return _state(node, node.transactions, node.groups)


def replayed_state(node: BrokerState, now_ms: int) -> State:
    """Return the state after a replay of the coordinators' logs."""
    transactions, groups = node.new_transaction_coordinator(), node.new_group_coordinator()
    transactions.load()
    groups.load(now_ms)
    return _state(node, transactions, groups)


def differences(live: State, stored: State) -> list[tuple[str, str]]:
    """Return the differences between the state in memory and the stored state, as pairs (kind, text).

    For a rebalancing group, only a stored generation above the one in memory is a difference.
    """
    differences = []
    rebalancing = live["rebalancing groups"]
    for kind in live.keys() - {"rebalancing groups"}:
        one, other = live[kind], stored[kind]
        for key in sorted(one.keys() | other.keys(), key=repr):
            if kind == "classic groups" and key in rebalancing:
                if key in other and other[key][0] > rebalancing[key]:
                    text = f"{key!r} is at generation {rebalancing[key]}, stored is {other[key]}"
                    differences.append((kind, text))
            elif not _is_same(one.get(key), other.get(key)):
                differences.append((kind, f"{key!r}: {one.get(key)} in memory, {other.get(key)} stored"))
    return sorted(differences)


def _is_same(one: object, other: object) -> bool:
    """Return True for equal values, and for open transactions that differ in their start time only.

    A start of the broker bounds the start time of an open transaction by its clock, in memory only (R1031).
    """
    both_are_entries = isinstance(one, TransactionEntry) and isinstance(other, TransactionEntry)
    if both_are_entries and one.state is TransactionState.ONGOING:  # type: ignore[attr-defined]
        one = one._replace(start_ms=other.start_ms)  # type: ignore[attr-defined]
    return one == other


def metadata(node: BrokerState) -> Metadata:
    """Return the content that the node's small files must have."""
    topics = node.topics
    authorizer = node.authorizer
    return Metadata(
        {
            topic.name: (topic.topic_id, len(topic.partitions), dict(topic.overrides))
            for topic in topics.all()
        },
        topics.names_being_created(),
        {
            "brokers' settings": dict(node.dynamic._brokers),
            "groups' settings": dict(node.dynamic._groups),
            "quotas": dict(node.quotas.values),
            # Ignore the secret if there are no users: each start then creates a new one.
            "users": (node.users.secret if node.users.names() else b"", dict(node.users._credentials)),
            "ACLs": None if authorizer is None else sorted(map(repr, authorizer.acls)),
        },
        _next_producer_id(node),
        node.producer_ids._next,
    )


def _next_producer_id(node: BrokerState) -> int:
    """Return the id after the last producer id that was handed out; 0 if this process handed out none."""
    next_id = node.producer_ids._next
    return next_id if next_id <= stored_next_id(node.log_manager.disk) else 0


def metadata_differences(before: Metadata, after: Metadata, *, writes_failed: bool) -> list[tuple[str, str]]:
    """Return the differences of the small files before and after a restart, as pairs of a kind and a text.

    If `writes_failed` is True, the disk has refused writes. Then `oncelog-topics.json` may have a topic whose
    creation failed.
    """
    changes = []
    for name in sorted(before.topics.keys() | after.topics.keys()):
        one, other = before.topics.get(name), after.topics.get(name)
        is_new = one is None and (name in before.names_being_created or writes_failed)
        may_grow = writes_failed or name in before.names_being_created
        has_grown = may_grow and one and other and one[0] == other[0] and one[1] < other[1]
        if one != other and not is_new and not has_grown:
            changes.append(("topics", f"{name}: {one} before, {other} now"))
    for kind, value in before.settings.items():
        if value != after.settings[kind]:
            changes.append((kind, f"{value} before, {after.settings[kind]} now"))
    if after.first_producer_id < before.next_producer_id:
        changes.append(("producer ids", f"{before.next_producer_id} before, {after.first_producer_id} now"))
    return changes


def _state(node: BrokerState, transactions: TransactionCoordinator, groups: GroupCoordinator) -> State:
    keeps_all = node.settings["oncelog.transaction.version"] > 0
    entries = {}
    for entry in transactions.all():
        stored = entry._replace(last_producer_epoch=-1)
        if not keeps_all:
            stored = stored._replace(previous_producer_id=-1, next_producer_id=-1, client_version=0)
        entries[entry.transactional_id] = stored
    classic = groups._groups
    at_rest = {name: group for name, group in classic.items() if _is_at_rest(group)}
    return {
        "transactions": entries,
        "classic groups": {name: _classic(group) for name, group in at_rest.items()},
        "rebalancing groups": {
            name: group.generation_id for name, group in classic.items() if name not in at_rest
        },
        "consumer groups": _consumer_groups(groups.consumers._groups),
        **_offsets(node, groups.offsets),
        "damaged partitions": {**_damaged(transactions.topic), **_damaged(groups.topic)},
    }


def _is_at_rest(group: ClassicGroup) -> bool:
    """Return True if the group's state in memory must equal its stored record.

    A group without a generation is never stored.
    """
    is_quiet = group.state in (GroupState.STABLE, GroupState.EMPTY) and not group.is_unsaved
    return is_quiet and group.generation_id > 0


def _classic(group: ClassicGroup) -> tuple[Any, ...]:
    members = {
        member.member_id: (
            member.group_instance_id,
            member.client_id,
            member.client_host,
            member.session_timeout_ms,
            member.rebalance_timeout_ms,
            member.metadata(group.protocol_name),
            member.assignment,
        )
        for member in group.members.values()
    }
    leader = group.members.leader_id if members else None
    since_ms = None if members else group.state_since_ms
    protocol = group.protocol_type or None, group.protocol_name
    return group.generation_id, protocol, leader, since_ms, members


def _consumer_groups(groups: Mapping[str, ConsumerGroup]) -> dict[Any, Any]:
    """Return groups by id, and their members and targets by group and member id."""
    parts: dict[Any, Any] = {}
    for name, group in groups.items():
        parts[name] = group.epoch, group.assignment_epoch
        parts.update({(name, "member", key): member for key, member in group.members.items()})
        parts.update({(name, "target", key): target for key, target in group.targets.items()})
    return parts


def _offsets(node: BrokerState, offsets: Offsets) -> State:
    committed, pending = offsets.snapshot()
    partition_of = node.groups.topic.partition_of

    def kept(group: str, held: Mapping[TopicPartition, CommittedOffset]) -> dict[Any, Any]:
        return {
            (group, tp): committed
            for tp, committed in held.items()
            if not _is_to_be_deleted(node, tp.topic, partition_of(group), committed)
        }

    return {
        "committed offsets": {
            key: offset for group, held in committed.items() for key, offset in kept(group, held).items()
        },
        "pending offsets": {
            (*transaction, *key): offset
            for transaction, groups in pending.items()
            for group, held in groups.items()
            for key, offset in kept(group, held).items()
        },
    }


def _is_to_be_deleted(node: BrokerState, topic: str, index: int, offset: CommittedOffset) -> bool:
    deletion = node.topics.offsets_to_delete.get(topic)
    if deletion is None:
        return False
    return deletion.before is None or offset.record_offset < deletion.before.get(index, 0)


def _damaged(topic: InternalTopic) -> dict[Any, Any]:
    return {(topic.name, index): damage.offset for index, damage in topic.damaged.items()}


def after_resume(before: State, after: State) -> State:
    """Return the state that a start must restore, from the state `before` it and the state `after` it.

    A start also completes the decided transactions, so `after` shows how far it has come. Pending offsets are
    committed or dropped when the marker is written, slightly before the transaction is complete.
    """
    expected = {kind: dict(values) for kind, values in before.items()}
    for transactional_id, entry in before["transactions"].items():
        entry_now = after["transactions"].get(transactional_id)
        if not entry.state.is_prepared or entry_now is None:
            continue
        is_complete = _completes(entry, entry_now)
        if is_complete:
            expected["transactions"][transactional_id] = entry_now
        is_commit = entry.state is TransactionState.PREPARE_COMMIT
        for key, offset in before["pending offsets"].items():
            index, producer_id, group, tp = key
            offsets_partition = TopicPartition(CONSUMER_OFFSETS, index)
            is_marked = is_complete or key not in after["pending offsets"]
            if producer_id != entry.producer_id or offsets_partition not in entry.partitions or not is_marked:
                continue
            del expected["pending offsets"][key]
            held = expected["committed offsets"].get((group, tp))
            if is_commit and (held is None or held.record_offset < offset.record_offset):
                expected["committed offsets"][group, tp] = offset
    return expected


def _completes(prepared: TransactionEntry, entry: TransactionEntry) -> bool:
    is_commit = prepared.state is TransactionState.PREPARE_COMMIT
    complete = TransactionState.COMPLETE_COMMIT if is_commit else TransactionState.COMPLETE_ABORT
    return entry.state is complete and not entry.partitions
