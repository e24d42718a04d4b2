"""Offset lookups at the leaders of partitions, for consumers and admin clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.list_offsets import (
    OffsetAt,
    OffsetSpec,
    list_offsets_request,
    min_version_for,
    offsets_of,
)
from oncelog.errors import (
    BrokerError,
    DisconnectedError,
    LeaderNotAvailable,
    OncelogError,
    TimedOut,
    UnknownTopicOrPartition,
)
from oncelog.types import Isolation, TopicPartition

Specs = dict[TopicPartition, OffsetSpec]
Outcome = dict[TopicPartition, OffsetAt | OncelogError]


async def list_offsets(
    cluster: ClusterConnection,
    specs: Mapping[TopicPartition, OffsetSpec],
    isolation: Isolation,
    *,
    timeout_ms: float | None = None,
) -> Outcome:
    """Return the offset or the error of each partition, after retries of transient errors.

    Retries end after `timeout_ms`; None means request.timeout.ms.
    """
    limit_ms = cluster.settings["request.timeout.ms"] if timeout_ms is None else timeout_ms
    deadline_ms = cluster.now_ms() + limit_ms
    outcome: Outcome = {}
    remaining: Specs = dict(specs)
    attempt = 0
    while remaining:
        without_leader = await find_leaders(cluster, remaining)
        outcome |= without_leader
        outcome |= await _send_to_leaders(
            cluster, {tp: spec for tp, spec in remaining.items() if tp not in without_leader}, isolation
        )
        pause_ms = cluster.retry_pause_ms(attempt)
        if cluster.now_ms() + pause_ms > deadline_ms:
            break
        # Do not retry a partition that `find_leaders` did not find, because that call has waited for it. But
        # retry the same error of a leader: the partition may have just moved to another broker. Guard:
        # test_a_partition_that_was_moved_away_is_asked_for_again.
        missing = {tp for tp, error in without_leader.items() if isinstance(error, UnknownTopicOrPartition)}
        remaining = {
            tp: spec for tp, spec in remaining.items() if tp not in missing and _is_transient(outcome[tp])
        }
        if remaining:
            cluster.metadata.mark_stale(remaining)
            await asyncio.sleep(pause_ms / 1000)
        attempt += 1
    return outcome


def _is_transient(outcome: OffsetAt | OncelogError) -> bool:
    if isinstance(outcome, BrokerError):
        return outcome.retriable
    return isinstance(outcome, (DisconnectedError, TimedOut))


async def _send_to_leaders(cluster: ClusterConnection, specs: Specs, isolation: Isolation) -> Outcome:
    by_node, errors = group_by_leader(cluster, specs)
    results = await asyncio.gather(
        *(
            _send(cluster, node_id, {tp: specs[tp] for tp in led}, isolation)
            for node_id, led in by_node.items()
        )
    )
    outcome: Outcome = dict(errors)
    for result in results:
        outcome |= result
    return outcome


def group_by_leader(
    cluster: ClusterConnection, partitions: Iterable[TopicPartition]
) -> tuple[dict[int, list[TopicPartition]], dict[TopicPartition, OncelogError]]:
    """Return the partitions of each leader by its node id, and an error for each of the other partitions."""
    by_node: dict[int, list[TopicPartition]] = {}
    errors: dict[TopicPartition, OncelogError] = {}
    for tp in partitions:
        if (node_id := cluster.metadata.leader_of(tp)) is not None:
            by_node.setdefault(node_id, []).append(tp)
        else:
            # `find_leaders` knew the leader, but another request has since marked it stale.
            errors[tp] = LeaderNotAvailable(f"the leader of {tp} has just changed")
    return by_node, errors


async def find_leaders(
    cluster: ClusterConnection, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, OncelogError]:
    """Look up leaders that are unknown. Return an error for each partition whose leader was not found."""
    unknown = [tp for tp in partitions if cluster.metadata.leader_of(tp) is None]
    # Look up all leaders at the same time: waiting for each missing partition in turn could take minutes.
    # Guards: test_missing_partitions_are_looked_for_together,
    # test_an_admin_client_looks_for_missing_partitions_together.
    results = await asyncio.gather(
        *(cluster.leader(tp, allow_auto_topic_creation=False) for tp in unknown), return_exceptions=True
    )
    errors: dict[TopicPartition, OncelogError] = {}
    for tp, result in zip(unknown, results, strict=True):
        if isinstance(result, OncelogError):
            errors[tp] = result
        elif isinstance(result, BaseException):
            raise result
    return errors


async def _send(cluster: ClusterConnection, node_id: int, specs: Specs, isolation: Isolation) -> Outcome:
    timeout_ms = cluster.settings["request.timeout.ms"]
    request = list_offsets_request(specs, isolation, timeout_ms)
    try:
        response = await cluster.request(node_id, request, min_version=min_version_for(specs))
    except OncelogError as error:
        return dict.fromkeys(specs, error)
    offsets: Outcome = dict(offsets_of(response))
    missing = UnknownTopicOrPartition("the broker's response has no entry for this partition")
    return {tp: offsets.get(tp, missing) for tp in specs}
