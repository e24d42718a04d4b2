"""What one connection's requests cost its client, and how long it is not heard after too many (KIP-219)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

from oncelog.broker.apis.produce_direct import told_to_wait
from oncelog.broker.door import Door
from oncelog.broker.quotas import Quotas
from oncelog.wire.frames import RequestHeader, decode_request_header


class Throttle:
    """One connection's. `hold` is told when nothing of it is to be read or begun, and when that is over."""

    __slots__ = ("_hold", "_quotas", "_timer", "_until_ms")

    def __init__(self, quotas: Quotas, hold: Callable[[bool], None]) -> None:
        self._quotas, self._hold = quotas, hold
        self._until_ms = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_silent(self) -> bool:
        return self._timer is not None

    def handled(self, door: Door, header: RequestHeader, size_bytes: int, began: float, now_ms: int) -> None:
        """A request of this size has been carried out, begun at `began` (perf_counter)."""
        payer = door.payer(header.client_id)
        self._quotas.requested(header.api_key, payer, size_bytes, perf_counter() - began, now_ms)

    def answered(self, door: Door, header: RequestHeader, answer: Any, now_ms: int) -> int:
        """Tell an answer its throttle time (ms) and keep to it."""
        wait_ms = self._quotas.answered(header.api_key, door.payer(header.client_id), answer, now_ms)
        if now_ms + wait_ms > max(self._until_ms, now_ms):
            self._wait(wait_ms, now_ms, self._speak_again)
        return wait_ms

    def produced(self, door: Door, frame: memoryview, response: bytes, began: float, now_ms: int) -> bytes:
        """Both for a plain Produce; the response as it is to leave."""
        header = decode_request_header(frame)
        self.handled(door, header, len(frame), began, now_ms)
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
