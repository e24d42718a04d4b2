"""Fetch (key 1), versions 4-18: whole stored batches from an offset on, waiting for them if asked.

Sessions (v7+): see oncelog.broker.fetch_sessions. Topic ids from v13 on; an unknown one is 100.
Partitions are filled in request order until max_bytes; the first that has data gives at least one
whole batch however small the limits; the more answers clients leave untaken, the less a fetch gets.
isolation_level 1 stops at the last stable offset and lists aborted transactions (empty, not null).
Errors per partition: 3 / 100 unknown, 6 asked by a replica,
74 / 75 leader epoch, 1 offset out of range, 56 unreadable. With fewer than min_bytes and no error, the
answer waits until appends bring them or max_wait_ms is over. Who owes for consumer_byte_rate is answered
at once, without partitions.
"""

from __future__ import annotations

from collections.abc import Iterator

from oncelog.broker.fetch_sessions import (
    FULL_AND_CREATE,
    FULL_WITHOUT_SESSION,
    FetchContext,
    Target,
    error_response,
)
from oncelog.broker.leader_epoch import check_leader_epoch
from oncelog.broker.purgatory import DelayedFetch, PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps, continue_in_steps
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

_Result = FetchResponse.PartitionData


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: FetchRequest = request.message
    owes = state.quotas.is_any and state.quotas.wait_ms(CONSUMER_BYTES, request.quota_principal, now_ms) > 0
    if owes and message.session_epoch in (FULL_AND_CREATE, FULL_WITHOUT_SESSION):
        return FetchResponse(responses=[])
    try:
        context = state.sessions.open(message, request.header.api_version, now_ms, request.principal)
    except BrokerError as error:
        return error_response(error)
    if owes:
        return FetchResponse(session_id=context.session_id, responses=[])
    answer: Answer = answer_in_steps(state.slots, _read(state, request, context, now_ms))
    return answer


def _read(state: BrokerState, request: Request, context: FetchContext, now_ms: int) -> Work[Answer]:
    """Read in steps, and wait for more if need be."""
    message: FetchRequest = request.message
    fetch = _Fetch(state, request, context)
    results = yield from _read_all(fetch)
    missing_bytes = fetch.missing_bytes(results)
    if missing_bytes <= 0 or message.max_wait_ms <= 0 or not results:
        return fetch.response(results)
    has_stepped = len(results) >= state.limits.request_step_elements
    if has_stepped and fetch.is_outdated(results):
        # An append between two steps completed no waiting fetch. The client's next fetch returns its records.
        return fetch.response(results)
    # A connection that waits longer than an idle one may stay has no client any more.
    idle_ms, max_wait_ms = state.settings["connections.max.idle.ms"], message.max_wait_ms
    pending = PendingResponse(blocks_pipeline=True)
    wait = DelayedFetch(
        pending,
        fetch.partitions(),
        missing_bytes,
        now_ms + (min(max_wait_ms, idle_ms) if idle_ms > 0 else max_wait_ms),
        fetch.answer,
        is_committed_only=fetch.is_committed_only,
    )
    if has_stepped:
        wait.begin = lambda wait: continue_in_steps(state.slots, _read_again(fetch, wait), wait.pending)
    state.fetch_purgatory.watch(wait)
    return pending


def _read_again(fetch: _Fetch, wait: DelayedFetch) -> Work[Answer]:
    """Read what an append or the deadline of a waiting fetch asks for, and wait again if it is too little."""
    results = yield from _read_all(fetch)
    missing_bytes = fetch.missing_bytes(results)
    if wait.is_due or missing_bytes <= 0 or fetch.is_outdated(results):
        fetch.state.fetch_purgatory.remove(wait)
        return fetch.response(results)
    fetch.state.fetch_purgatory.watch_again(wait, missing_bytes)
    return wait.pending


def _read_all(fetch: _Fetch) -> Work[list[tuple[Target, _Result]]]:
    budget, held = StepBudget(fetch.state.limits.request_step_elements), fetch.state.response_memory
    results: list[tuple[Target, _Result]] = []
    unfinished_bytes = 0
    try:
        for result in fetch.read():
            results.append(result)
            # Else each of many fetches gets its share of the same memory, for none has an answer yet.
            size_bytes = len(result[1].records or b"")
            unfinished_bytes += size_bytes
            held.unfinished_bytes += size_bytes
            if budget.spend():
                yield None
    finally:
        held.unfinished_bytes -= unfinished_bytes
    return results


class _Fetch:
    """One fetch: may be read twice, when it is asked and when what it waited for is there."""

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

    def read(self) -> Iterator[tuple[Target, _Result]]:
        response_budget = self.state.response_memory.response_budget()
        left_bytes = self.max_bytes if response_budget is None else min(self.max_bytes, response_budget)
        has_data = False
        for target in self.context.targets:
            result = self._read_one(target, left_bytes, at_least_one=not has_data)
            size_bytes = len(result.records or b"")
            left_bytes -= size_bytes
            has_data = has_data or size_bytes > 0
            yield target, result

    def answer(self, is_due: bool) -> FetchResponse | None:
        """As DelayedFetch asks for it."""
        results = list(self.read())
        return self.response(results) if is_due or self.missing_bytes(results) <= 0 else None

    def missing_bytes(self, results: list[tuple[Target, _Result]]) -> int:
        """How much more must come before an answer is due; 0 or less: answer now."""
        if any(result.error_code or result.diverging_epoch for _, result in results):
            return 0
        have_bytes = sum(len(result.records or b"") for _, result in results)
        wanted_bytes: int = min(self.message.min_bytes, self.max_bytes)
        return wanted_bytes - have_bytes

    def is_outdated(self, results: list[tuple[Target, _Result]]) -> bool:
        """Return True if this reader sees more of a partition than when it was read, or it is gone."""
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

    def partitions(self) -> list[TopicPartition]:
        found = ((self._topic(t), t.asked.partition) for t in self.context.targets)
        return [TopicPartition(topic.name, partition) for topic, partition in found if topic]

    def response(self, results: list[tuple[Target, _Result]]) -> FetchResponse:
        topics: list[FetchResponse.FetchableTopicResponse] = []
        for (name, topic_id, _), result in ((t.key, r) for t, r in self.context.select(results)):
            # Consecutive partitions of one topic share a struct; the request's order is kept.
            if not topics or (topics[-1].topic, topics[-1].topic_id) != (name, topic_id):
                topics.append(
                    FetchResponse.FetchableTopicResponse(topic=name, topic_id=topic_id, partitions=[])
                )
            topics[-1].partitions.append(result)
        return FetchResponse(session_id=self.context.session_id, responses=topics)

    def _topic(self, target: Target) -> Topic | None:
        name, topic_id, _ = target.key
        return self.state.topics.get(name) if topic_id == NO_ID else self.state.topics.by_id(topic_id)

    def _read_one(self, target: Target, left_bytes: int, *, at_least_one: bool) -> _Result:
        asked = target.asked
        result = _Result(partition_index=asked.partition, high_watermark=-1, records=b"")
        try:
            self._fill(result, target, left_bytes, at_least_one)
        except BrokerError as error:
            result.error_code, result.records = error.code, b""
        except StorageError:
            result.error_code, result.records = KafkaStorageError.code, b""
        return result

    def _fill(self, result: _Result, target: Target, left_bytes: int, at_least_one: bool) -> None:
        asked = target.asked
        partition = self._partition(target)
        result.aborted_transactions = None
        # Here Kafka takes any negative number for none, elsewhere only -1.
        check_leader_epoch(partition, max(asked.current_leader_epoch, -1))
        is_committed_only = self.is_committed_only
        # The stable offset first: a sync that ends in its thread meanwhile moves both up.
        first, stable = partition.log_start_offset, partition.last_stable_offset
        high, end = partition.high_watermark, partition.log_end_offset
        # As on Kafka an offset between high watermark and log end is no error: there is nothing yet.
        # Before the range: a reader behind a log that was cut must learn where to cut back to.
        diverges = self._diverges(result, partition, asked)
        if not diverges and not first <= asked.fetch_offset <= end:
            raise OffsetOutOfRange(f"offset {asked.fetch_offset} is outside {first}..{end}")
        result.high_watermark, result.last_stable_offset, result.log_start_offset = high, stable, first
        upper_offset = stable if is_committed_only else high
        if is_committed_only:
            result.aborted_transactions = []
        if diverges:
            return
        max_bytes = min(asked.partition_max_bytes, left_bytes)
        if asked.fetch_offset < upper_offset and (max_bytes > 0 or at_least_one):
            found = partition.read(
                asked.fetch_offset,
                max(max_bytes, 0),
                upper_offset=upper_offset,
                at_least_one=at_least_one,
            )
            result.records = found.records
            if is_committed_only:
                result.aborted_transactions = _aborted(partition, asked.fetch_offset, found.next_offset)

    def _partition(self, target: Target) -> Partition:
        topic = self._topic(target)
        name, topic_id, _ = target.key
        if topic is None and topic_id != NO_ID:
            raise self.unknown_topic()
        self._check(topic.name if topic is not None else name)
        if topic is None:
            raise self.unknown_topic()
        partition = topic.partition(target.asked.partition)
        if self.is_by_replica:
            raise NotLeaderOrFollower("this node is the partition's only replica; no other may follow it")
        return partition

    def _check(self, topic: str) -> None:
        """Consumers read a topic; a replica that follows needs the cluster's trust."""
        if not self.is_by_replica:
            self.request.authorize(ResourceType.TOPIC, topic)
        elif not self.request.access.may(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME):
            raise TopicAuthorizationFailed()

    @staticmethod
    def _diverges(result: _Result, partition: Partition, asked: FetchRequest.FetchPartition) -> bool:
        """Whether the reader's last epoch ended elsewhere than it read: it must cut back (KIP-595)."""
        if asked.last_fetched_epoch < 0:
            return False
        epoch, end_offset = partition.end_offset_for_epoch(asked.last_fetched_epoch)
        if epoch is None or end_offset is None:
            raise OffsetOutOfRange(f"no epoch up to {asked.last_fetched_epoch} is known here")
        if epoch == asked.last_fetched_epoch and end_offset >= asked.fetch_offset:
            return False
        result.diverging_epoch = FetchResponse.EpochEndOffset(epoch=epoch, end_offset=end_offset)
        return True


def _aborted(
    partition: Partition, from_offset: int, upper_offset: int
) -> list[FetchResponse.AbortedTransaction]:
    return [
        FetchResponse.AbortedTransaction(producer_id=each.producer_id, first_offset=each.first_offset)
        for each in partition.aborted_transactions(from_offset, upper_offset)
    ]
