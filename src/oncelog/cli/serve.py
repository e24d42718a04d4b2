"""`oncelog serve`: run the broker in the foreground."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncelog.cli.common import parse_properties
from oncelog.cli.kafka_properties import adapt
from oncelog.cli.properties import read_properties
from oncelog.config import BROKER

if TYPE_CHECKING:
    from oncelog.broker.settings.listeners import Listener


def default_data_dir() -> Path:
    """Return the user's data directory: oncelog in $XDG_DATA_HOME or ~/.local/share."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "oncelog"


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, because each active partition needs an
    open file.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # macOS refuses "unlimited" for this limit. Continue: if open files run out later, the broker
            # reports it.
            pass


def say(lines: Iterable[str]) -> None:
    """Write lines to standard output. If that fails, log a warning and write no more lines.

    Standard output may be a file on a full disk, or a pipe that nobody reads (`oncelog serve | head -1`).
    A failure of either must not stop the broker.
    """
    from oncelog.runtime.event_log import log_event

    try:
        for line in lines:
            click.echo(line)
    except OSError as error:
        log_event("warning", "standard output cannot be written", error=error)
        # Redirect standard output to the null device. Otherwise Python would fail at exit, when it writes the
        # buffered text again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, readable=False, path_type=Path),
    envvar="ONCELOG_DATA_DIR",
    help="The data directory; created if missing.  [default: oncelog in $XDG_DATA_HOME or ~/.local/share]",
)
@click.option(
    "--listen",
    multiple=True,
    metavar="[NAME://]HOST:PORT",
    help="Address to listen on; port 0 means a free port. NAME is PLAINTEXT, SSL, SASL_SSL, SASL_PLAINTEXT, "
    "or a name in listener.security.protocol.map. Repeatable.  [default: 127.0.0.1:9092]",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow listeners beyond loopback without authentication (docs/security.md).",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A .properties file with broker settings by their Kafka names, for example Apache Kafka's "
    "server.properties. Settings without a meaning here are named in a warning.",
)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="One setting. It overrides --config. Repeatable.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65_535),
    help="Serve Prometheus metrics on this port; 0 means a free port.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="Address of the metrics. Beyond loopback, set oncelog.metrics.token (docs/security.md).",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="The minimum level of events on standard error.",
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

    The first line on standard output is `listening on HOST:PORT`. With several listeners, each has a line
    with NAME://HOST:PORT. The log goes to standard error. A second broker on the same data directory fails
    with exit code 1.
    """
    from oncelog.runtime.event_log import log_event, log_to_stderr
    from oncelog.server.embedded import run_foreground

    log_to_stderr(log_level)
    raise_file_limit()
    file = adapt(read_properties(config_file) if config_file else {})
    if file.without_effect:
        log_event("warning", "settings without effect", file=config_file, keys=",".join(file.without_effect))
    given: dict[str, object] = {**file.settings, **parse_properties(pairs)}
    if listen:
        given["listeners"] = listen
    if insecure:
        given["oncelog.insecure"] = "true"

    def on_ready(listeners: Sequence[Listener], metrics_port: int | None) -> None:
        lines = []
        for listener in listeners:
            name = f"{listener.name}://" if len(listeners) > 1 else ""
            lines.append(f"listening on {name}{listener.bootstrap_servers}")
        if metrics_port is not None:
            lines.append(f"metrics on http://{metrics_host}:{metrics_port}/metrics")
        say(lines)

    run_foreground(
        data_dir or default_data_dir(),
        BROKER.parse(given),
        metrics=None if metrics_port is None else (metrics_host, metrics_port),
        on_ready=on_ready,
    )
