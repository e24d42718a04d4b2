"""ListTransactions (key 66), versions 0-2: the transactional ids of this broker, filtered (behaviour T14).

Filters are producer ids and names of states; the response lists the state names that are unknown. Version 1
and later also filter by a minimum duration in ms, and version 2 by a regular expression that must match the
whole id. Only ids that the client may describe are matched, so that the response time reveals nothing about
others. Errors: INVALID_REGULAR_EXPRESSION if RE2 rejects the expression.
Source: KIP-664, KIP-994, KIP-1152; Kafka's TransactionStateManager.listTransactionStates.
"""

from __future__ import annotations

from oncelog.broker.coordinators.patterns import Pattern, matching_texts
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import InvalidRegularExpression
from oncelog.rules.security.authorization import ResourceType
from oncelog.rules.transactions.entry import TransactionEntry, TransactionState
from oncelog.wire.messages import ListTransactionsRequest, ListTransactionsResponse

KEY = 66

_State = ListTransactionsResponse.TransactionState

_STATES = {state.label for state in TransactionState} | {"Dead", "PrepareEpochFence"}


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: ListTransactionsRequest = request.message
    pattern = None
    if message.transactional_id_pattern:
        try:
            pattern = Pattern(message.transactional_id_pattern)
        except InvalidRegularExpression as error:
            return ListTransactionsResponse(error_code=error.code)
    answer: Answer = respond_in_steps(state.slots, _answer_all(state, request, pattern, now_ms))
    return answer


def _answer_all(
    state: BrokerState, request: Request, pattern: Pattern | None, now_ms: int
) -> Work[ListTransactionsResponse]:
    message: ListTransactionsRequest = request.message
    # Use sets, because a request may have 20,000 filters. With a list, each id would be compared with all of
    # them. See test_filters_cost_no_work_for_each_id.
    states, producer_ids = frozenset(message.state_filters), frozenset(message.producer_id_filters)
    matching: list[_State] = []
    budget = state.step_budget()
    for entry in list(state.transactions.all()):
        if budget.spend():
            yield None
        if not request.is_authorized(ResourceType.TRANSACTIONAL_ID, entry.transactional_id):
            continue
        if (
            (not states or entry.state.label in states)
            and (not producer_ids or entry.producer_id in producer_ids)
            and _is_long(entry, message.duration_filter, now_ms)
        ):
            matching.append(_list_transaction(entry))
    if pattern is not None:
        step_cost = state.limits.pattern_step_cost
        matching = yield from matching_texts(
            pattern, matching, lambda listed: listed.transactional_id, step_cost
        )
    return ListTransactionsResponse(
        unknown_state_filters=[name for name in message.state_filters if name not in _STATES],
        transaction_states=matching,
    )


def _list_transaction(entry: TransactionEntry) -> _State:
    return _State(
        transactional_id=entry.transactional_id,
        producer_id=entry.producer_id,
        transaction_state=entry.state.label,
    )


def _is_long(entry: TransactionEntry, duration_filter_ms: int, now_ms: int) -> bool:
    """Return True if the transaction is older than `duration_filter_ms`.

    A negative filter matches every id.
    """
    # As in Kafka, an id without a transaction matches every duration, because its start time is -1.
    return duration_filter_ms < 0 or now_ms - entry.start_ms > duration_filter_ms
