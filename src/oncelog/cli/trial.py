"""`oncelog trial`: run a pipeline under a matrix of faults, and count lost and doubled rows."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import click

from oncelog.cli.common import emit, output_option, parse_properties, say
from oncelog.cli.interrupt import clean_up_on_termination
from oncelog.errors import ConfigError

if TYPE_CHECKING:
    from oncelog.trial.plan import Cell
    from oncelog.trial.run import Outcome, Trial

DEFAULT_ROW = '{"id": "{n}", "text": "' + "x" * 180 + '"}'
_MIN_ROWS = 10


@click.command("trial")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--target",
    "kind",
    type=click.Choice(["topic", "parquet", "parquet-committed", "delta", "iceberg", "sqlite", "postgresql"]),
    default="topic",
    show_default=True,
    help="The kind of the pipeline's target. parquet counts every file, parquet-committed only those that "
    "Spark's log of the directory names.",
)
@click.option(
    "--database",
    metavar="URL",
    help="The database of --target postgresql: jdbc:postgresql://HOST:PORT/DB?user=NAME. Each run gets a "
    "schema of its own, which is dropped at the end. Keep the password in ~/.pgpass.",
)
@click.option(
    "--cells",
    metavar="NAME[,...]",
    help="Run only these cells of the matrix.  [default: all that can happen with the target]",
)
@click.option(
    "--rows", type=click.IntRange(min=_MIN_ROWS), default=600, show_default=True, help="Rows per run."
)
@click.option(
    "--micro-batches",
    type=click.IntRange(min=1, max=100),
    default=3,
    show_default=True,
    help="Send the rows in this many parts, each when the one before is committed.",
)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the pipeline. In its value, {source}, {target}, {table}, {checkpoint} and "
    "{bootstrap_servers} are replaced. Repeatable.",
)
@click.option(
    "--row",
    metavar="TEXT",
    help='The value of each row; {n} is its id.  [default: {"id": "{n}", "text": ...}]',
)
@click.option(
    "--id",
    "id_name",
    default="id",
    show_default=True,
    help="The column of the target, or the field of its JSON value, that holds the row's id. Without it, the "
    "record's key is the id.",
)
@click.option(
    "--master",
    default="local[2,4]",
    show_default=True,
    help="The Spark master: local[N], local-cluster[N,CORES,MB], or spark://HOST:PORT on this machine.",
)
@click.option(
    "--conf", multiple=True, metavar="KEY=VALUE", help="A Spark setting, as for spark-submit. Repeatable."
)
@click.option(
    "-b",
    "--bootstrap-server",
    "servers",
    metavar="HOST:PORT",
    help="Use this cluster (plaintext). The trial creates topics there and deletes them.  "
    "[default: a broker of its own]",
)
@click.option(
    "--cluster-name",
    metavar="TEXT",
    help="With -b: the cluster's name in reports, such as its version.  [default: HOST:PORT]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=600,
    show_default=True,
    help="Seconds after which a run is given up.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write an HTML report with a timeline of each run to this file.",
)
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="An empty directory for checkpoints, targets and logs; it is kept.  [default: a temporary one, "
    "which is kept if a run is not clean]",
)
@output_option
def command(
    file: Path,
    kind: str,
    cells: str | None,
    pairs: tuple[str, ...],
    conf: tuple[str, ...],
    servers: str | None,
    report: Path | None,
    work_dir: Path | None,
    output: str,
    **options: Any,
) -> None:
    """Run the pipeline in FILE under a matrix of faults, and count the rows that it loses or doubles.

    FILE is a pipeline as for `oncelog pipeline run`: it defines pipeline(spark, settings), which starts the
    query and returns it. The trial gives it the settings BOOTSTRAP_SERVERS, SOURCE (a topic), TARGET, TABLE,
    CHECKPOINT and TRIGGER. The query must read SOURCE from its beginning, write each row once, with its id.

    \b
    Examples:
      oncelog trial enrich.py --set CUSTOMERS=customers.csv --report trial.html
      oncelog trial to_parquet.py --target parquet --cells driver-in-write,commit-lost
      oncelog trial to_postgresql.py --target postgresql --database jdbc:postgresql://127.0.0.1:5432/test
      oncelog trial mine.py --set KAFKA={bootstrap_servers} --set IN={source} --set OUT={target}

    Each cell of the matrix is one run with one fault. If the fault did not happen, the run proves nothing.

    \b
    Exit codes: 0 every fault that can happen did so and every row is there once, 1 a run failed or a fault
    did not happen, 2 usage or a file that is not a pipeline, 3 a row was lost or doubled.
    """
    from oncelog.spark.session import check_spark
    from oncelog.trial.judgement import exit_code
    from oncelog.trial.plan import TargetKind

    settings, spark_conf = parse_properties(pairs), parse_properties(conf)
    chosen = _chosen_cells(cells, kind, options["master"])
    _check_options(kind, report, options)
    cluster_name = _cluster_name(servers, options.pop("cluster_name"))
    options["row"] = options["row"] or DEFAULT_ROW
    check_spark()
    name = f"trial-{token_hex(4)}"
    with _cluster(servers, options, name) as address, _directory(work_dir) as directory:
        from oncelog.trial.run import Trial

        trial = Trial(
            file=file.resolve(),
            kind=TargetKind(kind),
            servers=address,
            work_dir=directory.resolve(),
            name=name,
            settings=settings,
            conf=spark_conf,
            **options,
        )
        outcomes = _run_cells(trial, chosen)
        _show(outcomes, trial, cluster_name, report, output)
        if code := exit_code(outcome.verdict for outcome in outcomes):
            sys.exit(code)


def _chosen_cells(cells: str | None, kind: str, master: str) -> tuple[Cell, ...]:
    from oncelog.trial.masters import standalone_hosts
    from oncelog.trial.plan import TargetKind, choose_cells

    names = [name.strip() for name in cells.split(",")] if cells else []
    has_workers = bool(standalone_hosts(master))
    return choose_cells(
        names, TargetKind(kind), has_proc=sys.platform == "linux", has_spark_workers=has_workers
    )


def _check_options(kind: str, report: Path | None, options: Mapping[str, Any]) -> None:
    from oncelog.trial.masters import check_master, is_own_host

    if (kind == "postgresql") != (options["database"] is not None):
        raise click.UsageError("--target postgresql and --database need each other")
    check_master(options["master"], is_own_host)
    if report is not None and not report.absolute().parent.is_dir():
        # Check the directory before the runs: they take minutes, and their results would be lost.
        raise ConfigError(f"--report {report}: there is no directory {report.parent}")


def _run_cells(trial: Trial, cells: Iterable[Cell]) -> list[Outcome]:
    from oncelog.trial.run import run_cell

    outcomes = []
    for cell in cells:
        say(f"{cell.name} ...", err=True)
        outcome = run_cell(trial, cell)
        outcomes.append(outcome)
        say(f"{cell.name}: {outcome.verdict} ({outcome.seconds:.1f} s)", err=True)
        if outcome.error:
            say(outcome.error, err=True)
    return outcomes


def _cluster_name(servers: str | None, given: str | None) -> str:
    if given is not None and servers is None:
        raise click.UsageError("--cluster-name needs -b")
    return "the embedded broker" if servers is None else given or servers


def _show(
    outcomes: Sequence[Outcome], trial: Trial, cluster_name: str, report: Path | None, output: str
) -> None:
    from oncelog.trial.report import COLUMNS, WIDE, render_report, row_of, summary_text
    from oncelog.trial.versions import facts_of

    facts = facts_of(trial, cluster_name)
    if report is not None:
        report.write_text(render_report(outcomes, facts))
    emit([{**row_of(outcome), "facts": facts} for outcome in outcomes], output, columns=COLUMNS, wide=WIDE)
    say(summary_text(outcomes), err=True)


@contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    """Yield the directory of a trial: `given`, which must be empty, or a temporary one. The temporary one is
    removed at the end, but kept if the `with` block raises an exception.
    """
    if given is not None:
        if given.exists() and any(given.iterdir()):
            raise ConfigError(f"--work-dir {given} is not empty; choose a new or empty directory")
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    directory = Path(tempfile.mkdtemp(prefix="oncelog-trial-"))
    try:
        yield directory
    except BaseException:  # BaseException, because a trial that is not clean ends with SystemExit
        say(f"logs, checkpoints and targets are in {directory}", err=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _cluster(servers: str | None, options: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield `servers`, and at the end delete the trial's topics on that cluster. If `servers` is None, start
    a broker, and yield its address. At the end, also drop the trial's schemas in the database.
    """
    from oncelog import Broker
    from oncelog.trial.targets import schemas_of

    with ExitStack() as stack:
        # Without this handler, SIGTERM would leave the trial's topics and schemas on the user's cluster and
        # database. Guard: test_a_trial_that_is_terminated_leaves_no_topic.
        stack.enter_context(clean_up_on_termination())
        if options["database"] is not None:
            stack.enter_context(schemas_of(options["database"], name))
        if servers is None:
            yield stack.enter_context(Broker()).bootstrap_servers
            return
        stack.callback(_delete_topics, servers, name)
        yield servers


def _delete_topics(servers: str, name: str) -> None:
    from oncelog import Admin

    with Admin({"bootstrap.servers": servers}) as admin:
        topics = [topic.name for topic in admin.list_topics() if topic.name.startswith(f"{name}-")]
        if topics:
            admin.delete_topics(topics)
