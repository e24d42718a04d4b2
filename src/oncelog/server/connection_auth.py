"""The authentication state of one connection, in attributes that are cheap to read for every request.

`broker.security.authenticator` decides which requests are allowed. On most connections every request is
allowed at any time. This module caches that fact and the client's access rights.
"""

from __future__ import annotations

from collections.abc import Callable

from oncelog.broker.security.authorizer import Access
from oncelog.broker.settings.listeners import Listener
from oncelog.broker.state import BrokerState
from oncelog.rules.limits.quotas import QuotaPrincipal


class ConnectionAuth:
    """The authenticator of one connection, and cached results of the authentication.

    `on_authenticated` is called after the authentication and after each re-authentication.
    """

    __slots__ = ("_node", "access", "allows_any_request", "authenticator", "host", "on_authenticated")

    def __init__(self, node: BrokerState, listener: Listener, on_authenticated: Callable[[], None]) -> None:
        self._node, self.on_authenticated = node, on_authenticated
        self.authenticator = node.new_authenticator(listener, needs_sasl=True)
        self.host = ""
        """IP address of the client."""
        self.access: Access | None = None
        """The client's rights; None before authentication, or if the broker has no authorizer."""
        self.allows_any_request = False
        """True if requests need no check: the client is authenticated, and its session never expires."""

    def start(self, listener: Listener, host: str, *, needs_sasl: bool, principal: str) -> None:
        """Begin the authentication of a client.

        `host`: the client's IP address. `needs_sasl`: True if the listener uses SASL. `principal`: the
        principal of the client's TLS certificate, or ANONYMOUS.
        """
        self.host = host
        self.authenticator = self._node.new_authenticator(
            listener, host, needs_sasl=needs_sasl, principal=principal
        )
        self.update()

    def update(self) -> None:
        """Update the cached results. Must be called after each SASL request."""
        self.allows_any_request = self.authenticator.allows_any_request
        if self.authenticator.is_authenticated:
            self.access = None if self._node.authorizer is None else self.authenticator.access
            self.on_authenticated()

    @property
    def is_authenticated(self) -> bool:
        return self.authenticator.is_authenticated

    def check(self, api_key: int, now_ms: int) -> str | None:
        """Return the reason why a request is not allowed now; None if it is allowed."""
        return None if self.allows_any_request else self.authenticator.check_request_allowed(api_key, now_ms)

    def quota_principal(self, client_id: str | None) -> QuotaPrincipal | None:
        """Return the user and client id whose quotas apply; None before the client is authenticated."""
        return self.authenticator.quota_principal(client_id)
