"""DescribeTransactions (key 65), version 0: what the coordinator knows of transactional ids (row T14).

An unknown id is 105, an empty one 42.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from oncelog.broker.stepwise import Pace, Work, answer_in_steps, name_cost
from oncelog.errors import (
    InvalidRequest,
    NotCoordinator,
    TransactionalIdAuthorizationFailed,
    TransactionalIdNotFound,
)
from oncelog.rules.security.authorization import ResourceType
from oncelog.rules.transactions.entry import TransactionEntry
from oncelog.wire.messages import DescribeTransactionsRequest, DescribeTransactionsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Answer, Node, Request

KEY = 65

_State = DescribeTransactionsResponse.TransactionState


def handle(node: Node, request: Request, now_ms: int) -> Answer:
    answer: Answer = answer_in_steps(node, _answer_all(node, request))
    return answer


def _answer_all(node: Node, request: Request) -> Work[DescribeTransactionsResponse]:
    message: DescribeTransactionsRequest = request.message
    response = DescribeTransactionsResponse(transaction_states=[])
    pace = Pace(node.limits.request_step_elements)
    for transactional_id in dict.fromkeys(message.transactional_ids):
        state = _describe(node, request, transactional_id)
        response.transaction_states.append(state)
        if pace.next(name_cost(transactional_id) + sum(len(topic.partitions) for topic in state.topics)):
            yield None
    return response


def _describe(node: Node, request: Request, transactional_id: str) -> _State:
    if not transactional_id:
        return _State(transactional_id=transactional_id, error_code=InvalidRequest.code)
    if not request.may(ResourceType.TRANSACTIONAL_ID, transactional_id):
        return _State(transactional_id=transactional_id, error_code=TransactionalIdAuthorizationFailed.code)
    try:
        entry = node.transactions.get(transactional_id)
    except NotCoordinator as error:
        return _State(transactional_id=transactional_id, error_code=error.code)
    if entry is None:
        return _State(transactional_id=transactional_id, error_code=TransactionalIdNotFound.code)
    return _State(
        transactional_id=transactional_id,
        transaction_state=entry.state.label,
        transaction_timeout_ms=entry.timeout_ms,
        transaction_start_time_ms=entry.start_ms,
        producer_id=entry.producer_id,
        producer_epoch=entry.producer_epoch,
        topics=[t for t in _topics(entry) if request.may(ResourceType.TOPIC, t.topic)],
    )


def _topics(entry: TransactionEntry) -> list[DescribeTransactionsResponse.TopicData]:
    return [
        DescribeTransactionsResponse.TopicData(topic=topic, partitions=[at.partition for at in group])
        for topic, group in groupby(sorted(entry.partitions), key=lambda at: at.topic)
    ]
