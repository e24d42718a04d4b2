"""`oncelog transactions`: list transactions, end an open one, and find and abort those that hang (behaviour
T14).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from oncelog.cli.common import (
    bootstrap_options,
    cluster_text,
    emit,
    new_admin,
    only_settings_of,
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
    """List, describe and terminate transactions; find and abort hanging ones.

    \b
    Examples:
      oncelog transactions list --state Ongoing
      oncelog transactions describe payments-1
      oncelog transactions terminate payments-1                      (prints what would be aborted)
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
            "partitions": " ".join(map(str, sorted(transaction.partitions))),
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
        "no": "wait: its producer or its timeout ends the transaction, or `oncelog transactions terminate`",
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


@command.command("terminate")
@click.argument("transactional_id")
@click.option("--yes", is_flag=True, help="Abort it. Without --yes, only print what would be aborted.")
@bootstrap_options
def terminate(transactional_id: str, yes: bool, client_config: dict[str, Any]) -> None:
    """Abort the open transaction of a transactional id on all its partitions, and fence its producer.

    The coordinator aborts it, as at its timeout. The next request of the producer fails with PRODUCER_FENCED.
    """
    say_target(client_config)
    with new_admin(client_config) as admin:
        transaction = admin.describe_transactions([transactional_id])[transactional_id]
    if transaction.state != "Ongoing":
        raise click.ClickException(
            f"{transactional_id!r} has no open transaction: its state is {transaction.state}"
        )
    partitions = " ".join(map(str, sorted(transaction.partitions)))
    what = (
        f"the transaction of {transactional_id!r} on {partitions}, and fence"
        f" producer id {transaction.producer_id}, epoch {transaction.producer_epoch}"
    )
    if not yes:
        say(
            f"would abort {what}\nnothing is changed; repeat with --yes to abort it on "
            f"{cluster_text(client_config)}"
        )
        return
    from oncelog.client.producer.blocking import Producer
    from oncelog.config import PRODUCER

    config = only_settings_of(PRODUCER, client_config)
    # The coordinator keeps the timeout of its newest producer: leave it as it is.
    config |= {"transactional.id": transactional_id, "transaction.timeout.ms": transaction.timeout_ms}
    with Producer(config) as producer:
        producer.init_transactions()
    say(f"aborted {what.replace(', and fence', ', and fenced')}")


def _hanging_transaction(held_back: Sequence[Any], where: str, producer_id: int) -> Any:
    """Return the producer's open transaction on the partition TOPIC:PARTITION.

    Raises click.ClickException if there is none, or if a coordinator can still end it.
    """
    for opened, hanging, reason in held_back:
        if f"{opened.tp.topic}:{opened.tp.partition}" != where or opened.producer_id != producer_id:
            continue
        # An ABORT marker on one partition of a transaction that its producer then commits would lose records.
        # Guard: test_a_transaction_that_does_not_hang_is_terminated_as_a_whole.
        if hanging.value == "no":
            raise click.ClickException(
                f"the transaction does not hang ({reason}): abort it on all its partitions with "
                "`oncelog transactions terminate TRANSACTIONAL_ID`"
            )
        return opened
    raise click.ClickException(f"producer id {producer_id} has no open transaction in {where}")


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
        opened = _hanging_transaction(admin.find_hanging([topic], older_than_ms=0), where, producer_id)
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
