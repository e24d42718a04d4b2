"""Records the memory that one connection uses of the server's two budgets, for requests and for responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncelog.rules.limits.connections import CloseReason, MemoryBudget

Evict = Callable[[MemoryBudget[Any], CloseReason, int], None]
"""A function of (budget, reason, now_ms) that closes the slowest connections until the total is within the
budget.
"""


class MemoryAccount:
    """The memory of one connection (`owner`) in the server's two budgets.

    The setting queued.max.request.bytes limits `requests`, and oncelog.queued.max.response.bytes limits
    `responses`. When a limit is exceeded, `evict` is called. `evict` closes the connections that send or
    receive their bytes slowest, which may include `owner`.
    """

    __slots__ = (
        "_evict",
        "_flushed_bytes",
        "_owner",
        "_requests",
        "_responses",
        "is_holding_requests",
    )

    def __init__(
        self, owner: object | None, requests: MemoryBudget[Any], responses: MemoryBudget[Any], evict: Evict
    ) -> None:
        self._owner, self._requests, self._responses, self._evict = owner, requests, responses, evict
        self._flushed_bytes = 0
        self.is_holding_requests = False
        """True while the request budget contains an entry for this connection."""

    def set_requests(self, held_bytes: int, received_bytes: int, now_ms: int) -> None:
        """Record the memory of the requests that are not carried out yet.

        `received_bytes`: bytes received since the connection opened.
        """
        self.is_holding_requests = held_bytes > 0
        if self._requests.update(self._owner, held_bytes, received_bytes, now_ms):
            self._evict(self._requests, CloseReason.REQUEST_BYTES, now_ms)

    def set_responses(self, held_bytes: int, flushed_bytes: int, now_ms: int) -> None:
        """Record the memory of the responses that the client has not accepted.

        `flushed_bytes`: bytes sent since the connection opened.
        """
        if self._owner is None or not (held_bytes or self._owner in self._responses):
            return
        if self._responses.update(self._owner, held_bytes, flushed_bytes, now_ms):
            self._evict(self._responses, CloseReason.RESPONSE_BYTES, now_ms)

    def note_flushed(self, flushed_bytes: int) -> bool:
        """Return True if `flushed_bytes`, the bytes sent so far, has grown since the last call."""
        has_grown = flushed_bytes > self._flushed_bytes and self._owner is not None
        if has_grown:
            self._flushed_bytes = flushed_bytes
        return has_grown

    def close(self) -> None:
        """Remove the connection from both budgets. Called when the connection has ended."""
        self._requests.release(self._owner)
        self._responses.release(self._owner)
        self._owner = None
