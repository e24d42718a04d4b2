"""`oncelog producers`: show the producer state of partitions, by which brokers recognise duplicates."""

from __future__ import annotations

from typing import Any

import click

from oncelog.cli.common import bootstrap_options, emit, new_admin, output_option, time_text
from oncelog.cli.watch import watch_option

COLUMNS = ["topic", "partition", "producer_id", "epoch", "last_sequence", "last_time"]
WIDE = ["coordinator_epoch", "transaction_start_offset"]


@click.group("producers")
def command() -> None:
    """Show the producer state of partitions.

    \b
    Examples:
      oncelog producers list flights
      oncelog producers describe flights:0 --producer-id 1000 -o json
    """


@command.command("list")
@watch_option
@click.argument("where", metavar="TOPIC[:PARTITION]")
@bootstrap_options
@output_option
def list_producers(where: str, output: str, client_config: dict[str, Any]) -> None:
    """List producer ids with their epochs and last sequence numbers."""
    emit(_rows(where, client_config), output, columns=COLUMNS, wide=WIDE)


@command.command("describe")
@watch_option
@click.argument("where", metavar="TOPIC[:PARTITION]")
@click.option("--producer-id", type=int, help="Only this producer id.")
@bootstrap_options
@output_option
def describe(where: str, producer_id: int | None, output: str, client_config: dict[str, Any]) -> None:
    """Show the producer state of a topic or of one partition, including open transactions."""
    rows = _rows(where, client_config)
    chosen = [row for row in rows if producer_id is None or row["producer_id"] == producer_id]
    if producer_id is not None and not chosen:
        raise click.ClickException(f"{where} has no state of producer id {producer_id}")
    emit(chosen, output, columns=[*COLUMNS, *WIDE])


def parse_where(where: str) -> tuple[str, int | None]:
    """Return topic and partition of `TOPIC:PARTITION`, or topic and None for `TOPIC`. Raises
    click.BadParameter.
    """
    topic, separator, partition = where.partition(":")
    if not topic or (separator and not partition.isdecimal()):
        raise click.BadParameter(f"{where!r}: expected TOPIC or TOPIC:PARTITION")
    return topic, int(partition) if separator else None


def _rows(where: str, client_config: dict[str, Any]) -> list[dict[str, Any]]:
    from oncelog.types import TopicPartition

    topic, partition = parse_where(where)
    with new_admin(client_config) as admin:
        if partition is None:
            parts = admin.describe_topics([topic])[topic].partitions
            tps = [TopicPartition(topic, part.partition) for part in parts]
        else:
            tps = [TopicPartition(topic, partition)]
        described = admin.describe_producers(tps)
    return [_row(tp, producer) for tp, found in described.items() for producer in found.producers]


def _row(tp: Any, producer: Any) -> dict[str, Any]:
    return {
        "topic": tp.topic,
        "partition": tp.partition,
        "producer_id": producer.producer_id,
        "epoch": producer.producer_epoch,
        "last_sequence": producer.last_sequence,
        "last_time": time_text(producer.last_timestamp_ms),
        "coordinator_epoch": producer.coordinator_epoch,
        "transaction_start_offset": producer.current_txn_start_offset,
    }
