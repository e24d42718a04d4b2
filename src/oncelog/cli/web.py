"""`oncelog web`: the pages about a cluster's transactions, producers and groups."""

from __future__ import annotations

from typing import Any

import click

from oncelog.cli.common import bootstrap_options, only_settings_of


@click.command("web")
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Address of the pages; port 0 takes a free one.",
)
@click.option("--insecure", is_flag=True, help="Beyond loopback, although the pages have no log-in.")
@bootstrap_options
def command(listen: str, insecure: bool, client_config: dict[str, Any]) -> None:
    """Show a cluster's transactions, producers and groups as web pages until Ctrl-C.

    Who holds back the last stable offset of which partition, since when, and a button to abort what hangs.
    The first line on standard output is `pages on http://HOST:PORT/`.
    """
    import contextlib
    import socket

    from oncelog.broker.listeners import EVERY_INTERFACE, parse_address
    from oncelog.config import ADMIN
    from oncelog.edge.admin import Admin
    from oncelog.edge.broker import is_loopback
    from oncelog.errors import ConfigError

    try:
        import uvicorn

        from oncelog.web.app import make_app
    except ImportError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'oncelog[web]'") from None

    host, port = parse_address(listen, "--listen")
    if not (insecure or is_loopback(host)):
        raise ConfigError(
            f"--listen {listen}: the pages have no log-in, anybody could read them and abort transactions; "
            "put a web server with one before them, or say --insecure where the network keeps others out"
        )
    servers = client_config["bootstrap.servers"]
    with Admin(only_settings_of(ADMIN, client_config)) as admin, socket.create_server((host, port)) as sock:
        port = sock.getsockname()[1]
        names = [socket.gethostname(), socket.getfqdn()] if host in EVERY_INTERFACE else [host]
        click.echo(f"pages on http://{names[0]}:{port}/")
        app = make_app(admin, hosts=[*names, "localhost"], servers=servers)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])
