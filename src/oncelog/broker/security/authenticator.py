"""One connection's way in: who its client is, and what it may send before that is known.

The states are in `rules.security.auth_state`. Without SASL the client is known from the start: by its
certificate, or as ANONYMOUS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oncelog.broker.security.authorizer import NOTHING, Access
from oncelog.broker.security.sasl import BearerExchange, Exchange, PlainExchange, ScramExchange, TokenCheck
from oncelog.broker.security.users import Users
from oncelog.broker.settings.listeners import Listener
from oncelog.errors import SaslAuthenticationFailed, UnsupportedSaslMechanism
from oncelog.rules.limits.quotas import Payer
from oncelog.rules.security.auth_state import (
    DoorState,
    may_authenticate_again,
    next_state,
    session_lifetime_ms,
)
from oncelog.rules.security.authorization import ANONYMOUS
from oncelog.rules.security.scram import Mechanism
from oncelog.wire.messages import Message

_SCRAM = {mechanism.label: mechanism for mechanism in Mechanism}


@dataclass(frozen=True, slots=True)
class Farewell:
    """An answer after which the connection ends, `delay_ms` from now."""

    answer: Message
    reason: str
    delay_ms: int


class Door:
    """Authenticates the client of one connection.

    `needs_sasl`: clients of this listener authenticate with SASL. `host`: the address they come from.
    `access` returns the permissions of a principal and host; `wall_ms` turns `now_ms` into wall-clock time.
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
        self.access: Access = NOTHING if needs_sasl else access(principal, host)
        self._state = DoorState.STRANGER if needs_sasl else DoorState.KNOWN
        self._mechanism = ""
        self._exchange: Exchange | None = None
        self._expires_ms: int | None = None
        self._authenticated_again_ms: int | None = None
        self._client_id: str | None = None
        self._payer: Payer | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is known who the client is; it may have to say so again."""
        return self.principal is not None

    @property
    def is_plain(self) -> bool:
        """Whether any request may come, whatever the time is."""
        return self._state is DoorState.KNOWN and self._expires_ms is None

    def payer(self, client_id: str | None) -> Payer | None:
        """Whose quotas its requests use; nobody's while it is not known who it is."""
        if self.principal is None:
            return None
        if client_id != self._client_id or self._payer is None:
            self._client_id, self._payer = client_id, Payer(self.principal.partition(":")[2], client_id or "")
        return self._payer

    def pass_through(self, api_key: int, now_ms: int) -> str | None:
        """Take note of a request that is about to be handled; why it may not be, if so."""
        if not self.needs_sasl:
            return None
        if self._state is DoorState.KNOWN and self._expires_ms is not None and now_ms >= self._expires_ms:
            self._state = DoorState.EXPIRED
        may_again = may_authenticate_again(self._expires_ms, self._authenticated_again_ms, now_ms)
        state = next_state(self._state, api_key, may_authenticate_again=may_again)
        if state is None:
            return f"API key {api_key} while {self._state.value}"
        if state is DoorState.CHOSEN_AGAIN and self._state is not state:
            self._authenticated_again_ms = now_ms
        self._state = state
        return None

    @property
    def is_authenticating(self) -> bool:
        """Return True while SASL requests are expected: they are out of place before and after."""
        return self._state in (DoorState.CHOSEN, DoorState.CHOSEN_AGAIN)

    @property
    def mechanisms(self) -> list[str]:
        return list(self.listener.settings["sasl.enabled.mechanisms"])

    def choose(self, mechanism: str) -> None:
        """Raises UnsupportedSaslMechanism."""
        if mechanism not in self.mechanisms:
            raise UnsupportedSaslMechanism(f"{mechanism!r} is not offered")
        if self._mechanism not in ("", mechanism):
            raise UnsupportedSaslMechanism("authenticating again takes the mechanism of the first time")
        self._mechanism, self._exchange = mechanism, self._new_exchange(mechanism)

    def _new_exchange(self, mechanism: str) -> Exchange:
        if mechanism in _SCRAM:
            return ScramExchange(self._users, _SCRAM[mechanism], self._new_name())
        if mechanism == "OAUTHBEARER":
            return BearerExchange(self._check_token)
        if mechanism == "PLAIN":
            return PlainExchange(self._users)
        raise UnsupportedSaslMechanism(f"{mechanism!r} is not served")

    def answer(self, data: bytes, now_ms: int) -> tuple[bytes, int]:
        """The next message of the exchange and how long the client is then known (ms; 0: no end, or not yet).

        Raises SaslAuthenticationFailed.
        """
        if self._exchange is None:
            raise SaslAuthenticationFailed("a mechanism must be chosen first")
        wall_ms = self._wall_ms(now_ms)
        answer = self._exchange.answer(data, wall_ms)
        if self._exchange.user is None:
            return answer, 0
        expires_ms = self._exchange.expires_ms
        token_ms = None if expires_ms is None else max(expires_ms - wall_ms, 1)
        return answer, self._let_in(f"User:{self._exchange.user}", token_ms, now_ms)

    def _let_in(self, principal: str, token_ms: int | None, now_ms: int) -> int:
        if self.principal not in (None, principal):
            raise SaslAuthenticationFailed("a connection does not change its user")
        lifetime_ms = session_lifetime_ms(self.listener.settings["connections.max.reauth.ms"], token_ms)
        self._expires_ms = now_ms + lifetime_ms if lifetime_ms else None
        if self.principal is None:
            self.access = self._access_of(principal, self._host)
        self.principal, self._state, self._exchange = principal, DoorState.KNOWN, None
        return lifetime_ms
