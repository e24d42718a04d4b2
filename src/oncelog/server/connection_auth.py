"""The authentication state of one connection, in the form that the request path needs.

`broker.security.authenticator` decides which requests are allowed. Most connections may send any request at
any time, so this module keeps that fact and the client's access rights as plain attributes.
"""

from __future__ import annotations

from collections.abc import Callable

from oncelog.broker.security.authorizer import Access
from oncelog.broker.settings.listeners import Listener
from oncelog.broker.state import BrokerState
from oncelog.rules.limits.quotas import QuotaPrincipal


class ConnectionAuth:
    """The authenticator of one connection and the results of it that every request reads.

    `on_authenticated` is called when the client is known, and again after each re-authentication.
    """

    __slots__ = ("_node", "_on_authenticated", "access", "allows_any_request", "authenticator", "host")

    def __init__(self, node: BrokerState, listener: Listener, on_authenticated: Callable[[], None]) -> None:
        self._node, self._on_authenticated = node, on_authenticated
        self.authenticator = node.new_authenticator(listener, needs_sasl=True)
        self.host = ""
        """IP address of the client."""
        self.access: Access | None = None
        """The client's rights; None if it is not authenticated, or if the broker has no authorizer."""
        self.allows_any_request = False
        """True if no request has to be checked: authenticated, and the session never expires."""

    def start(self, listener: Listener, host: str, *, needs_sasl: bool, principal: str) -> None:
        """Begin authentication of a client from `host`, whose certificate names `principal`."""
        self.host = host
        self.authenticator = self._node.new_authenticator(
            listener, host, needs_sasl=needs_sasl, principal=principal
        )
        self.update()

    def update(self) -> None:
        """Read the authenticator's state, which SASL requests change."""
        self.allows_any_request = self.authenticator.allows_any_request
        if self.authenticator.is_authenticated:
            self.access = None if self._node.authorizer is None else self.authenticator.access
            self._on_authenticated()

    @property
    def is_authenticated(self) -> bool:
        return self.authenticator.is_authenticated

    def check(self, api_key: int, now_ms: int) -> str | None:
        """Return the reason for which a request must not be carried out; None if it may be."""
        return None if self.allows_any_request else self.authenticator.check_request_allowed(api_key, now_ms)

    def quota_principal(self, client_id: str | None) -> QuotaPrincipal | None:
        """Return whose quotas the client's requests use; None before it is authenticated."""
        return self.authenticator.quota_principal(client_id)
