"""ListTransactions (key 66), versions 0-2: the transactional ids of this node, filtered (row T14).

Filters: states by name (names that are none come back), producer ids, v1 open for longer than so many
milliseconds, v2 a regular expression over the whole id; one that does not parse is 132.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from oncelog.errors import InvalidRegularExpression
from oncelog.rules.authorization import ResourceType
from oncelog.rules.transaction_entry import TransactionEntry, TransactionState
from oncelog.wire.messages import ListTransactionsRequest, ListTransactionsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 66

_STATES = {state.label for state in TransactionState} | {"Dead", "PrepareEpochFence"}


def handle(node: Node, request: Request, now_ms: int) -> ListTransactionsResponse:
    message: ListTransactionsRequest = request.message
    try:
        pattern = re.compile(message.transactional_id_pattern or ".*", re.DOTALL)
    except re.error:
        return ListTransactionsResponse(error_code=InvalidRegularExpression.code)
    unknown = [name for name in message.state_filters if name not in _STATES]
    chosen = [
        entry
        for entry in node.transactions.all()
        if _is_chosen(entry, message, now_ms)
        and pattern.fullmatch(entry.transactional_id)
        and request.may(ResourceType.TRANSACTIONAL_ID, entry.transactional_id)
    ]
    return ListTransactionsResponse(
        unknown_state_filters=unknown,
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
    return message.duration_filter < 0 or (
        entry.start_ms >= 0 and now_ms - entry.start_ms > message.duration_filter
    )
