"""`oncelog acls`: manage ACLs. Options that also exist in kafka-acls have the same names here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

_RESOURCES = ("topic", "group", "transactional_id", "user")
_ROLES = {
    "producer": {"topic": ("WRITE", "DESCRIBE", "CREATE"), "transactional_id": ("WRITE", "DESCRIBE")},
    "consumer": {"topic": ("READ", "DESCRIBE"), "group": ("READ",)},
}
"""The operations that --producer and --consumer allow. Source: Kafka's AclCommand."""


@click.group("acls")
def command() -> None:
    """List, add and remove ACLs. Without an ACL everything is denied. A DENY overrides any ALLOW.

    \b
    Examples:
      oncelog acls add --allow-principal User:alice --producer --topic flights
      oncelog acls add --allow-principal User:bob --consumer --topic flights --group dashboards
      oncelog acls add --allow-principal User:etl --operation ALL --topic etl- --prefixed
      oncelog acls add --deny-principal User:bob --operation READ --topic salaries
      oncelog acls list --topic flights
      oncelog acls remove --principal User:bob --yes
    """


def _resource_options(function: F) -> F:
    for option in (
        click.option("--topic", multiple=True, help="A topic; * means every topic."),
        click.option("--group", multiple=True, help="A consumer group; * means every group."),
        click.option("--transactional-id", multiple=True, help="A transactional id; * means every id."),
        click.option("--user", multiple=True, help="A user."),
        click.option("--cluster", is_flag=True, help="The cluster itself."),
        click.option("--prefixed", is_flag=True, help="Treat the given names as prefixes."),
    ):
        function = option(function)
    return function


def _resources(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (type, name) of each resource in the options."""
    for kind in _RESOURCES:
        for name in given[kind]:
            yield kind, name
    if given["cluster"]:
        yield "cluster", "kafka-cluster"


@command.command("list")
@watch_option
@_resource_options
@click.option("--principal", help="Only ACLs of this principal, for example User:alice.")
@bootstrap_options
@output_option
def list_acls(output: str, client_config: dict[str, Any], **given: Any) -> None:
    """List ACLs. For a named resource, list all ACLs that apply to it."""
    with new_admin(client_config) as admin:
        found = sorted({acl for wanted in _filters(given) for acl in admin.describe_acls(wanted)})
    rows = [
        {
            "principal": acl.principal,
            "permission": acl.permission.name,
            "operation": acl.operation.name,
            "resource": acl.resource_type.name,
            "name": acl.name,
            "pattern": acl.pattern_type.name,
            "host": acl.host,
        }
        for acl in found
    ]
    emit(rows, output)


def _filters(given: dict[str, Any]) -> list[Any]:
    from oncelog.rules.security.authorization import AclFilter, PatternType, ResourceType

    pattern = PatternType.PREFIXED if given["prefixed"] else PatternType.MATCH
    named = [
        AclFilter(ResourceType[kind.upper()], name, pattern, principal=given["principal"])
        for kind, name in _resources(given)
    ]
    return named or [AclFilter(principal=given["principal"])]


@command.command("add")
@_resource_options
@click.option(
    "--allow-principal",
    multiple=True,
    help="The principal to allow, for example User:alice. User:* means every user.",
)
@click.option("--deny-principal", multiple=True, help="The principal to deny.")
@click.option("--operation", "operations", multiple=True, help="READ, WRITE, ... or ALL. Repeatable.")
@click.option(
    "--producer", is_flag=True, help="All operations that a producer needs on --topic and --transactional-id."
)
@click.option("--consumer", is_flag=True, help="All operations that a consumer needs on --topic and --group.")
@click.option(
    "--host",
    default="*",
    show_default=True,
    help="The ACL applies to clients at this address; * means every address.",
)
@bootstrap_options
def add(client_config: dict[str, Any], **given: Any) -> None:
    """Add ACLs."""
    from oncelog.client.admin.acl_requests import acl_text

    acls = list(_acls(given))
    if not acls:
        raise click.UsageError(
            "choose a principal (--allow-principal or --deny-principal), operations "
            "(--operation, --producer or --consumer) and a resource (--topic, --group, "
            "--transactional-id or --cluster)"
        )
    with new_admin(client_config) as admin:
        admin.create_acls(acls)
    for acl in acls:
        say(acl_text(acl))


def _acls(given: dict[str, Any]) -> Iterator[Any]:
    from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType

    pattern = PatternType.PREFIXED if given["prefixed"] else PatternType.LITERAL
    principals = [(principal, Permission.ALLOW) for principal in given["allow_principal"]]
    principals += [(principal, Permission.DENY) for principal in given["deny_principal"]]
    for kind, name in _resources(given):
        literal = PatternType.LITERAL if kind == "cluster" else pattern
        for operation in _operations(given, kind):
            if operation not in Operation.__members__:
                raise click.BadParameter(f"--operation {operation}: unknown operation")
            for principal, permission in principals:
                yield Acl(
                    ResourceType[kind.upper()],
                    name,
                    literal,
                    principal,
                    given["host"],
                    Operation[operation],
                    permission,
                )


def _operations(given: dict[str, Any], kind: str) -> list[str]:
    named = [operation.upper().replace("-", "_") for operation in given["operations"]]
    for role, needs in _ROLES.items():
        if given[role]:
            named += needs.get(kind, ())
    return list(dict.fromkeys(named))


@command.command("remove")
@_resource_options
@click.option("--principal", help="Only ACLs of this principal, for example User:alice.")
@click.option("--yes", is_flag=True, help="Remove the ACLs. Without --yes, only print them.")
@bootstrap_options
def remove(yes: bool, client_config: dict[str, Any], **given: Any) -> None:
    """Remove the ACLs of a resource (with exactly this name or prefix), of a principal, or of both."""
    from dataclasses import replace

    from oncelog.client.admin.acl_requests import acl_text
    from oncelog.rules.security.authorization import PatternType

    if given["principal"] is None and not list(_resources(given)):
        raise click.UsageError(
            "choose ACLs with --principal, --topic, --group, --transactional-id or --cluster"
        )
    exact = PatternType.PREFIXED if given["prefixed"] else PatternType.LITERAL
    # Match names exactly, so that an empty name (an unset shell variable) matches no ACL. With the pattern
    # type MATCH, an empty name would remove the ACLs of "*". Guard: test_an_empty_name_removes_no_acl.
    filters = [each if each.name is None else replace(each, pattern_type=exact) for each in _filters(given)]
    say_target(client_config)
    with new_admin(client_config) as admin:
        if yes:
            gone = admin.delete_acls(filters)
        else:
            gone = sorted({acl for wanted in filters for acl in admin.describe_acls(wanted)})
    for acl in gone:
        say(f"{'removed' if yes else 'would remove'}: {acl_text(acl)}")
    if not yes:
        say(f"nothing is removed; repeat with --yes to remove on {cluster_text(client_config)}", err=True)
