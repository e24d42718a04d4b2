"""The client side of SASL: the first message, and the reply to each message of the broker.

Source: RFC 4616 (PLAIN), RFC 5802 (SCRAM), RFC 7628 (OAUTHBEARER).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from oncelog.errors import AuthenticationError, ConfigError
from oncelog.rules.security.scram import load_scramp

_JAAS = re.compile(
    r"\s*(?P<module>[\w.]+)\s+(?:required|requisite|sufficient|optional)\b(?P<rest>.*);\s*", re.S
)
_JAAS_OPTION = re.compile(r"""\s*([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s"';]+))\s*""")
_KEYS = "sasl.username and sasl.password (or sasl.jaas.config)"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user name and password, or a source of tokens. `token()` returns the current token."""

    mechanism: str
    username: str
    password: str = field(repr=False)
    token: Callable[[], str] = field(repr=False)


class Exchange(Protocol):
    """One authentication exchange."""

    def first(self) -> bytes: ...

    def reply(self, challenge: bytes) -> bytes | None:
        """Return the next message; None if the exchange is complete and the broker is authenticated.

        Raises AuthenticationError if the broker fails to authenticate itself.
        """
        ...


def credentials(settings: Mapping[str, Any], token: Callable[[], str]) -> Credentials:
    """Return the credentials of the `sasl.*` settings.

    Raises ConfigError if they are incomplete or contradictory.
    """
    mechanism = settings["sasl.mechanism"]
    if mechanism is None:
        raise ConfigError(
            f"security.protocol={settings['security.protocol']} needs sasl.mechanism: PLAIN, SCRAM-SHA-256, "
            "SCRAM-SHA-512 or OAUTHBEARER"
        )
    if mechanism == "OAUTHBEARER":
        if settings["sasl.oauthbearer.token.endpoint.url"] is None:
            raise ConfigError(
                "sasl.mechanism=OAUTHBEARER needs sasl.oauthbearer.token.endpoint.url=file:///PATH"
            )
        return Credentials(mechanism, "", "", token)
    username, password = settings["sasl.username"], settings["sasl.password"]
    jaas = settings["sasl.jaas.config"]
    if jaas is not None:
        if username is not None or password is not None:
            raise ConfigError(
                "sasl.jaas.config and sasl.username/sasl.password both set the credentials; keep one of them"
            )
        username, secret = parse_jaas(jaas.value)
    else:
        secret = password.value if password is not None else None
    if not username or not secret:
        raise ConfigError(f"sasl.mechanism={mechanism} needs {_KEYS}")
    return Credentials(mechanism, username, secret, token)


def parse_jaas(text: str) -> tuple[str | None, str | None]:
    """Return the user name and password of a JAAS configuration, None for each that is missing.

    The configuration has the syntax of Java's sasl.jaas.config. Raises ConfigError; the error text never
    contains the password.
    """
    match = _JAAS.fullmatch(text)
    if match is None or not match["module"].endswith(("PlainLoginModule", "ScramLoginModule")):
        raise ConfigError(
            "sasl.jaas.config: expected ...PlainLoginModule or ...ScramLoginModule required "
            'username="..." password="..."; (the semicolon is required)'
        )
    options: dict[str, str] = {}
    position, rest = 0, match["rest"]
    while position < len(rest.rstrip()):
        option = _JAAS_OPTION.match(rest, position)
        if option is None:
            raise ConfigError('sasl.jaas.config: write each option as name="value"')
        quoted = option[2] if option[2] is not None else option[3]
        options[option[1]] = option[4] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        position = option.end()
    return options.get("username"), options.get("password")


def begin(login: Credentials) -> Exchange:
    """Return a new exchange for the mechanism of `login`.

    Raises AuthenticationError if the token cannot be read, or if SCRAM cannot use the user name or password.
    """
    if login.mechanism == "PLAIN":
        return _SingleMessage(f"\0{login.username}\0{login.password}".encode())
    if login.mechanism == "OAUTHBEARER":
        return _SingleMessage(f"n,,\x01auth=Bearer {login.token()}\x01\x01".encode())
    return _Scram(login)


class _SingleMessage:
    """An exchange with a single message of the client: PLAIN or OAUTHBEARER."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def first(self) -> bytes:
        return self._message

    def reply(self, challenge: bytes) -> bytes | None:
        # A broker that refuses a token may first send the reason, and then waits for this reply (RFC 7628,
        # 3.2.3).
        return b"\x01" if challenge else None


class _Scram:
    """A SCRAM exchange. The package scramp computes its messages."""

    def __init__(self, login: Credentials) -> None:
        from scramp import ScramException

        try:
            self._client = load_scramp().ScramClient([login.mechanism], login.username, login.password)
        except ScramException as error:
            raise AuthenticationError(
                f"user name or password cannot be used for {login.mechanism}: {error}"
            ) from None
        self._has_replied = False

    def first(self) -> bytes:
        return str(self._client.get_client_first()).encode()

    def reply(self, challenge: bytes) -> bytes | None:
        from scramp import ScramException

        try:
            if not self._has_replied:
                self._has_replied = True
                self._client.set_server_first(bytes(challenge).decode())
                return str(self._client.get_client_final()).encode()
            self._client.set_server_final(bytes(challenge).decode())
        except (ScramException, UnicodeDecodeError) as error:
            raise AuthenticationError(
                f"the broker did not prove that it knows the password: {error}"
            ) from error
        return None
