"""DescribeTopicPartitions (key 75), version 0: the partitions of topics, page by page (KIP-966).

Topics are sorted by name, and each is returned once. A request without topics means all topics. A page has at
most max.request.partition.size.limit partitions. The request may lower this limit, but not below one.
`next_cursor` is the first partition of the next page. A cursor outside the request's topics, or at a negative
partition, gets INVALID_REQUEST for every topic. Source: Kafka's DescribeTopicPartitionsRequestHandler.
"""

from __future__ import annotations

from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authorizer import allowed_bits
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps, sorted_in_steps
from oncelog.broker.topics.topic_names import check_topic_name
from oncelog.errors import BrokerError, InvalidRequest, UnknownTopicOrPartition
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import NO_ID, DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse

KEY = 75

_Topic = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic
_Partition = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponsePartition


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _describe_page(state, request))
    return answer


def _describe_page(state: BrokerState, request: Request) -> Work[DescribeTopicPartitionsResponse]:
    message: DescribeTopicPartitionsRequest = request.message
    cursor = message.cursor
    requested = {topic.name for topic in message.topics}
    first_name, first_index = ("", 0) if cursor is None else (cursor.topic_name, cursor.partition_index)
    if first_index < 0 or (cursor is not None and requested and first_name not in requested):
        return DescribeTopicPartitionsResponse(
            topics=[_error_result(topic.name, InvalidRequest()) for topic in message.topics]
        )
    limit = min(message.response_partition_limit, state.settings["max.request.partition.size.limit"])
    page, budget = _Page(state, max(limit, 1)), state.step_budget()
    names = requested or {topic.name for topic in state.topics.all()}
    unauthorized = []
    for name in (yield from sorted_in_steps((name for name in names if name >= first_name), budget)):
        if not requested and state.topics.get(name) is None:
            continue  # deleted since an earlier step
        cost = 1
        try:
            request.authorize(ResourceType.TOPIC, name)
        except BrokerError as error:
            if requested:
                unauthorized.append(_error_result(name, error))
        else:
            # End the page only after the authorization, because `next_cursor` must not name a topic that the
            # client may not describe.
            if page.is_full:
                page.end_at(name, 0)
                break
            topic = page.add(name, first_index if name == first_name else 0)
            topic.topic_authorized_operations = allowed_bits(request.access, ResourceType.TOPIC, name)
            cost += len(topic.partitions)
        is_step_full = budget.spend(cost)
        if page.next_cursor is not None:
            break
        if is_step_full:
            yield None
    return DescribeTopicPartitionsResponse(topics=page.topics + unauthorized, next_cursor=page.next_cursor)


def _error_result(name: str, error: BrokerError) -> _Topic:
    return _Topic(error_code=error.code, name=name, topic_id=NO_ID)


class _Page:
    """The topics of one response, with at most `limit` partitions in total."""

    def __init__(self, state: BrokerState, limit: int) -> None:
        self._state, self._remaining_count = state, limit
        self.topics: list[_Topic] = []
        self.next_cursor: DescribeTopicPartitionsResponse.Cursor | None = None

    @property
    def is_full(self) -> bool:
        return self._remaining_count <= 0

    def end_at(self, name: str, index: int) -> None:
        """Let the next page begin at this partition."""
        self.next_cursor = DescribeTopicPartitionsResponse.Cursor(topic_name=name, partition_index=index)

    def add(self, name: str, first_index: int) -> _Topic:
        """Describe the topic's partitions from `first_index` on, and return the result.

        If not all of them fit, set the cursor.
        """
        described = self._describe(name, first_index)
        self.topics.append(described)
        return described

    def _describe(self, name: str, first_index: int) -> _Topic:
        topic = self._state.topics.get(name)
        if topic is None:
            try:
                check_topic_name(name)
            except BrokerError as error:
                return _error_result(name, error)
            return _error_result(name, UnknownTopicOrPartition())
        node_ids = [self._state.node_id]
        end_index = min(len(topic.partitions), first_index + self._remaining_count)
        described = [
            _Partition(
                partition_index=index,
                leader_id=self._state.node_id,
                leader_epoch=topic.partitions[index].leader_epoch,
                replica_nodes=node_ids,
                isr_nodes=node_ids,
                eligible_leader_replicas=[],
                last_known_elr=[],
            )
            for index in range(first_index, end_index)
        ]
        self._remaining_count -= len(described)
        if end_index < len(topic.partitions):
            self.end_at(name, end_index)
        return _Topic(name=name, topic_id=topic.topic_id, is_internal=topic.is_internal, partitions=described)
