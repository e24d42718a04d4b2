"""Looking up offsets at whichever brokers lead the partitions; shared by consumer and admin."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from oncelog.client.offsets import OffsetAt, OffsetSpec, list_offsets_request, min_version_for, offsets_of
from oncelog.edge.cluster import ClusterConnection
from oncelog.errors import BrokerError, DisconnectedError, OncelogError, TimedOut, UnknownTopicOrPartition
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
    """The offset or the error per partition; what may pass is tried again until the time is over.

    `timeout_ms` None is request.timeout.ms.
    """
    limit_ms = cluster.settings["request.timeout.ms"] if timeout_ms is None else timeout_ms
    deadline_ms = cluster.now_ms() + limit_ms
    outcome: Outcome = {}
    remaining: Specs = dict(specs)
    attempt = 0
    while remaining:
        outcome |= await _ask_leaders(cluster, remaining, isolation)
        pause_ms = cluster.retry_pause_ms(attempt)
        if cluster.now_ms() + pause_ms > deadline_ms:
            break
        remaining = {tp: spec for tp, spec in remaining.items() if _may_pass(outcome[tp])}
        if remaining:
            cluster.metadata.mark_stale(remaining)
            await asyncio.sleep(pause_ms / 1000)
        attempt += 1
    return outcome


def _may_pass(outcome: OffsetAt | OncelogError) -> bool:
    if isinstance(outcome, UnknownTopicOrPartition):
        return False  # finding the leader has been patient about it already
    if isinstance(outcome, BrokerError):
        return outcome.retriable
    return isinstance(outcome, (DisconnectedError, TimedOut))


async def _ask_leaders(cluster: ClusterConnection, specs: Specs, isolation: Isolation) -> Outcome:
    outcome: Outcome = {}
    by_node: dict[int, Specs] = {}
    for tp, spec in specs.items():
        try:
            node_id = await cluster.leader(tp, allow_auto_topic_creation=False)
            by_node.setdefault(node_id, {})[tp] = spec
        except OncelogError as error:
            outcome[tp] = error
    answers = await asyncio.gather(
        *(_ask(cluster, node_id, mine, isolation) for node_id, mine in by_node.items())
    )
    for answer in answers:
        outcome |= answer
    return outcome


async def _ask(cluster: ClusterConnection, node_id: int, specs: Specs, isolation: Isolation) -> Outcome:
    timeout_ms = cluster.settings["request.timeout.ms"]
    request = list_offsets_request(specs, isolation, timeout_ms)
    try:
        response = await cluster.request(node_id, request, min_version=min_version_for(specs))
    except OncelogError as error:
        return dict.fromkeys(specs, error)
    answered: Outcome = dict(offsets_of(response))
    missing = UnknownTopicOrPartition("the broker's answer does not name the partition")
    return {tp: answered.get(tp, missing) for tp in specs}
