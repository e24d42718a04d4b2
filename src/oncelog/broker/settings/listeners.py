"""The broker's listeners: the address, security protocol and settings of each.

A listener is written [NAME://]HOST:PORT. Its name is a security protocol, or is mapped to one by
listener.security.protocol.map. If a listener has no name, the value of security.protocol is its name.
Settings that apply to one listener are written as listener.name.NAME.KEY. Responses give a client the
advertised address of the listener to which it connected.
Source: KIP-103; kafka SocketServerConfigs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from oncelog.config import PROTOCOLS
from oncelog.errors import ConfigError
from oncelog.settings import SCOPE, Settings

EVERY_INTERFACE = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Listener:
    """A listener. `settings` are the broker's, overridden by those of this listener.

    `port` is 0 for a free port until the listener is bound. `advertised` is the address that clients connect
    to; None if it is (host, port).
    """

    name: str
    host: str
    port: int
    settings: Settings
    advertised: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The address of the broker in responses to clients of this listener.

        See test_metadata_names_the_listener_of_the_connection.
        """
        return self.advertised or (self.host, self.port)

    @property
    def bootstrap_servers(self) -> str:
        """The address on which the broker listens, as HOST:PORT."""
        return address_text(self.host, self.port)

    def bound(self, port: int) -> Listener:
        """Return a copy of the listener with the port to which it was bound."""
        advertised = self.advertised and (self.advertised[0], self.advertised[1] or port)
        return replace(self, port=port, advertised=advertised)


def parse_listeners(settings: Settings, host_name: str) -> tuple[Listener, ...]:
    """Parse the setting `listeners`.

    A listener on all interfaces advertises `host_name`, unless advertised.listeners names another address for
    it. Raises ConfigError for invalid or contradictory settings.
    """
    protocols = _protocols(settings)
    parts = [_parse(text, "listeners", settings) for text in settings["listeners"]]
    names = [name for name, _, _ in parts]
    if not names:
        raise ConfigError("listeners is empty: set it to an address, for example PLAINTEXT://127.0.0.1:9092")
    for name, count in Counter(names).items():
        if name not in protocols:
            raise ConfigError(
                f"listeners: {name} is not a security protocol; set "
                f"listener.security.protocol.map={name}:PROTOCOL ({', '.join(PROTOCOLS)})"
            )
        if count > 1:
            raise ConfigError(
                f"listeners: two have the name {name}; rename one of them and map it, as in "
                f"INTERNAL://HOST:PORT with listener.security.protocol.map=INTERNAL:{protocols[name]}"
            )
    advertised, own = _advertised(settings, names), _own_settings(settings, names)
    listeners = []
    for name, host, port in parts:
        # Clients cannot connect to "all interfaces". Like Kafka, advertise the host name instead.
        client_address = advertised.get(name) or ((host_name, port) if host in EVERY_INTERFACE else None)
        changes = {**own.get(name, {}), "security.protocol": protocols[name]}
        listeners.append(Listener(name, host, port, settings.replaced(changes), client_address))
    return tuple(listeners)


def address_text(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 host in brackets. `parse_address` is the inverse."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Parse HOST:PORT, with an IPv6 host in brackets.

    Raises ConfigError; its text names the setting `what`.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{what}={text!r}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def _parse(text: str, what: str, settings: Settings) -> tuple[str, str, int]:
    name, _, address = text.rpartition("://")
    host, port = parse_address(address, what)
    return (name or settings["security.protocol"]).upper(), host, port


def _protocols(settings: Settings) -> dict[str, str]:
    """Map listener names to security protocols; a protocol name maps to itself unless overridden."""
    key = "listener.security.protocol.map"
    protocols = {protocol: protocol for protocol in PROTOCOLS}
    for pair in settings[key]:
        name, _, protocol = (part.strip().upper() for part in pair.partition(":"))
        if not name or protocol not in PROTOCOLS:
            raise ConfigError(
                f"{key}={pair!r}: expected NAME:PROTOCOL, PROTOCOL one of {', '.join(PROTOCOLS)}"
            )
        protocols[name] = protocol
    return protocols


def _advertised(settings: Settings, names: list[str]) -> dict[str, tuple[str, int]]:
    key = "advertised.listeners"
    addresses: dict[str, tuple[str, int]] = {}
    for text in settings[key]:
        if "://" not in text and len(names) > 1:
            raise ConfigError(f"{key}={text!r}: with several listeners, write NAME://HOST:PORT")
        name, host, port = _parse(text if "://" in text else f"{names[0]}://{text}", key, settings)
        if name not in names:
            raise ConfigError(
                f"{key}={text!r}: listener {name} does not exist; use one of {', '.join(names)}"
            )
        if host in EVERY_INTERFACE:
            raise ConfigError(f"{key}={text!r}: clients cannot connect to all interfaces; set a host name")
        if name in addresses:
            raise ConfigError(f"{key}: {name} occurs twice")
        addresses[name] = host, port
    return addresses


def _own_settings(settings: Settings, names: list[str]) -> dict[str, dict[str, object]]:
    """Return the settings listener.name.NAME.KEY, by upper-case listener name and key."""
    own: dict[str, dict[str, object]] = {}
    for scoped, value in settings.user_set().items():
        if scoped.startswith(SCOPE):
            name, _, key = scoped.removeprefix(SCOPE).partition(".")
            if name.upper() not in names:
                raise ConfigError(
                    f"{scoped}: listener {name.upper()} does not exist; use one of {', '.join(names)}"
                )
            own.setdefault(name.upper(), {})[key] = value
    return own
