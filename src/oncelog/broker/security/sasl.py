"""The broker's side of SASL exchanges. An exchange authenticates a client and yields its user name.

A failed exchange raises SaslAuthenticationFailed. The error's text must not reveal whether the user exists.
Source: RFC 4616 (PLAIN), RFC 5802 (SCRAM), RFC 7628 (OAUTHBEARER).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from unicodedata import normalize

from oncelog.broker.security.users import Users
from oncelog.config import INT64_MAX
from oncelog.errors import SaslAuthenticationFailed
from oncelog.rules.security.scram import Credential, Mechanism, load_scramp

TokenCheck = Callable[[str, int], tuple[str, int]]
"""(token, now_ms) -> (user name, expiry of the token). Both times are in ms since the epoch.

The check raises SaslAuthenticationFailed.
"""

_SEPARATOR = "\x01"
MAX_SCRAM_BYTES = 4_096
"""Longest SCRAM message in bytes, and in characters once it is normalized (NFKC).

scramp examines user names character by character: 500 KB would take a second. NFKC may turn one character
into 18, so without the second limit 4 KB would take 60 ms. See
test_a_name_that_grows_when_it_is_normalized_is_refused_before_it_is_prepared.
"""


class Exchange(Protocol):
    """One SASL exchange.

    `user` is None until the exchange is complete. `expires_ms` is the expiry of the client's token in ms
    since the epoch; None without a token.
    """

    user: str | None
    expires_ms: int | None

    def answer(self, data: bytes, now_ms: int) -> bytes:
        """Return the response to a message of the client. `now_ms` is in ms since the epoch.

        Raises SaslAuthenticationFailed.
        """
        ...


class PlainExchange:
    """PLAIN: the client sends user and password in clear text.

    Both are checked against the SCRAM credentials.
    """

    def __init__(self, users: Users) -> None:
        self._users = users
        self.user: str | None = None
        self.expires_ms: int | None = None

    def answer(self, data: bytes, now_ms: int) -> bytes:
        parts = _text(data).split("\0")
        if len(parts) != 3:
            raise SaslAuthenticationFailed(
                "a PLAIN message must contain an authorization id, a user and a password"
            )
        authorization_id, user, password = parts
        if authorization_id not in ("", user):
            raise SaslAuthenticationFailed("the authorization id must be empty or equal to the user")
        if not user or not password or not self._users.has_password(user, password):
            raise SaslAuthenticationFailed("wrong user or password")
        self.user = user
        return b""


class ScramExchange:
    """SCRAM: the client proves that it has the password without sending it.

    An unknown user gets the same responses as a known user with a wrong password.
    """

    def __init__(self, users: Users, mechanism: Mechanism, nonce: str) -> None:
        self._users, self._mechanism = users, mechanism
        self._server = (
            load_scramp().ScramMechanism(mechanism.label).make_server(self._credential, s_nonce=nonce)
        )
        self._user = ""
        self._is_begun = False
        self.user: str | None = None
        self.expires_ms: int | None = None

    def _credential(self, user: str) -> Credential:
        self._user = user
        credential = self._users.get(user, self._mechanism)
        if credential is not None:
            return credential
        fake = hmac.digest(self._users.secret, user.encode(), "sha512")
        size = hashlib.new(self._mechanism.hash_name).digest_size
        usual = self._users.usual
        return Credential(fake[: usual.salt_bytes], fake[-size:], fake[:size], usual.iterations)

    def answer(self, data: bytes, now_ms: int) -> bytes:
        from scramp import ScramException

        if len(data) > MAX_SCRAM_BYTES:
            raise SaslAuthenticationFailed("wrong user or password")
        text = _text(data)
        if len(normalize("NFKC", text)) > MAX_SCRAM_BYTES:
            raise SaslAuthenticationFailed("wrong user or password")
        try:
            if not self._is_begun:
                self._is_begun = True
                self._server.set_client_first(text)
                return str(self._server.get_server_first()).encode()
            self._accept_doubled_nonce(text)
            self._server.set_client_final(text)
            final = str(self._server.get_server_final()).encode()
        except ScramException:
            # Do not pass on the text of scramp's error: it could reveal whether the user exists.
            raise SaslAuthenticationFailed("wrong user or password") from None
        self.user = self._user
        return final

    def _accept_doubled_nonce(self, client_final: str) -> None:
        """Accept a final message that has the client's nonce twice, as librdkafka before 2.6.1 sends it.

        Apache Kafka accepts every nonce that ends with the server's. The proof covers the nonce as sent.
        """
        nonce = str(self._server.nonce)
        client_nonce = nonce.removesuffix(str(self._server.s_nonce))
        if f",r={client_nonce}{nonce}," in client_final:
            self._server.nonce = type(self._server.nonce)(client_nonce + nonce)


class BearerExchange:
    """OAUTHBEARER: the client sends a signed JSON Web Token."""

    def __init__(self, check: TokenCheck) -> None:
        self._check = check
        self.user: str | None = None
        self.expires_ms: int | None = None

    def answer(self, data: bytes, now_ms: int) -> bytes:
        header, *fields = _text(data).split(_SEPARATOR)
        token = next((f[len("auth=") :] for f in fields if f.startswith("auth=")), "")
        scheme, _, token = token.partition(" ")
        if not header.startswith("n,") or scheme.lower() != "bearer" or not token:
            raise SaslAuthenticationFailed("an OAUTHBEARER message must contain auth=Bearer TOKEN")
        self.user, self.expires_ms = self._check(token.strip(), now_ms)
        return b""


def _text(data: bytes) -> str:
    try:
        return bytes(data).decode()
    except UnicodeDecodeError:
        raise SaslAuthenticationFailed("the message is not UTF-8") from None


def token_check(settings: Any, keys: Callable[[], str | None]) -> TokenCheck:
    """Return a function that checks tokens as the settings `sasl.oauthbearer.*` require.

    `keys` returns the current JSON Web Key Set as text; None if it is not available.
    """

    def check(token: str, now_ms: int) -> tuple[str, int]:
        from joserfc import jwt
        from joserfc.errors import JoseError

        text = keys()
        if text is None:
            raise SaslAuthenticationFailed("sasl.oauthbearer.jwks.endpoint.url provides no keys")
        try:
            decoded = jwt.decode(token, _usable_keys(text), _ALGORITHMS, _token_registry())
            _registry(settings, now_ms).validate(decoded.claims)
            user = decoded.claims[settings["sasl.oauthbearer.sub.claim.name"]]
            return _checked_name(user), min(int(decoded.claims["exp"]) * 1000, INT64_MAX)
        except (JoseError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise SaslAuthenticationFailed(f"the token is invalid: {type(error).__name__}") from None

    return check


_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"]
"""Accepted signature algorithms.

All use a private key; "none" and secrets shared with the issuer are rejected.
"""


MAX_TOKEN_HEADER_BYTES = 16_384
"""Longest header of a token in bytes of base64. It may contain a chain of certificates."""
MAX_SIGNATURE_BYTES = 4_096
"""Longest signature of a token in bytes of base64."""


def _token_registry() -> Any:
    """Return the rules for the header of a token.

    As RFC 7515 requires, unknown parameters are ignored, unless `crit` names them. By default
    joserfc refuses them, and headers of more than 512 bytes. See
    test_a_token_may_have_a_header_with_more_than_its_algorithm.
    """
    from joserfc.jws import JWSRegistry

    registry = JWSRegistry(algorithms=_ALGORITHMS, strict_check_header=False)
    registry.max_header_length = MAX_TOKEN_HEADER_BYTES
    registry.max_signature_length = MAX_SIGNATURE_BYTES
    return registry


def _usable_keys(text: str) -> Any:
    """Return the keys of a JSON Web Key Set, without those that cannot be used.

    RFC 7517 requires that keys of an unknown kind are ignored. Raises ValueError, KeyError or TypeError if
    the text is not a key set.
    """
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet

    usable: list[Any] = []
    for key in _json(text)["keys"]:
        with suppress(JoseError, ValueError, KeyError, TypeError, AttributeError):
            usable += KeySet.import_key_set({"keys": [key]}).keys
    return KeySet(usable)


def _registry(settings: Any, now_ms: int) -> Any:
    from joserfc.jwt import JWTClaimsRegistry

    claims: dict[str, Any] = {"exp": {"essential": True}}
    audience, issuer = (settings[f"sasl.oauthbearer.expected.{name}"] for name in ("audience", "issuer"))
    if audience:
        claims["aud"] = {"essential": True, "values": audience}
    if issuer:
        claims["iss"] = {"essential": True, "value": issuer}
    leeway = settings["sasl.oauthbearer.clock.skew.seconds"]
    return JWTClaimsRegistry(now=now_ms // 1000, leeway=leeway, **claims)


def _checked_name(user: object) -> str:
    if not isinstance(user, str) or not user:
        raise SaslAuthenticationFailed("the token names no user")
    return user


def _json(text: str) -> Any:
    import json

    return json.loads(text)
