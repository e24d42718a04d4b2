"""An open listener: its sockets, its TLS context and the SASL settings of its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from oncelog.broker.settings.listeners import Listener
from oncelog.errors import StorageError
from oncelog.rules.security.authorization import ANONYMOUS
from oncelog.rules.security.principal import distinguished_name, principal_mapper
from oncelog.runtime.tls import ServerTls, check_mechanisms, uses_sasl, uses_tls
from oncelog.server.listen_errors import listen_error_text
from oncelog.server.listener import AcceptedConnection, Listen


class Acceptor:
    """Accepts connections on one listener.

    Raises ConfigError for TLS or SASL settings that cannot be used.
    """

    def __init__(self, listener: Listener, listen: Listen) -> None:
        settings = listener.settings
        self.listener = listener
        self.needs_sasl = uses_sasl(settings)
        if self.needs_sasl:
            check_mechanisms(settings["sasl.enabled.mechanisms"])
        self._principal_name = principal_mapper(settings["ssl.principal.mapping.rules"])
        self._tls = ServerTls(settings) if uses_tls(settings) else None
        self._listen = listen
        self._opened: Any = None

    @property
    def uses_tls(self) -> bool:
        return self._tls is not None

    def principal_of(self, transport: asyncio.BaseTransport) -> str:
        """Return the principal of the client's certificate; ANONYMOUS without a certificate.

        Raises ConfigError if no rule of ssl.principal.mapping.rules matches.
        """
        certificate = transport.get_extra_info("peercert")
        if not certificate:
            return ANONYMOUS
        return f"User:{self._principal_name(distinguished_name(certificate['subject']))}"

    async def start(self, connect: Callable[[], AcceptedConnection]) -> None:
        """Listen. `connect` returns the protocol of a new connection. Raises StorageError."""
        host, port = self.listener.host, self.listener.port
        tls = self._tls
        context = None if tls is None else lambda: tls.context
        try:
            self._opened = await self._listen(connect, host, port, ssl=context)
        except OSError as error:
            raise StorageError(listen_error_text(self.listener.bootstrap_servers, error)) from error
        self.listener = self.listener.bound(self._opened.sockets[0].getsockname()[1])

    def refresh(self) -> None:
        """Reload certificates whose files have changed."""
        if self._tls is not None:
            self._tls.refresh()

    def stop(self) -> None:
        """Accept no more connections. Existing connections stay open."""
        if self._opened is not None:
            self._opened.close()
