"""`oncelog transactions`: list open transactions, and find and abort those that hang (behaviour T14)."""

from __future__ import annotations

from typing import Any

import click

from oncelog.cli.common import (
    bootstrap_options,
    cluster_text,
    emit,
    new_admin,
    output_option,
    say,
    say_target,
    time_text,
)
from oncelog.cli.producers import parse_where
from oncelog.cli.watch import watch_option

LIST_COLUMNS = ["transactional_id", "producer_id", "state", "coordinator"]
OPEN_COLUMNS = ["topic", "partition", "producer_id", "epoch", "first_offset", "since", "hanging"]
DEFAULT_AGE_S = 1_200
"""Default of --older-than-s, in seconds: the default transaction.max.timeout.ms plus five minutes. The
coordinator may still end a younger transaction.
"""


@click.group("transactions")
def command() -> None:
    """List and describe transactions; find and abort hanging ones.

    \b
    Examples:
      oncelog transactions list --state Ongoing
      oncelog transactions describe payments-1
      oncelog transactions find-hanging
      oncelog transactions abort flights:0 --producer-id 1000        (prints the marker)
      oncelog transactions abort flights:0 --producer-id 1000 --start-offset 7 --yes  (writes it)
    """


@command.command("list")
@watch_option
@click.option(
    "--state",
    multiple=True,
    help="Only transactions in this state (Empty, Ongoing, CompleteCommit, ...). Repeatable.",
)
@click.option(
    "--producer-id", type=int, multiple=True, help="Only transactions of this producer id. Repeatable."
)
@bootstrap_options
@output_option
def list_transactions(
    state: tuple[str, ...], producer_id: tuple[int, ...], output: str, client_config: dict[str, Any]
) -> None:
    """List the transactional ids of all brokers."""
    with new_admin(client_config) as admin:
        found = admin.list_transactions(state, producer_id)
    rows = [
        {
            "transactional_id": transaction.transactional_id,
            "producer_id": transaction.producer_id,
            "state": transaction.state,
            "coordinator": transaction.coordinator_id,
        }
        for transaction in found
    ]
    emit(rows, output, columns=LIST_COLUMNS)


@command.command("describe")
@watch_option
@click.argument("transactional_ids", nargs=-1, required=True, metavar="TRANSACTIONAL_ID...")
@bootstrap_options
@output_option
def describe(transactional_ids: tuple[str, ...], output: str, client_config: dict[str, Any]) -> None:
    """Show the coordinator's state of a transactional id: producer id, epoch, state, timeout, partitions."""
    with new_admin(client_config) as admin:
        found = admin.describe_transactions(transactional_ids)
    rows = [
        {
            "transactional_id": transaction.transactional_id,
            "producer_id": transaction.producer_id,
            "epoch": transaction.producer_epoch,
            "state": transaction.state,
            "timeout_ms": transaction.timeout_ms,
            "start": time_text(transaction.start_ms),
            "partitions": " ".join(map(str, transaction.partitions)),
        }
        for transaction in found.values()
    ]
    emit(rows, output)


@command.command("find-hanging")
@watch_option
@click.option("--topic", multiple=True, help="Only partitions of this topic (default: all). Repeatable.")
@click.option(
    "--older-than-s",
    type=click.IntRange(min=0),
    default=DEFAULT_AGE_S,
    show_default=True,
    help="Skip transactions whose last record is younger than this.",
)
@bootstrap_options
@output_option
def find_hanging(
    topic: tuple[str, ...], older_than_s: int, output: str, client_config: dict[str, Any]
) -> None:
    """Show which transactions hold back last stable offsets, since when, and whether they hang.

    Exit code 3: a transaction hangs.
    """
    with new_admin(client_config) as admin:
        found = admin.find_hanging(topic or None, older_than_ms=older_than_s * 1000)
    rows = [_held_back_row(transaction) for transaction in found]
    emit(rows, output, columns=OPEN_COLUMNS, wide=["what_to_do"])
    if any(row["hanging"].startswith("yes") for row in rows):
        from oncelog.cli.main import EXIT_VIOLATIONS

        raise SystemExit(EXIT_VIOLATIONS)


def _held_back_row(held_back: Any) -> dict[str, Any]:
    opened, hanging, reason = held_back
    where = f"{opened.tp.topic}:{opened.tp.partition}"
    what_to_do = {
        "no": "wait: its producer or its timeout ends the transaction",
        "perhaps": "check again later",
        "yes": f"oncelog transactions abort {where} --producer-id {opened.producer_id}"
        f" --start-offset {opened.first_offset}",
    }
    return {
        "topic": opened.tp.topic,
        "partition": opened.tp.partition,
        "producer_id": opened.producer_id,
        "epoch": opened.producer_epoch,
        "first_offset": opened.first_offset,
        "since": time_text(opened.last_timestamp_ms),
        "hanging": f"{hanging.value}: {reason}",
        "what_to_do": what_to_do[hanging.value],
    }


@command.command("abort")
@click.argument("where", metavar="TOPIC:PARTITION")
@click.option("--producer-id", type=int, required=True, help="The producer id of the transaction.")
@click.option("--start-offset", type=int, help="Abort only a transaction whose first offset is this one.")
@click.option(
    "--yes", is_flag=True, help="Write the marker. Without --yes, only print what would be written."
)
@bootstrap_options
def abort(
    where: str, producer_id: int, start_offset: int | None, yes: bool, client_config: dict[str, Any]
) -> None:
    """Abort a hanging transaction on one partition (see find-hanging).

    read_committed readers will never see the transaction's records on this partition. Set --start-offset: the
    producer may have ended the transaction and begun another one since you looked.
    """
    say_target(client_config)
    topic, partition = parse_where(where)
    if partition is None:
        raise click.UsageError(f"{where!r}: expected TOPIC:PARTITION, for example {topic}:0")
    with new_admin(client_config) as admin:
        found = [
            transaction
            for transaction in admin.open_transactions([topic])
            if transaction.tp.partition == partition and transaction.producer_id == producer_id
        ]
        if not found:
            raise click.ClickException(f"producer id {producer_id} has no open transaction in {where}")
        opened = found[0]
        if start_offset not in (None, opened.first_offset):
            raise click.ClickException(
                f"producer id {producer_id} has no open transaction in {where} from offset "
                f"{start_offset} on, but another one from offset {opened.first_offset} on: "
                "run find-hanging again"
            )
        marker = (
            f"an ABORT marker in {where} for producer id {opened.producer_id}, epoch "
            f"{opened.producer_epoch}, coordinator epoch {opened.coordinator_epoch or 0}; "
            f"read_committed readers do not get its records from offset {opened.first_offset} "
            "on"
        )
        if not yes:
            say(
                f"would write {marker}\nrepeat with --start-offset {opened.first_offset} --yes to write it"
                f" on {cluster_text(client_config)}"
            )
            return
        admin.abort_transaction(opened)
    say(f"wrote {marker}")
