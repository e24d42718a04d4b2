"""OffsetCommit (key 8), versions 2-10: commit a group's offsets.

Per partition: UNKNOWN_TOPIC_OR_PARTITION, OFFSET_METADATA_TOO_LARGE, from version 10 on UNKNOWN_TOPIC_ID. For
the whole group: INVALID_COMMIT_OFFSET_SIZE (the records exceed message.max.bytes) and the errors of
`GroupCoordinator.check_commit`. In versions 2 to 4 `retention_time_ms` replaces offsets.retention.minutes.
Source: Kafka's OffsetMetadataManager.commitOffset.
"""

from __future__ import annotations

from typing import Any

from oncelog.broker.coordinators.internal_topic import respond_when_durable
from oncelog.broker.coordinators.offsets import OffsetRecord
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.broker.topics.topics import Topic
from oncelog.config import INT64_MAX
from oncelog.errors import (
    BrokerError,
    GroupAuthorizationFailed,
    InvalidCommitOffsetSize,
    MessageTooLarge,
    OffsetMetadataTooLarge,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
    copy_to_raise,
    without_traceback,
)
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.security.authorization import ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import NO_ID, OffsetCommitRequest, OffsetCommitResponse

KEY = 8
FIRST_ID_VERSION = 10

_Partition = OffsetCommitResponse.OffsetCommitResponsePartition


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _commit(state, request, now_ms))
    return answer


def _commit(state: BrokerState, request: Request, now_ms: int) -> Work[Answer]:
    message: OffsetCommitRequest = request.message
    if request.header.api_version >= FIRST_ID_VERSION:
        _name_topics(state, message)
    has_retention = message.retention_time_ms >= 0
    # Limit the sum to an int64: clients send the largest int64 for offsets that never expire.
    expire_ms = min(now_ms + message.retention_time_ms, INT64_MAX) if has_retention else -1
    response = OffsetCommitResponse(
        topics=[
            OffsetCommitResponse.OffsetCommitResponseTopic(
                name=topic.name, topic_id=topic.topic_id, partitions=[]
            )
            for topic in message.topics
        ]
    )
    rows = CommitRows(state, request, response.topics, _Partition)
    if not request.is_authorized(ResourceType.GROUP, message.group_id):
        yield from rows.refuse_all(GroupAuthorizationFailed())
        return response
    yield from rows.check(now_ms, expire_ms)

    def refusal(error: BrokerError) -> OffsetCommitResponse:
        rows.refuse(error)
        return response

    try:
        yield from rows.encode(message.group_id)
        # This check must be in the step that stores the offsets: the member may have been fenced since the
        # first step.
        state.groups.check_commit(
            message.group_id,
            message.generation_id_or_member_epoch,
            message.member_id,
            message.group_instance_id,
            version=request.header.api_version,
        )
        state.groups.note_commit(message.group_id, message.member_id, now_ms)
        records, written = rows.records(), []
        if records:
            written.append(state.groups.offsets.commit(message.group_id, rows.offsets, now_ms, records))
    except MessageTooLarge as error:
        return refusal(InvalidCommitOffsetSize(str(error)))
    except BrokerError as error:
        return refusal(error)
    return respond_when_durable(state.flush_queue, written, response, refusal)


def _name_topics(state: BrokerState, message: OffsetCommitRequest) -> None:
    """Set the name of each topic from its id; an unknown id gets an empty name."""
    for requested in message.topics:
        topic = state.topics.by_id(requested.topic_id)
        requested.name = "" if topic is None else topic.name


class CommitRows:
    """The partitions of an offset commit: their results in the response, and the offsets to store.

    Also used by TxnOffsetCommit. A partition that is named twice has two results.
    """

    def __init__(
        self, state: BrokerState, request: Request, response_topics: list[Any], new_row: type[Any]
    ) -> None:
        self._state, self._request = state, request
        is_commit = request.header.api_key == KEY
        self._has_ids = is_commit and request.header.api_version >= FIRST_ID_VERSION
        self._response_topics, self._new_row = response_topics, new_row
        self._budget = state.step_budget()
        self._rows: dict[TopicPartition, list[Any]] = {}
        self._topics: dict[str, Topic | None] = {}
        self.offsets: dict[TopicPartition, CommittedOffset] = {}
        self._records: list[OffsetRecord] = []
        self._too_large: MessageTooLarge | None = None

    def check(self, now_ms: int, expire_ms: int) -> Work[None]:
        """Check each partition, but not the group. The offsets of valid partitions are added to `offsets`."""
        for topic, results in zip(self._request.message.topics, self._response_topics, strict=True):
            code = self._topic_code(topic.name, getattr(topic, "topic_id", NO_ID))
            if self._budget.spend():
                yield None
            for partition in topic.partitions:
                tp = TopicPartition(topic.name, partition.partition_index)
                metadata = partition.committed_metadata
                row_code = code or self._code(tp, metadata)
                row = self._new_row(partition_index=tp.partition, error_code=row_code)
                results.partitions.append(row)
                self._rows.setdefault(tp, []).append(row)
                if not row_code:
                    self.offsets[tp] = CommittedOffset(
                        partition.committed_offset,
                        partition.committed_leader_epoch,
                        metadata or "",
                        now_ms,
                        expire_ms,
                        -1,
                    )
                if self._budget.spend():
                    yield None

    def _topic_code(self, name: str, topic_id: bytes) -> int:
        """Return the error code for all partitions of a topic, or 0.

        `name` is empty if the topic id is unknown.
        """
        if not name and self._has_ids:
            return UnknownTopicId.code
        if not self._request.is_authorized(ResourceType.TOPIC, name):
            return TopicAuthorizationFailed.code
        topic = self._state.topics.get(name)
        if self._has_ids and (topic is None or topic.topic_id != topic_id):
            # The topic was deleted between two steps. A topic that now has its name is another one.
            self._topics[name] = None
            return UnknownTopicId.code
        self._topics[name] = topic
        return UnknownTopicOrPartition.code if topic is None else 0

    def _code(self, tp: TopicPartition, metadata: str | None) -> int:
        topic = self._topics[tp.topic]
        if topic is None or not 0 <= tp.partition < len(topic.partitions):
            return UnknownTopicOrPartition.code
        if (
            metadata is not None
            and _java_length(metadata) > self._state.settings["offset.metadata.max.bytes"]
        ):
            return OffsetMetadataTooLarge.code
        return 0

    @property
    def has_any_for_group(self) -> bool:
        """True if there are partitions whose result depends on the group's check."""
        return any(is_for_group(row.error_code) for rows in self._rows.values() for row in rows)

    def encode(self, group_id: str) -> Work[None]:
        """Encode the records of the offsets. Topics that are deleted between the steps are left out."""
        while True:
            self._drop_deleted()
            self._too_large = None
            try:
                self._records = yield from self._state.groups.offsets.encode(
                    group_id, self.offsets, self._budget
                )
            except MessageTooLarge as error:
                self._too_large = without_traceback(error)
            if not self._drop_deleted():
                return

    def records(self) -> list[OffsetRecord]:
        """Return the encoded records.

        Raises MessageTooLarge; check the group first, because its error has priority.
        """
        if self._too_large is not None:
            raise copy_to_raise(self._too_large)
        return self._records

    def _drop_deleted(self) -> bool:
        """Refuse offsets whose topic was deleted since `check`. Return True if there is such a topic.

        The deletion of a topic removes its committed offsets, so no offset of it may be stored afterwards.
        """
        topics = self._state.topics
        named = {name: topic for name, topic in self._topics.items() if topic is not None}
        deleted = {name for name, topic in named.items() if topics.get(name) is not topic}
        error = UnknownTopicId if self._has_ids else UnknownTopicOrPartition
        for name in deleted:
            self._topics[name] = None
        for tp in [tp for tp in self.offsets if tp.topic in deleted] if deleted else ():
            del self.offsets[tp]
            for row in self._rows[tp]:
                row.error_code = error.code
        return bool(deleted)

    def refuse(self, error: BrokerError) -> None:
        """Set the error of the group's check in each partition that has no other error.

        As in Kafka, this error also replaces OFFSET_METADATA_TOO_LARGE.
        """
        for row in (row for rows in self._rows.values() for row in rows):
            if is_for_group(row.error_code):
                row.error_code = error.code

    def refuse_all(self, error: BrokerError) -> Work[None]:
        """Give every partition this error without checking it."""
        for topic, results in zip(self._request.message.topics, self._response_topics, strict=True):
            for partition in topic.partitions:
                row = self._new_row(partition_index=partition.partition_index, error_code=error.code)
                results.partitions.append(row)
                if self._budget.spend():
                    yield None


def _java_length(text: str) -> int:
    """Return the length that Kafka compares with offset.metadata.max.bytes: UTF-16 code units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def is_for_group(code: int) -> bool:
    """Return True if a partition with this error code still depends on the group's check."""
    return code in (0, OffsetMetadataTooLarge.code)
