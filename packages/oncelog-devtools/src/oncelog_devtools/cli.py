"""The `oncelog dev` command: local clusters of Apache Kafka and Spark, and Prometheus, for developers."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncelog.cli.common import emit, output_option, parse_properties

if TYPE_CHECKING:
    from oncelog_devtools.cluster_state import NodeRecord


@click.group("dev")
def command() -> None:
    """Start local clusters of Apache Kafka and Spark, or Prometheus, for development and comparison."""


@command.group("kafka")
def kafka() -> None:
    """Run Apache Kafka from its Maven jars: one node or several on this machine, no Docker."""


@command.group("spark")
def spark() -> None:
    """Run a Spark standalone cluster on this machine: a master and workers from the package PySpark."""


@command.group("prometheus")
def prometheus() -> None:
    """Run Prometheus, with Oncelog's alert rules, on this machine."""


_directory_option = click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the cluster's data and logs.  [default: in $XDG_DATA_HOME or ~/.local/share]",
)
_foreground_option = click.option(
    "--foreground",
    is_flag=True,
    help="Stay in the foreground until Ctrl-C or SIGTERM, then stop the cluster.",
)


def _home(directory: Path | None, kind: str) -> Path:
    from oncelog.cli.serve import default_data_dir

    default = {
        "kafka": "oncelog-apache-kafka",
        "spark": "oncelog-spark-cluster",
        "prometheus": "oncelog-prometheus",
    }[kind]
    return (directory or default_data_dir().with_name(default)).absolute()


def _announce(name: str, home: Path) -> None:
    # Turn SIGTERM into SystemExit, which runs the clean-up of a cluster that is only partly started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    click.echo(f"starting {name} in {home}", err=True)


def _report(address: str, home: Path, started: list[NodeRecord], foreground: bool) -> None:
    """Print the address. With `foreground`, wait for Ctrl-C or the cluster's end, then stop the cluster."""
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
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1, 9), help="Number of brokers.")
@_directory_option
@click.option(
    "-X",
    "--property",
    "properties",
    multiple=True,
    metavar="KEY=VALUE",
    help="A broker property, set on every node.",
)
@_foreground_option
def start_kafka(nodes: int, directory: Path | None, properties: tuple[str, ...], foreground: bool) -> None:
    """Start a cluster in the background and print its bootstrap servers.

    Maven downloads the jars at the first start. With three nodes or more, internal topics have three
    replicas. If some nodes are still running, only the others are started. A restarted cluster keeps its
    ports if they are free.
    """
    from oncelog_devtools import cluster_state

    home = _home(directory, "kafka")
    _announce("Apache Kafka", home)
    started = cluster_state.start_kafka(
        home, nodes=nodes, properties=parse_properties(properties), outlive_parent=not foreground
    )
    _report(",".join(f"127.0.0.1:{node.port}" for node in started), home, started, foreground)


@spark.command("start")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 9), help="Number of workers.")
@click.option("--cores", default=1, show_default=True, type=click.IntRange(1), help="Cores of each worker.")
@click.option(
    "--memory-mb",
    default=1024,
    show_default=True,
    type=click.IntRange(512),
    help="Executor memory of each worker. An application needs 1024 unless it sets spark.executor.memory.",
)
@_directory_option
@_foreground_option
def start_spark(workers: int, cores: int, memory_mb: int, directory: Path | None, foreground: bool) -> None:
    """Start a master and workers in the background and print the master's URL.

    The cluster listens on loopback only. If a worker dies, Spark restarts its executors on other workers.
    """
    from oncelog_devtools import cluster_state

    home = _home(directory, "spark")
    _announce("Spark", home)
    started = cluster_state.start_spark(
        home, workers=workers, cores=cores, memory_mb=memory_mb, outlive_parent=not foreground
    )
    click.echo(f"web page: {started[0].page}", err=True)
    _report(f"spark://127.0.0.1:{started[0].port}", home, started, foreground)


@prometheus.command("start")
@click.argument("targets", nargs=-1, required=True, metavar="HOST:PORT...")
@click.option(
    "--interval", default=15, show_default=True, type=click.IntRange(1), help="Seconds between scrapes."
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the bearer token of the targets (oncelog.metrics.token).",
)
@_directory_option
@_foreground_option
def start_prometheus(
    targets: tuple[str, ...],
    interval: int,
    token_file: Path | None,
    directory: Path | None,
    foreground: bool,
) -> None:
    """Scrape brokers in the background and print the URL of Prometheus's page.

    HOST:PORT is the address of a broker's metrics (oncelog serve --metrics-port PORT). The program prometheus
    must be on PATH. It listens on loopback only, and loads the alert rules of Oncelog.
    """
    from oncelog_devtools import cluster_state

    home = _home(directory, "prometheus")
    _announce("Prometheus", home)
    started = cluster_state.start_prometheus(
        home, targets, interval_s=interval, token_file=token_file, outlive_parent=not foreground
    )
    _report(started[0].page, home, started, foreground)


def _status(kind: str, directory: Path | None, output: str) -> None:
    from oncelog_devtools import cluster_state

    rows = [_row(node) for node in cluster_state.find(_home(directory, kind))]
    emit(rows, output, columns=("node", "address", "pid", "state"), wide=() if kind == "kafka" else ("page",))


def _row(node: NodeRecord) -> dict[str, object]:
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
    """Show the nodes of the last start and their states."""
    _status("kafka", directory, output)


@spark.command("status")
@_directory_option
@output_option
def spark_status(directory: Path | None, output: str) -> None:
    """Show the master and the workers of the last start and their states."""
    _status("spark", directory, output)


@prometheus.command("status")
@_directory_option
@output_option
def prometheus_status(directory: Path | None, output: str) -> None:
    """Show the process of the last start and its state."""
    _status("prometheus", directory, output)


@kafka.command("stop")
@_directory_option
def stop_kafka(directory: Path | None) -> None:
    """Stop all nodes. Their data stays."""
    _stop("kafka", directory)


@spark.command("stop")
@_directory_option
def stop_spark(directory: Path | None) -> None:
    """Stop the workers, their executors and the master."""
    _stop("spark", directory)


@prometheus.command("stop")
@_directory_option
def stop_prometheus(directory: Path | None) -> None:
    """Stop Prometheus. Its data stays."""
    _stop("prometheus", directory)
