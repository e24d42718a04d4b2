"""SaslAuthenticate (key 36), versions 0-2: exchange the messages of the selected SASL mechanism.

From version 1 on, the last response contains the session lifetime. The client must re-authenticate before the
session ends (KIP-368).

Errors: SASL_AUTHENTICATION_FAILED, with the same text for an unknown user and a wrong password; the
connection closes. ILLEGAL_SASL_STATE on a listener without SASL, and for an authenticated client that has not
sent SaslHandshake again. Source: Kafka's SaslServerAuthenticator.
"""

from __future__ import annotations

from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authenticator import CloseAfterResponse
from oncelog.broker.state import BrokerState
from oncelog.errors import IllegalSaslState, SaslAuthenticationFailed
from oncelog.wire.messages import SaslAuthenticateRequest, SaslAuthenticateResponse

KEY = 36


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: SaslAuthenticateRequest = request.message
    authenticator = request.authenticator
    if authenticator is None or not authenticator.is_authenticating:
        return SaslAuthenticateResponse(error_code=IllegalSaslState.code)
    try:
        data, lifetime_ms = authenticator.answer(message.auth_bytes, now_ms)
    except SaslAuthenticationFailed as error:
        state.metrics.authentications_failed += 1
        refusal = SaslAuthenticateResponse(error_code=error.code, error_message=error.message)
        return CloseAfterResponse(
            refusal, str(error), state.settings["connection.failed.authentication.delay.ms"]
        )
    return SaslAuthenticateResponse(auth_bytes=data, session_lifetime_ms=lifetime_ms)
