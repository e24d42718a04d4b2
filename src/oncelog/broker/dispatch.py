"""The entry points of a broker without I/O: handle requests, and run timed work.

The server decodes a request, calls `refuse`, then `handle`. The requests of a connection that are handled in
one turn of the event loop are a round. After each round, the server calls `end_round`. The server also calls
`tick`, no later than `next_wakeup_ms`. Each API has a file in `broker.handlers`.
"""

from __future__ import annotations

from oncelog.broker.handlers import api_versions
from oncelog.broker.purgatory import Disconnect
from oncelog.broker.registry import HANDLERS
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import Message


def refuse(state: BrokerState, header: RequestHeader) -> Message | Disconnect | None:
    """Return the response to a request whose API or version is not offered; None if both are offered.

    ApiVersions gets its version 0 response (KIP-35). For other APIs, the connection is closed, as in Kafka.
    """
    api = state.offered.get(header.api_key)
    if api is not None and api.first_version <= header.api_version <= api.max_version:
        return None
    if header.api_key == api_versions.KEY:
        return api_versions.unsupported()
    name = api.name if api else f"API key {header.api_key}"
    return Disconnect(f"{name} version {header.api_version} is not supported")


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    """Handle a request for which `refuse` returned None, and return its answer."""
    answer: Answer = HANDLERS[request.header.api_key](state, request, now_ms)
    return answer


def end_round(state: BrokerState) -> None:
    """Complete the delayed fetches that the requests of this round have satisfied.

    Also reset two counters: the transaction markers that this round has written, and the partitions that it
    has read for delayed fetches. Each counter has a maximum per round; further work is done in background
    steps.
    """
    state.transactions.end_round()
    state.complete_satisfied_fetches()
    state.fetch_purgatory.end_round()


def next_wakeup_ms(state: BrokerState) -> int:
    """Return the time in ms of the next deadline, by which `tick` must be called."""
    first_ms, groups = state.periodic.next_ms, state.groups
    for due_ms in (
        state.fetch_purgatory.next_deadline_ms,
        groups.next_deadline_ms,
        groups.consumers.next_deadline_ms,
    ):
        if due_ms is not None and due_ms < first_ms:
            first_ms = due_ms
    return first_ms


def tick(state: BrokerState, now_ms: int) -> None:
    """Complete fetches whose max_wait_ms has passed, handle group timeouts, and run due periodic tasks."""
    state.fetch_purgatory.expire(now_ms)
    state.fetch_purgatory.end_round()
    state.groups.tick(now_ms)
    state.groups.consumers.tick(now_ms)
    state.periodic.run_due(now_ms)
