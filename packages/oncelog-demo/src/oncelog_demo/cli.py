"""The `oncelog demo` command: an exactly-once pipeline, end to end, on real data."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import click

from oncelog.cli.common import emit, output_option
from oncelog.errors import ConfigError


@click.command("demo")
@click.option(
    "--seed",
    default=13,
    show_default=True,
    help="Seed of the network faults. It decides which messages are lost.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1000),
    default=None,
    help="Load only the first N flights. [default: all]",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("out/demo-report.html"),
    show_default=True,
    help="File for the HTML report.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Empty directory for log, checkpoints and Parquet files; not removed. [default: a temporary one]",
)
@click.option(
    "--control/--no-control",
    "with_control",
    default=None,
    help="Compare with Spark's own Kafka sink. Maven downloads its jars once. [default: if mvn is installed]",
)
@click.option("--keep", is_flag=True, help="Keep the temporary directory, and say how to look at its log.")
@output_option
def command(
    seed: int,
    rows: int | None,
    report: Path,
    data_dir: Path | None,
    with_control: bool | None,
    keep: bool,
    output: str,
) -> None:
    """Send real flights through real faults into Spark, and count lost and doubled records.

    The demonstration starts a broker and loads 336,776 flights over a network that loses and reorders
    messages. The broker is killed halfway. Two more loads, without idempotence, show the difference.

    Spark enriches the flights and writes them back exactly once, although its driver is killed in the middle
    of a micro-batch. A second query aggregates the flights, and both topics are audited. The demonstration
    takes three to four minutes on two cores.

    \b
    Exit code 0: every exactly-once record is stored once, and the comparison shows lost and doubled records.
    Exit code 3: a record was lost or doubled, or the comparison shows no difference.
    """
    from oncelog_devtools.progress import Progress

    from oncelog_demo.report import render_report, summary_rows
    from oncelog_demo.run import run_demo

    if with_control is None:
        with_control = shutil.which("mvn") is not None
    work_dir = _work_dir(data_dir)
    keep = keep or data_dir is not None
    try:
        with Progress() as progress:
            result = run_demo(
                seed=seed, rows=rows, with_control=with_control, work_dir=work_dir, progress=progress
            )
            with progress.step("Writing the report", None):
                report.parent.mkdir(parents=True, exist_ok=True)
                report.write_text(render_report(result))
    finally:
        if not keep:
            shutil.rmtree(work_dir, ignore_errors=True)
    emit(summary_rows(result), output)
    if result.control is None:
        click.echo(f"Spark's own Kafka sink was left out: {result.control_left_out}", err=True)
    click.echo(f"report: {report}", err=True)
    click.echo(_next_step(work_dir if keep else None), err=True)
    for problem in result.problems:
        click.echo(f"oncelog: {problem}", err=True)
    sys.exit(3 if result.problems else 0)


def _next_step(kept: Path | None) -> str:
    """Return a hint with the commands that show the demonstration's log in the console."""
    if kept is None:
        return "to see its batches, producers and transactions afterwards, keep the log: oncelog demo --keep"
    serve = f"oncelog serve --data-dir {shlex.quote(str(kept / 'broker'))} --listen 127.0.0.1:9092"
    return f"data: {kept}\nto see its batches, producers and transactions:\n  {serve} &\n  oncelog web"


def _work_dir(data_dir: Path | None) -> Path:
    if data_dir is None:
        return Path(tempfile.mkdtemp(prefix="oncelog-demo-"))
    if data_dir.exists() and any(data_dir.iterdir()):
        raise ConfigError(f"--data-dir {data_dir} is not empty; choose a new or empty directory")
    data_dir.mkdir(parents=True, exist_ok=True)
    return data_dir
