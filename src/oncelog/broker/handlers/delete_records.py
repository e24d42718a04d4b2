"""DeleteRecords (key 21), versions 0-2: move a partition's log start offset up.

The requested offset -1 means the high watermark.

    UNKNOWN_TOPIC_OR_PARTITION  there is no such partition
    INVALID_TOPIC_EXCEPTION     an internal topic
    OFFSET_OUT_OF_RANGE         an offset above the high watermark, or below -1
    POLICY_VIOLATION            a compacted topic whose cleanup.policy does not include delete
    KAFKA_STORAGE_ERROR         the disk failed

Source: KIP-107; Kafka's KafkaApis.handleDeleteRecordsRequest.
"""

from __future__ import annotations

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import (
    BrokerError,
    InvalidTopicException,
    KafkaStorageError,
    OffsetOutOfRange,
    PolicyViolation,
    StorageError,
)
from oncelog.rules.security.authorization import ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import DeleteRecordsRequest, DeleteRecordsResponse

KEY = 21
TO_HIGH_WATERMARK = -1

_Result = DeleteRecordsResponse.DeleteRecordsPartitionResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _delete_all(state, request, now_ms))
    return answer


def _delete_all(state: BrokerState, request: Request, now_ms: int) -> Work[DeleteRecordsResponse]:
    message: DeleteRecordsRequest = request.message
    response, budget = DeleteRecordsResponse(topics=[]), state.step_budget()
    for topic in message.topics:
        results: list[_Result] = []
        response.topics.append(
            DeleteRecordsResponse.DeleteRecordsTopicResult(name=topic.name, partitions=results)
        )
        if budget.spend():
            yield None
        for requested in topic.partitions:
            tp = TopicPartition(topic.name, requested.partition_index)
            result, is_long = _delete(state, request, tp, requested.offset, now_ms)
            results.append(result)
            # A deletion may close a segment, which creates files and may sync a directory. It also renames
            # the files of up to eight segments. So it ends the step. See
            # test_each_deletion_of_records_is_a_step_of_its_own.
            if budget.spend(state.limits.request_step_elements if is_long else 1):
                yield None
    return response


def _delete(
    state: BrokerState, request: Request, tp: TopicPartition, offset: int, now_ms: int
) -> tuple[_Result, bool]:
    """Return the result of a partition, and True if there was something to delete.

    An earlier request, or one on a full disk, may have left segments below the log start. Then there is
    something to delete, although the log start does not move. See
    test_a_repeated_deletion_of_records_ends_steps_too.
    """
    result, is_long = _Result(partition_index=tp.partition, low_watermark=-1), False
    try:
        request.authorize(ResourceType.TOPIC, tp.topic)
        topic, partition = state.topics.partition(tp)
        if topic.is_internal:
            raise InvalidTopicException(f"{tp.topic} is an internal topic; its records cannot be deleted")
        if topic.settings["cleanup.policy"] == ["compact"]:
            raise PolicyViolation(
                f"{tp.topic} is compacted (cleanup.policy=compact); its records cannot be deleted by offset"
            )
        target = partition.high_watermark if offset == TO_HIGH_WATERMARK else offset
        if not 0 <= target <= partition.high_watermark:
            raise OffsetOutOfRange(f"offset {offset} is outside 0..{partition.high_watermark}")
        is_long = target > partition.log_start_offset or not partition.log.is_trimmed
        result.low_watermark = partition.delete_records(target, now_ms)
    except BrokerError as error:
        result.error_code = error.code
    except StorageError:
        result.error_code = KafkaStorageError.code
    else:
        state.fetch_purgatory.complete_all(tp)
    return result, is_long
