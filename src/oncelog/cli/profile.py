"""`oncelog profile`: named clusters, so that commands need no -b."""

from __future__ import annotations

from pathlib import Path

import click

from oncelog.cli.common import emit, known_settings, output_option, parse_properties, say
from oncelog.cli.profiles import (
    SERVERS,
    check_name,
    config_path,
    hidden,
    read_profiles,
    write_profiles,
)
from oncelog.cli.properties import read_properties
from oncelog.errors import ConfigError


@click.group("profile")
def command() -> None:
    """Keep the addresses and settings of clusters under names, in ~/.config/oncelog/config.toml.

    \b
    Examples:
      oncelog profile create prod broker1:9093,broker2:9093 --command-config prod.properties
      oncelog profile use prod
      oncelog topics list                    (on prod)
      oncelog topics list --profile staging
    A command uses the current profile only if nothing else names another cluster. An option, the environment
    and --command-config override the settings of a profile.
    """


@command.command("create")
@click.argument("name")
@click.argument("servers", metavar="HOST:PORT[,...]")
@click.option(
    "-X", "--property", "properties", multiple=True, metavar="KEY=VALUE",
    help="A client setting by its Kafka name. Repeatable.",
)  # fmt: skip
@click.option(
    "--command-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A .properties file, whose settings are copied into the profile.",
)
@click.option("--replace", is_flag=True, help="Replace a profile of this name.")
def create(
    name: str, servers: str, properties: tuple[str, ...], command_config: Path | None, replace: bool
) -> None:
    """Add a profile. It is not used until `oncelog profile use`, or with --profile."""
    from oncelog.client.connection.cluster import parse_bootstrap

    profiles = read_profiles()
    check_name(name)
    if name in profiles.profiles and not replace:
        raise click.UsageError(f"there is a profile {name!r} already; replace it with --replace")
    given = read_properties(command_config) if command_config else {}
    settings = known_settings({**given, **parse_properties(properties)}) | {SERVERS: servers}
    try:
        "".join((*settings, *settings.values())).encode()
    except UnicodeEncodeError:
        raise click.UsageError("settings of a profile must be UTF-8") from None
    parse_bootstrap([server.strip() for server in servers.split(",") if server.strip()])
    profiles.profiles[name] = settings
    say(f"created {name} in {write_profiles(profiles)}")


@command.command("list")
@output_option
def list_profiles(output: str) -> None:
    """List the profiles."""
    profiles = read_profiles()
    rows = [
        {"profile": name, "bootstrap_servers": settings[SERVERS], "current": name == profiles.current}
        for name, settings in sorted(profiles.profiles.items())
    ]
    emit(rows, output, columns=["profile", "bootstrap_servers", "current"])


@command.command("use")
@click.argument("name", required=False)
def use(name: str | None) -> None:
    """Use a profile in all commands from now on; none without NAME."""
    profiles = read_profiles()
    if name is not None:
        profiles.get(name)
    profiles.current = name
    write_profiles(profiles)
    say(f"commands use {name}: {profiles.get(name)[SERVERS]}" if name else "commands use no profile")


@command.command("show")
@click.argument("name", required=False)
@output_option
def show(name: str | None, output: str) -> None:
    """Show the settings of a profile, by default of the current one. Passwords stay hidden."""
    profiles = read_profiles()
    name = name or profiles.current
    if name is None:
        raise ConfigError(f"no profile is in use in {config_path()}: name one")
    rows = [
        {"profile": name, "name": key, "value": value}
        for key, value in sorted(hidden(profiles.get(name)).items())
    ]
    emit(rows, output, columns=["profile", "name", "value"])


@command.command("delete")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Delete the profile. Without --yes, only print its cluster.")
def delete(name: str, yes: bool) -> None:
    """Delete a profile. The cluster is not touched."""
    profiles = read_profiles()
    servers = profiles.get(name)[SERVERS]
    if not yes:
        say(f"would delete {name}: {servers}")
        say("nothing is deleted; repeat with --yes", err=True)
        return
    del profiles.profiles[name]
    if profiles.current == name:
        profiles.current = None
    write_profiles(profiles)
    say(f"deleted {name}")
