"""What one connection's requests cost its client, and how long it is not heard after too many (KIP-219)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

from oncelog.broker.handlers.produce_direct import told_to_wait
from oncelog.broker.quota_manager import Quotas
from oncelog.broker.security.authenticator import Door
from oncelog.wire.frames import RequestHeader, decode_request_header


class Throttle:
    """One connection's charges and its mute time. `hold` is told when nothing may be begun, and when it may.

    The client pays for all the time that its requests take on the broker's thread: reading them (also
    those that cannot be read), carrying them out, writing the answers, also those that come later.
    """

    __slots__ = ("_client_id", "_hold", "_mark", "_quotas", "_timer", "_until_ms")

    def __init__(self, quotas: Quotas, hold: Callable[[bool], None]) -> None:
        self._quotas, self._hold = quotas, hold
        self._until_ms = 0
        self._timer: asyncio.TimerHandle | None = None
        self._client_id: str | None = None
        self._mark = 0.0
        """perf_counter up to which time is charged; 0: nothing is measured."""

    @property
    def is_silent(self) -> bool:
        return self._timer is not None

    def measured(self, door: Door, now_ms: int, work: Callable[[], Any]) -> Any:
        """Return what `work` returns, and charge its time, however it ends. Calls may be nested."""
        is_outer = not self._mark
        if is_outer:
            self._mark = perf_counter()
        try:
            return work()
        finally:
            self.spent(door, now_ms)
            if is_outer:
                self._mark = 0.0

    def spent(self, door: Door, now_ms: int) -> None:
        """Charge the time since the last charge, while time is measured."""
        if self._mark:
            now = perf_counter()
            self._quotas.worked(door.payer(self._client_id), now - self._mark, now_ms)
            self._mark = now

    def identified(self, header: RequestHeader) -> None:
        """Note whose request it is; until then time is charged to the client id of the one before."""
        self._client_id = header.client_id

    def answered(self, door: Door, header: RequestHeader, answer: Any, now_ms: int) -> int:
        """Tell an answer its throttle time (ms) and keep to it."""
        self._client_id = header.client_id
        self.spent(door, now_ms)
        wait_ms = self._quotas.answered(header.api_key, door.payer(header.client_id), answer, now_ms)
        if now_ms + wait_ms > max(self._until_ms, now_ms):
            self._wait(wait_ms, now_ms, self._speak_again)
        return wait_ms

    def produced(self, door: Door, header: RequestHeader, size_bytes: int, now_ms: int) -> None:
        """Charge the bytes of a Produce request."""
        self._quotas.produced(door.payer(header.client_id), size_bytes, now_ms)

    def produced_directly(self, door: Door, frame: memoryview, response: bytes, now_ms: int) -> bytes:
        """Charge a plain Produce; returns the response as it is to leave."""
        header = decode_request_header(frame)
        self.produced(door, header, len(frame), now_ms)
        wait_ms = self.answered(door, header, None, now_ms)
        return told_to_wait(response, wait_ms) if wait_ms else response

    def turns_away(self, host: str, now_ms: int, transport: asyncio.Transport) -> bool:
        """Whether the connection is one too many; it then ends after a while. Counted, not logged."""
        wait_ms = self._quotas.admit(host, now_ms)
        if wait_ms:
            self._wait(wait_ms, now_ms, transport.abort)
        return wait_ms > 0

    def _wait(self, wait_ms: int, now_ms: int, then: Callable[[], None]) -> None:
        was_silent = self.is_silent
        self.cancel()
        self._until_ms = now_ms + wait_ms
        self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, then)
        if not was_silent:
            self._hold(True)

    def _speak_again(self) -> None:
        self._timer = None
        self._hold(False)

    def cancel(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
