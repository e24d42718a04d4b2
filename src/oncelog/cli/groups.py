"""`oncelog groups`: consumer groups, their members, offsets and lag; reset and delete offsets."""

from __future__ import annotations

from typing import Any

import click

from oncelog.cli.common import (
    bootstrap_options,
    cluster_text,
    emit,
    held_back_cells,
    new_admin,
    output_option,
    say,
    say_target,
)

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
      oncelog groups reset-offsets dashboards --topic flights --to-earliest        (prints the changes)
      oncelog groups reset-offsets dashboards --topic flights --to-earliest --yes  (makes them)
      oncelog groups delete dashboards --yes
    """


@command.command("list")
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
@click.argument("group")
@click.option("--members", is_flag=True, help="Show the members instead of the offsets.")
@bootstrap_options
@output_option
def describe(group: str, members: bool, output: str, client_config: dict[str, Any]) -> None:
    """Show the committed offset, the lag and the member of each partition, or all members.

    \b
    END OFFSET         the high watermark, the offset of the next record
    LAG                END OFFSET minus the committed offset
    STABLE END OFFSET  the last stable offset, at which read_committed readers stop
    HELD BACK BY       the producer whose open transaction keeps STABLE END OFFSET below END OFFSET
    """
    with new_admin(client_config) as admin:
        described = admin.describe_groups([group])[group]
        if not members:
            rows = _offset_rows(admin, described)
            emit(rows, output, columns=OFFSET_COLUMNS, wide=["hanging", "metadata"])
            for row in rows:
                if row["remark"]:
                    say(f"{row['topic']}-{row['partition']}: {row['remark']}", err=True)
            return
    rows = [
        {
            "member": member.member_id,
            "instance": member.group_instance_id,
            "client": member.client_id,
            "host": member.host,
            "partitions": " ".join(map(str, member.partitions)),
        }
        for member in described.members
    ]
    emit(rows, output, columns=["member", "instance", "client", "host", "partitions"])


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
    """Return the problem with a committed offset, or None if there is none."""
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
@click.option("--topic", multiple=True, required=True, help="Reset all partitions of this topic. Repeatable.")
@click.option("--to-earliest", is_flag=True, help="Reset to the first record.")
@click.option("--to-latest", is_flag=True, help="Reset to the end, after the last record.")
@click.option("--to-offset", type=click.IntRange(min=0), help="Reset to this offset.")
@click.option("--to-datetime", help="Reset to the first record at or after this time (ISO 8601).")
@click.option(
    "--shift-by", type=int, help="Add this number to the offsets. A negative number moves them back."
)
@click.option("--yes", is_flag=True, help="Commit the new offsets. Without --yes, only print them.")
@bootstrap_options
@output_option
def reset_offsets(group: str, topic: tuple[str, ...], yes: bool, output: str, **given: Any) -> None:
    """Reset a group's offsets. The group must have no members."""
    client_config = given.pop("client_config")
    say_target(client_config)
    # 0 is a value of --to-offset and --shift-by, and equals False.
    targets = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(targets) != 1:
        raise click.UsageError(
            "use exactly one of --to-earliest, --to-latest, --to-offset, --to-datetime and --shift-by"
        )
    way, value = next(iter(targets.items()))
    with new_admin(client_config) as admin:
        planned = _planned(admin, group, topic, way, value)
        rows = [
            {**plan.tp._asdict(), "offset": plan.offset, "new_offset": plan.new_offset} for plan in planned
        ]
        emit(rows, output, columns=["topic", "partition", "offset", "new_offset"])
        if yes:
            admin.alter_group_offsets(group, _offsets_of(planned))
    if not yes:
        say(f"nothing is changed; repeat with --yes to commit on {cluster_text(client_config)}", err=True)


def _planned(admin: Any, group: str, topics: tuple[str, ...], way: str, value: Any) -> list[Any]:
    from oncelog.client.admin.offset_reset import plan_reset
    from oncelog.errors import MisuseError
    from oncelog.types import TopicPartition

    described = admin.describe_topics(list(topics))
    tps = [TopicPartition(name, part.partition) for name in topics for part in described[name].partitions]
    try:
        return list(plan_reset(admin, group, tps, way, value))
    except MisuseError as error:
        raise click.BadParameter(f"--{way.replace('_', '-')} {error}") from None


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
