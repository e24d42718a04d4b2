"""`oncelog audit`: prove or refute on Spark that topics hold every record once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from oncelog.cli.common import bootstrap_options, emit, only_settings_of, output_option

if TYPE_CHECKING:
    from oncelog.spark.audit import AuditResult

EXIT_VIOLATIONS = 3
_COLUMNS = ("kind", "topic", "partition", "base_offset", "last_offset", "explanation")
_WIDE = ("producer_id", "producer_epoch", "first_sequence", "last_sequence", "other_offset", "key")


@click.command("audit")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@bootstrap_options
@click.option("--keys", is_flag=True, help="Check too that each record key occurs once per topic.")
@click.option(
    "--key-expr",
    metavar="SQL",
    help="Check this key instead: an SQL expression over the source's columns (key, value, ...).",
)
@click.option("--master", default="local[*]", show_default=True, help="Spark master.")
@output_option
def command(
    topics: tuple[str, ...],
    client_config: dict[str, Any],
    keys: bool,
    key_expr: str | None,
    master: str,
    output: str,
) -> None:
    """Audit topics of any Kafka-protocol cluster, as a Spark job.

    Reads the header of every stored batch and checks that each producer's sequence is unbroken, unrepeated
    and in order, and that every checksum fits. Findings go to standard output, one per row with its offsets;
    the summary goes to standard error.

    \b
    oncelog audit payments
    oncelog audit payments --keys
    oncelog audit payments --key-expr "get_json_object(CAST(value AS STRING), '$.id')"

    Exit code 0: nothing found. 3: violations found.
    """
    from oncelog.config import CONSUMER
    from oncelog.spark.audit import audit_topic
    from oncelog.spark.session import local_session

    config = only_settings_of(CONSUMER, client_config)
    bootstrap = str(config.pop("bootstrap.servers"))
    CONSUMER.parse(config)
    with local_session("oncelog audit", master) as spark:
        result = audit_topic(spark, bootstrap, topics, key_check=key_expr or keys, client_config=config)
    if result.findings or output not in ("table", "wide"):
        emit(result.to_rows(), output, columns=_COLUMNS, wide=_WIDE)
    click.echo(_summary(result), err=True)
    if result.finding_count:
        raise SystemExit(EXIT_VIOLATIONS)


def _summary(result: AuditResult) -> str:
    totals = result.totals
    lines = [
        f"{totals.records} records in {totals.batches} batches of {len(result.partitions)} partitions, "
        f"{totals.producers} producer sequences"
    ]
    if totals.unnumbered_records:
        lines.append(
            f"{totals.unnumbered_records} records carry no producer id (idempotence off): their batches "
            "prove nothing" + ("" if result.keys else "; --keys checks them by key")
        )
    if totals.unknown_starts:
        lines.append(f"{totals.unknown_starts} sequences begin before the log does (retention)")
    if result.keys:
        lines.append(f"{result.keys.keys} different keys, {result.keys.repeated} of them more than once")
    lines.append(f"verdict: {result.verdict}" + _more(result))
    return "\n".join(lines)


def _more(result: AuditResult) -> str:
    count, shown = result.finding_count, len(result.findings)
    cut = f", the first {shown} shown" if shown < count else ""
    return f" ({count} findings{cut})" if count else ""
