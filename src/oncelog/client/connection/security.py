"""What a client connects with: its TLS context and how it says who it is."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from oncelog.client.connection.sasl import Credentials, credentials
from oncelog.errors import AuthenticationError, ConfigError
from oncelog.runtime.tls import check_mechanisms, client_context, uses_sasl
from oncelog.settings import Settings

_TOKEN_URL = "sasl.oauthbearer.token.endpoint.url"


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """None: without."""

    context: ssl.SSLContext | None = None
    credentials: Credentials | None = None


PLAINTEXT = ClientSecurity()


def client_security(settings: Settings) -> ClientSecurity:
    """Raises ConfigError for settings that lack something or cannot be used."""
    if settings["security.protocol"] == "PLAINTEXT":
        useless = [key for key in settings.user_set() if key.startswith(("ssl.", "sasl."))]
        if useless:
            raise ConfigError(
                f"{', '.join(useless)} has no effect with security.protocol=PLAINTEXT; set SSL, SASL_SSL or "
                "SASL_PLAINTEXT"
            )
        return PLAINTEXT
    who = credentials(settings, lambda: _token(settings[_TOKEN_URL])) if uses_sasl(settings) else None
    if who is not None and who.mechanism != "OAUTHBEARER":  # a client only hands its token on
        check_mechanisms([who.mechanism])
    return ClientSecurity(client_context(settings), who)


def tls_failed(peer: str, error: ssl.SSLError) -> AuthenticationError:
    """The error, with what is to be looked at."""
    why = getattr(error, "verify_message", "") or error.reason or str(error)
    return AuthenticationError(
        f"TLS with {peer} failed: {why}; check that it speaks TLS (security.protocol), whom you trust "
        "(ssl.truststore.location or ssl.ca.location), that its certificate names the host in "
        "bootstrap.servers, and whether it asks for a certificate of yours (ssl.keystore.location)"
    )


def _token(url: str) -> str:
    if not url.startswith("file://"):
        raise AuthenticationError(f"{_TOKEN_URL}={url!r}: only file:///PATH is served")
    try:
        return Path(url.removeprefix("file://")).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AuthenticationError(f"{_TOKEN_URL}={url!r} cannot be read: {error}") from error
