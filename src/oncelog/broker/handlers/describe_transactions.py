"""DescribeTransactions (key 65), version 0: the coordinator's state of transactional ids (behaviour T14).

Topics that the client may not describe are left out. Errors: TRANSACTIONAL_ID_NOT_FOUND for an unknown id,
INVALID_REQUEST for an empty one. Source: KIP-664; Kafka's TransactionCoordinator.handleDescribeTransactions.
"""

from __future__ import annotations

from itertools import groupby

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, name_cost, respond_in_steps
from oncelog.errors import (
    InvalidRequest,
    NotCoordinator,
    TransactionalIdAuthorizationFailed,
    TransactionalIdNotFound,
)
from oncelog.rules.security.authorization import ResourceType
from oncelog.rules.transactions.entry import TransactionEntry
from oncelog.wire.messages import DescribeTransactionsRequest, DescribeTransactionsResponse

KEY = 65

_State = DescribeTransactionsResponse.TransactionState


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _answer_all(state, request))
    return answer


def _answer_all(state: BrokerState, request: Request) -> Work[DescribeTransactionsResponse]:
    message: DescribeTransactionsRequest = request.message
    response = DescribeTransactionsResponse(transaction_states=[])
    budget = state.step_budget()
    for transactional_id in dict.fromkeys(message.transactional_ids):
        transaction = _describe(state, request, transactional_id)
        response.transaction_states.append(transaction)
        if budget.spend(
            name_cost(transactional_id) + sum(len(topic.partitions) for topic in transaction.topics)
        ):
            yield None
    return response


def _describe(state: BrokerState, request: Request, transactional_id: str) -> _State:
    if not transactional_id:
        return _State(transactional_id=transactional_id, error_code=InvalidRequest.code)
    if not request.is_authorized(ResourceType.TRANSACTIONAL_ID, transactional_id):
        return _State(transactional_id=transactional_id, error_code=TransactionalIdAuthorizationFailed.code)
    try:
        entry = state.transactions.get(transactional_id)
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
        topics=[t for t in _topics(entry) if request.is_authorized(ResourceType.TOPIC, t.topic)],
    )


def _topics(entry: TransactionEntry) -> list[DescribeTransactionsResponse.TopicData]:
    return [
        DescribeTransactionsResponse.TopicData(topic=topic, partitions=[tp.partition for tp in group])
        for topic, group in groupby(sorted(entry.partitions), key=lambda tp: tp.topic)
    ]
