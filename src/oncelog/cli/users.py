"""`oncelog users`: manage SCRAM users, in a running cluster or in the data directory of a stopped broker."""

from __future__ import annotations

import sys
from pathlib import Path
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
)
from oncelog.cli.watch import watch_option


@click.group("users")
def command() -> None:
    """List, set and delete SCRAM users. Passwords come from a prompt or from standard input.

    \b
    Examples:
      oncelog users set admin --data-dir /var/lib/oncelog      (the first user, while the broker is stopped)
      oncelog users set alice --command-config admin.properties
      oncelog users list --command-config admin.properties
      oncelog users delete alice --command-config admin.properties --yes
    """


@command.command("list")
@watch_option
@bootstrap_options
@output_option
def list_users(output: str, client_config: dict[str, Any]) -> None:
    """List users and their mechanisms."""
    with new_admin(client_config) as admin:
        found = admin.list_users()
    rows = [
        {"user": user, "mechanism": mechanism.label, "iterations": iterations}
        for user, credentials in found.items()
        for mechanism, iterations in credentials.items()
    ]
    emit(rows, output, columns=["user", "mechanism", "iterations"])


@command.command("set")
@click.argument("user")
@click.option(
    "--iterations",
    type=click.IntRange(4_096, 16_384),
    default=8_192,
    show_default=True,
    help="SCRAM iterations. More of them make guessing a stolen password slower, and every login too.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write to the data directory of a stopped broker instead of to a running cluster.",
)
@bootstrap_options
def set_user(user: str, iterations: int, data_dir: Path | None, client_config: dict[str, Any]) -> None:
    """Add a user for SCRAM-SHA-256 and SCRAM-SHA-512, or change the user's password."""
    password = _ask_password(user)
    if data_dir is not None:
        _set_offline(data_dir, user, password, iterations)
    else:
        with new_admin(client_config) as admin:
            admin.set_user(user, password, iterations=iterations)
    say(f"user {user} is set")


def _ask_password(user: str) -> str:
    if sys.stdin.isatty():
        return str(click.prompt(f"Password of {user}", hide_input=True, confirmation_prompt=True))
    password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise click.UsageError("no password on standard input")
    return password


def _set_offline(data_dir: Path, user: str, password: str, iterations: int) -> None:
    import os

    from oncelog.broker.security.users import Users
    from oncelog.rules.security.scram import Mechanism, salt_password
    from oncelog.server.embedded import held_data_dir

    salt = os.urandom(24)
    with held_data_dir(data_dir) as disk:
        changes = [
            (int(mechanism), salt, salt_password(mechanism, password, salt, iterations), iterations)
            for mechanism in Mechanism
        ]
        Users(disk).alter(user, [], changes)


@command.command("delete")
@click.argument("user")
@click.option(
    "--yes", is_flag=True, help="Delete the credentials. Without --yes, only print what would be deleted."
)
@bootstrap_options
def delete(user: str, yes: bool, client_config: dict[str, Any]) -> None:
    """Remove a user. The user's open connections stay open (see connections.max.reauth.ms)."""
    say_target(client_config)
    with new_admin(client_config) as admin:
        mechanisms = admin.list_users([user])[user]
        if yes:
            admin.delete_user(user)
    names = ", ".join(mechanism.label for mechanism in mechanisms)
    say(f"{'deleted' if yes else 'would delete'} {user}: {names}")
    if not yes:
        say(f"nothing is deleted; repeat with --yes to delete on {cluster_text(client_config)}", err=True)
