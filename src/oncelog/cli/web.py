"""`oncelog web`: serve web pages about a cluster's transactions, producers and groups."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from oncelog.cli.common import ClientConfig, bootstrap_options, new_admin
from oncelog.cli.registry_options import registry_option, take_registry

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from oncelog.web.faults import FaultProxy

_SHUTDOWN_S = 2
"""Seconds after Ctrl-C in which started responses may still be sent. The limit is needed because a page may
wait for a broker that never answers.
"""
_SHORT_WAITS = {"request.timeout.ms": 5_000, "http.read.timeout.ms": 3_000, "http.connect.timeout.ms": 2_000}
"""Short default time-outs for the schema registry, because a page waits for it before it shows bytes."""


@click.command("web")
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Address of the pages; port 0 means a free port.",
)
@click.option(
    "--insecure", is_flag=True, help="Allow an address beyond loopback, although the pages have no login."
)
@click.option("--read-only", is_flag=True, help="Show pages without anything that changes the cluster.")
@click.option(
    "--fault-proxy",
    metavar="HOST:PORT",
    help="Start a fault proxy in front of the cluster, at this loopback address, for the page of faults.",
)
@registry_option
@bootstrap_options
def command(
    listen: str,
    insecure: bool,
    read_only: bool,
    fault_proxy: str | None,
    registry_url: str | None,
    client_config: ClientConfig,
) -> None:
    """Serve web pages about a cluster until Ctrl-C.

    The pages show topics, messages with the fate of each record, producers with their sequences,
    transactions, groups, Spark sinks and the stories of `oncelog explain`. They say which transactions hold
    back last stable offsets and since when. Hanging transactions have a button that aborts them; offsets of
    groups and settings of topics can be changed. The first line on standard output is
    `pages on http://HOST:PORT/`. With --fault-proxy, a page switches faults on and off for the clients that
    connect to that address, and draws what happens to their batches. With --schema-registry, the messages
    page shows keys and values in the registry's wire format as JSON.
    """
    from oncelog.broker.settings.listeners import EVERY_INTERFACE, parse_address
    from oncelog.errors import ConfigError
    from oncelog.server.embedded import is_loopback

    try:
        import uvicorn  # noqa: F401

        from oncelog.client.consumer.blocking import Consumer
        from oncelog.config import CONSUMER
        from oncelog.web.app import make_app
    except ImportError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'oncelog[web]'") from None
    host, port = parse_address(listen, "--listen")
    if not (insecure or is_loopback(host)):
        raise ConfigError(
            f"--listen {listen}: the pages have no login, so anybody could read them and "
            "abort transactions; put a web server with a login before them, or use "
            "--insecure in a network that keeps others out"
        )
    deserializer = _deserializer(client_config, registry_url)
    with (
        new_admin(client_config) as admin,
        _listening(host, port) as sock,
        _fault_proxy(fault_proxy, client_config) as faults,
    ):
        port = sock.getsockname()[1]
        names = [socket.gethostname(), socket.getfqdn()] if host in EVERY_INTERFACE else [host]
        click.echo(f"pages on http://{in_url(names[0])}:{port}/")
        # Browsers write an IPv6 address in brackets.
        hosts = {*names, *map(in_url, names), "localhost"}
        reading = {key: value for key, value in client_config.items() if CONSUMER.get(key) is not None}
        app = make_app(
            admin,
            hosts=sorted(hosts),
            servers=client_config["bootstrap.servers"],
            make_consumer=lambda: Consumer({**reading, "enable.auto.commit": False}),
            fault_proxy=faults,
            deserializer=deserializer,
            is_read_only=read_only,
            closes_admin=True,
        )
        _run(app, sock)


def _deserializer(client_config: ClientConfig, url: str | None) -> Any | None:
    """Return an AnyDeserializer, or None without a schema registry. Raises ConfigError."""
    from oncelog.config import ADMIN

    registry = take_registry(client_config, url, ADMIN, _SHORT_WAITS)
    if registry is None:
        return None
    from oncelog.schema_registry.any_schema import AnyDeserializer

    # Show a value even if it does not fit its JSON Schema.
    return AnyDeserializer(registry, config={"json.fail.invalid.schema": False})


def _run(app: Starlette, sock: socket.socket) -> None:
    """Serve the application until SIGINT or SIGTERM."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Close the clients first: uvicorn waits for unfinished pages, which wait for brokers that may not
            # answer.
            app.state.close_clients()
            await super().shutdown(sockets)

    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_S)
    with contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[sock])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        from oncelog.server.listen_errors import listen_error_text

        raise click.ClickException(listen_error_text(f"{in_url(host)}:{port}", error)) from error


@contextlib.contextmanager
def _fault_proxy(listen: str | None, client_config: dict[str, Any]) -> Iterator[FaultProxy | None]:
    """Start the fault proxy at the address `listen`, print the address on standard error, and yield the
    proxy. If `listen` is None, yield None.
    """
    if listen is None:
        yield None
        return
    from oncelog.broker.settings.listeners import parse_address
    from oncelog.errors import ConfigError
    from oncelog.server.embedded import is_loopback
    from oncelog.server.listen_errors import listen_error_text
    from oncelog.web.faults import FaultProxy

    host, port = parse_address(listen, "--fault-proxy")
    if not is_loopback(host):
        raise ConfigError(f"--fault-proxy {listen}: the proxy has no login, so it listens on loopback only")
    if str(client_config.get("security.protocol", "PLAINTEXT")).upper().endswith("SSL"):
        raise ConfigError("--fault-proxy: the proxy reads messages, so it cannot pass TLS")
    faults = FaultProxy(client_config["bootstrap.servers"].split(",")[0].strip(), host, port)
    try:
        faults.proxy.start()
    except OSError as error:
        raise click.ClickException(listen_error_text(f"{in_url(host)}:{port}", error)) from error
    with faults.proxy:
        click.echo(f"fault proxy on {faults.proxy.bootstrap_servers}", err=True)
        yield faults


def in_url(host: str) -> str:
    """Return the host as it is written in a URL: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host
