"""`oncelog demo`: the main job, end to end, on real data."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import click

from oncelog.cli.common import emit, output_option
from oncelog.errors import ConfigError


@click.command("demo")
@click.option("--seed", default=13, show_default=True, help="Chooses which messages the network loses.")
@click.option(
    "--rows",
    type=click.IntRange(min=1000),
    default=None,
    help="Only the first so many flights. [default: all]",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("out/demo-report.html"),
    show_default=True,
    help="Where the HTML report is written.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Empty directory for log, checkpoint and Parquet; it is kept. [default: a temporary one]",
)
@click.option(
    "--control/--no-control",
    "with_control",
    default=None,
    help="Also write with Spark's own Kafka sink, whose jars Maven fetches once. [default: if mvn is there]",
)
@click.option("--keep", is_flag=True, help="Keep the temporary directory too.")
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
    """Real flights, real faults, Spark, and the count of what was lost and doubled.

    Starts a broker, loads 336,776 flights through a network that loses and reorders, kills the broker in
    the middle, and does the load again without idempotence to show the difference. Spark enriches the
    flights and writes them back exactly once, though its driver is killed in the middle of a micro-batch; a
    second stream aggregates them, and both topics are audited. Takes two to three minutes on two cores.

    \b
    Exit code 0 when every exactly-once record is there once and the comparison shows its point,
    3 when a record was lost or doubled or the comparison shows nothing.
    """
    from oncelog_devtools.progress import Showing

    from oncelog_demo.report import render_report, summary_rows
    from oncelog_demo.run import run_demo

    if with_control is None:
        with_control = shutil.which("mvn") is not None
    work_dir = _work_dir(data_dir)
    keep = keep or data_dir is not None
    try:
        with Showing() as showing:
            result = run_demo(
                seed=seed, rows=rows, with_control=with_control, work_dir=work_dir, showing=showing
            )
            with showing.step("Writing the report", None):
                report.parent.mkdir(parents=True, exist_ok=True)
                report.write_text(render_report(result))
    finally:
        if not keep:
            shutil.rmtree(work_dir, ignore_errors=True)
    emit(summary_rows(result), output)
    if result.control is None:
        click.echo(f"left out: Spark's own Kafka sink; {result.control_left_out}", err=True)
    click.echo(f"report: {report}", err=True)
    if keep:
        click.echo(f"data: {work_dir}", err=True)
    for problem in result.problems:
        click.echo(f"oncelog: {problem}", err=True)
    sys.exit(3 if result.problems else 0)


def _work_dir(data_dir: Path | None) -> Path:
    if data_dir is None:
        return Path(tempfile.mkdtemp(prefix="oncelog-demo-"))
    if data_dir.exists() and any(data_dir.iterdir()):
        raise ConfigError(f"--data-dir {data_dir} is not empty; name a new or an empty directory")
    data_dir.mkdir(parents=True, exist_ok=True)
    return data_dir
