"""SaslHandshake (key 17), version 1: which mechanism comes. (Version 0 had tokens without headers.)

33 a mechanism that is not offered, with those that are; 34 on a listener without SASL, and of a client that
is known and may not authenticate again now (`oncelog.rules.security.auth_state`).
"""

from __future__ import annotations

from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authenticator import CloseAfterResponse
from oncelog.broker.state import BrokerState
from oncelog.errors import IllegalSaslState, UnsupportedSaslMechanism
from oncelog.wire.messages import SaslHandshakeRequest, SaslHandshakeResponse

KEY = 17


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: SaslHandshakeRequest = request.message
    authenticator = request.authenticator
    if authenticator is None or not authenticator.is_authenticating:
        return SaslHandshakeResponse(error_code=IllegalSaslState.code, mechanisms=[])
    try:
        authenticator.select_mechanism(message.mechanism)
    except UnsupportedSaslMechanism as error:
        refusal = SaslHandshakeResponse(error_code=error.code, mechanisms=authenticator.mechanisms)
        return CloseAfterResponse(
            refusal, str(error), state.settings["connection.failed.authentication.delay.ms"]
        )
    return SaslHandshakeResponse(mechanisms=authenticator.mechanisms)
