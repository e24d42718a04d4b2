"""Fetch (key 1), versions 4-18: read whole stored batches from an offset on.

Version 7 and later have fetch sessions (`broker.fetch_sessions`), version 13 and later topic ids. Partitions
are read in the order of the request until the response has max_bytes. The first partition that has data
returns at least one whole batch, even above the limits. While unsent responses of all connections use much
memory, the broker lowers max_bytes. With isolation_level 1 the data ends at the last stable offset, and
aborted_transactions is a list, perhaps empty; otherwise it is null.

    UNKNOWN_TOPIC_OR_PARTITION  an unknown topic name or partition
    UNKNOWN_TOPIC_ID            an unknown topic id
    TOPIC_AUTHORIZATION_FAILED  the client may not read the topic
    NOT_LEADER_OR_FOLLOWER      the fetch comes from a replica
    FENCED_LEADER_EPOCH         an older leader epoch
    UNKNOWN_LEADER_EPOCH        a newer leader epoch
    OFFSET_OUT_OF_RANGE         below the log start or above the log end
    KAFKA_STORAGE_ERROR         the batch cannot be read

If the response is smaller than min_bytes and has no error, it waits for appends, at most max_wait_ms. A
client over its consumer_byte_rate quota gets an immediate response without partitions. Source: KIP-74,
KIP-227, KIP-320; Kafka's ReplicaManager.fetchMessages.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from oncelog.broker.fetch_sessions import (
    FULL_AND_CREATE,
    FULL_WITHOUT_SESSION,
    FetchContext,
    SessionPartition,
    error_response,
)
from oncelog.broker.leader_epoch import check_leader_epoch
from oncelog.broker.purgatory import DelayedFetch, PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, continue_in_steps, respond_in_steps
from oncelog.broker.topics.topics import Topic
from oncelog.errors import (
    BrokerError,
    KafkaStorageError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    StorageError,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from oncelog.log.partition import Partition
from oncelog.rules.limits.quotas import CONSUMER_BYTES
from oncelog.rules.security.authorization import CLUSTER_NAME, Operation, ResourceType
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.messages import NO_ID, FetchRequest, FetchResponse

KEY = 1
FIRST_ID_VERSION = 13
PARTITION_RECORDS = 7
"""Cost of reading a partition, in records of `RoundMeter`. With a session, a request need not name them."""

_Result = FetchResponse.PartitionData


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: FetchRequest = request.message
    quotas = state.quotas
    is_throttled = quotas.is_any and quotas.wait_ms(CONSUMER_BYTES, request.quota_principal, now_ms) > 0
    if is_throttled and message.session_epoch in (FULL_AND_CREATE, FULL_WITHOUT_SESSION):
        state.sessions.end(message.session_id, request.principal)
        return FetchResponse(responses=[])
    try:
        context = state.sessions.open(message, request.header.api_version, now_ms, request.principal)
    except BrokerError as error:
        return error_response(error)
    if is_throttled:
        return FetchResponse(session_id=context.session_id, responses=[])
    answer: Answer = respond_in_steps(state.slots, _read(state, request, context, now_ms))
    return answer


def _read(state: BrokerState, request: Request, context: FetchContext, now_ms: int) -> Work[Answer]:
    """Read the partitions of a fetch in steps. If there is too little data, let the fetch wait in the
    purgatory.
    """
    message: FetchRequest = request.message
    fetch = _Fetch(state, request, context)
    results = yield from _read_all(fetch)
    missing_bytes = fetch.missing_bytes(results)
    if missing_bytes <= 0 or message.max_wait_ms <= 0 or not results:
        return fetch.response(results)
    state.round_meter.add(PARTITION_RECORDS * len(results))
    has_stepped = len(results) >= state.limits.request_step_elements
    if has_stepped and fetch.is_outdated(results):
        # An append between two steps could not complete this fetch, because the purgatory does not watch it
        # yet. Respond now: the client's next fetch returns the new records.
        return fetch.response(results)
    # A connection that waits for a response is not closed as idle. So limit max_wait_ms to
    # connections.max.idle.ms. Otherwise the fetch of a client that is gone could stay for max_wait_ms.
    idle_ms, max_wait_ms = state.settings["connections.max.idle.ms"], message.max_wait_ms
    pending = PendingResponse(blocks_pipeline=True)
    delayed = DelayedFetch(
        pending,
        fetch.partitions(),
        missing_bytes,
        now_ms + (min(max_wait_ms, idle_ms) if idle_ms > 0 else max_wait_ms),
        fetch.answer,
        lambda delayed: continue_in_steps(state.slots, _read_again(fetch, delayed), delayed.pending),
        reads_in_steps=has_stepped,
        is_committed_only=fetch.is_committed_only,
    )
    fetch.forget_request()
    state.fetch_purgatory.watch(delayed)
    return pending


def _read_again(fetch: _Fetch, delayed: DelayedFetch) -> Work[Answer]:
    """Read a delayed fetch after an append or at its deadline.

    If there is still too little data before the deadline, let the purgatory watch the fetch again.
    """
    results = yield from _read_all(fetch)
    missing_bytes = fetch.missing_bytes(results)
    if delayed.is_due or missing_bytes <= 0 or fetch.is_outdated(results):
        fetch.state.fetch_purgatory.remove(delayed)
        return fetch.response(results)
    fetch.state.fetch_purgatory.watch_again(delayed, missing_bytes)
    return delayed.pending


def _read_all(fetch: _Fetch) -> Work[list[tuple[SessionPartition, _Result]]]:
    budget, held = fetch.state.step_budget(), fetch.state.response_memory
    results: list[tuple[SessionPartition, _Result]] = []
    unfinished_bytes = 0
    try:
        for result in fetch.read():
            results.append(result)
            # Count each result immediately. Otherwise several fetches that run in steps could each fill the
            # same free memory.
            size_bytes = len(result[1].records or b"")
            unfinished_bytes += size_bytes
            held.unfinished_bytes += size_bytes
            if budget.spend():
                yield None
    finally:
        held.unfinished_bytes -= unfinished_bytes
    return results


class _Fetch:
    """One fetch. Its partitions may be read several times: when it arrives, after appends, and at its
    deadline.
    """

    __slots__ = (
        "context",
        "is_by_replica",
        "is_committed_only",
        "max_bytes",
        "message",
        "request",
        "state",
        "unknown_topic",
    )  # fmt: skip

    def __init__(self, state: BrokerState, request: Request, context: FetchContext) -> None:
        message: FetchRequest = request.message
        version = request.header.api_version
        self.state, self.request, self.message, self.context = state, request, message, context
        self.unknown_topic = UnknownTopicId if version >= FIRST_ID_VERSION else UnknownTopicOrPartition
        replica = message.replica_state
        self.is_by_replica = message.replica_id >= 0 or (replica is not None and replica.replica_id >= 0)
        self.is_committed_only = message.isolation_level == Isolation.READ_COMMITTED
        self.max_bytes = min(message.max_bytes, state.settings["fetch.max.bytes"])
        if state.quotas.is_any:
            self.max_bytes = int(min(self.max_bytes, state.quotas.max_fetch_bytes(request.quota_principal)))

    def read(self) -> Iterator[tuple[SessionPartition, _Result]]:
        response_budget = self.state.response_memory.response_budget()
        remaining_bytes = self.max_bytes if response_budget is None else min(self.max_bytes, response_budget)
        has_data = False
        for target in self.context.targets:
            result = self._read_one(target, remaining_bytes, at_least_one=not has_data)
            size_bytes = len(result.records or b"")
            remaining_bytes -= size_bytes
            has_data = has_data or size_bytes > 0
            yield target, result

    def answer(self, is_due: bool) -> FetchResponse | None:
        """Read the partitions again and return the response; None if there is too little data and `is_due` is
        false.
        """
        results = list(self.read())
        return self.response(results) if is_due or self.missing_bytes(results) <= 0 else None

    def missing_bytes(self, results: list[tuple[SessionPartition, _Result]]) -> int:
        """Return how many more bytes must be appended before the response is due. If it is 0 or less, respond
        now.
        """
        if any(result.error_code or result.diverging_epoch for _, result in results):
            return 0
        have_bytes = sum(len(result.records or b"") for _, result in results)
        requested_bytes: int = min(self.message.min_bytes, self.max_bytes)
        return requested_bytes - have_bytes

    def is_outdated(self, results: list[tuple[SessionPartition, _Result]]) -> bool:
        """Return True if a partition was deleted, or if its visible end has changed since it was read."""
        for target, result in results:
            try:
                partition = self._partition(target)
            except BrokerError:
                return True
            if self.is_committed_only:
                is_same = partition.last_stable_offset == result.last_stable_offset
            else:
                is_same = partition.high_watermark == result.high_watermark
            if not is_same:
                return True
        return False

    def forget_request(self) -> None:
        """Keep only the partitions of the context while the fetch waits.

        A request may name one partition 99,000 times or have a long client id, and a fetch may wait for ten
        minutes. See test_a_waiting_fetch_does_not_keep_its_request.
        """
        self.message = message = copy(self.message)
        message.topics, message.forgotten_topics_data = [], []
        header = self.request.header._replace(client_id=None)
        self.request = replace(self.request, message=message, header=header)

    def partitions(self) -> list[TopicPartition]:
        named = ((self._topic(t), t.requested.partition) for t in self.context.targets)
        return [TopicPartition(topic.name, partition) for topic, partition in named if topic]

    def response(self, results: list[tuple[SessionPartition, _Result]]) -> FetchResponse:
        topics: list[FetchResponse.FetchableTopicResponse] = []
        for (name, topic_id, _), result in ((t.key, r) for t, r in self.context.select(results)):
            # Consecutive partitions of one topic share an entry of the response. A topic gets several entries
            # if its partitions are not consecutive in the request.
            if not topics or (topics[-1].topic, topics[-1].topic_id) != (name, topic_id):
                topics.append(
                    FetchResponse.FetchableTopicResponse(topic=name, topic_id=topic_id, partitions=[])
                )
            topics[-1].partitions.append(result)
        return FetchResponse(session_id=self.context.session_id, responses=topics)

    def _topic(self, target: SessionPartition) -> Topic | None:
        name, topic_id, _ = target.key
        return self.state.topics.get(name) if topic_id == NO_ID else self.state.topics.by_id(topic_id)

    def _read_one(self, target: SessionPartition, remaining_bytes: int, *, at_least_one: bool) -> _Result:
        requested = target.requested
        result = _Result(partition_index=requested.partition, high_watermark=-1, records=b"")
        try:
            self._fill(result, target, remaining_bytes, at_least_one)
        except BrokerError as error:
            result.error_code, result.records = error.code, b""
        except StorageError:
            result.error_code, result.records = KafkaStorageError.code, b""
        return result

    def _fill(
        self, result: _Result, target: SessionPartition, remaining_bytes: int, at_least_one: bool
    ) -> None:
        requested = target.requested
        partition = self._partition(target)
        result.aborted_transactions = None
        # In Fetch, Kafka treats every negative epoch as a missing one; in other APIs, only -1.
        check_leader_epoch(partition, max(requested.current_leader_epoch, -1))
        is_committed_only = self.is_committed_only
        # Read the stable offset before the high watermark. A flush in another thread may raise both in
        # between, and the stable offset must not be above the high watermark.
        first, stable = partition.log_start_offset, partition.last_stable_offset
        high, end = partition.high_watermark, partition.log_end_offset
        # As in Kafka, an offset from the high watermark to the log end is valid, and gets no records.
        # The epoch is checked before the range: a reader of a truncated log must learn where to truncate its
        # own copy.
        diverges = self._diverges(result, partition, requested)
        if not diverges and not first <= requested.fetch_offset <= end:
            raise OffsetOutOfRange(f"offset {requested.fetch_offset} is outside {first}..{end}")
        result.high_watermark, result.last_stable_offset, result.log_start_offset = high, stable, first
        upper_offset = stable if is_committed_only else high
        if is_committed_only:
            result.aborted_transactions = []
        if diverges:
            return
        max_bytes = min(requested.partition_max_bytes, remaining_bytes)
        if requested.fetch_offset < upper_offset and (max_bytes > 0 or at_least_one):
            stored = partition.read(
                requested.fetch_offset,
                max(max_bytes, 0),
                upper_offset=upper_offset,
                at_least_one=at_least_one,
            )
            result.records = stored.records
            if is_committed_only:
                result.aborted_transactions = _aborted(partition, requested.fetch_offset, stored.next_offset)

    def _partition(self, target: SessionPartition) -> Partition:
        topic = self._topic(target)
        name, topic_id, _ = target.key
        if topic is None and topic_id != NO_ID:
            raise self.unknown_topic()
        self._check(topic.name if topic is not None else name)
        if topic is None:
            raise self.unknown_topic()
        partition = topic.partition(target.requested.partition)
        if self.is_by_replica:
            raise NotLeaderOrFollower("this broker has the only replica; other brokers cannot follow")
        return partition

    def _check(self, topic: str) -> None:
        """Check that a consumer may READ the topic, or a replica has CLUSTER_ACTION.

        Raises TopicAuthorizationFailed.
        """
        if not self.is_by_replica:
            self.request.authorize(ResourceType.TOPIC, topic)
        elif not self.request.access.may(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME):
            raise TopicAuthorizationFailed()

    @staticmethod
    def _diverges(result: _Result, partition: Partition, requested: FetchRequest.FetchPartition) -> bool:
        """Compare the epoch of the last record that the reader has with the log's epochs (KIP-595).

        If the log lacks that epoch, or the epoch ended at a lower offset here, return True and set the
        diverging epoch: the reader must truncate its copy. Raises OffsetOutOfRange if the epoch is above the
        log's newest one.
        """
        if requested.last_fetched_epoch < 0:
            return False
        epoch, end_offset = partition.end_offset_for_epoch(requested.last_fetched_epoch)
        if epoch is None or end_offset is None:
            raise OffsetOutOfRange(f"the partition has no leader epoch up to {requested.last_fetched_epoch}")
        if epoch == requested.last_fetched_epoch and end_offset >= requested.fetch_offset:
            return False
        result.diverging_epoch = FetchResponse.EpochEndOffset(epoch=epoch, end_offset=end_offset)
        return True


def _aborted(
    partition: Partition, from_offset: int, upper_offset: int
) -> list[FetchResponse.AbortedTransaction]:
    return [
        FetchResponse.AbortedTransaction(producer_id=aborted.producer_id, first_offset=aborted.first_offset)
        for aborted in partition.aborted_transactions(from_offset, upper_offset)
    ]
