"""Makes the TLS contexts of clients and servers from their settings. Certificates are PEM files or PEM text.

A server watches the files of ssl.keystore.location and ssl.truststore.location. After a change, new
connections use the new files. If the new files cannot be read, the server continues with the old ones.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from oncelog.config import MECHANISMS
from oncelog.errors import ConfigError
from oncelog.runtime.event_log import log_event
from oncelog.settings import Settings

T = TypeVar("T")

_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_CLIENT_AUTH = {
    "none": ssl.CERT_NONE,
    "requested": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_OWN = "a certificate chain with its private key (set ssl.key.password if the key is encrypted)"
_AUTHORITIES = "the certificates of authorities (a Java keystore is not supported)"
_FILES = ("ssl.keystore.location", "ssl.truststore.location")


def uses_tls(settings: Settings) -> bool:
    return str(settings["security.protocol"]).endswith("SSL")


def uses_sasl(settings: Settings) -> bool:
    return str(settings["security.protocol"]).startswith("SASL")


def check_mechanisms(mechanisms: Collection[str]) -> None:
    """Raise ConfigError if a SASL mechanism is unknown or needs a package that is not installed."""
    unknown = [name for name in mechanisms if name not in MECHANISMS]
    if unknown or not mechanisms:
        raise ConfigError(
            f"SASL mechanisms {', '.join(unknown) or '(none)'}: expected {', '.join(MECHANISMS)}"
        )
    for prefix, package in (("SCRAM", "scramp"), ("OAUTHBEARER", "joserfc")):
        if any(name.startswith(prefix) for name in mechanisms) and find_spec(package) is None:
            raise ConfigError(f"SASL {prefix} needs the package {package}: pip install 'oncelog[security]'")


def client_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the context for a client's settings; None for a security protocol without TLS.

    Raises ConfigError for missing or invalid files.
    """
    return tls_context(settings) if uses_tls(settings) else None


def tls_context(settings: Mapping[str, Any]) -> ssl.SSLContext:
    """Return the context for a client's settings ssl.*. Raises ConfigError for missing or invalid files."""
    source, trusted = _trusted(settings)
    context = _load(
        lambda: ssl.create_default_context(ssl.Purpose.SERVER_AUTH, **trusted), source, _AUTHORITIES
    )
    _set_versions(context, settings)
    if settings["ssl.endpoint.identification.algorithm"] != "https":
        context.check_hostname = False
    _load_own(context, settings)
    return context


def _server_context(settings: Settings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _ServerSide
    _set_versions(context, settings)
    if not _load_own(context, settings):
        raise ConfigError(
            f"security.protocol={settings['security.protocol']} needs a certificate: set "
            "ssl.keystore.location to a PEM file with the chain and its private key"
        )
    context.verify_mode = _CLIENT_AUTH[settings["ssl.client.auth"]]
    source, trusted = _trusted(settings)
    if context.verify_mode is not ssl.CERT_NONE:
        if not trusted:
            raise ConfigError(
                f"ssl.client.auth={settings['ssl.client.auth']} needs ssl.truststore.location: the "
                "authorities whose client certificates are accepted"
            )
        _load(lambda: context.load_verify_locations(**trusted), source, _AUTHORITIES)
    return context


def _set_versions(context: ssl.SSLContext, settings: Mapping[str, Any]) -> None:
    names = settings["ssl.enabled.protocols"]
    unknown = [name for name in names if name not in _VERSIONS]
    if unknown or not names:
        raise ConfigError(f"ssl.enabled.protocols={','.join(names)}: expected {' and '.join(_VERSIONS)}")
    versions = [_VERSIONS[name] for name in names]
    context.minimum_version, context.maximum_version = min(versions), max(versions)


def _trusted(settings: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return (source for error texts, arguments of load_verify_locations) for the trusted authorities.

    Empty arguments mean the authorities of the operating system. Raises ConfigError if two settings name
    authorities, or if their file cannot be found.
    """
    files = [key for key in ("ssl.truststore.location", "ssl.ca.location") if settings.get(key)]
    text = settings["ssl.truststore.certificates"]
    if len(files) + bool(text) > 1:
        names = [*files, *(["ssl.truststore.certificates"] if text else [])]
        raise ConfigError(f"{' and '.join(names)} both set the trusted authorities; keep one of them")
    if text:
        return "ssl.truststore.certificates", {"cadata": text.value}
    if not files:
        return "the system's certificates", {}
    source = f"{files[0]}={settings[files[0]]!r}"
    _load(lambda: os.stat(settings[files[0]]), source, _AUTHORITIES)
    return source, {"cafile": settings[files[0]]}


def _load_own(context: ssl.SSLContext, settings: Mapping[str, Any]) -> bool:
    """Load the certificate and key of this side. Return False if no certificate is configured.

    Raises ConfigError if the key or the chain is missing, or if they cannot be loaded.
    """
    key_password = settings["ssl.key.password"]
    # Pass an empty password if none is set. Otherwise OpenSSL would ask for one on the terminal.
    password = key_password.value if key_password else ""
    chain, key = settings["ssl.keystore.certificate.chain"], settings["ssl.keystore.key"]
    if chain or key:
        if not (chain and key):
            raise ConfigError("set both ssl.keystore.certificate.chain and ssl.keystore.key, or neither")
        # Use a temporary file, because OpenSSL loads certificates only from files. It has mode 0600, because
        # it contains the key.
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(f"{chain.value}\n{key.value}\n")
            file.flush()
            _load(lambda: context.load_cert_chain(file.name, None, password), "ssl.keystore.*", _OWN)
        return True
    certificate = settings["ssl.keystore.location"] or settings.get("ssl.certificate.location")
    if not certificate:
        return False
    key_file = settings.get("ssl.key.location")
    key = "ssl.keystore.location" if settings["ssl.keystore.location"] else "ssl.certificate.location"
    source = f"{key}={certificate!r}"
    _load(lambda: context.load_cert_chain(certificate, key_file, password), source, _OWN)
    return True


def _load(load: Callable[[], T], source: str, content: str) -> T:
    """Return the result of `load()`. Raises ConfigError if the content of `source` cannot be used."""
    try:
        return load()
    except FileNotFoundError:
        raise ConfigError(f"{source}: there is no such file") from None
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(f"{source} cannot be used: {error}; it must be PEM, {content}") from error


_ALERTED = frozenset(
    {
        "CERTIFICATE_VERIFY_FAILED",
        "NO_SHARED_CIPHER",
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "UNSUPPORTED_PROTOCOL",
    }
)
"""Reasons of handshake failures for which the client gets a TLS alert.

After any other failure, the connection is closed without an alert.
"""


class _ServerSide(ssl.SSLObject):
    """The server side of a TLS connection. If the handshake fails, the client gets an alert.

    asyncio closes the socket of a failed handshake while the alert is still in asyncio's buffer. Therefore
    this class does not raise the failure immediately, so that asyncio sends the alert. The failure is raised
    when the client sends more or closes. If the client does neither, the handshake times out. See
    test_a_client_whose_certificate_is_refused_learns_why.
    """

    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Continue the handshake. Raises SSLError."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason not in _ALERTED:
                raise
            log_event("debug", "TLS handshake failed", error=repr(error))
            self._failure = error
            raise ssl.SSLWantReadError("the alert must be sent first") from error


class ServerTls:
    """The TLS of a listener. New connections use `context`, which is replaced when the files change.

    A new context has new ticket keys and an empty session cache. If an authority is removed from the files,
    clients with certificates of that authority therefore cannot resume earlier sessions. It would not be
    enough to replace the context during the handshake (`sni_callback`): tickets belong to the context with
    which the handshake began.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen = self._failed = self._stamps()
        """Stamps (see `_stamp`) of the certificate files.

        `_seen`: when `context` was made. `_failed`: at the last failed attempt to make a new context.
        """
        self.context = _server_context(settings)

    def _stamps(self) -> list[tuple[int, int] | None]:
        return [_stamp(self._settings[key]) for key in _FILES]

    def refresh(self) -> None:
        """Load the certificates again if their files have changed.

        Files that could not be read are retried on each call, because `chmod` and `chown` do not change their
        stamps. See test_a_renewed_certificate_that_could_not_be_read_is_read_later.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return
        try:
            self.context = _server_context(self._settings)
        except ConfigError as error:
            if stamps != self._failed:
                log_event("error", "changed certificates cannot be used; the old ones stay", error=error)
            self._failed = stamps
        else:
            self._seen = self._failed = stamps
            log_event("info", "certificates read again")


class WatchedFile:
    """The current content of a text file.

    `url` is file:///PATH. `text` is None until the file has been read.
    """

    def __init__(self, url: str, setting: str) -> None:
        if not url.startswith("file://"):
            raise ConfigError(f"{setting}={url!r}: only file:///PATH is supported")
        self._path, self._setting = url.removeprefix("file://"), setting
        self._seen: tuple[int, int] | None = None
        self._failed: tuple[int, int] | None = None
        self.text: str | None = None

    def refresh(self) -> str | None:
        """Read the file if it has changed since it was last read. Return the text that was read last, or
        None.
        """
        stamp = _stamp(self._path)
        if stamp is not None and stamp != self._seen:
            try:
                self.text = Path(self._path).read_text()
            except (OSError, UnicodeDecodeError) as error:
                if stamp != self._failed:
                    log_event("error", f"{self._setting} cannot be read", error=error)
                # Leave `_seen` unchanged, so that each call retries the file, as in ServerTls.refresh.
                self._failed = stamp
            else:
                self._seen = stamp
        return self.text


def _stamp(path: str | None) -> tuple[int, int] | None:
    """Return a file's modification time in ns and its inode, to detect changes; None if there is no file."""
    if not path:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
