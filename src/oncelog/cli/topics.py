"""`oncelog topics`: list, describe, create, alter and delete topics of any Kafka cluster."""

from __future__ import annotations

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
    parse_properties,
    partition_arguments,
    say,
    say_target,
    size_text,
    suggest_setting,
)
from oncelog.cli.times import TimeType
from oncelog.cli.watch import watch_option

ALIASES = {"ls": "list"}


class _AliasGroup(click.Group):
    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return super().get_command(ctx, ALIASES.get(name, name))


@click.group("topics", cls=_AliasGroup)
def command() -> None:
    """List, describe, create, alter, trim and delete topics.

    \b
    Examples:
      oncelog topics create flights --partitions 3 --config retention.ms=86400000
      oncelog topics describe flights -o wide
      oncelog topics sizes
      oncelog topics trim flights --before 7d  (prints what would be deleted)
      oncelog topics delete flights            (prints what would be deleted)
      oncelog topics delete flights --yes      (deletes it)
    """


@command.command("list")
@watch_option
@click.option("--internal", is_flag=True, help="Also list internal topics.")
@bootstrap_options
@output_option
def list_topics(internal: bool, output: str, client_config: dict[str, Any]) -> None:
    """List the topics of the cluster (alias: ls)."""
    with new_admin(client_config) as admin:
        topics = admin.list_topics(include_internal=internal)
    rows = [
        {"topic": t.name, "partitions": t.partition_count, "topic_id": t.topic_id, "internal": t.is_internal}
        for t in topics
    ]
    emit(rows, output, columns=["topic", "partitions"], wide=["topic_id", "internal"])


@command.command("describe")
@watch_option
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("-c", "--configs", is_flag=True, help="Show the topics' settings instead of their partitions.")
@click.option("--all-configs", is_flag=True, help="Show all settings, also those at their default.")
@bootstrap_options
@output_option
def describe(
    topics: tuple[str, ...], configs: bool, all_configs: bool, output: str, client_config: dict[str, Any]
) -> None:
    """Show partitions with leaders, replicas and offsets, or the topics' settings.

    \b
    END OFFSET         the high watermark, the offset of the next record
    STABLE END OFFSET  the last stable offset, at which read_committed readers stop
    HELD BACK BY       (-o wide) the producer whose open transaction keeps STABLE END OFFSET back
    """
    with new_admin(client_config) as admin:
        if configs or all_configs:
            emit(
                _config_rows(admin, topics, all_configs), output, columns=["topic", "name", "value", "source"]
            )
        else:
            rows = _partition_rows(admin, topics)
            columns = ["topic", "partition", "leader", "start_offset", "end_offset", "stable_end_offset"]
            wide = ["held_back_by", "hanging", "leader_epoch", "replicas", "in_sync_replicas"]
            emit(rows, output, columns=columns, wide=wide)


def _config_rows(admin: Any, topics: tuple[str, ...], with_defaults: bool) -> list[dict[str, Any]]:
    from oncelog.client.admin.blocking import ConfigResource

    described = admin.describe_configs([ConfigResource("topic", name) for name in topics])
    return [
        {"topic": resource.name, "name": entry.name, "value": entry.value, "source": entry.source}
        for resource, description in described.items()
        for entry in sorted(description.entries.values(), key=lambda entry: entry.name)
        if with_defaults or not entry.is_default
    ]


def _partition_rows(admin: Any, topics: tuple[str, ...]) -> list[dict[str, Any]]:
    from oncelog.client.consumer.partition_ends import PartitionEnds, partition_ends
    from oncelog.types import TopicPartition

    parts = [part for topic in admin.describe_topics(topics).values() for part in topic.partitions]
    # The offsets of a partition without a leader cannot be looked up. The row shows the other values.
    tps = [TopicPartition(part.topic, part.partition) for part in parts if part.leader is not None]
    ends_by_tp = partition_ends(admin, tps)
    rows = []
    for part in parts:
        ends = ends_by_tp.get(
            TopicPartition(part.topic, part.partition), PartitionEnds(None, None, None, None)
        )
        rows.append(
            {
                "topic": part.topic,
                "partition": part.partition,
                "leader": part.leader,
                "start_offset": ends.start,
                "end_offset": ends.end,
                **held_back_cells(ends),
                "leader_epoch": part.leader_epoch,
                "replicas": list(part.replicas),
                "in_sync_replicas": list(part.in_sync_replicas),
            }
        )
    return rows


@command.command("create")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option(
    "-p", "--partitions", type=int, help="The number of partitions (default: the broker's num.partitions)."
)
@click.option(
    "-r",
    "--replication-factor",
    type=int,
    help="Replicas per partition (default: the broker's default.replication.factor).",
)
@click.option(
    "-c", "--config", "configs", multiple=True, metavar="KEY=VALUE", help="A topic setting. Repeatable."
)
@click.option("--if-not-exists", is_flag=True, help="Skip topics that exist already.")
@bootstrap_options
def create(
    topics: tuple[str, ...],
    partitions: int | None,
    replication_factor: int | None,
    configs: tuple[str, ...],
    if_not_exists: bool,
    client_config: dict[str, Any],
) -> None:
    """Create topics."""
    from oncelog.client.admin.blocking import NewTopic
    from oncelog.client.admin.core import raise_first
    from oncelog.errors import TopicAlreadyExists

    settings = parse_properties(configs)
    requested = [NewTopic(name, partitions, replication_factor, settings) for name in topics]
    with new_admin(client_config) as admin, suggest_setting(admin, [], settings):
        created = admin.create_topics(requested, raise_errors=False)
        for topic in created.values():
            if topic.error is None:
                say(f"created {topic.name}")
            elif if_not_exists and isinstance(topic.error, TopicAlreadyExists):
                say(f"{topic.name} exists already", err=True)
        raise_first(
            topic
            for topic in created.values()
            if not (if_not_exists and isinstance(topic.error, TopicAlreadyExists))
        )


@command.command("alter")
@click.argument("topic")
@click.option(
    "-p", "--partitions", type=int, help="The new number of partitions; must be higher than the present one."
)
@click.option(
    "--config", "configs", multiple=True, metavar="KEY=VALUE", help="Set a topic setting. Repeatable."
)
@click.option(
    "--delete-config",
    "deleted",
    multiple=True,
    metavar="KEY",
    help="Reset a setting to its default. Repeatable.",
)
@bootstrap_options
def alter(
    topic: str,
    partitions: int | None,
    configs: tuple[str, ...],
    deleted: tuple[str, ...],
    client_config: dict[str, Any],
) -> None:
    """Add partitions to a topic, or change its settings."""
    from oncelog.client.admin.blocking import ConfigResource

    values: dict[str, str | None] = {**parse_properties(configs), **dict.fromkeys(deleted)}
    if partitions is None and not values:
        raise click.UsageError("nothing to change: use --partitions, --config or --delete-config")
    with new_admin(client_config) as admin:
        if values:
            resource = ConfigResource("topic", topic)
            with suggest_setting(admin, [resource], values):
                admin.alter_configs({resource: values})
            say(f"altered {topic}: {', '.join(values)}")
        if partitions is not None:
            admin.create_partitions({topic: partitions})
            say(f"{topic} has {partitions} partitions")


@command.command("delete")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option(
    "--yes", is_flag=True, help="Delete the topics. Without --yes, only print what would be deleted."
)
@bootstrap_options
def delete(topics: tuple[str, ...], yes: bool, client_config: dict[str, Any]) -> None:
    """Delete topics with all their records. Without --yes, only print what would be deleted."""
    from oncelog.client.admin.core import raise_first

    topics = tuple(dict.fromkeys(topics))
    say_target(client_config)
    with new_admin(client_config) as admin:
        if yes:
            outcomes = admin.delete_topics(topics, raise_errors=False)
            # If the broker refuses to delete a topic, the other topics are still deleted. Guard:
            # test_each_deleted_topic_is_named_if_another_one_is_missing.
            for topic in outcomes.values():
                if topic.error is None:
                    say(f"deleted {topic.name}")
            raise_first(outcomes.values())
            return
        rows = _partition_rows(admin, topics)
    for name in topics:
        mine = [row for row in rows if row["topic"] == name]
        offsets = sum((row["end_offset"] or 0) - (row["start_offset"] or 0) for row in mine)
        say(f"would delete {name}: {len(mine)} partitions, {offsets} offsets")
    say(f"nothing was deleted; repeat with --yes to delete on {cluster_text(client_config)}", err=True)


@command.command("trim")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC[:PARTITION,...]...")
@click.option("--to-offset", type=click.IntRange(min=0), help="Delete all records below this offset.")
@click.option(
    "--before", "before_ms", type=TimeType(), metavar="TIME",
    help="Delete all records before the first record of this time or later: 7d (ago), 2026-11-28T10:00.",
)  # fmt: skip
@click.option("--to-end", is_flag=True, help="Delete all records.")
@click.option(
    "--yes", is_flag=True, help="Delete the records. Without --yes, only print what would be deleted."
)
@bootstrap_options
@output_option
def trim(
    topics: tuple[str, ...],
    to_offset: int | None,
    before_ms: int | None,
    to_end: bool,
    yes: bool,
    output: str,
    client_config: dict[str, Any],
) -> None:
    """Delete the oldest records of topics. The topics and their offsets stay (DeleteRecords).

    An offset above the end offset of a partition counts as its end offset.
    """
    if [to_offset is not None, before_ms is not None, to_end].count(True) != 1:
        raise click.UsageError("use exactly one of --to-offset, --before and --to-end")
    where = partition_arguments(topics)
    say_target(client_config)
    with new_admin(client_config) as admin:
        planned = _trim_plan(admin, where, to_offset, before_ms)
        rows = [
            {**tp._asdict(), "start_offset": start, "new_start_offset": new, "offsets": new - start}
            for tp, (start, new) in planned.items()
        ]
        emit(rows, output, columns=["topic", "partition", "start_offset", "new_start_offset", "offsets"])
        if yes:
            admin.delete_records({tp: new for tp, (start, new) in planned.items() if new > start})
    if not yes:
        say(f"nothing was deleted; repeat with --yes to delete on {cluster_text(client_config)}", err=True)


def _trim_plan(
    admin: Any, where: list[tuple[str, list[int] | None]], to_offset: int | None, before_ms: int | None
) -> dict[Any, tuple[int, int]]:
    """Return the current and the planned log start offset of each partition."""
    tps = existing_partitions(admin, where)
    starts = admin.list_offsets(dict.fromkeys(tps, "earliest"))
    ends = admin.list_offsets(dict.fromkeys(tps, "latest"))
    found = admin.list_offsets(dict.fromkeys(tps, before_ms)) if before_ms is not None else {}
    plan = {}
    for tp in tps:
        start, end = starts[tp].offset or 0, ends[tp].offset or 0
        # If no record is as young as --before, the offset is None, and all records are trimmed.
        target = found[tp].offset if tp in found else to_offset
        plan[tp] = (start, end if target is None else max(min(target, end), start))
    return plan


@command.command("sizes")
@watch_option
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--partitions", "by_partition", is_flag=True, help="Show each replica instead of each topic.")
@bootstrap_options
@output_option
def sizes(topics: tuple[str, ...], by_partition: bool, output: str, client_config: dict[str, Any]) -> None:
    """Show how much disk space topics take, the largest first. All replicas count."""
    from oncelog.errors import UnknownTopicOrPartition

    with new_admin(client_config) as admin:
        directories = admin.describe_log_dirs()
    rows = [
        {
            "topic": log.tp.topic,
            "partition": log.tp.partition,
            "broker": directory.node_id,
            "bytes": log.size_bytes,
            "size": size_text(log.size_bytes),
            "directory": directory.path,
            "offset_lag": log.offset_lag,
            "is_future": log.is_future,
        }
        for directory in directories
        for log in directory.replicas
        if not topics or log.tp.topic in topics
    ]
    missing = set(topics) - {row["topic"] for row in rows}
    if missing:
        raise UnknownTopicOrPartition(f"topic {min(missing)!r} does not exist")
    if by_partition:
        rows.sort(key=lambda row: (-row["bytes"], row["topic"], row["partition"]))
        wide = ["directory", "offset_lag", "is_future"]
        emit(rows, output, columns=["topic", "partition", "broker", "bytes", "size"], wide=wide)
    else:
        emit(_by_topic(rows), output, columns=["topic", "partitions", "replicas", "bytes", "size"])
    for directory in directories:
        if directory.error is not None:
            say(f"broker {directory.node_id}, {directory.path}: {directory.error}", err=True)


def _by_topic(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    replicas: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        replicas.setdefault(row["topic"], []).append(row)
    summed = [
        {
            "topic": topic,
            "partitions": len({row["partition"] for row in of_topic}),
            "replicas": len(of_topic),
            "bytes": sum(row["bytes"] for row in of_topic),
        }
        for topic, of_topic in replicas.items()
    ]
    summed.sort(key=lambda row: (-row["bytes"], row["topic"]))
    return [{**row, "size": size_text(row["bytes"])} for row in summed]
