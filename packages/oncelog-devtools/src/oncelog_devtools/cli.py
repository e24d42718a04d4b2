"""`oncelog dev`: what developers of Kafka and Spark applications want beside them."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncelog.cli.common import emit, output_option, parse_properties

if TYPE_CHECKING:
    from oncelog_devtools.cluster_state import StandingNode


@click.group("dev")
def command() -> None:
    """Things to develop and compare with."""


@command.group("kafka")
def kafka() -> None:
    """Apache Kafka itself, from its Maven jars: one node or several on this machine, no Docker."""


@command.group("spark")
def spark() -> None:
    """A Spark standalone cluster from the pip package of PySpark: a master and workers on this machine."""


_directory_option = click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where its data and logs live.  [default: a directory under your data home]",
)
_foreground_option = click.option(
    "--foreground", is_flag=True, help="Stay until Ctrl-C or SIGTERM, then stop it."
)


def _home(directory: Path | None, kind: str) -> Path:
    from oncelog.cli.serve import default_data_dir

    default = {"kafka": "oncelog-apache-kafka", "spark": "oncelog-spark-cluster"}[kind]
    return (directory or default_data_dir().with_name(default)).absolute()


def _announce(what: str, home: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays behind half started
    click.echo(f"starting {what} in {home}", err=True)


def _tell(address: str, home: Path, started: list[StandingNode], foreground: bool) -> None:
    """Print the address; in the foreground stay as long as the cluster, and take it along."""
    from oncelog_devtools import cluster_state

    try:
        click.echo(address)
        sys.stdout.flush()
        while foreground and any(node.is_running for node in started):
            time.sleep(0.2)
    except KeyboardInterrupt:
        click.echo("stopping", err=True)
    finally:
        if foreground:
            cluster_state.stop(home)


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
@_foreground_option
def start_kafka(nodes: int, directory: Path | None, properties: tuple[str, ...], foreground: bool) -> None:
    """Start a cluster in the background and print its bootstrap servers.

    The first time fetches the jars with Maven. With three nodes or more, internal topics have three replicas.
    Nodes that were killed while others run are started again. A stopped cluster gets the ports that it had,
    if they are free.
    """
    from oncelog_devtools import cluster_state

    home = _home(directory, "kafka")
    _announce("Apache Kafka", home)
    started = cluster_state.start_kafka(
        home, nodes=nodes, properties=parse_properties(properties), outlive_parent=not foreground
    )
    _tell(",".join(f"127.0.0.1:{node.port}" for node in started), home, started, foreground)


@spark.command("start")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 9), help="Workers.")
@click.option("--cores", default=1, show_default=True, type=click.IntRange(1), help="Of each worker.")
@click.option(
    "--memory-mb",
    default=1024,
    show_default=True,
    type=click.IntRange(512),
    help="Of each worker, for executors; an application asks for 1024 unless spark.executor.memory is set.",
)
@_directory_option
@_foreground_option
def start_spark(workers: int, cores: int, memory_mb: int, directory: Path | None, foreground: bool) -> None:
    """Start a master and workers in the background and print the master's URL.

    It listens on loopback only. Executors that die with a worker are started again on the others by Spark.
    """
    from oncelog_devtools import cluster_state

    home = _home(directory, "spark")
    _announce("Spark", home)
    started = cluster_state.start_spark(
        home, workers=workers, cores=cores, memory_mb=memory_mb, outlive_parent=not foreground
    )
    click.echo(f"its page: {started[0].page}", err=True)
    _tell(f"spark://127.0.0.1:{started[0].port}", home, started, foreground)


def _status(kind: str, directory: Path | None, output: str) -> None:
    from oncelog_devtools import cluster_state

    rows = [_row(node) for node in cluster_state.find(_home(directory, kind))]
    emit(rows, output, columns=("node", "address", "pid", "state"), wide=("page",) if kind == "spark" else ())


def _row(node: StandingNode) -> dict[str, object]:
    return {
        "node": node.name,
        "address": f"127.0.0.1:{node.port}",
        "pid": node.pid,
        "state": "running" if node.is_running else "stopped",
        "config": node.properties,
        **({"page": node.page} if node.page else {}),
    }


def _stop(kind: str, directory: Path | None) -> None:
    from oncelog_devtools import cluster_state

    for node in cluster_state.stop(_home(directory, kind)):
        click.echo(f"stopped node {node.name} (pid {node.pid})")


@kafka.command("status")
@_directory_option
@output_option
def kafka_status(directory: Path | None, output: str) -> None:
    """Show the nodes last started there, and whether they run."""
    _status("kafka", directory, output)


@spark.command("status")
@_directory_option
@output_option
def spark_status(directory: Path | None, output: str) -> None:
    """Show the master and the workers last started there, and whether they run."""
    _status("spark", directory, output)


@kafka.command("stop")
@_directory_option
def stop_kafka(directory: Path | None) -> None:
    """Stop its nodes; the data stay."""
    _stop("kafka", directory)


@spark.command("stop")
@_directory_option
def stop_spark(directory: Path | None) -> None:
    """Stop the workers with their executors, and the master."""
    _stop("spark", directory)
