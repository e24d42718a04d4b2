"""`oncelog pipeline`: run a streaming query of Spark and restart it after failures."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from oncelog.cli.common import parse_properties


@click.group("pipeline")
def command() -> None:
    """Run streaming queries of Spark under supervision."""


@command.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the pipeline. It overrides the environment. Repeatable.",
)
@click.option("--master", default="local[*]", show_default=True, help="The Spark master.")
@click.option(
    "--conf", multiple=True, metavar="KEY=VALUE", help="A Spark setting, as for spark-submit. Repeatable."
)
@click.option(
    "--status-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the state and the last micro-batch to this file, as JSON.",
)
@click.option(
    "-X",
    "--property",
    "properties",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the supervisor, for example restart.backoff.ms. Repeatable.",
)
def run(
    file: Path,
    pairs: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
    status_file: Path | None,
    properties: tuple[str, ...],
) -> None:
    """Run the streaming query of FILE until it ends, and restart it when it fails.

    FILE defines a function pipeline(spark, settings) that returns the started query. settings contains the
    environment and the values of --set. See examples/pipelines and docs/pipelines.md.

    \b
    Example:
      oncelog pipeline run enrich.py --set SOURCE=orders --set TARGET=enriched \\
          --set CUSTOMERS=customers.csv --set CHECKPOINT=/var/lib/enrich

    The query runs in a separate process. If the query fails, or its process or JVM dies, it is restarted
    after a pause that doubles each time. After restart.max.failures within restart.window.ms it is not
    restarted. SIGTERM or Ctrl-C stops the query after the running micro-batch. A second signal stops it at
    once.

    One line per micro-batch goes to standard error: rows in and out, seconds and lag. For Oncelog's sink the
    line also has bytes, commit time and skipped tasks.

    \b
    Exit codes:
      0      the query ended or was stopped
      1      too many failures; a later start may succeed
      2      the file or a setting must be changed first, or source or sink refused the query
      128+N  signal N ended the supervisor
    """
    from oncelog.config import PIPELINE
    from oncelog.pipeline.restart_policy import Limits
    from oncelog.pipeline.supervisor import Pipeline, Supervisor
    from oncelog.runtime.event_log import log_to_stderr
    from oncelog.spark.session import check_spark

    # Check this before the child process starts, so that the user sees a one-line error and not the child's
    # traceback.
    check_spark()
    given = PIPELINE.parse(parse_properties(properties))
    limits = Limits(
        backoff_ms=given["restart.backoff.ms"],
        backoff_max_ms=given["restart.backoff.max.ms"],
        max_failures=given["restart.max.failures"],
        window_ms=given["restart.window.ms"],
    )
    log_to_stderr()
    pipeline = Pipeline(file.resolve(), parse_properties(pairs), master, parse_properties(conf), status_file)
    sys.exit(Supervisor(pipeline, limits).run())
