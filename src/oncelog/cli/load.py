"""`oncelog load`: load files into a topic exactly once, over any number of kills and restarts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from oncelog.cli.common import bootstrap_options, emit, only_settings_of, output_option, say
from oncelog.runtime.optional import check_pyarrow

_MAX_BATCH_BYTES = 256 << 20


def _one_character(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not (len(value := value.replace("\\t", "\t")) == 1 and value.isascii()):
        raise click.BadParameter("one character")
    return value


@click.command("load")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--topic", required=True, help="The topic of the records. It must exist.")
@click.option(
    "--id",
    "load_id",
    required=True,
    help="The name of the load. A command with the same name continues the load.",
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["csv", "jsonl", "parquet", "lines"]),
    help="The format of the files (default: by their extensions).",
)
@click.option("--key", metavar="COLUMN", help="Use this column as the record's key.")
@click.option(
    "--delimiter",
    metavar="C",
    callback=_one_character,
    help=r"The separator of CSV columns; \t is a tab (default: comma, in .tsv files tab).",
)
@click.option(
    "--null", "nulls", multiple=True, metavar="TEXT", help="A CSV text that means null. Repeatable."
)
@click.option("--text", is_flag=True, help="Read every CSV column as text, also numbers.")
@click.option(
    "--batch-records",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="The maximum number of records in a transaction.",
)
@click.option(
    "--batch-bytes",
    type=click.IntRange(min=1, max=_MAX_BATCH_BYTES),
    default=8 << 20,
    show_default=True,
    help="Commit a transaction after this many bytes of the files.",
)
@click.option("--spark", is_flag=True, help="Load the files in parallel on Spark, with one task per file.")
@click.option("--master", help="With --spark: the Spark master.  [default: local[*]]")
@output_option
@bootstrap_options
def command(
    files: tuple[Path, ...],
    topic: str,
    load_id: str,
    layout: Any,
    key: str | None,
    delimiter: str | None,
    nulls: tuple[str, ...],
    text: bool,
    batch_records: int,
    batch_bytes: int,
    spark: bool,
    master: str | None,
    output: str,
    client_config: dict[str, Any],
) -> None:
    """Load FILES into a topic, each record exactly once over any number of runs.

    \b
    Examples:
      oncelog load flights.csv --topic flights --id flights-2013 --key tailnum --null NA
      oncelog load part-*.parquet --topic trips --id trips-2024-01 --key trip_id
      oncelog load events.jsonl.gz --topic events --id events-17 -X compression.type=zstd
      oncelog load part-*.parquet --topic trips --id trips-2024 --spark --master spark://HOST:7077
    After a kill or an error, the same command continues the load at its last checkpoint. If the load is
    complete, the command prints that and does nothing. Checkpoints are stored in topic oncelog-loads, in the
    transactions of the records. A file that changed since it was read is refused, and so is another --key.
    More files may be added to a load. A second loader with the same id takes over, and the first one
    fails with an error.

    \b
    csv, parquet  the value is a JSON object per row
    jsonl, lines  the value is the line
    Files that end in .gz or .zst are decompressed. The partition follows from the key as in Kafka's clients.
    Exit codes: 0 complete, 1 error (a changed file, another loader), 2 usage, 4 time-out.
    """
    check_pyarrow("oncelog load")
    from oncelog.config import PRODUCER
    from oncelog.load.loader import Load, run_load
    from oncelog.load.parsing import Options

    if master and not spark:
        raise click.UsageError("--master needs --spark")
    options = Options(key, delimiter, nulls, text)
    load = Load(files, topic, load_id, options, layout, batch_records, batch_bytes)
    config = only_settings_of(PRODUCER, client_config)
    with _progress() as show:
        report = _on_spark(load, config, master, show) if spark else run_load(load, config, show)
    if report.was_complete:
        say(f"load {load_id} is complete: its {report.records_before} records were loaded earlier", err=True)
    emit([_row(load, report)], output)


def _on_spark(load: Any, config: dict[str, Any], master: str | None, show: Callable[[Any], object]) -> Any:
    from oncelog.load.on_spark import run_load_on_spark
    from oncelog.spark.session import local_session

    # Disable speculation: a speculative copy of a task would fence the task that is running.
    with local_session("oncelog load", master or "local[*]", {"spark.speculation": "false"}) as session:
        return run_load_on_spark(session, load, config, show if sys.stderr.isatty() else None)


def _row(load: Any, report: Any) -> dict[str, Any]:
    return {
        "id": load.load_id,
        "topic": load.topic,
        "files": len(load.files),
        "records": report.records,
        "records_before": report.records_before,
        "transactions": report.transactions,
        "seconds": round(report.seconds, 3),
    }


def _progress() -> AbstractContextManager[Callable[[Any], object]]:
    """Return a context that shows a progress bar if standard error is a terminal."""
    return _Bar() if sys.stderr.isatty() else nullcontext(lambda report: None)


class _Bar(AbstractContextManager[Callable[[Any], object]]):
    """A progress bar over the bytes of the files, with records per second."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._began = 0.0

    def __enter__(self) -> Callable[[Any], object]:
        self._began = time.monotonic()
        return self._show

    def _show(self, report: Any) -> None:
        rate = report.records / max(time.monotonic() - self._began, 1e-3)
        if self._bar is None:
            self._bar = click.progressbar(
                length=report.total_bytes, label="loading", file=sys.stderr, item_show_func=lambda item: item
            )
            self._bar.__enter__()
        said = f"{report.records:,} records, {rate:,.0f}/s"
        self._bar.update(report.done_bytes - self._bar.pos, said)

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
