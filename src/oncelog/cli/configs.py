"""`oncelog configs`: settings of topics, brokers and the cluster, with their defaults and meanings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import click

from oncelog.cli.common import (
    F,
    bootstrap_options,
    cluster_text,
    emit,
    new_admin,
    output_option,
    parse_properties,
    say,
    say_target,
    suggest_setting,
)
from oncelog.cli.watch import watch_option


@click.group("configs")
def command() -> None:
    """Describe and alter the settings of topics, brokers and the cluster.

    \b
    Examples:
      oncelog configs describe --topic flights
      oncelog configs describe --topic flights retention.ms -o wide
      oncelog configs describe --broker 1 --all
      oncelog configs alter --topic flights --set retention.ms=86400000        (prints the change)
      oncelog configs alter --topic flights --set retention.ms=86400000 --yes  (makes it)
    """


def _resource_options(function: F) -> F:
    for option in (
        click.option("--cluster", is_flag=True, help="Settings of all brokers that were set at run time."),
        click.option("--broker", "brokers", multiple=True, type=click.IntRange(min=0), metavar="ID",
                     help="The settings of this broker. Repeatable."),
        click.option("--topic", "topics", multiple=True, help="The settings of this topic. Repeatable."),
    ):  # fmt: skip
        function = option(function)
    return function


def _resources(topics: tuple[str, ...], brokers: tuple[int, ...], cluster: bool) -> list[Any]:
    from oncelog.client.admin.types import ConfigResource

    resources = [ConfigResource("topic", name) for name in topics]
    resources += [ConfigResource("broker", str(node_id)) for node_id in brokers]
    resources += [ConfigResource("broker", "")] if cluster else []
    if not resources:
        raise click.UsageError("name what has the settings: --topic NAME, --broker ID or --cluster")
    return resources


def _name(resource: Any) -> str:
    return f"{resource.kind} {resource.name}" if resource.name else "cluster"


@command.command("describe")
@watch_option
@click.argument("names", nargs=-1, metavar="[SETTING]...")
@_resource_options
@click.option("--all", "with_defaults", is_flag=True, help="Show all settings, also those at their default.")
@bootstrap_options
@output_option
def describe(
    names: tuple[str, ...],
    topics: tuple[str, ...],
    brokers: tuple[int, ...],
    cluster: bool,
    with_defaults: bool,
    output: str,
    client_config: dict[str, Any],
) -> None:
    """Show settings that differ from their defaults, all settings, or the SETTINGs that you name.

    \b
    DEFAULT  the value that the broker's software has for it
    SOURCE   where the value was set: topic, broker, cluster (all brokers), file, or default
    MEANING  (-o wide, JSON) as the broker documents it
    """
    resources = _resources(topics, brokers, cluster)
    with new_admin(client_config) as admin:
        described = admin.describe_configs(resources, documented=True)
    rows = [
        {
            "resource": _name(resource),
            "name": entry.name,
            "value": "(hidden)" if entry.is_sensitive else entry.value,
            "default": entry.default,
            "source": entry.source,
            "type": entry.kind,
            "read_only": entry.is_read_only,
            "meaning": entry.doc,
        }
        for resource, description in described.items()
        for entry in sorted(description.entries.values(), key=lambda entry: entry.name)
        if entry.name in names or (not names and (with_defaults or not entry.is_default))
    ]
    unknown = set(names) - {row["name"] for row in rows}
    if unknown:
        _refuse_unknown(min(unknown), described)
    columns = ["resource", "name", "value", "default", "source"]
    emit(rows, output, columns=columns, wide=["type", "read_only", "meaning"])


def _refuse_unknown(name: str, described: Mapping[Any, Any]) -> None:
    known = sorted({name for description in described.values() for name in description.entries})
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise click.ClickException(f"there is no setting {name!r}{hint}")


@command.command("alter")
@_resource_options
@click.option("--set", "values", multiple=True, metavar="KEY=VALUE", help="Set a setting. Repeatable.")
@click.option(
    "--delete", "deleted", multiple=True, metavar="KEY", help="Reset a setting to its default. Repeatable."
)
@click.option("--yes", is_flag=True, help="Make the changes. Without --yes, only check and print them.")
@bootstrap_options
@output_option
def alter(
    topics: tuple[str, ...],
    brokers: tuple[int, ...],
    cluster: bool,
    values: tuple[str, ...],
    deleted: tuple[str, ...],
    yes: bool,
    output: str,
    client_config: dict[str, Any],
) -> None:
    """Change settings. Without --yes, the broker checks the new values, and nothing is changed."""
    resources = _resources(topics, brokers, cluster)
    changes: dict[str, str | None] = {**parse_properties(values), **dict.fromkeys(deleted)}
    if not changes:
        raise click.UsageError("nothing to change: use --set KEY=VALUE or --delete KEY")
    say_target(client_config)
    with new_admin(client_config) as admin:
        before = admin.describe_configs(resources)
        with suggest_setting(admin, resources, changes):
            admin.alter_configs(dict.fromkeys(resources, changes), validate_only=not yes)
    rows = [
        _change_row(resource, name, before[resource].entries.get(name), value)
        for resource in resources
        for name, value in changes.items()
    ]
    emit(rows, output, columns=["resource", "name", "value", "new_value"])
    if not yes:
        say(f"nothing was changed; repeat with --yes to change it on {cluster_text(client_config)}", err=True)


def _change_row(resource: Any, name: str, entry: Any, value: str | None) -> dict[str, Any]:
    is_secret = entry is not None and entry.is_sensitive
    old = entry.value if entry is not None else None
    return {
        "resource": _name(resource),
        "name": name,
        "value": "(hidden)" if is_secret else old,
        "new_value": "(default)" if value is None else "(hidden)" if is_secret else value,
    }
