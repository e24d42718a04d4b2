"""`oncelog serve`: the broker in the foreground."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncelog.cli.common import parse_properties
from oncelog.cli.properties import read_properties
from oncelog.config import BROKER

if TYPE_CHECKING:
    from oncelog.broker.settings.listeners import Listener


def default_data_dir() -> Path:
    """Return the user's data directory: oncelog in $XDG_DATA_HOME or ~/.local/share."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "oncelog"


def raise_file_limit() -> None:
    """Raise the limit of open files to the allowed maximum, because each active partition needs one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # macOS refuses "unlimited"; a later shortage of files is reported


def say(lines: Iterable[str]) -> None:
    """Write lines to standard output; after a failure, write nothing more there.

    A broker starts on a full disk, and keeps running when nobody reads its output (`oncelog serve | head
    -1`).
    """
    from oncelog.runtime.event_log import log_event

    try:
        for line in lines:
            click.echo(line)
    except OSError as error:
        log_event("warning", "standard output cannot be written", error=error)
        # Otherwise Python would write the rest again at exit and fail.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, readable=False, path_type=Path),
    envvar="ONCELOG_DATA_DIR",
    help="Where the data lives; made if missing.  [default: a directory under your data home]",
)
@click.option(
    "--listen",
    multiple=True,
    metavar="[NAME://]HOST:PORT",
    help="Address to listen on, port 0 takes a free one; may be repeated. NAME: PLAINTEXT, SSL, SASL_SSL, "
    "SASL_PLAINTEXT, or one that listener.security.protocol.map knows.  [default: 127.0.0.1:9092]",
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
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="Address of the metrics; beyond loopback with oncelog.metrics.token (docs/security.md).",
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
    listen: tuple[str, ...],
    insecure: bool,
    config_file: Path | None,
    pairs: tuple[str, ...],
    metrics_port: int | None,
    metrics_host: str,
    log_level: str,
) -> None:
    """Run the broker until SIGTERM, SIGHUP or Ctrl-C.

    The first line on standard output is `listening on HOST:PORT`; with several listeners there is a line per
    listener, with NAME://. The log goes to standard error. A second broker on the same data directory ends
    with exit code 1.
    """
    from oncelog.runtime.event_log import log_to_stderr
    from oncelog.server.embedded import run_foreground

    log_to_stderr(log_level)
    raise_file_limit()
    given: dict[str, object] = {
        **(read_properties(config_file) if config_file else {}),
        **parse_properties(pairs),
    }
    if listen:
        given["listeners"] = listen
    if insecure:
        given["oncelog.insecure"] = "true"

    def on_ready(listeners: Sequence[Listener], metrics_port: int | None) -> None:
        lines = []
        for each in listeners:
            name = f"{each.name}://" if len(listeners) > 1 else ""
            lines.append(f"listening on {name}{each.bootstrap_servers}")
        if metrics_port is not None:
            lines.append(f"metrics on http://{metrics_host}:{metrics_port}/metrics")
        say(lines)

    run_foreground(
        data_dir or default_data_dir(),
        BROKER.parse(given),
        metrics=None if metrics_port is None else (metrics_host, metrics_port),
        on_ready=on_ready,
    )
