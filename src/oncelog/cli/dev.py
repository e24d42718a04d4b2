"""`oncelog dev`: what developers of Kafka applications want beside them."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncelog.cli.common import emit, output_option, parse_properties

if TYPE_CHECKING:
    from oncelog.dev.standing import StandingNode


@click.group("dev")
def command() -> None:
    """Things to develop and compare with."""


@command.group("kafka")
def kafka() -> None:
    """Apache Kafka itself, from its Maven jars: one node or several on this machine, no Docker."""


def _default_directory() -> Path:
    from oncelog.cli.serve import default_data_dir

    return default_data_dir().with_name("oncelog-apache-kafka")


_directory_option = click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where its data and logs live.  [default: a directory under your data home]",
)


@kafka.command("start")
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1, 9), help="Brokers.")
@_directory_option
@click.option(
    "-X",
    "--property",
    "properties",
    multiple=True,
    metavar="KEY=VALUE",
    help="A server property of each node.",
)
@click.option("--foreground", is_flag=True, help="Stay until Ctrl-C or SIGTERM, then stop it.")
def start(nodes: int, directory: Path | None, properties: tuple[str, ...], foreground: bool) -> None:
    """Start a cluster in the background and print its bootstrap servers.

    The first time fetches the jars with Maven. With three nodes or more, internal topics have three replicas.
    """
    from oncelog.dev import standing

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays behind half started
    home = (directory or _default_directory()).absolute()
    click.echo(f"starting Apache Kafka in {home}", err=True)
    started = standing.start(
        home, nodes=nodes, properties=parse_properties(properties), outlive_parent=not foreground
    )
    try:
        click.echo(",".join(f"127.0.0.1:{node.port}" for node in started))
        sys.stdout.flush()
        while foreground and any(node.is_running for node in started):
            time.sleep(0.2)
    except KeyboardInterrupt:
        click.echo("stopping", err=True)
    finally:
        if foreground:
            standing.stop(home)


@kafka.command("status")
@_directory_option
@output_option
def status(directory: Path | None, output: str) -> None:
    """Show the nodes last started there, and whether they run."""
    from oncelog.dev import standing

    rows = [_row(node) for node in standing.find((directory or _default_directory()).absolute())]
    emit(rows, output, columns=("node", "address", "pid", "state"))


def _row(node: StandingNode) -> dict[str, object]:
    return {
        "node": node.node_id,
        "address": f"127.0.0.1:{node.port}",
        "pid": node.pid,
        "state": "running" if node.is_running else "stopped",
        "config": node.properties,
    }


@kafka.command("stop")
@_directory_option
def stop(directory: Path | None) -> None:
    """Stop its nodes; the data stay."""
    from oncelog.dev import standing

    for node in standing.stop((directory or _default_directory()).absolute()):
        click.echo(f"stopped node {node.node_id} (pid {node.pid})")
