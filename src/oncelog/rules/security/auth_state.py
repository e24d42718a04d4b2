"""The authentication states of a connection: which requests are allowed before, during and after SASL.

    state             ApiVersions      SaslHandshake     SaslAuthenticate  other APIs
    UNAUTHENTICATED   UNAUTHENTICATED  HANDSHAKE_DONE    -                 -
    HANDSHAKE_DONE    -                -                 HANDSHAKE_DONE    -
    AUTHENTICATED     AUTHENTICATED    REAUTHENTICATING  AUTHENTICATED     AUTHENTICATED
    SESSION_EXPIRED   -                REAUTHENTICATING  -                 -
    REAUTHENTICATING  -                -                 REAUTHENTICATING  -

The table has the state after each request; "-" closes the connection. At the end of a successful SASL
exchange the state becomes AUTHENTICATED, and at the end of the session lifetime SESSION_EXPIRED.

A client may re-authenticate only if its session has an end, and at most once a second
(`may_authenticate_again`). If a client may not re-authenticate, SaslHandshake does not change the state
AUTHENTICATED, and closes a connection in SESSION_EXPIRED. In AUTHENTICATED, SaslAuthenticate and such a
SaslHandshake get ILLEGAL_SASL_STATE.
Source: kafka SaslServerAuthenticator, KafkaChannel.maybeBeginServerReauthentication; KIP-368.
"""

from __future__ import annotations

from enum import Enum


class AuthState(Enum):
    """The authentication state of a connection. The values appear in log events."""

    UNAUTHENTICATED = "the client is not authenticated"
    HANDSHAKE_DONE = "the client must send SaslAuthenticate"
    AUTHENTICATED = "the client is authenticated"
    SESSION_EXPIRED = "the client's session has expired"
    REAUTHENTICATING = "the client is re-authenticating"


API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 18, 17, 36
MIN_REAUTHENTICATION_INTERVAL_MS = 1_000
"""Shortest time in ms between the starts of two re-authentications of a connection, as in Kafka."""

_S = AuthState
_OTHER = -1
_NEXT: dict[AuthState, dict[int, AuthState]] = {
    _S.UNAUTHENTICATED: {API_VERSIONS: _S.UNAUTHENTICATED, SASL_HANDSHAKE: _S.HANDSHAKE_DONE},
    _S.HANDSHAKE_DONE: {SASL_AUTHENTICATE: _S.HANDSHAKE_DONE},
    _S.AUTHENTICATED: {
        API_VERSIONS: _S.AUTHENTICATED,
        SASL_HANDSHAKE: _S.REAUTHENTICATING,
        SASL_AUTHENTICATE: _S.AUTHENTICATED,
        _OTHER: _S.AUTHENTICATED,
    },
    _S.SESSION_EXPIRED: {SASL_HANDSHAKE: _S.REAUTHENTICATING},
    _S.REAUTHENTICATING: {SASL_AUTHENTICATE: _S.REAUTHENTICATING},
}


def may_authenticate_again(expires_ms: int | None, last_begun_ms: int | None, now_ms: int) -> bool:
    """Return True if an authenticated client may re-authenticate now.

    `expires_ms` is the end of its session; None if the session never expires. `last_begun_ms` is the start of
    its last re-authentication; None before the first.
    """
    if expires_ms is None:
        return False
    return last_begun_ms is None or now_ms - last_begun_ms >= MIN_REAUTHENTICATION_INTERVAL_MS


def next_state(state: AuthState, api_key: int, *, may_authenticate_again: bool = True) -> AuthState | None:
    """Return the state after a request of this API; None if the request is not allowed.

    `may_authenticate_again` is the result of the function with this name; it matters only for SaslHandshake.
    """
    if api_key == SASL_HANDSHAKE and not may_authenticate_again:
        if state is AuthState.AUTHENTICATED:
            return state
        if state is AuthState.SESSION_EXPIRED:
            return None
    named = (API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE)
    return _NEXT[state].get(api_key if api_key in named else _OTHER)


def session_lifetime_ms(max_reauth_ms: int, token_lifetime_ms: int | None) -> int:
    """Return the session lifetime in ms; 0 means that the session never expires.

    The lifetime is connections.max.reauth.ms (`max_reauth_ms`), or the remaining lifetime of the token if
    that is shorter. If `max_reauth_ms` is 0, only the token limits it.
    """
    if token_lifetime_ms is None:
        return max_reauth_ms
    return min(token_lifetime_ms, max_reauth_ms or token_lifetime_ms)
