"""Client quotas of one connection: charges the cost of its requests, and mutes the connection (KIP-219).

While a connection is muted, the broker does not read from it and starts none of its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from oncelog.broker.handlers.produce_direct import with_throttle_time
from oncelog.broker.quota_manager import QuotaManager
from oncelog.rules.limits.quotas import counted_client_id
from oncelog.server.connection_auth import ConnectionAuth
from oncelog.wire.frames import RequestHeader, decode_request_header

T = TypeVar("T")


class Throttle:
    """Charges the quotas of one connection's client and mutes the connection.

    `on_mute` is called with True when the connection is muted, and with False when it is unmuted.

    The client is charged for all time that its requests take on the broker's thread: decoding, even if it
    fails, handling, and encoding of responses, including pending responses.
    """

    __slots__ = (
        "_auth",
        "_charged_until",
        "_client_id",
        "_quotas",
        "_timer",
        "_until_ms",
        "is_muted",
        "on_mute",
    )

    def __init__(self, quotas: QuotaManager, auth: ConnectionAuth, on_mute: Callable[[bool], None]) -> None:
        self._quotas, self._auth, self.on_mute = quotas, auth, on_mute
        self.is_muted = False
        self._until_ms = 0
        self._timer: asyncio.TimerHandle | None = None
        self._client_id: str | None = None
        self._charged_until = 0.0
        """The perf_counter time of the last charge, or of the start of `measure`; 0 outside `measure`."""

    def measure(self, now_ms: int, work: Callable[[], T]) -> T:
        """Call `work`, charge its time even if it raises, and return its result. Calls may be nested.

        `now_ms`: the current clock time, up to which the usage of the quota drains.
        """
        is_outer = not self._charged_until
        if is_outer:
            self._charged_until = perf_counter()
        try:
            return work()
        finally:
            self._charge_time(now_ms)
            if is_outer:
                self._charged_until = 0.0

    def _charge_time(self, now_ms: int) -> None:
        """Charge the time since the last charge. Outside `measure`, do nothing."""
        if self._charged_until:
            now = perf_counter()
            self._quotas.charge_request_time(
                self._auth.quota_principal(self._client_id), now - self._charged_until, now_ms
            )
            self._charged_until = now

    def set_client_id(self, header: RequestHeader) -> None:
        """Set the client id to which the time since the last charge will be charged.

        If the header of a request cannot be decoded, this method is not called. The time of that request is
        then charged to the client id of the previous request.
        """
        self._client_id = counted_client_id(header.client_id)

    def charge_response(self, header: RequestHeader, response: object, now_ms: int) -> int:
        """Charge a response, set its throttle time, and mute the connection for that time.

        Return the throttle time in milliseconds.
        """
        self._client_id = counted_client_id(header.client_id)
        self._charge_time(now_ms)
        principal = self._auth.quota_principal(header.client_id)
        throttle_ms = self._quotas.throttle_response(header.api_key, principal, response, now_ms)
        if now_ms + throttle_ms > max(self._until_ms, now_ms):
            self._mute(throttle_ms, now_ms, self._unmute)
        return throttle_ms

    def charge_produce(self, header: RequestHeader, size_bytes: int, now_ms: int) -> None:
        """Charge the bytes of a Produce request."""
        self._quotas.charge_produce(self._auth.quota_principal(header.client_id), size_bytes, now_ms)

    def charge_direct_produce(self, frame: memoryview, response: bytes, now_ms: int) -> bytes:
        """Charge a request of `produce_direct`. Return `response` with the throttle time set."""
        header = decode_request_header(frame)
        self.charge_produce(header, len(frame), now_ms)
        throttle_ms = self.charge_response(header, None, now_ms)
        return with_throttle_time(response, throttle_ms) if throttle_ms else response

    def rejects(self, host: str, now_ms: int, transport: asyncio.Transport) -> bool:
        """Return True if the client's IP address exceeds its connection rate.

        As on Kafka (KIP-612), the connection is muted first and closed later. This delays the client's next
        attempt. Rejected connections are counted in the metrics but not logged.
        """
        throttle_ms = self._quotas.admit_connection(host, now_ms)
        if throttle_ms:
            self._mute(throttle_ms, now_ms, transport.abort)
        return throttle_ms > 0

    def _mute(self, throttle_ms: int, now_ms: int, then: Callable[[], None]) -> None:
        was_muted = self.is_muted
        self.cancel()
        self._until_ms = now_ms + throttle_ms
        self._timer = asyncio.get_running_loop().call_later(throttle_ms / 1000, then)
        self.is_muted = True
        if not was_muted:
            self.on_mute(True)

    def _unmute(self) -> None:
        self._timer, self.is_muted = None, False
        self.on_mute(False)

    def cancel(self) -> None:
        """Stop the timer that would unmute or close the connection."""
        if self._timer is not None:
            self._timer.cancel()
