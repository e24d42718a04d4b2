"""`oncelog quotas`: manage client quotas. The names of quotas and entities are Kafka's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from oncelog.cli.common import (
    bootstrap_options,
    cluster_text,
    emit,
    new_admin,
    output_option,
    say,
    say_target,
)
from oncelog.cli.watch import watch_option

F = TypeVar("F", bound=Callable[..., Any])


@click.group("quotas")
def command() -> None:
    """List, set and remove quotas of users, client ids, pairs of both, or IP addresses.

    Quotas: producer_byte_rate, consumer_byte_rate, request_percentage, controller_mutation_rate, and
    (Oncelog's broker only) producer_ids_rate; for ips connection_creation_rate. All are per second.

    \b
    Examples:
      oncelog quotas set --user alice producer_byte_rate=1048576 consumer_byte_rate=2097152
      oncelog quotas set --user alice --client-id-default producer_byte_rate=65536
      oncelog quotas set --user-default producer_ids_rate=1
      oncelog quotas set --ip 10.1.2.3 connection_creation_rate=10
      oncelog quotas list --user alice
      oncelog quotas remove --user alice producer_byte_rate --yes
    """


def _entity_options(function: F) -> F:
    for option in (
        click.option("--user", help="A user, without the prefix User:."),
        click.option("--user-default", is_flag=True, help="Every user that has no quotas."),
        click.option("--client-id", help="A client id."),
        click.option("--client-id-default", is_flag=True, help="Every client id that has no quotas."),
        click.option("--ip", help="The IP address of clients."),
        click.option("--ip-default", is_flag=True, help="Every address that has no quotas."),
    ):
        function = option(function)
    return function


def _parts(given: dict[str, Any]) -> dict[str, str]:
    """Return the entity in the options as a map from type to name."""
    parts = {}
    for kind in ("user", "client-id", "ip"):
        option = kind.replace("-", "_")
        name, is_default = given[option], given[f"{option}_default"]
        if name == "" or (name is not None and is_default):
            raise click.UsageError(f"use --{kind} with a name, or --{kind}-default")
        if is_default:
            # An empty name means the default entity, as in rules.limits.quotas.
            parts[kind] = ""
        elif name is not None:
            parts[kind] = name
    return parts


def _entity(given: dict[str, Any]) -> Any:
    from oncelog.rules.limits.quotas import parse_entity

    parts = _parts(given)
    if not parts:
        raise click.UsageError("choose an entity with --user, --client-id or --ip, or their -default")
    return parse_entity((kind, name or None) for kind, name in parts.items())


@command.command("list")
@watch_option
@_entity_options
@bootstrap_options
@output_option
def list_quotas(output: str, client_config: dict[str, Any], **given: Any) -> None:
    """List quotas. With options, list those of all entities that include the named user, id or address."""
    from oncelog.rules.limits.quotas import QuotaFilter

    with new_admin(client_config) as admin:
        found = admin.describe_client_quotas(QuotaFilter(_parts(given)))
    rows = [
        {
            **{
                kind.replace("-", "_"): _shown(entity.parts.get(kind)) for kind in ("user", "client-id", "ip")
            },
            "quota": key,
            "value": value,
        }
        for entity, values in sorted(found.items(), key=lambda item: str(item[0]))
        for key, value in sorted(values.items())
    ]
    emit(rows, output, columns=["user", "client_id", "ip", "quota", "value"])


def _shown(name: str | None) -> str | None:
    return "<default>" if name == "" else name


@command.command("set")
@click.argument("quotas", nargs=-1, required=True, metavar="QUOTA=RATE...")
@_entity_options
@bootstrap_options
def set_quotas(quotas: tuple[str, ...], client_config: dict[str, Any], **given: Any) -> None:
    """Set quotas of an entity. Its other quotas stay."""
    values = dict(_pair(quota) for quota in quotas)
    entity = _entity(given)
    with new_admin(client_config) as admin:
        admin.alter_client_quotas({entity: values})
    for key, value in values.items():
        say(f"{entity}: {key}={value:.15g}")


def _pair(text: str) -> tuple[str, float]:
    key, separator, value = text.partition("=")
    try:
        if separator:
            return key.strip(), float(value)
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r}: expected QUOTA=RATE with a number", param_hint="QUOTA=RATE")


@command.command("remove")
@click.argument("quotas", nargs=-1, metavar="[QUOTA...]")
@_entity_options
@click.option("--yes", is_flag=True, help="Remove the quotas. Without --yes, only print them.")
@bootstrap_options
def remove(quotas: tuple[str, ...], yes: bool, client_config: dict[str, Any], **given: Any) -> None:
    """Remove quotas of exactly this entity. Without names, remove all of them."""
    from oncelog.rules.limits.quotas import QuotaFilter

    entity = _entity(given)
    say_target(client_config)
    with new_admin(client_config) as admin:
        found = admin.describe_client_quotas(QuotaFilter(entity.parts, is_strict=True)).get(entity, {})
        gone = {key: value for key, value in found.items() if not quotas or key in quotas}
        if yes and gone:
            admin.alter_client_quotas({entity: dict.fromkeys(gone)})
    for key, value in gone.items():
        say(f"{'removed' if yes else 'would remove'}: {entity}: {key}={value:.15g}")
    if not gone:
        say(f"{entity} has no such quota", err=True)
    elif not yes:
        say(f"nothing is removed; repeat with --yes to remove on {cluster_text(client_config)}", err=True)
