"""Groups and transactions for the admin client: each asked of its coordinator, or of every broker.

Source: row T14; KIP-664.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from oncelog.client.admin.groups_and_transactions import (
    GroupDescription,
    GroupListing,
    TransactionDescription,
    TransactionListing,
    consumer_group_from,
    group_from,
    transaction_from,
)
from oncelog.client.admin.types import PartitionProducers, TopicDescription, TopicListing
from oncelog.client.arguments import items_of, names_of, offsets_of, partitions_of
from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.connection.coordinator import GROUP, TRANSACTION, find_coordinator
from oncelog.client.group.core import (
    LAST_RETENTION_VERSION,
    MAX_COMMIT_VERSION,
    MAX_FETCH_VERSION,
    commit_error,
    commit_request,
    committed_from,
    committed_request,
)
from oncelog.errors import (
    GroupIdNotFound,
    TransactionalIdNotFound,
    UnknownMemberId,
    UnknownTopicOrPartition,
    UnsupportedVersion,
    error_for_code,
    named_text,
    raise_for_code,
)
from oncelog.rules.transactions.hanging import HeldBack, KnownTransaction, OpenTransaction, judge
from oncelog.runtime import system
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from oncelog.wire.messages import (
    ConsumerGroupDescribeRequest,
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    DescribeTransactionsRequest,
    ListGroupsRequest,
    ListTransactionsRequest,
    OffsetFetchRequest,
    WriteTxnMarkersRequest,
)

if TYPE_CHECKING:
    from oncelog.client.admin.aio import AsyncAdmin

T = TypeVar("T")

HANGING_AGE_MS = 1_200_000
"""Kafka's longest timeout of a transaction, and five minutes: younger ones may still be ended."""


class AsyncCoordination:
    """The asyncio face's part."""

    _connected: Callable[[], Awaitable[ClusterConnection]]
    list_topics: Callable[..., Awaitable[list[TopicListing]]]
    describe_topics: Callable[..., Awaitable[dict[str, TopicDescription]]]
    describe_producers: Callable[..., Awaitable[dict[TopicPartition, PartitionProducers]]]

    async def list_transactions(
        self, states: Collection[str] | str = (), producer_ids: Collection[int] | int = ()
    ) -> list[TransactionListing]:
        """The transactional ids of all brokers, filtered by state (Kafka's names) and producer id."""
        request = ListTransactionsRequest(
            state_filters=names_of(states, "names of states (str)"),
            producer_id_filters=items_of(producer_ids, int, "producer ids (int)"),
            duration_filter=-1,
        )
        found = []
        for node_id, answer in (await self._every_broker(request)).items():
            raise_for_code(answer.error_code, f"listing transactions of broker {node_id}")
            found += [
                TransactionListing(each.transactional_id, each.producer_id, each.transaction_state, node_id)
                for each in answer.transaction_states
            ]
        return sorted(found, key=lambda each: each.transactional_id)

    async def describe_transactions(
        self, transactional_ids: Collection[str] | str
    ) -> dict[str, TransactionDescription]:
        """What their coordinators know. Raises TransactionalIdNotFound."""
        names = names_of(transactional_ids, "transactional ids (str)")
        return {name: await self._describe_transaction(name) for name in names}

    async def _describe_transaction(self, transactional_id: str) -> TransactionDescription:
        async def once(cluster: ClusterConnection, node_id: int) -> TransactionDescription:
            answer = await cluster.request(
                node_id, DescribeTransactionsRequest(transactional_ids=[transactional_id])
            )
            (told,) = answer.transaction_states
            raise_for_code(
                told.error_code, named_text(told.error_code, f"transactional id {transactional_id!r}")
            )
            return transaction_from(told)

        return await self._at_coordinator(TRANSACTION, transactional_id, once)

    async def open_transactions(self, topics: Collection[str] | str | None = None) -> list[OpenTransaction]:
        """Every transaction that a partition of these topics (None: of all) waits for to end."""
        if topics is None:
            topics = [topic.name for topic in await self.list_topics(include_internal=True)]
        names = names_of(topics)
        described = await self.describe_topics(names)
        places = [
            TopicPartition(name, part.partition) for name in names for part in described[name].partitions
        ]
        found = await self.describe_producers(places) if places else {}
        return [opened for producers in found.values() for opened in producers.open_transactions()]

    async def find_hanging(
        self, topics: Collection[str] | str | None = None, *, older_than_ms: int = HANGING_AGE_MS
    ) -> list[HeldBack]:
        """Who holds back which partition's last stable offset, and whether anybody will end that."""
        found = await self.open_transactions(topics)
        known = await self.known_transactions({opened.producer_id for opened in found})
        now_ms = system.current().wall_ns() // 1_000_000
        return [
            judge(opened, known.get(opened.producer_id), now_ms=now_ms, older_than_ms=older_than_ms)
            for opened in found
        ]

    async def known_transactions(self, producer_ids: Collection[int] | int) -> dict[int, KnownTransaction]:
        """Return what the coordinators know of these producer ids, without those that none knows."""
        ids = items_of(producer_ids, int, "producer ids (int)")
        known: dict[int, KnownTransaction] = {}
        if not ids:
            return known  # no filter would list every transactional id
        for listed in await self.list_transactions(producer_ids=ids):
            # An id may expire after it was listed: then it is as if it had not been.
            with suppress(TransactionalIdNotFound):
                known[listed.producer_id] = (
                    await self._describe_transaction(listed.transactional_id)
                ).known()
        return known

    async def abort_transaction(self, opened: OpenTransaction) -> None:
        """Write an ABORT marker for a hanging transaction; its last stable offset moves on.

        Raises InvalidProducerEpoch and TransactionCoordinatorFenced when newer ones were there meanwhile.
        """
        cluster = await self._connected()
        topic = WriteTxnMarkersRequest.WritableTxnMarkerTopic(
            name=opened.at.topic, partition_indexes=[opened.at.partition]
        )
        marker = WriteTxnMarkersRequest.WritableTxnMarker(
            producer_id=opened.producer_id,
            producer_epoch=opened.producer_epoch,
            transaction_result=False,
            topics=[topic],
            coordinator_epoch=0 if opened.coordinator_epoch is None else opened.coordinator_epoch,
        )
        leader = await cluster.leader(opened.at, allow_auto_topic_creation=False)
        answer = await cluster.request(leader, WriteTxnMarkersRequest(markers=[marker]))
        raise_for_code(answer.markers[0].topics[0].partitions[0].error_code, f"aborting at {opened.at}")

    async def list_groups(self, states: Collection[str] | str = ()) -> list[GroupListing]:
        """The groups of all brokers, filtered by state (Kafka's names)."""
        found = []
        for node_id, answer in (
            await self._every_broker(
                ListGroupsRequest(states_filter=names_of(states, "names of states (str)"))
            )
        ).items():
            raise_for_code(answer.error_code, f"listing groups of broker {node_id}")
            found += [
                GroupListing(each.group_id, each.protocol_type, each.group_state, node_id)
                for each in answer.groups
            ]
        return sorted(found, key=lambda each: each.group_id)

    async def describe_groups(self, group_ids: Collection[str] | str) -> dict[str, GroupDescription]:
        """Their members and what each reads. Raises GroupIdNotFound on brokers that tell (Kafka 4)."""
        names = names_of(group_ids, "group ids (str)")
        return {group_id: await self._describe_group(group_id) for group_id in names}

    async def _describe_group(self, group_id: str) -> GroupDescription:
        async def once(cluster: ClusterConnection, node_id: int) -> GroupDescription:
            # Brokers describe groups of each protocol by an API of its own. Java's asks in this order.
            with suppress(UnsupportedVersion, GroupIdNotFound):
                answer = await cluster.request(node_id, ConsumerGroupDescribeRequest(group_ids=[group_id]))
                raise_for_code(answer.groups[0].error_code, f"group {group_id!r}")
                return consumer_group_from(answer.groups[0])
            answer = await cluster.request(node_id, DescribeGroupsRequest(groups=[group_id]))
            code = answer.groups[0].error_code
            raise_for_code(code, named_text(code, f"group {group_id!r}"))
            return group_from(answer.groups[0])

        return await self._at_coordinator(GROUP, group_id, once)

    async def delete_group(self, group_id: str) -> None:
        """Forget a group and its offsets. Raises NonEmptyGroup, GroupIdNotFound."""

        async def once(cluster: ClusterConnection, node_id: int) -> None:
            answer = await cluster.request(node_id, DeleteGroupsRequest(groups_names=[group_id]))
            code = answer.results[0].error_code
            raise_for_code(code, named_text(code, f"group {group_id!r}"))

        await self._at_coordinator(GROUP, group_id, once)

    async def group_offsets(
        self, group_id: str, stable: Collection[TopicPartition] | TopicPartition | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Everything a group has committed; nothing for one that is not there.

        `stable`: only these partitions, and wait for transactions that may yet commit to them (KIP-447).
        """
        every = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=None)
        request = OffsetFetchRequest(group_id=group_id, topics=None, groups=[every])
        min_version = 2
        if stable is not None:
            request, min_version = committed_request(group_id, partitions_of(stable), is_stable=True), 7

        async def once(cluster: ClusterConnection, node_id: int) -> dict[TopicPartition, OffsetAndMetadata]:
            answer = await cluster.request(
                node_id, request, min_version=min_version, max_version=MAX_FETCH_VERSION
            )
            error, found = committed_from(answer)
            if error is not None:
                raise error
            return found

        return await self._at_coordinator(GROUP, group_id, once)

    async def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
        *,
        retention_ms: int | None = None,
    ) -> None:
        """Commit for a group without members. Raises UnknownMemberId while it has some.

        `retention_ms`: how long these offsets are kept, instead of the broker's offsets.retention.minutes.
        """
        request = commit_request(ConsumerGroupMetadata(group_id), offsets_of(offsets))
        max_version = MAX_COMMIT_VERSION
        if retention_ms is not None:
            # The broker stores the time of expiry with the offset; later versions do not carry it.
            request.retention_time_ms, max_version = retention_ms, LAST_RETENTION_VERSION

        async def once(cluster: ClusterConnection, node_id: int) -> None:
            error = commit_error(await cluster.request(node_id, request, max_version=max_version))
            if error is not None:
                if isinstance(error, UnknownTopicOrPartition):
                    raise error
                why = " has members: stop them first" if isinstance(error, UnknownMemberId) else ""
                raise error_for_code(error.code, f"group {group_id!r}{why}")

        await self._at_coordinator(GROUP, group_id, once)

    async def _every_broker(self, request: Any) -> dict[int, Any]:
        cluster = await self._connected()
        return {
            node_id: await cluster.request(node_id, request) for node_id in list(cluster.metadata.brokers)
        }

    async def _at_coordinator(
        self, kind: int, name: str, once: Callable[[ClusterConnection, int], Awaitable[T]]
    ) -> T:
        """Ask the coordinator, and find it anew while what is wrong may pass."""
        cluster = await self._connected()

        async def attempt() -> T:
            return await once(cluster, await find_coordinator(cluster, kind, name))

        return await cluster.retrying(attempt)


class Coordination:
    """The blocking face's part; what calls mean is told at AsyncCoordination."""

    _async: AsyncAdmin
    _run: Callable[[Coroutine[Any, Any, Any]], Any]

    def list_transactions(
        self, states: Collection[str] | str = (), producer_ids: Collection[int] | int = ()
    ) -> list[TransactionListing]:
        """The transactional ids of all brokers."""
        found: list[TransactionListing] = self._run(self._async.list_transactions(states, producer_ids))
        return found

    def describe_transactions(
        self, transactional_ids: Collection[str] | str
    ) -> dict[str, TransactionDescription]:
        """What their coordinators know."""
        found: dict[str, TransactionDescription] = self._run(
            self._async.describe_transactions(transactional_ids)
        )
        return found

    def open_transactions(self, topics: Collection[str] | str | None = None) -> list[OpenTransaction]:
        """Every transaction that a partition waits for to end."""
        found: list[OpenTransaction] = self._run(self._async.open_transactions(topics))
        return found

    def find_hanging(
        self, topics: Collection[str] | str | None = None, *, older_than_ms: int = HANGING_AGE_MS
    ) -> list[HeldBack]:
        """Who holds back which partition's last stable offset, and whether anybody will end that."""
        found: list[HeldBack] = self._run(self._async.find_hanging(topics, older_than_ms=older_than_ms))
        return found

    def known_transactions(self, producer_ids: Collection[int] | int) -> dict[int, KnownTransaction]:
        """Return what the coordinators know of these producer ids, without those that none knows."""
        found: dict[int, KnownTransaction] = self._run(self._async.known_transactions(producer_ids))
        return found

    def abort_transaction(self, opened: OpenTransaction) -> None:
        """Write an ABORT marker for a hanging transaction."""
        self._run(self._async.abort_transaction(opened))

    def list_groups(self, states: Collection[str] | str = ()) -> list[GroupListing]:
        """The groups of all brokers."""
        found: list[GroupListing] = self._run(self._async.list_groups(states))
        return found

    def describe_groups(self, group_ids: Collection[str] | str) -> dict[str, GroupDescription]:
        """Their members and what each reads."""
        found: dict[str, GroupDescription] = self._run(self._async.describe_groups(group_ids))
        return found

    def delete_group(self, group_id: str) -> None:
        """Forget a group and its offsets."""
        self._run(self._async.delete_group(group_id))

    def group_offsets(
        self, group_id: str, stable: Collection[TopicPartition] | TopicPartition | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Everything a group has committed, or what it has for `stable`."""
        found: dict[TopicPartition, OffsetAndMetadata] = self._run(
            self._async.group_offsets(group_id, stable)
        )
        return found

    def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
        *,
        retention_ms: int | None = None,
    ) -> None:
        """Commit for a group without members; `retention_ms` replaces offsets.retention.minutes."""
        self._run(self._async.alter_group_offsets(group_id, offsets, retention_ms=retention_ms))
