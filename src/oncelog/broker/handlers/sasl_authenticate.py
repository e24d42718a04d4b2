"""SaslAuthenticate (key 36), versions 0-2: the messages of the chosen mechanism.

58 with one text for a wrong user and a wrong password, then the connection ends; 34 on a listener without
SASL, and of a client that is not about to authenticate. From version 1 on the last answer tells when the
client must authenticate again (KIP-368).
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
