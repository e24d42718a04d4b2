"""`oncelog audit`: prove or refute that topics, segment files or tables contain each record once."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from oncelog.cli.common import bootstrap_options, emit, only_settings_of, output_option, say
from oncelog.cli.interrupt import clean_up_on_termination
from oncelog.runtime.optional import check_pyarrow

if TYPE_CHECKING:
    from oncelog.audit.result import AuditResult, KeyTotals, ProvenanceTotals
    from oncelog.local_audit.table_result import TableAuditResult

EXIT_ERROR, EXIT_VIOLATIONS = 1, 3
_COLUMNS = ("kind", "topic", "partition", "base_offset", "last_offset", "explanation")
_WIDE = (
    "severity",
    "producer_id",
    "producer_epoch",
    "first_sequence",
    "last_sequence",
    "other_offset",
    "key",
)
_TABLE_COLUMNS = ("kind", "topic", "partition", "base_offset", "last_offset", "rows", "files", "explanation")
_TABLE_WIDE = ("severity", "key")


@click.command("audit")
@click.argument("names", nargs=-1, required=True, metavar="TOPIC|DIR...")
@bootstrap_options
@click.option("--files", is_flag=True, help="Audit directories of segment files instead, without a broker.")
@click.option(
    "--compacted",
    multiple=True,
    metavar="TOPIC",
    help="A topic that is or was compacted: its gaps are not violations. Repeatable.",
)
@click.option("--keys", is_flag=True, help="Also check that each record key occurs once per topic.")
@click.option(
    "--key-expr",
    metavar="SQL",
    help="Check or compare this key: an SQL expression over the source's columns (key, value, ...).",
)
@click.option(
    "--against",
    multiple=True,
    metavar="TOPIC|DIR",
    help="Compare keys with this topic or directory. Repeatable.",
)
@click.option(
    "--distinct",
    type=click.Choice(["provenance"]),
    help="Also check that each source record is stored once, by the headers of provenance_headers().",
)
@click.option(
    "--table",
    metavar="FORMAT:PATH",
    help="Compare this table with the topics instead: parquet:PATH, delta:PATH, iceberg:NAME, "
    "sqlite:PATH[#TABLE] or jdbc:postgresql://HOST:PORT/DB?table=NAME.",
)
@click.option(
    "--columns",
    metavar="topic=NAME,...",
    help="The columns of --table that are not named topic, partition, offset and key.",
)
@click.option(
    "--by",
    type=click.Choice(["offset", "key"]),
    default="offset",
    show_default=True,
    help="Compare --table by offset, or by key: the number of rows of each key, which proves less.",
)
@click.option(
    "--local/--spark",
    "local",
    default=None,
    help="Run in this process, for what fits one machine, or on Spark.  [default: on Spark if PySpark is "
    "installed; --table always runs in this process]",
)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report as an HTML page."
)
@click.option(
    "--master",
    help="The Spark master, or sc://HOST:PORT for a server of Spark Connect.  [default: SPARK_REMOTE if set, "
    "else local[*]]",
)
@output_option
def command(
    names: tuple[str, ...],
    client_config: dict[str, Any],
    files: bool,
    compacted: tuple[str, ...],
    keys: bool,
    key_expr: str | None,
    against: tuple[str, ...],
    distinct: str | None,
    table: str | None,
    columns: str | None,
    by: str,
    local: bool | None,
    html: Path | None,
    master: str | None,
    output: str,
) -> None:
    """Audit topics of any Kafka-protocol cluster, directories of segment files, or a table of records.

    The audit reads the header of every stored batch. It checks that each producer's sequence is complete, in
    order and without duplicates. It checks that each transaction has one outcome, that read_committed readers
    see this outcome, and that every checksum is right. Findings go to standard output, one per row with its
    offsets. The summary goes to standard error.

    \b
    oncelog audit payments
    oncelog audit payments --keys
    oncelog audit payments --key-expr "get_json_object(CAST(value AS STRING), '$.id')"
    oncelog audit enriched --against payments      # lost, doubled or unexpected keys
    oncelog audit --files /var/lib/kafka/data      # or partition directories: .../payments-0
    oncelog audit --files copies/enriched-0 --against copies/payments-0
    oncelog audit enriched --distinct provenance   # what an at-least-once job wrote twice
    oncelog audit payments --local                 # in this process, without Spark
    oncelog audit payments --table parquet:/lake/payments --columns partition=p,offset=o
    oncelog audit payments --table "jdbc:postgresql://127.0.0.1:5432/shop?table=payments"

    With --table, each committed record must have one row, and no other record may have one.

    Exit codes: 0 nothing found, 1 the audit failed or could not check keys, 3 violations found.
    """
    from oncelog.config import CONSUMER

    config = only_settings_of(CONSUMER, client_config)
    bootstrap = str(config.pop("bootstrap.servers"))
    CONSUMER.parse(config)
    what = ", ".join(names)
    requested = _Requested(names, bootstrap, config, files, compacted, key_expr or keys, against, distinct)
    _check_combination(requested, has_table=table is not None, is_on_spark=local is False)
    if table is not None:
        table_result = _audit_table(requested, table, columns, by_key=by == "key")
        _show_table(table_result, f"{table} against {what}", output, html)
        raise SystemExit(EXIT_VIOLATIONS if table_result.finding_count else 0)
    if columns is not None or by == "key":
        raise click.UsageError("--columns and --by need --table")
    result = _audit_locally(requested) if _is_local(local, requested) else _audit_on_spark(requested, master)
    _show(result, what, output, html)
    raise SystemExit(_exit_code(result))


def _exit_code(result: AuditResult) -> int:
    if result.finding_count:
        return EXIT_VIOLATIONS
    is_by_key = result.keys is not None or result.difference is not None
    return EXIT_ERROR if result.keys_problem or (is_by_key and result.verdict == "unproven") else 0


def _check_combination(requested: _Requested, *, has_table: bool, is_on_spark: bool) -> None:
    """Raise click.UsageError for options that contradict each other."""
    if requested.distinct and requested.files:
        raise click.UsageError("--distinct cannot be combined with --files")
    is_of_topics = requested.files or requested.key or requested.against or requested.distinct or is_on_spark
    if has_table and is_of_topics:
        others = "--files, --keys, --key-expr, --against, --distinct or --spark"
        raise click.UsageError(f"--table cannot be combined with {others}")


class _Requested(NamedTuple):
    """The options of `oncelog audit` that select the audited data and the checks."""

    names: tuple[str, ...]
    bootstrap: str
    config: dict[str, Any]
    files: bool
    compacted: tuple[str, ...]
    key: bool | str
    against: tuple[str, ...]
    distinct: str | None


def _is_local(local: bool | None, requested: _Requested) -> bool:
    """Return True if the audit runs in this process, False if it runs on Spark. Raises click.UsageError if
    --local is combined with options that need Spark.
    """
    needs_spark = None
    if isinstance(requested.key, str):
        needs_spark = "--key-expr, which is SQL,"
    elif requested.files and (requested.key or requested.against):
        needs_spark = "the check of keys in files"
    if local and needs_spark is not None:
        raise click.UsageError(f"{needs_spark} needs Spark: leave out --local")
    if local is None and needs_spark is None and not _has_pyspark():
        say("PySpark is not installed: the audit runs in this process", err=True)
        return True
    return bool(local)


def _has_pyspark() -> bool:
    try:
        return find_spec("pyspark") is not None
    except ModuleNotFoundError:
        return False


def _audit_locally(requested: _Requested) -> AuditResult:
    check_pyarrow("oncelog audit")
    from oncelog.local_audit.log_audit import audit_files, audit_topic

    if requested.files:
        return audit_files(requested.names, compacted_topics=requested.compacted)
    with clean_up_on_termination():
        return audit_topic(
            requested.bootstrap,
            requested.names,
            key_check=bool(requested.key),
            against=requested.against,
            distinct=requested.distinct,
            compacted_topics=requested.compacted,
            client_config=requested.config,
        )


def _audit_on_spark(requested: _Requested, master: str | None) -> AuditResult:
    from oncelog.spark import _pyspark as _pyspark
    from oncelog.spark.audit.audit import audit_files, audit_topic
    from oncelog.spark.session import any_session

    with any_session("oncelog audit", master) as spark:
        if requested.files:
            return audit_files(
                spark,
                requested.names,
                key_check=requested.key,
                against=requested.against,
                compacted_topics=requested.compacted,
            )
        return audit_topic(
            spark,
            requested.bootstrap,
            requested.names,
            key_check=requested.key,
            against=requested.against,
            distinct=requested.distinct,
            compacted_topics=requested.compacted,
            client_config=requested.config,
        )


def _audit_table(requested: _Requested, table: str, columns: str | None, *, by_key: bool) -> TableAuditResult:
    check_pyarrow("oncelog audit")
    from oncelog.local_audit.table_audit import audit_table

    # Without this handler, SIGTERM would leave the audit's temporary files, which may be large. Guard:
    # test_an_audit_that_is_terminated_leaves_no_temporary_file.
    with clean_up_on_termination():
        return audit_table(
            requested.bootstrap,
            requested.names,
            table,
            columns=columns,
            by_key=by_key,
            compacted_topics=requested.compacted,
            client_config=requested.config,
        )


def _show_table(result: TableAuditResult, what: str, output: str, html: Path | None) -> None:
    rows, summary = result.to_rows(), result.summary()
    if output in ("table", "wide"):
        rows = [row | {"files": ", ".join(row["files"])} for row in rows]
    if rows or output not in ("table", "wide"):
        emit(rows, output, columns=_TABLE_COLUMNS, wide=_TABLE_WIDE)
    say("\n".join(summary), err=True)
    if html is not None:
        from oncelog.local_audit.page import render_table_audit
        from oncelog.local_audit.tables.table import without_login

        html.write_text(render_table_audit(result, without_login(what)), encoding="utf-8")


def _show(result: AuditResult, what: str, output: str, html: Path | None) -> None:
    rows, summary = result.to_rows(), _summary(result)
    if rows or output not in ("table", "wide"):
        emit(rows, output, columns=_COLUMNS, wide=_WIDE)
    say("\n".join(summary), err=True)
    if html is not None:
        from oncelog.local_audit.page import render_audit

        html.write_text(render_audit(result, what, summary), encoding="utf-8")


def _summary(result: AuditResult) -> list[str]:
    totals = result.totals
    lines = [
        f"{totals.records} records in {totals.batches} batches of {len(result.partitions)} partitions, "
        f"{totals.producers} producer sequences"
    ]
    if totals.unnumbered_records:
        lines.append(
            f"{totals.unnumbered_records} records carry no producer id (idempotence off): their batches "
            "prove nothing" + ("" if result.keys or result.difference else "; --keys checks them by key")
        )
    if totals.removed_records:
        lines.append(f"{totals.removed_records} records below the log start were not checked (removed)")
    if totals.unknown_starts:
        lines.append(f"{totals.unknown_starts} sequences began before the log start (retention)")
    if totals.committed or totals.aborted:
        lines.append(
            f"{totals.committed} committed and {totals.aborted} aborted transactions with data, counted per "
            "partition"
        )
    if result.keys:
        lines += _key_lines(result.keys)
    if result.keys_problem:
        lines.append(result.keys_problem)
    if result.provenance:
        lines += _provenance_lines(result.provenance)
    if difference := result.difference:
        lines.append(
            f"{difference.found} records with a key, {difference.expected} expected; keys lost "
            f"{difference.lost}, doubled {difference.doubled}, unexpected {difference.unexpected}"
        )
        if difference.without_key:
            lines.append(f"{difference.without_key} records without a key on either side were not compared")
    if result.notes:
        lines.append(f"{len(result.notes)} notes (not violations)")
    lines.append(f"verdict: {result.verdict}" + _more(result))
    return lines


def _key_lines(totals: KeyTotals) -> list[str]:
    lines = [f"{totals.keys} different keys, {totals.repeated} of them more than once"]
    if totals.without_key:
        lines.append(f"{totals.without_key} records without a key were not checked by key")
    return lines


def _provenance_lines(totals: ProvenanceTotals) -> list[str]:
    lines = [f"{totals.records} records of {totals.sources} source records: {totals.repeated} repetitions"]
    problems = (
        (totals.filter_loses, "source records are stored only after later ones, and it would drop them"),
        (totals.filter_doubles, "source records are in several partitions, and it would keep several copies"),
        (totals.malformed, "records have malformed provenance headers"),
        (totals.unmarked, "records have no provenance headers"),
    )
    found = [f"{count} {problem}" for count, problem in problems if count]
    if found:
        return [*lines, "a ProvenanceFilter is not exact here: " + "; ".join(found)]
    return [*lines, "a ProvenanceFilter drops exactly the repetitions"]


def _more(result: AuditResult) -> str:
    if result.verdict == "clean":
        checks = (result.keys, result.difference, result.provenance)
        are_read = any(check is not None for check in checks)
        told = "" if are_read else "; the contents of the records were not read"
        return f" (by its header each numbered batch occurs once, in order and undamaged{told})"
    count, shown = result.finding_count, len(result.findings)
    cut = f", of which the first {shown} are shown" if shown < count else ""
    if result.provenance is not None and result.provenance.repeated:
        from oncelog.audit.result import MAX_FINDINGS

        cut = f" in {shown} rows; a run is one row, and {MAX_FINDINGS} rows of a kind are shown"
    return f" ({count} findings{cut})" if count else ""
