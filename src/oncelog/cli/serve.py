"""`oncelog serve`: the broker in the foreground."""

from __future__ import annotations

import os
from pathlib import Path

import click

from oncelog.cli.common import parse_properties, read_properties
from oncelog.config import BROKER


def default_data_dir() -> Path:
    """Where data of this user lives: $XDG_DATA_HOME or ~/.local/share, then oncelog."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "oncelog"


def raise_file_limit() -> None:
    """As many open files as the system lets this process have: every partition in use takes one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # macOS refuses "unlimited"; what is out of files later says so


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, readable=False, path_type=Path),
    envvar="ONCELOG_DATA_DIR",
    help="Where the data lives; made if missing.  [default: a directory under your data home]",
)
@click.option(
    "--listen",
    default="127.0.0.1:9092",
    show_default=True,
    metavar="[PROTOCOL://]HOST:PORT",
    help="Address to listen on; port 0 takes a free one. PROTOCOL: PLAINTEXT, SSL, SASL_SSL, SASL_PLAINTEXT.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen beyond loopback although clients need not say who they are (docs/security.md).",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A .properties file with Kafka's broker keys.",
)
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="One setting; wins over --config.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65_535), help="Serve Prometheus metrics there; 0 is free."
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least level of events on standard error.",
)
def command(
    data_dir: Path | None,
    listen: str,
    insecure: bool,
    config_file: Path | None,
    pairs: tuple[str, ...],
    metrics_port: int | None,
    log_level: str,
) -> None:
    """Run the broker until SIGTERM or Ctrl-C.

    The first line on standard output is `listening on HOST:PORT`; the log goes to standard error.
    A second broker on the same data directory is refused with exit code 1.
    """
    from oncelog.edge.broker import parse_address, run_foreground
    from oncelog.edge.event_log import log_to_stderr

    log_to_stderr(log_level)
    raise_file_limit()
    protocol, separator, address = listen.rpartition("://")
    host, port = parse_address(address, "--listen")
    given = {**(read_properties(config_file) if config_file else {}), **parse_properties(pairs)}
    if separator:
        given["security.protocol"] = protocol
    if insecure:
        given["oncelog.insecure"] = "true"

    def on_ready(host: str, port: int, metrics_port: int | None) -> None:
        click.echo(f"listening on {host}:{port}")
        if metrics_port is not None:
            click.echo(f"metrics on http://{host}:{metrics_port}/metrics")

    run_foreground(
        data_dir or default_data_dir(),
        host,
        port,
        BROKER.parse(given),
        metrics_port=metrics_port,
        on_ready=on_ready,
    )
