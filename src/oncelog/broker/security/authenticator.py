"""The authenticator of a connection: its client's principal, and which requests the client may send now.

`rules.security.auth_state` has the states. Without SASL the client is authenticated from the start, by its
certificate or as User:ANONYMOUS.
Source: kafka SaslServerAuthenticator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oncelog.broker.security.authorizer import NO_ACCESS, Access
from oncelog.broker.security.sasl import BearerExchange, Exchange, PlainExchange, ScramExchange, TokenCheck
from oncelog.broker.security.users import Users
from oncelog.broker.settings.listeners import Listener
from oncelog.errors import SaslAuthenticationFailed, UnsupportedSaslMechanism
from oncelog.rules.limits.quotas import QuotaPrincipal, counted_client_id
from oncelog.rules.security.auth_state import (
    AuthState,
    may_authenticate_again,
    next_state,
    session_lifetime_ms,
)
from oncelog.rules.security.authorization import ANONYMOUS
from oncelog.rules.security.scram import Mechanism
from oncelog.wire.messages import Message

_SCRAM = {mechanism.label: mechanism for mechanism in Mechanism}


@dataclass(frozen=True, slots=True)
class CloseAfterResponse:
    """A response after which the connection is closed.

    The broker first waits `delay_ms`, then sends `response` and closes.
    """

    response: Message
    reason: str
    delay_ms: int


class Authenticator:
    """The authentication of one connection's client.

    `needs_sasl` is true if the listener uses SASL. `host` is the client's address. `access` returns the
    permissions of a principal and host. `wall_ms` converts `now_ms` to the wall clock's time.
    """

    def __init__(
        self,
        listener: Listener,
        host: str = "",
        *,
        needs_sasl: bool = False,
        principal: str = ANONYMOUS,
        users: Users,
        check_token: TokenCheck,
        new_name: Callable[[], str],
        access: Callable[[str, str], Access],
        wall_ms: Callable[[int], int],
    ) -> None:
        self.listener, self._host = listener, host
        self._users, self._check_token, self._new_name = users, check_token, new_name
        self._access_of, self._wall_ms = access, wall_ms
        self.needs_sasl = needs_sasl
        self.principal: str | None = None if needs_sasl else principal
        self.access: Access = NO_ACCESS if needs_sasl else access(principal, host)
        self._state = AuthState.UNAUTHENTICATED if needs_sasl else AuthState.AUTHENTICATED
        self._mechanism = ""
        self._exchange: Exchange | None = None
        self._expires_ms: int | None = None
        self._authenticated_again_ms: int | None = None
        self._quota_principal: QuotaPrincipal | None = None

    @property
    def is_authenticated(self) -> bool:
        """True once the client's principal is known, even if the client must re-authenticate."""
        return self.principal is not None

    @property
    def allows_any_request(self) -> bool:
        """True if every request is always allowed, because the client is authenticated and its session never
        expires.
        """
        return self._state is AuthState.AUTHENTICATED and self._expires_ms is None

    def quota_principal(self, client_id: str | None) -> QuotaPrincipal | None:
        """Return the user and client id whose quotas apply; None if the client is not authenticated."""
        if self.principal is None:
            return None
        counted = counted_client_id(client_id)
        if self._quota_principal is None or counted != self._quota_principal.client_id:
            self._quota_principal = QuotaPrincipal(self.principal.partition(":")[2], counted)
        return self._quota_principal

    def check_request_allowed(self, api_key: int, now_ms: int) -> str | None:
        """Move to the next state for a request that is about to be handled.

        Return None if the request is allowed. Otherwise return the reason, and the caller must close the
        connection.
        """
        if not self.needs_sasl:
            return None
        if (
            self._state is AuthState.AUTHENTICATED
            and self._expires_ms is not None
            and now_ms >= self._expires_ms
        ):
            self._state = AuthState.SESSION_EXPIRED
        may_again = may_authenticate_again(self._expires_ms, self._authenticated_again_ms, now_ms)
        state = next_state(self._state, api_key, may_authenticate_again=may_again)
        if state is None:
            return f"API key {api_key} is not allowed while {self._state.value}"
        if state is AuthState.REAUTHENTICATING and self._state is not state:
            self._authenticated_again_ms = now_ms
        self._state = state
        return None

    @property
    def is_authenticating(self) -> bool:
        """True from SaslHandshake to the end of the exchange.

        While it is False, the SASL requests that `check_request_allowed` allows get ILLEGAL_SASL_STATE.
        """
        return self._state in (AuthState.HANDSHAKE_DONE, AuthState.REAUTHENTICATING)

    @property
    def mechanisms(self) -> list[str]:
        return list(self.listener.settings["sasl.enabled.mechanisms"])

    def select_mechanism(self, mechanism: str) -> None:
        """Begin an exchange with this mechanism.

        Raises UnsupportedSaslMechanism if the mechanism is not enabled, or if the client logged in with
        another one.
        """
        if mechanism not in self.mechanisms:
            raise UnsupportedSaslMechanism(f"{mechanism!r} is not enabled")
        if self._mechanism not in ("", mechanism):
            raise UnsupportedSaslMechanism("re-authentication must use the mechanism of the first login")
        self._mechanism, self._exchange = mechanism, self._new_exchange(mechanism)

    def _new_exchange(self, mechanism: str) -> Exchange:
        if mechanism in _SCRAM:
            return ScramExchange(self._users, _SCRAM[mechanism], self._new_name())
        if mechanism == "OAUTHBEARER":
            return BearerExchange(self._check_token)
        if mechanism == "PLAIN":
            return PlainExchange(self._users)
        raise UnsupportedSaslMechanism(f"{mechanism!r} is not implemented")

    def answer(self, data: bytes, now_ms: int) -> tuple[bytes, int]:
        """Return the next message of the exchange, and the session lifetime in ms.

        The lifetime is 0 if the session never expires, and before the exchange is complete. Raises
        SaslAuthenticationFailed.
        """
        if self._exchange is None:
            raise SaslAuthenticationFailed("a mechanism must be selected first")
        wall_ms = self._wall_ms(now_ms)
        answer = self._exchange.answer(data, wall_ms)
        if self._exchange.user is None:
            return answer, 0
        expires_ms = self._exchange.expires_ms
        token_ms = None if expires_ms is None else max(expires_ms - wall_ms, 1)
        return answer, self._complete(f"User:{self._exchange.user}", token_ms, now_ms)

    def _complete(self, principal: str, token_ms: int | None, now_ms: int) -> int:
        if self.principal not in (None, principal):
            raise SaslAuthenticationFailed("re-authentication must not change the user")
        lifetime_ms = session_lifetime_ms(self.listener.settings["connections.max.reauth.ms"], token_ms)
        self._expires_ms = now_ms + lifetime_ms if lifetime_ms else None
        if self.principal is None:
            self.access = self._access_of(principal, self._host)
        self.principal, self._state, self._exchange = principal, AuthState.AUTHENTICATED, None
        return lifetime_ms
