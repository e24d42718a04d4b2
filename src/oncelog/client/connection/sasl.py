"""The client's side of SASL: the first message, and the reply to each of the broker's.

Source: RFC 4616 (PLAIN), RFC 5802 (SCRAM), RFC 7628 (OAUTHBEARER).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from oncelog.errors import AuthenticationError, ConfigError

_JAAS = re.compile(
    r"\s*(?P<module>[\w.]+)\s+(?:required|requisite|sufficient|optional)\b(?P<rest>.*);\s*", re.S
)
_JAAS_OPTION = re.compile(r"""\s*([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s"';]+))\s*""")
_KEYS = "sasl.username and sasl.password (or sasl.jaas.config)"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What to say who one is with; `token` gives a fresh token each time."""

    mechanism: str
    username: str
    password: str = field(repr=False)
    token: Callable[[], str] = field(repr=False)


class Exchange(Protocol):
    """One authentication."""

    def first(self) -> bytes: ...

    def reply(self, challenge: bytes) -> bytes | None:
        """The next message; None: the broker has proven itself, nothing is to be said any more.

        Raises AuthenticationError when it has not.
        """
        ...


def credentials(settings: Mapping[str, Any], token: Callable[[], str]) -> Credentials:
    """Raises ConfigError when settings `sasl.*` lack something or contradict each other."""
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
                "sasl.jaas.config and sasl.username/sasl.password say the same; keep one of them"
            )
        username, secret = parse_jaas(jaas.value)
    else:
        secret = password.value if password is not None else None
    if not username or not secret:
        raise ConfigError(f"sasl.mechanism={mechanism} needs {_KEYS}")
    return Credentials(mechanism, username, secret, token)


def parse_jaas(text: str) -> tuple[str | None, str | None]:
    """User and password of a login module of Java's clients. Raises ConfigError, without the text."""
    found = _JAAS.fullmatch(text)
    if found is None or not found["module"].endswith(("PlainLoginModule", "ScramLoginModule")):
        raise ConfigError(
            "sasl.jaas.config: expected ...PlainLoginModule or ...ScramLoginModule required "
            'username="..." password="..."; (with the semicolon)'
        )
    options: dict[str, str] = {}
    position, rest = 0, found["rest"]
    while position < len(rest.rstrip()):
        option = _JAAS_OPTION.match(rest, position)
        if option is None:
            raise ConfigError('sasl.jaas.config: options are written name="value"')
        quoted = option[2] if option[2] is not None else option[3]
        options[option[1]] = option[4] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        position = option.end()
    return options.get("username"), options.get("password")


def begin(who: Credentials) -> Exchange:
    """A new exchange. Raises AuthenticationError when there is no token."""
    if who.mechanism == "PLAIN":
        return _Once(f"\0{who.username}\0{who.password}".encode())
    if who.mechanism == "OAUTHBEARER":
        return _Once(f"n,,\x01auth=Bearer {who.token()}\x01\x01".encode())
    return _Scram(who)


class _Once:
    """One message says it all."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def first(self) -> bytes:
        return self._message

    def reply(self, challenge: bytes) -> bytes | None:
        # A broker that refuses a token may say why first (RFC 7628) and waits for this before it gives up.
        return b"\x01" if challenge else None


class _Scram:
    def __init__(self, who: Credentials) -> None:
        from scramp import ScramClient, ScramException

        try:
            self._client = ScramClient([who.mechanism], who.username, who.password)
        except ScramException as error:
            raise AuthenticationError(f"no user or password for {who.mechanism}: {error}") from None
        self._is_proven = False

    def first(self) -> bytes:
        return str(self._client.get_client_first()).encode()

    def reply(self, challenge: bytes) -> bytes | None:
        from scramp import ScramException

        try:
            if not self._is_proven:
                self._is_proven = True
                self._client.set_server_first(bytes(challenge).decode())
                return str(self._client.get_client_final()).encode()
            self._client.set_server_final(bytes(challenge).decode())
        except (ScramException, UnicodeDecodeError) as error:
            raise AuthenticationError(f"the broker does not know the password either: {error}") from error
        return None
