"""SaslHandshake (key 17), version 1: select a SASL mechanism.

The response lists the enabled mechanisms. Version 0 is advertised, because librdkafka 2.0.2 takes its absence
for a broker without SASL. It is not served, because the SASL messages after it have no request header: a
request of version 0 closes the connection.

Errors: UNSUPPORTED_SASL_MECHANISM for a mechanism that is not enabled; ILLEGAL_SASL_STATE on a listener
without SASL, and for an authenticated client that may not re-authenticate now (`rules.security.auth_state`).
Source: KIP-43, KIP-152; Kafka's SaslServerAuthenticator.
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
