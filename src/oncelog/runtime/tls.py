"""TLS contexts from settings, both sides; certificates in PEM files or as PEM text.

A server's files are looked at again while it runs: what has changed holds for the next connection. Files
that cannot be read leave the old ones in use.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

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
_OWN = "a certificate chain with its private key (ssl.key.password if that is encrypted)"
_AUTHORITIES = "the certificates of authorities, not a Java keystore"
_FILES = ("ssl.keystore.location", "ssl.truststore.location")


def uses_tls(settings: Settings) -> bool:
    return str(settings["security.protocol"]).endswith("SSL")


def uses_sasl(settings: Settings) -> bool:
    return str(settings["security.protocol"]).startswith("SASL")


def check_mechanisms(mechanisms: Collection[str]) -> None:
    """Raises ConfigError when a SASL mechanism is not known or needs a package that is not installed."""
    unknown = [name for name in mechanisms if name not in MECHANISMS]
    if unknown or not mechanisms:
        raise ConfigError(
            f"SASL mechanisms {', '.join(unknown) or '(none)'}: expected {', '.join(MECHANISMS)}"
        )
    for prefix, package in (("SCRAM", "scramp"), ("OAUTHBEARER", "joserfc")):
        if any(name.startswith(prefix) for name in mechanisms) and find_spec(package) is None:
            raise ConfigError(f"SASL {prefix} needs the package {package}: pip install 'oncelog[security]'")


def client_context(settings: Settings) -> ssl.SSLContext | None:
    """None without TLS. Raises ConfigError for files that are not there or not what they should be."""
    if not uses_tls(settings):
        return None
    what, trusted = _trusted(settings)
    context = _reading(
        lambda: ssl.create_default_context(ssl.Purpose.SERVER_AUTH, **trusted), what, _AUTHORITIES
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
    what, trusted = _trusted(settings)
    if context.verify_mode is not ssl.CERT_NONE:
        if not trusted:
            raise ConfigError(
                f"ssl.client.auth={settings['ssl.client.auth']} needs ssl.truststore.location: whose "
                "certificates are to be believed?"
            )
        _reading(lambda: context.load_verify_locations(**trusted), what, _AUTHORITIES)
    return context


def _set_versions(context: ssl.SSLContext, settings: Settings) -> None:
    wanted = settings["ssl.enabled.protocols"]
    unknown = [name for name in wanted if name not in _VERSIONS]
    if unknown or not wanted:
        raise ConfigError(f"ssl.enabled.protocols={','.join(wanted)}: expected {' and '.join(_VERSIONS)}")
    versions = [_VERSIONS[name] for name in wanted]
    context.minimum_version, context.maximum_version = min(versions), max(versions)


def _trusted(settings: Settings) -> tuple[str, dict[str, str]]:
    """Return what names whom to trust, and the arguments of load_verify_locations.

    No arguments: whom the system trusts. Raises ConfigError.
    """
    files = [key for key in ("ssl.truststore.location", "ssl.ca.location") if settings.get(key)]
    text = settings["ssl.truststore.certificates"]
    if len(files) + bool(text) > 1:
        names = [*files, *(["ssl.truststore.certificates"] if text else [])]
        raise ConfigError(f"{' and '.join(names)} say whom to trust; keep one of them")
    if text:
        return "ssl.truststore.certificates", {"cadata": text.value}
    if not files:
        return "the system's certificates", {}
    what = f"{files[0]}={settings[files[0]]!r}"
    _reading(lambda: os.stat(settings[files[0]]), what, _AUTHORITIES)
    return what, {"cafile": settings[files[0]]}


def _load_own(context: ssl.SSLContext, settings: Settings) -> bool:
    """This side's certificate; False when none is set."""
    key_password = settings["ssl.key.password"]
    # Without a password OpenSSL would ask for one on the terminal.
    password = key_password.value if key_password else ""
    chain, key = settings["ssl.keystore.certificate.chain"], settings["ssl.keystore.key"]
    if chain or key:
        if not (chain and key):
            raise ConfigError("set both ssl.keystore.certificate.chain and ssl.keystore.key, or neither")
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # 0600; OpenSSL reads files only
            file.write(f"{chain.value}\n{key.value}\n")
            file.flush()
            _reading(lambda: context.load_cert_chain(file.name, None, password), "ssl.keystore.*", _OWN)
        return True
    certificate = settings["ssl.keystore.location"] or settings.get("ssl.certificate.location")
    if not certificate:
        return False
    key_file = settings.get("ssl.key.location")
    what = "ssl.keystore.location" if settings["ssl.keystore.location"] else "ssl.certificate.location"
    what = f"{what}={certificate!r}"
    _reading(lambda: context.load_cert_chain(certificate, key_file, password), what, _OWN)
    return True


def _reading(load: Callable[[], T], what: str, content: str) -> T:
    """Return what `load` returns. Raises ConfigError, whatever is wrong with the file."""
    try:
        return load()
    except FileNotFoundError:
        raise ConfigError(f"{what}: there is no such file") from None
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(f"{what} cannot be used: {error}; it must be PEM, {content}") from error


_TOLD = frozenset(
    {
        "CERTIFICATE_VERIFY_FAILED",
        "NO_SHARED_CIPHER",
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "UNSUPPORTED_PROTOCOL",
    }
)
"""Failures of a client that speaks TLS and takes an alert; others are ended at once."""


class _ServerSide(ssl.SSLObject):
    """The broker's side of a connection, whose client learns by an alert why its handshake failed.

    asyncio closes the socket of a handshake that failed while the alert is still in its buffer. So the
    failure is raised when the client sends more, and asyncio sends the alert before. A client that does
    neither this nor close meets the deadline of the handshake.
    See test_a_client_whose_certificate_is_refused_learns_why.
    """

    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Raises SSLError."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason not in _TOLD:
                raise
            log_event("debug", "TLS handshake failed", error=repr(error))
            self._failure = error
            raise ssl.SSLWantReadError("the alert is to be sent") from error


class ServerTls:
    """The TLS of a listener. `context` is for the next connection, and is replaced when files change.

    A new context has new ticket keys and an empty session cache. So a client whose authority was removed
    cannot come back by resuming a session of before; a context exchanged during the handshake
    (`sni_callback`) would not prevent that, since tickets belong to the context that began it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen = self._failed = self._stamps()
        """Of the files that `context` was made of, and of the last ones that could not be used."""
        self.context = _server_context(settings)

    def _stamps(self) -> list[tuple[int, int] | None]:
        return [_stamp(self._settings[key]) for key in _FILES]

    def refresh(self) -> None:
        """Read files again that have changed.

        Files that could not be read are tried again: `chmod` and `chown` leave their stamps as they are.
        See test_a_renewed_certificate_that_could_not_be_read_is_read_later.
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
    """A text file's present content, for `file:///PATH`; None while it cannot be read."""

    def __init__(self, url: str, what: str) -> None:
        if not url.startswith("file://"):
            raise ConfigError(f"{what}={url!r}: only file:///PATH is served")
        self._path, self._what = url.removeprefix("file://"), what
        self._seen: tuple[int, int] | None = None
        self._failed: tuple[int, int] | None = None
        self.text: str | None = None

    def refresh(self) -> str | None:
        stamp = _stamp(self._path)
        if stamp is not None and stamp != self._seen:
            try:
                self.text = Path(self._path).read_text()
            except (OSError, UnicodeDecodeError) as error:
                if stamp != self._failed:
                    log_event("error", f"{self._what} cannot be read", error=error)
                self._failed = stamp  # tried again, as in ServerTls.refresh
            else:
                self._seen = stamp
        return self.text


def _stamp(path: str | None) -> tuple[int, int] | None:
    """What changes with a file's content."""
    if not path:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
