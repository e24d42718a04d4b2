"""ListTransactions (key 66), versions 0-2: the transactional ids of this node, filtered (row T14).

Filters: states by name (names that are none come back), producer ids, v1 open for longer than so many
milliseconds, v2 a regular expression over the whole id (INVALID_REGULAR_EXPRESSION if RE2 refuses it).
Only ids that the client may describe are matched, so that the time it takes tells nothing of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.patterns import Pattern, matching_texts
from oncelog.broker.stepwise import Pace, Work, answer_in_steps
from oncelog.errors import InvalidRegularExpression
from oncelog.rules.authorization import ResourceType
from oncelog.rules.transaction_entry import TransactionEntry, TransactionState
from oncelog.wire.messages import ListTransactionsRequest, ListTransactionsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Answer, Node, Request

KEY = 66

_STATES = {state.label for state in TransactionState} | {"Dead", "PrepareEpochFence"}


def handle(node: Node, request: Request, now_ms: int) -> Answer:
    message: ListTransactionsRequest = request.message
    pattern = None
    if message.transactional_id_pattern:
        try:
            pattern = Pattern(message.transactional_id_pattern)
        except InvalidRegularExpression as error:
            return ListTransactionsResponse(error_code=error.code)
    answer: Answer = answer_in_steps(node, _answer_all(node, request, pattern, now_ms))
    return answer


def _answer_all(
    node: Node, request: Request, pattern: Pattern | None, now_ms: int
) -> Work[ListTransactionsResponse]:
    message: ListTransactionsRequest = request.message
    chosen, pace = [], Pace(node.limits.request_step_elements)
    for entry in list(node.transactions.all()):
        may_see = request.may(ResourceType.TRANSACTIONAL_ID, entry.transactional_id)
        if may_see and _is_chosen(entry, message, now_ms):
            chosen.append(entry)
        if pace.next():
            yield None
    if pattern is not None:
        step_cost = node.limits.pattern_step_cost
        chosen = yield from matching_texts(pattern, chosen, lambda entry: entry.transactional_id, step_cost)
    return _response(message, chosen)


def _response(message: ListTransactionsRequest, chosen: list[TransactionEntry]) -> ListTransactionsResponse:
    return ListTransactionsResponse(
        unknown_state_filters=[name for name in message.state_filters if name not in _STATES],
        transaction_states=[
            ListTransactionsResponse.TransactionState(
                transactional_id=entry.transactional_id,
                producer_id=entry.producer_id,
                transaction_state=entry.state.label,
            )
            for entry in chosen
        ],
    )


def _is_chosen(entry: TransactionEntry, message: ListTransactionsRequest, now_ms: int) -> bool:
    if message.state_filters and entry.state.label not in message.state_filters:
        return False
    if message.producer_id_filters and entry.producer_id not in message.producer_id_filters:
        return False
    # An id that has had no transaction started at -1, so it is older than any filter, as in Kafka.
    return message.duration_filter < 0 or now_ms - entry.start_ms > message.duration_filter
