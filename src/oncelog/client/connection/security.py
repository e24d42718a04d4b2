"""The security settings of a client: its TLS context and its SASL credentials."""

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
    """The TLS context and the SASL credentials of a client. Each is None if the client does not use it."""

    context: ssl.SSLContext | None = None
    credentials: Credentials | None = None


PLAINTEXT = ClientSecurity()


def client_security(settings: Settings) -> ClientSecurity:
    """Return the TLS context and the SASL credentials of the `ssl.*` and `sasl.*` settings.

    Raises ConfigError if the settings are incomplete or invalid.
    """
    if settings["security.protocol"] == "PLAINTEXT":
        useless = [key for key in settings.user_set() if key.startswith(("ssl.", "sasl."))]
        if useless:
            raise ConfigError(
                f"{', '.join(useless)} has no effect with security.protocol=PLAINTEXT; set SSL, SASL_SSL or "
                "SASL_PLAINTEXT"
            )
        return PLAINTEXT
    login = credentials(settings, lambda: _token(settings[_TOKEN_URL])) if uses_sasl(settings) else None
    # A client sends its OAUTHBEARER token without reading it, so this mechanism needs no package.
    if login is not None and login.mechanism != "OAUTHBEARER":
        check_mechanisms([login.mechanism])
    return ClientSecurity(client_context(settings), login)


def tls_failed(peer: str, error: ssl.SSLError) -> AuthenticationError:
    """Return the error for a failed TLS handshake. Its text names the settings to check."""
    reason = getattr(error, "verify_message", "") or error.reason or str(error)
    return AuthenticationError(
        f"TLS with {peer} failed: {reason}; check that it uses TLS (security.protocol), that you trust its "
        "certificate authority (ssl.truststore.location or ssl.ca.location), that its certificate names the "
        "host in bootstrap.servers, and whether it requires a client certificate (ssl.keystore.location)"
    )


def _token(url: str) -> str:
    if not url.startswith("file://"):
        raise AuthenticationError(f"{_TOKEN_URL}={url!r}: only file:///PATH is supported")
    try:
        return Path(url.removeprefix("file://")).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AuthenticationError(f"{_TOKEN_URL}={url!r} cannot be read: {error}") from error
