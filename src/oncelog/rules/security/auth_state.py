"""What a client may send before it is known who it is, while it says so, and when it must say so again.

    state      ApiVersions  SaslHandshake  SaslAuthenticate  anything else
    STRANGER   STRANGER     CHOSEN         -                 -
    CHOSEN     -            -              CHOSEN            -
    KNOWN      KNOWN        CHOSEN_AGAIN   KNOWN             KNOWN
    EXPIRED    -            CHOSEN_AGAIN   -                 -
    CHOSEN_AGAIN  -         -              CHOSEN_AGAIN      -
-: the connection ends. CHOSEN becomes KNOWN when the exchange is complete, KNOWN becomes EXPIRED in time.

Only a session that ends may be renewed, and once a second at most (`may_authenticate_again`). Otherwise a
handshake leaves KNOWN as it is and ends an EXPIRED connection. SASL requests in KNOWN are answered with
ILLEGAL_SASL_STATE.
Source: Kafka's SaslServerAuthenticator, KafkaChannel.maybeBeginServerReauthentication, KIP-368.
"""

from __future__ import annotations

from enum import Enum


class DoorState(Enum):
    STRANGER = "nobody knows who it is"
    CHOSEN = "it chose how to say who it is"
    KNOWN = "it said who it is"
    EXPIRED = "it said so too long ago"
    CHOSEN_AGAIN = "it is about to say again who it is"


API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 18, 17, 36
MIN_REAUTHENTICATION_INTERVAL_MS = 1_000
"""Between the beginnings of two re-authentications of a connection, as in Kafka."""

_S = DoorState
_OTHER = -1
_NEXT: dict[DoorState, dict[int, DoorState]] = {
    _S.STRANGER: {API_VERSIONS: _S.STRANGER, SASL_HANDSHAKE: _S.CHOSEN},
    _S.CHOSEN: {SASL_AUTHENTICATE: _S.CHOSEN},
    _S.KNOWN: {
        API_VERSIONS: _S.KNOWN,
        SASL_HANDSHAKE: _S.CHOSEN_AGAIN,
        SASL_AUTHENTICATE: _S.KNOWN,
        _OTHER: _S.KNOWN,
    },
    _S.EXPIRED: {SASL_HANDSHAKE: _S.CHOSEN_AGAIN},
    _S.CHOSEN_AGAIN: {SASL_AUTHENTICATE: _S.CHOSEN_AGAIN},
}


def may_authenticate_again(expires_ms: int | None, last_begun_ms: int | None, now_ms: int) -> bool:
    """Return True if a known client may authenticate again now.

    `expires_ms`: when its session ends; None: never. `last_begun_ms`: when it last authenticated again.
    """
    if expires_ms is None:
        return False
    return last_begun_ms is None or now_ms - last_begun_ms >= MIN_REAUTHENTICATION_INTERVAL_MS


def next_state(state: DoorState, api_key: int, *, may_authenticate_again: bool = True) -> DoorState | None:
    """The state after a request of this API; None: it may not be sent now."""
    if api_key == SASL_HANDSHAKE and not may_authenticate_again:
        if state is DoorState.KNOWN:
            return state
        if state is DoorState.EXPIRED:
            return None
    named = (API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE)
    return _NEXT[state].get(api_key if api_key in named else _OTHER)


def session_lifetime_ms(max_reauth_ms: int, token_lifetime_ms: int | None) -> int:
    """How long a client is known: connections.max.reauth.ms, or less with a token; 0: without an end."""
    if token_lifetime_ms is None:
        return max_reauth_ms
    return min(token_lifetime_ms, max_reauth_ms or token_lifetime_ms)
