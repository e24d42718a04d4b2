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
    help="Address of the pages; port 0 takes a free one. They have no log-in: leave them on loopback.",
)
@bootstrap_options
def command(listen: str, client_config: dict[str, Any]) -> None:
    """Show a cluster's transactions, producers and groups as web pages until Ctrl-C.

    Who holds back the last stable offset of which partition, since when, and a button to abort what hangs.
    The first line on standard output is `pages on http://HOST:PORT/`.
    """
    import contextlib
    import socket

    from oncelog.config import ADMIN
    from oncelog.edge.admin import Admin
    from oncelog.edge.broker import parse_address

    try:
        import uvicorn

        from oncelog.web.app import make_app
    except ImportError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'oncelog[web]'") from None

    host, port = parse_address(listen, "--listen")
    servers = client_config["bootstrap.servers"]
    with Admin(only_settings_of(ADMIN, client_config)) as admin, socket.create_server((host, port)) as sock:
        port = sock.getsockname()[1]
        click.echo(f"pages on http://{host}:{port}/")
        app = make_app(admin, hosts=[host, "localhost"], servers=servers)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])
