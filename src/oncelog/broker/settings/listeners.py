"""Where the broker listens, and what it demands there: `listeners`, with the settings of each.

A listener is written [NAME://]HOST:PORT. Its name is a security protocol, or stands for one in
listener.security.protocol.map; without a name it is that of security.protocol. What holds for one listener
only is set as listener.name.NAME.KEY. Source: KIP-103, Kafka's SocketServerConfigs.
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
    """`settings`: the broker's as they hold here. `port` 0: a free one, not known before it listens.

    `advertised`: what clients are told instead of host and port.
    """

    name: str
    host: str
    port: int
    settings: Settings
    advertised: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """What clients that came by it are told to connect to."""
        return self.advertised or (self.host, self.port)

    @property
    def bootstrap_servers(self) -> str:
        return address_text(self.host, self.port)

    def bound(self, port: int) -> Listener:
        """The same at the port that it was given."""
        told = self.advertised and (self.advertised[0], self.advertised[1] or port)
        return replace(self, port=port, advertised=told)


def listeners_of(settings: Settings, host_name: str) -> tuple[Listener, ...]:
    """All of `listeners`. `host_name`: what this machine is called, for those on every interface.

    Raises ConfigError for what contradicts itself or is not written as it must be.
    """
    protocols = _protocols(settings)
    parts = [_parse(text, "listeners", settings) for text in settings["listeners"]]
    names = [name for name, _, _ in parts]
    if not names:
        raise ConfigError("listeners= is empty: where is the broker to listen?")
    for name, count in Counter(names).items():
        if name not in protocols:
            raise ConfigError(
                f"listeners: {name} is no security protocol; listener.security.protocol.map={name}:PROTOCOL "
                f"says which it speaks ({', '.join(PROTOCOLS)})"
            )
        if count > 1:
            raise ConfigError(
                f"listeners: two are called {name}; name one of them otherwise and map it, as in "
                f"INTERNAL://HOST:PORT with listener.security.protocol.map=INTERNAL:{protocols[name]}"
            )
    advertised, own = _advertised(settings, names), _own_settings(settings, names)
    made = []
    for name, host, port in parts:
        # Clients cannot connect to "every interface"; Kafka advertises the host's name then, too.
        told = advertised.get(name) or ((host_name, port) if host in EVERY_INTERFACE else None)
        changes = {**own.get(name, {}), "security.protocol": protocols[name]}
        made.append(Listener(name, host, port, settings.replaced(changes), told))
    return tuple(made)


def address_text(host: str, port: int) -> str:
    """What `parse_address` reads: HOST:PORT, IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, what: str) -> tuple[str, int]:
    """`HOST:PORT`, IPv6 hosts in brackets. Raises ConfigError naming `what`."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{what}={text!r}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def _parse(text: str, what: str, settings: Settings) -> tuple[str, str, int]:
    name, _, address = text.rpartition("://")
    host, port = parse_address(address, what)
    return (name or settings["security.protocol"]).upper(), host, port


def _protocols(settings: Settings) -> dict[str, str]:
    """Name of a listener -> what it speaks; every protocol is a name of itself, unless mapped."""
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
    found: dict[str, tuple[str, int]] = {}
    for text in settings[key]:
        if "://" not in text and len(names) > 1:
            raise ConfigError(f"{key}={text!r}: with several listeners, NAME://HOST:PORT says whose it is")
        name, host, port = _parse(text if "://" in text else f"{names[0]}://{text}", key, settings)
        if name not in names:
            raise ConfigError(f"{key}={text!r}: there is no listener {name}, but {', '.join(names)}")
        if host in EVERY_INTERFACE:
            raise ConfigError(f"{key}={text!r}: clients cannot connect to every interface; name the host")
        if name in found:
            raise ConfigError(f"{key}: {name} is there twice")
        found[name] = host, port
    return found


def _own_settings(settings: Settings, names: list[str]) -> dict[str, dict[str, object]]:
    """Name of a listener -> what is set as listener.name.NAME.KEY."""
    own: dict[str, dict[str, object]] = {}
    for scoped, value in settings.user_set().items():
        if scoped.startswith(SCOPE):
            name, _, key = scoped.removeprefix(SCOPE).partition(".")
            if name.upper() not in names:
                raise ConfigError(f"{scoped}: there is no listener {name.upper()}, but {', '.join(names)}")
            own.setdefault(name.upper(), {})[key] = value
    return own
