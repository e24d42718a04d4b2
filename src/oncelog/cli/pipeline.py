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
    help="A setting of the pipeline; before environment.",
)
@click.option("--master", default="local[*]", show_default=True, help="Spark master.")
@click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark, as for spark-submit.")
@click.option(
    "--status-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the state and the last micro-batch there, as JSON.",
)
@click.option(
    "-X",
    "--property",
    "properties",
    multiple=True,
    metavar="KEY=VALUE",
    help="restart.backoff.ms and the like.",
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

    FILE defines pipeline(spark, settings), which returns the started query; settings are the environment and
    the values of --set. See examples/pipelines and docs/pipelines.md.

    \b
    Example:
      oncelog pipeline run enrich.py --set SOURCE=orders --set TARGET=enriched \\
          --set CUSTOMERS=customers.csv --set CHECKPOINT=/var/lib/enrich
    The query runs in a process of its own. If it fails, or the process or its JVM dies, it is restarted after
    a pause that doubles. After restart.max.failures within restart.window.ms it is not restarted. SIGTERM or
    Ctrl-C stops it after the running micro-batch, a second one at once. One line per micro-batch goes to
    standard error: rows in and out, seconds, lag and, for Oncelog's sink, bytes, commit time, skipped tasks.

    \b
    Exit codes: 0 ended or stopped, 1 too many failures (a later run may succeed),
    2 cannot succeed without a change (the file, a setting, or a refusal by source or sink),
    128+N killed by signal N.
    """
    from oncelog.config import PIPELINE
    from oncelog.pipeline.restart_policy import Limits
    from oncelog.pipeline.supervisor import Pipeline, Supervisor
    from oncelog.runtime.event_log import log_to_stderr
    from oncelog.spark.session import check_spark

    check_spark()  # checked here, so that no child ends with a traceback
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
