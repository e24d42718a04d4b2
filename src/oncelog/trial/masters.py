"""The Spark masters that a trial supports: their executors run on this machine, where it can kill them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping

from oncelog.errors import ConfigError

STANDALONE = "spark://"
"""The beginning of the URL of a standalone cluster's master."""


def standalone_hosts(master: str) -> list[str]:
    """Return the hosts of the master of a standalone cluster, `spark://HOST:PORT[,HOST:PORT]`; else none."""
    if not master.startswith(STANDALONE):
        return []
    addresses = master.removeprefix(STANDALONE).split(",")
    return [address.rpartition(":")[0].strip("[]") for address in addresses]


def check_master(master: str, is_own: Callable[[str], bool]) -> None:
    """Raise ConfigError if a trial cannot use the master. `is_own` tells if a host is this machine."""
    hosts = standalone_hosts(master)
    if master.startswith("local") or (hosts and all(map(is_own, hosts))):
        return
    raise ConfigError(
        f"--master {master}: a trial kills processes of this machine. It supports local[N], "
        "local-cluster[N,CORES,MB], and spark://HOST:PORT of a standalone cluster on this machine (oncelog "
        "dev spark start)"
    )


def is_own_host(host: str) -> bool:
    """Return True if `host` resolves to an address of this machine. Looks the name up."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def network_conf(master: str) -> Mapping[str, str]:
    """Return Spark's settings for a driver that executors of this master reach on loopback; else none."""
    if not any(map(_is_loopback, standalone_hosts(master))):
        return {}
    return {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
