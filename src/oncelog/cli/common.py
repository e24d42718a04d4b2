"""Common parts of commands: connection options, `-X key=value`, and output formats."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from oncelog.cli.profiles import Profiles, read_profiles
from oncelog.cli.properties import read_properties
from oncelog.cli.tables import table
from oncelog.errors import InvalidConfig, OncelogError, UnknownTopicOrPartition

DEFAULT_SERVERS = "127.0.0.1:9092"
_SERVERS = "bootstrap.servers"
_MAX_COMPARED = 5_000
"""The maximum number of topic names to compare with a mistyped name. Comparing more would take over a second.
"""

_HARMLESS = "\n\t\u00a0\u2009\u202f\u3000\u200c\u200d"
"""White space and joiner characters. `str.isprintable` is False for them, but a terminal shows them safely.
"""

F = TypeVar("F", bound=Callable[..., Any])


class ClientConfig(dict[str, Any]):
    """The client settings of a command.

    `profile` is the name of the profile in use, or None. `of_profile` has the names of the settings that come
    from this profile.
    """

    def __init__(self, settings: Mapping[str, Any], profile: str | None, of_profile: Iterable[str]) -> None:
        super().__init__(settings)
        self.profile = profile
        self.of_profile = frozenset(of_profile)


def parse_properties(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `key=value` strings. Raises click.BadParameter (exit code 2) if one is malformed."""
    properties = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{pair!r}: expected key=value")
        properties[key.strip()] = value
    return properties


def bootstrap_options(function: F) -> F:
    """Add `-b`, `-X`, `--command-config` and `--profile`; the command receives a ClientConfig as
    `client_config`.
    """
    import functools

    @click.option(
        "-b",
        "--bootstrap-server",
        "bootstrap_servers",
        multiple=True,
        metavar="HOST:PORT[,...]",
        help="Brokers to connect to first.  [default: bootstrap.servers of -X, else "
        "ONCELOG_BOOTSTRAP_SERVERS, else bootstrap.servers of --command-config, else the current profile, "
        f"else {DEFAULT_SERVERS}]",
    )
    @click.option(
        "--profile",
        envvar="ONCELOG_PROFILE",
        help="Use the cluster and the settings of this profile (see `oncelog profile`).",
    )
    @click.option(
        "-X",
        "--property",
        "properties",
        multiple=True,
        metavar="KEY=VALUE",
        help="A client setting by its Kafka name. ONCELOG_KEY_NAME in the environment sets it too. "
        "-X overrides the environment, and the environment overrides --command-config. Repeatable.",
    )
    @click.option(
        "--command-config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="ONCELOG_COMMAND_CONFIG",
        help="A .properties file with client settings, for example those of TLS and SASL.",
    )
    @functools.wraps(function)
    def wrapper(
        *args: Any,
        bootstrap_servers: tuple[str, ...],
        properties: tuple[str, ...],
        command_config: Path | None,
        profile: str | None,
        **kwargs: Any,
    ) -> Any:
        of_file = read_properties(command_config) if command_config else {}
        config = make_client_config(bootstrap_servers, properties, of_file, read_profiles(), profile)
        try:
            return function(*args, client_config=config, **kwargs)
        except UnknownTopicOrPartition as error:
            near = None if kwargs.get("regex") else _near_topic(config, kwargs)
            if near is not None:
                error.detail = f"{error.message}; did you mean {near!r}?"
            raise

    return wrapper  # type: ignore[return-value]


def _near_topic(config: ClientConfig, arguments: Mapping[str, Any]) -> str | None:
    """Return the existing topic whose name is most similar to the missing topic of a command. Return None if
    no name is similar, or the topics cannot be listed.
    """
    from oncelog.config import ADMIN

    texts: list[str] = []
    for name in ("topic", "topics", "where"):
        value = arguments.get(name) or ()
        texts += [value] if isinstance(value, str) else value
    try:
        # Keep only the settings that an Admin has. -X may have settings of other clients, and the command has
        # already refused unknown ones.
        with new_admin({key: value for key, value in config.items() if ADMIN.get(key)}) as admin:
            existing = [topic.name for topic in admin.list_topics()][:_MAX_COMPARED]
    except OncelogError:
        return None
    missing = [name for text in texts if (name := text.partition(":")[0]) not in existing]
    near = difflib.get_close_matches(missing[0], existing, n=1) if missing else []
    return near[0] if near else None


@contextlib.contextmanager
def suggest_setting(admin: Any, resources: Sequence[Any], names: Iterable[str]) -> Iterator[None]:
    """Add the most similar known name to an InvalidConfig error about one of the settings `names`.

    The known names are those of `resources`. If `resources` is empty, they are those of some topic of the
    cluster and those of TOPIC. The error is raised again.
    """
    try:
        yield
    except InvalidConfig as error:
        known = _known_settings(admin, resources)
        # A name that the error does not quote is not what the broker refuses.
        refused = [name for name in names if name not in known and name in error.message]
        near = difflib.get_close_matches(refused[0], known, n=1) if refused else []
        if near:
            error.detail = f"{error.message}; did you mean {near[0]}?"
        raise


def _known_settings(admin: Any, resources: Sequence[Any]) -> set[str]:
    from oncelog.client.admin.types import ConfigResource
    from oncelog.config import TOPIC

    known = set() if resources else set(TOPIC.key_names())
    with contextlib.suppress(OncelogError):  # the client may not be allowed to describe them
        if not resources:
            topics = admin.list_topics(include_internal=True)[:1]
            resources = [ConfigResource("topic", topic.name) for topic in topics]
        if resources:
            for description in admin.describe_configs(resources).values():
                known.update(description.entries)
    return known


def make_client_config(
    servers: Sequence[str],
    properties: Sequence[str],
    of_file: Mapping[str, str],
    profiles: Profiles | None = None,
    profile: str | None = None,
) -> ClientConfig:
    """Return the client settings of the command line, the environment, the file, a profile and the default.

    If several of these sources have a setting, the first source in this order wins. `profile` is the profile
    that an option or the environment names. If `profile` is None, the current profile is used. It is not used
    if -b, -X, the environment or the file names another cluster, because that cluster must not get the
    profile's passwords. Raises click.UsageError if two clusters are named, because a command that deletes
    must not guess.
    """
    profiles = profiles or Profiles()
    of_profile = _canonical(profiles.get(profile)) if profile is not None else {}
    of_command_line = _canonical(parse_properties(properties))
    of_file = _canonical(of_file)
    # Parse each pair separately to find contradictions: `of_command_line` has only the last value of a
    # setting.
    pairs = [(pair, _canonical(parse_properties([pair])).get(_SERVERS)) for pair in properties]
    named = _only_cluster(
        [(f"-b {value}", value) for value in servers]
        + [(f"-X {pair}", value) for pair, value in pairs if value is not None]
    )
    if named is None:
        named = environment_servers()
    if named is None:
        named = of_file.get(_SERVERS)
    if profile is None and profiles.current is not None:
        profile, of_profile = profiles.current, _canonical(profiles.get(profiles.current))
        if named is not None and _servers_of(named) != _servers_of(of_profile[_SERVERS]):
            profile, of_profile = None, {}
    elif profile is not None and named is not None:
        _only_cluster([(f"--profile {profile}", of_profile[_SERVERS]), (named, named)])
    if named is None:
        named = of_profile.get(_SERVERS, DEFAULT_SERVERS)
    explicit = {**of_file, **_environment_properties(), **of_command_line, _SERVERS: named}
    return ClientConfig({**of_profile, **explicit}, profile, of_profile.keys() - explicit.keys())


def _canonical(given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with Kafka's names, which have dots.

    Clients also accept names with underscores. With both spellings, a merge could keep two values of one
    setting, and the wrong one would win.
    """
    known = {key.replace(".", "_"): key for key in _known_keys()}
    return {known.get(key, key): value for key, value in given.items()}


def environment_servers() -> str | None:
    """Return the bootstrap servers in the environment, or None.

    Raises click.UsageError if ONCELOG_BOOTSTRAP_SERVERS and ONCELOG_BOOTSTRAP_SERVER name different clusters.
    """
    names = ("ONCELOG_BOOTSTRAP_SERVERS", "ONCELOG_BOOTSTRAP_SERVER")
    return _only_cluster(
        [(f"{name}={os.environ[name]}", os.environ[name]) for name in names if os.environ.get(name)]
    )


def _only_cluster(named: Sequence[tuple[str, str]]) -> str | None:
    """Return the bootstrap servers of the first (user's text, bootstrap servers) pair; None without pairs.

    Raises click.UsageError if the pairs name different clusters.
    """
    different = {_servers_of(value): way for way, value in named}
    if len(different) > 1:
        raise click.UsageError(f"{' and '.join(different.values())} name different clusters: leave one out")
    return named[0][1] if named else None


def _servers_of(value: str) -> frozenset[str]:
    return frozenset(part.strip().lower() for part in value.split(",") if part.strip())


def cluster_text(client_config: Mapping[str, Any]) -> str:
    """Return the text that names the cluster in a confirmation: its bootstrap servers, and the profile if one
    is used.
    """
    profile = getattr(client_config, "profile", None)
    of_profile = f" (profile {profile})" if profile else ""
    return f"the cluster at {client_config[_SERVERS]}{of_profile}"


def say_target(client_config: Mapping[str, Any]) -> None:
    """Print on standard error which cluster a destructive command changes."""
    say(f"on {cluster_text(client_config)}:", err=True)


def _known_keys() -> set[str]:
    from oncelog.config import ADMIN, CONSUMER, PRODUCER, SCHEMA_REGISTRY

    return {key for table in (ADMIN, PRODUCER, CONSUMER, SCHEMA_REGISTRY) for key in table.key_names()}


def _environment_properties() -> dict[str, str]:
    known = {key.replace(".", "_").upper(): key for key in _known_keys()}
    found = (
        (known.get(name.removeprefix("ONCELOG_")), value)
        for name, value in os.environ.items()
        if name.startswith("ONCELOG_")
    )
    return {key: value for key, value in found if key}


def only_settings_of(table: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` without those settings of the environment and the profile that are not in `table`.

    The environment and the profile may contain settings for other clients. Settings of -X stay, so that the
    client refuses a wrong name.
    """
    of_others = _environment_properties().keys() | getattr(config, "of_profile", ())
    return {key: value for key, value in config.items() if table.get(key) or key not in of_others}


def known_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return client settings with Kafka's names, which have dots. Raises ConfigError for an unknown name or
    an invalid value.
    """
    from oncelog.config import ADMIN, CONSUMER, PRODUCER, SCHEMA_REGISTRY

    settings = _canonical(given)
    tables = (ADMIN, CONSUMER, PRODUCER, SCHEMA_REGISTRY)
    for key, value in settings.items():
        table = next((table for table in tables if table.get(key)), ADMIN)
        table.parse({key: value})
    return settings


def new_admin(client_config: Mapping[str, Any]) -> Any:
    """Return an Admin for the cluster of a command's options. Raises ConfigError."""
    from oncelog.client.admin.blocking import Admin
    from oncelog.config import ADMIN

    return Admin(only_settings_of(ADMIN, client_config))


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "jsonl", "yaml"]),
    default="table",
    show_default=True,
    help="Format on standard output.",
)


def printable(text: str) -> str:
    """Return text in which control characters are escaped. Line ends, tabs and spaces are kept.

    Names come from the cluster and may be hostile: a terminal executes control sequences in them.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in _HARMLESS else char.encode("unicode_escape").decode()
        for char in text
    )


def time_text(timestamp_ms: int | None) -> str | None:
    """Return a time in ms since the epoch as ISO 8601; `N ms` if it is out of range, and None for None."""
    if timestamp_ms is None:
        return None
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    # The time may be out of range, because a client may set any 64-bit timestamp.
    except (OverflowError, ValueError, OSError):
        return f"{timestamp_ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def partition_arguments(texts: Sequence[str]) -> list[tuple[str, list[int] | None]]:
    """Return each topic with its partition numbers; None stands for all of them. Raises click.UsageError."""
    from oncelog.cli.partitions import parse_partitions

    try:
        return [parse_partitions(text) for text in texts]
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def existing_partitions(admin: Any, where: Sequence[tuple[str, list[int] | None]]) -> list[Any]:
    """Return the partitions that `where`, a result of `partition_arguments`, selects. They are sorted by
    topic and number.

    Raises UnknownTopicOrPartition, and click.ClickException for a partition that does not exist.
    """
    from oncelog.types import TopicPartition

    described = admin.describe_topics(list(dict.fromkeys(topic for topic, _ in where)))
    tps = set()
    for topic, numbers in where:
        existing = [part.partition for part in described[topic].partitions]
        for number in existing if numbers is None else numbers:
            if number not in existing:
                raise click.ClickException(f"{topic!r} has no partition {number}, but 0 to {max(existing)}")
            tps.add(TopicPartition(topic, number))
    return sorted(tps)


def size_text(count: int) -> str:
    """Return a number of bytes as text with a readable unit, such as `1.5 MiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def say(text: str, *, err: bool = False) -> None:
    """Print a line that may contain names from the cluster. Control characters are escaped."""
    click.echo(printable(text), err=err)


def emit(
    rows: Iterable[Mapping[str, Any]],
    output: str,
    *,
    columns: Sequence[str] | None = None,
    wide: Sequence[str] = (),
) -> None:
    """Print rows in the format `output`.

    `columns`: the columns of a table, by default the keys of the first row. `wide`: the columns that -o wide
    adds.
    """
    rows = list(rows)
    if output == "json":
        click.echo(json.dumps(rows, indent=2, default=str))
    elif output == "jsonl":
        for row in rows:
            click.echo(json.dumps(row, default=str))
    elif output == "yaml":
        click.echo(_yaml(rows), nl=False)
    else:
        _emit_table(rows, columns, wide if output == "wide" else ())


def held_back_cells(ends: Any) -> dict[str, Any]:
    """Return table cells: the last stable offset, the transaction that holds it back, and whether that
    transaction hangs.
    """
    holder = ends.held_by
    judged = holder.judged if holder else None
    return {
        "stable_end_offset": ends.stable_end,
        "held_back_by": str(holder) if holder else None,
        "hanging": f"{judged.hanging.value}: {judged.reason}" if judged else None,
    }


def _yaml(rows: Sequence[Mapping[str, Any]]) -> str:
    # JSON is valid YAML. Each row is a list item, and each key is on its own line.
    lines = []
    for row in rows:
        for index, (key, value) in enumerate(row.items()):
            lines.append(f"{'- ' if index == 0 else '  '}{key}: {json.dumps(value, default=str)}\n")
    return "".join(lines) or "[]\n"


def one_line(text: str) -> str:
    """Return printable text with escaped line ends and tabs, for a row of a table."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _cell(value: object) -> str:
    return "-" if value is None else one_line(str(value))


def _emit_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None, wide: Sequence[str]
) -> None:
    names = [*(columns or (list(rows[0]) if rows else [])), *wide]
    titles = [name.upper().replace("_", " ") for name in names]
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    numeric = [all(isinstance(row.get(name), int) for row in rows) for name in names]
    # In piped output each row stays on one line, for grep.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo(table(titles, cells, numeric=numeric, columns=width, bold=has_styles()), nl=False)


def can_move_cursor() -> bool:
    """Return True unless TERM names a terminal that prints control sequences instead of executing them."""
    return os.environ.get("TERM") not in ("dumb", "unknown")


def has_styles() -> bool:
    """Return True if text on a terminal may have styles. click removes them from piped output."""
    return can_move_cursor() and not os.environ.get("NO_COLOR")


def say_in_place(text: str) -> None:
    """Replace the last line on standard error, which must be a terminal that can move its cursor."""
    # A longer line would take two rows, and the next text would replace only the second one.
    shown = text[: shutil.get_terminal_size().columns - 1]
    click.echo(f"\r\x1b[K{shown}", nl=False, err=True, color=True)
