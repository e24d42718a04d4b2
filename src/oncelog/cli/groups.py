"""`oncelog groups`: consumer groups, their members, offsets and lag; reset and delete offsets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from oncelog.cli.common import (
    bootstrap_options,
    cluster_text,
    emit,
    existing_partitions,
    held_back_cells,
    new_admin,
    output_option,
    partition_arguments,
    say,
    say_target,
)
from oncelog.cli.partitions import format_plan, parse_plan
from oncelog.cli.times import DurationType, now_ms
from oncelog.cli.watch import watch_option

OFFSET_COLUMNS = [
    *("group", "topic", "partition", "offset", "end_offset", "lag"),
    *("stable_end_offset", "held_back_by", "member"),
]


@click.group("groups")
def command() -> None:
    """List, describe, reset and delete consumer groups.

    \b
    Examples:
      oncelog groups list
      oncelog groups describe dashboards
      oncelog groups describe --all --totals
      oncelog groups reset-offsets dashboards --topic flights --to-earliest        (prints the changes)
      oncelog groups reset-offsets dashboards --topic flights --to-earliest --yes  (makes them)
      oncelog groups reset-offsets dashboards --topic flights:0,2 --by-duration PT1H
      oncelog groups reset-offsets dashboards --all-topics --to-current --export > offsets.csv
      oncelog groups reset-offsets dashboards --from-file offsets.csv --yes
      oncelog groups delete-offsets dashboards flights:1 --yes
      oncelog groups delete dashboards --yes
    """


@command.command("list")
@watch_option
@click.option("--state", multiple=True, help="Only groups in this state (Stable, Empty, ...). Repeatable.")
@bootstrap_options
@output_option
def list_groups(state: tuple[str, ...], output: str, client_config: dict[str, Any]) -> None:
    """List the groups of all brokers."""
    with new_admin(client_config) as admin:
        found = admin.list_groups(state)
    rows = [
        {
            "group": g.group_id,
            "state": g.state,
            "protocol_type": g.protocol_type,
            "coordinator": g.coordinator_id,
        }
        for g in found
    ]
    emit(rows, output, columns=["group", "state", "protocol_type", "coordinator"])


@command.command("describe")
@watch_option
@click.argument("groups", nargs=-1, metavar="[GROUP]...")
@click.option("--all", "all_groups", is_flag=True, help="Describe all groups.")
@click.option("--members", is_flag=True, help="Show the members instead of the offsets.")
@click.option("--totals", is_flag=True, help="Show one row for each group, with its total lag.")
@bootstrap_options
@output_option
def describe(
    groups: tuple[str, ...],
    all_groups: bool,
    members: bool,
    totals: bool,
    output: str,
    client_config: dict[str, Any],
) -> None:
    """Show the committed offset, the lag and the member of each partition, or all members.

    \b
    END OFFSET         the high watermark, the offset of the next record
    LAG                END OFFSET minus the committed offset
    STABLE END OFFSET  the last stable offset, at which read_committed readers stop
    HELD BACK BY       the producer whose open transaction keeps STABLE END OFFSET below END OFFSET
    HELD BACK          (--totals) the number of such partitions
    """
    if bool(groups) is all_groups:
        raise click.UsageError("name the groups, or use --all")
    if members and totals:
        raise click.UsageError("--members and --totals exclude each other")
    with new_admin(client_config) as admin:
        described = list(_described(admin, groups, all_groups))
        if members:
            rows = [row for group in described for row in _member_rows(group)]
            emit(rows, output, columns=["group", "member", "instance", "client", "host", "partitions"])
            return
        offsets = {group.group_id: _offset_rows(admin, group) for group in described}
    if totals:
        rows = [_total(group, offsets[group.group_id]) for group in described]
        emit(rows, output, columns=["group", "state", "members", "partitions", "lag", "held_back"])
        return
    rows = [row for of_group in offsets.values() for row in of_group]
    emit(rows, output, columns=OFFSET_COLUMNS, wide=["hanging", "metadata"])
    for row in rows:
        if row["remark"]:
            say(f"{row['topic']}-{row['partition']}: {row['remark']}", err=True)


def _described(admin: Any, groups: tuple[str, ...], all_groups: bool) -> Iterator[Any]:
    from oncelog.errors import GroupIdNotFound

    for group in [listed.group_id for listed in admin.list_groups()] if all_groups else dict.fromkeys(groups):
        try:
            yield admin.describe_groups([group])[group]
        except GroupIdNotFound:
            # With --all, ignore a group that was deleted after it was listed.
            if not all_groups:
                raise


def _member_rows(described: Any) -> list[dict[str, Any]]:
    return [
        {
            "group": described.group_id,
            "member": member.member_id,
            "instance": member.group_instance_id,
            "client": member.client_id,
            "host": member.host,
            "partitions": " ".join(map(str, member.partitions)),
        }
        for member in described.members
    ]


def _total(described: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "group": described.group_id,
        "state": described.state,
        "members": len(described.members),
        "partitions": len(rows),
        "lag": sum(row["lag"] or 0 for row in rows),
        "held_back": sum(row["held_back_by"] is not None for row in rows),
    }


def _offset_rows(admin: Any, described: Any) -> list[dict[str, Any]]:
    from oncelog.client.consumer.partition_ends import partition_ends

    offsets = admin.group_offsets(described.group_id)
    readers = {tp: member.member_id for member in described.members for tp in member.partitions}
    tps = sorted({*offsets, *readers})
    rows = []
    for tp, ends in partition_ends(admin, tps).items():
        committed = offsets.get(tp)
        offset = committed.offset if committed else None
        rows.append(
            {
                "group": described.group_id,
                "topic": tp.topic,
                "partition": tp.partition,
                "offset": offset,
                "end_offset": ends.end,
                # As in Kafka's tool, the lag is negative if the committed offset is above the end.
                "lag": ends.end - offset if ends.end is not None and offset is not None else None,
                **held_back_cells(ends),
                "member": readers.get(tp),
                "metadata": committed.metadata if committed else None,
                "remark": _remark(offset, ends),
            }
        )
    return rows


def _remark(offset: int | None, ends: Any) -> str | None:
    """Return the problem with a committed offset as text, or None if the offset is valid."""
    if offset is None or ends.end is None or ends.start is None:
        return None if ends.end is not None else "no broker returned its offsets"
    by_setting = "auto.offset.reset decides where reading starts"
    if offset > ends.end:
        return f"offset {offset} is above the end offset {ends.end}: {by_setting}"
    if offset < ends.start:
        return f"offset {offset} is below the start offset {ends.start}: {by_setting}"
    return None


@command.command("reset-offsets")
@click.argument("group")
@click.option(
    "--topic", "topics", multiple=True, metavar="TOPIC[:PARTITION,...]",
    help="Reset all partitions of this topic, or only these. Repeatable.",
)  # fmt: skip
@click.option("--all-topics", is_flag=True, help="Reset all partitions with a committed offset.")
@click.option("--to-earliest", is_flag=True, help="Reset to the first record.")
@click.option("--to-latest", is_flag=True, help="Reset to the end, after the last record.")
@click.option("--to-current", is_flag=True, help="Keep the committed offsets; use it with --export.")
@click.option("--to-offset", type=click.IntRange(min=0), help="Reset to this offset.")
@click.option("--to-datetime", help="Reset to the first record at or after this time (ISO 8601).")
@click.option(
    "--by-duration", type=DurationType(), metavar="DURATION",
    help="Reset to the first record of the time this long ago: PT1H, 90m, 7d.",
)  # fmt: skip
@click.option(
    "--shift-by", type=int, help="Add this number to the offsets. A negative number moves them back."
)
@click.option(
    "--from-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Reset to the offsets in this CSV file: topic, partition, offset.",
)  # fmt: skip
@click.option("--export", is_flag=True, help="Print the new offsets as CSV, for --from-file.")
@click.option("--yes", is_flag=True, help="Commit the new offsets. Without --yes, only print them.")
@bootstrap_options
@output_option
def reset_offsets(
    group: str,
    topics: tuple[str, ...],
    all_topics: bool,
    export: bool,
    yes: bool,
    output: str,
    client_config: dict[str, Any],
    **given: Any,
) -> None:
    """Reset a group's offsets. The group must have no members.

    The CSV files are those of kafka-consumer-groups (--export, --from-file).
    """
    # Compare with `is`, not `==`: 0 is a valid value of --to-offset and --shift-by, and 0 == False.
    targets = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(targets) != 1:
        raise click.UsageError(f"use exactly one of {_options_text(given)}")
    if (bool(topics) + all_topics + ("from_file" in targets)) != 1:
        raise click.UsageError("use exactly one of --topic, --all-topics and --from-file")
    way, value = next(iter(targets.items()))
    where = partition_arguments(topics)
    say_target(client_config)
    with new_admin(client_config) as admin:
        planned = _planned(admin, group, where, way, value)
        if export:
            click.echo(format_plan((plan.tp, plan.new_offset) for plan in planned), nl=False)
        else:
            rows = [
                {**plan.tp._asdict(), "offset": plan.offset, "new_offset": plan.new_offset}
                for plan in planned
            ]
            emit(rows, output, columns=["topic", "partition", "offset", "new_offset"])
        if yes:
            admin.alter_group_offsets(group, _offsets_of(planned))
    if not yes:
        say(f"nothing is changed; repeat with --yes to commit on {cluster_text(client_config)}", err=True)


def _options_text(names: Iterable[str]) -> str:
    *options, last = (f"--{name.replace('_', '-')}" for name in names)
    return f"{', '.join(options)} and {last}"


def _planned(
    admin: Any, group: str, where: list[tuple[str, list[int] | None]], way: str, value: Any
) -> list[Any]:
    from oncelog.client.admin.offset_reset import plan_offsets, plan_reset
    from oncelog.errors import MisuseError

    try:
        if way == "from_file":
            return list(plan_offsets(admin, group, _offsets_in(value, group)))
        if way == "by_duration":
            moment = datetime.fromtimestamp(max(now_ms() - value, 0) / 1000, UTC)
            way, value = "to_datetime", moment.isoformat()
        # Without a topic, reset all topics with a committed offset.
        committed = sorted(admin.group_offsets(group)) if not where or way == "to_current" else []
        tps = existing_partitions(admin, where) if where else committed
        if way == "to_current":
            tps, way, value = [tp for tp in tps if tp in committed], "shift_by", 0
        return list(plan_reset(admin, group, tps, way, value))
    except MisuseError as error:
        raise click.BadParameter(f"--{way.replace('_', '-')} {error}") from None


def _offsets_in(path: Path, group: str) -> dict[Any, int]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return parse_plan(file, group)
    except ValueError as error:  # also UnicodeDecodeError: text that is not UTF-8
        raise click.ClickException(f"{path}: {error}") from None


def _offsets_of(planned: list[Any]) -> dict[Any, Any]:
    from oncelog.types import OffsetAndMetadata

    return {plan.tp: OffsetAndMetadata(plan.new_offset) for plan in planned}


@command.command("delete")
@click.argument("groups", nargs=-1, required=True, metavar="GROUP...")
@click.option(
    "--yes", is_flag=True, help="Delete the groups. Without --yes, only print what would be deleted."
)
@bootstrap_options
def delete(groups: tuple[str, ...], yes: bool, client_config: dict[str, Any]) -> None:
    """Delete groups without members, and their committed offsets."""
    say_target(client_config)
    with new_admin(client_config) as admin:
        for group in groups:
            offsets = admin.group_offsets(group)
            if yes:
                admin.delete_group(group)
            say(f"{'deleted' if yes else 'would delete'} {group}: {len(offsets)} committed offsets")
    if not yes:
        say(f"nothing is deleted; repeat with --yes to delete on {cluster_text(client_config)}", err=True)


@command.command("delete-offsets")
@click.argument("group")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC[:PARTITION,...]...")
@click.option(
    "--yes", is_flag=True, help="Delete the offsets. Without --yes, only print what would be deleted."
)
@bootstrap_options
@output_option
def delete_offsets(
    group: str, topics: tuple[str, ...], yes: bool, output: str, client_config: dict[str, Any]
) -> None:
    """Delete a group's committed offsets of topics that none of its members reads (KIP-496)."""
    where = partition_arguments(topics)
    say_target(client_config)
    with new_admin(client_config) as admin:
        offsets = admin.group_offsets(group)
        chosen = {
            tp: offsets[tp].offset
            for tp in sorted(offsets)
            if any(tp.topic == topic and (only is None or tp.partition in only) for topic, only in where)
        }
        if not chosen:
            raise click.ClickException(f"group {group!r} has no committed offset of {' or '.join(topics)}")
        if yes:
            admin.delete_group_offsets(group, list(chosen))
    rows = [{**tp._asdict(), "offset": offset} for tp, offset in chosen.items()]
    emit(rows, output, columns=["topic", "partition", "offset"])
    if not yes:
        say(f"nothing is deleted; repeat with --yes to delete on {cluster_text(client_config)}", err=True)
