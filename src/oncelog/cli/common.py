"""Common parts of commands: connection options, `-X key=value`, and output formats."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from oncelog.cli.properties import read_properties

DEFAULT_SERVERS = "127.0.0.1:9092"
_SERVERS = "bootstrap.servers"
_PIPED_COLUMNS = 400

_HARMLESS = "\n\t\u00a0\u2009\u202f\u3000\u200c\u200d"
"""Characters that Python calls not printable but terminals show safely: white space, joiners."""

F = TypeVar("F", bound=Callable[..., Any])


def parse_properties(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `key=value` strings. Raises click.BadParameter (exit code 2) for a malformed one."""
    properties = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{pair!r}: expected key=value")
        properties[key.strip()] = value
    return properties


def bootstrap_options(function: F) -> F:
    """Add `-b/--bootstrap-server`, `-X` and `--command-config`; the command receives `client_config`."""
    import functools

    @click.option(
        "-b",
        "--bootstrap-server",
        "bootstrap_servers",
        multiple=True,
        metavar="HOST:PORT[,...]",
        help="Brokers to start from.  [default: bootstrap.servers of -X, else ONCELOG_BOOTSTRAP_SERVERS, "
        f"else bootstrap.servers of --command-config, else {DEFAULT_SERVERS}]",
    )
    @click.option(
        "-X",
        "--property",
        "properties",
        multiple=True,
        metavar="KEY=VALUE",
        help="A client setting by its Kafka name; also as ONCELOG_KEY_NAME in the environment. "
        "-X is taken before the environment, and the environment before --command-config.",
    )
    @click.option(
        "--command-config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="ONCELOG_COMMAND_CONFIG",
        help="A .properties file with client settings, for example of TLS and SASL.",
    )
    @functools.wraps(function)
    def wrapper(
        *args: Any,
        bootstrap_servers: tuple[str, ...],
        properties: tuple[str, ...],
        command_config: Path | None,
        **kwargs: Any,
    ) -> Any:
        config = make_client_config(
            bootstrap_servers, properties, read_properties(command_config) if command_config else {}
        )
        return function(*args, client_config=config, **kwargs)

    return wrapper  # type: ignore[return-value]


def make_client_config(
    servers: Sequence[str], properties: Sequence[str], of_file: Mapping[str, str]
) -> dict[str, str]:
    """Return the client settings of the command line, the environment, the file and the default.

    Each takes precedence over the next one. Raises click.UsageError if one of them names two clusters,
    because a command that deletes must not guess.
    """
    of_command_line = _canonical(parse_properties(properties))
    of_file = _canonical(of_file)
    # All pairs, because `of_command_line` keeps only the last one.
    pairs = [(pair, _canonical(parse_properties([pair])).get(_SERVERS)) for pair in properties]
    named = _only_cluster(
        [(f"-b {value}", value) for value in servers]
        + [(f"-X {pair}", value) for pair, value in pairs if value is not None]
    )
    if named is None:
        named = environment_servers()
    if named is None:
        named = of_file.get(_SERVERS, DEFAULT_SERVERS)
    return {**of_file, **_environment_properties(), **of_command_line, _SERVERS: named}


def _canonical(given: Mapping[str, str]) -> dict[str, str]:
    """Return settings under their names with dots. Clients also accept underscores.

    Without this, a merge could keep two values of one setting, and the wrong one would win.
    """
    known = {key.replace(".", "_"): key for key in _known_keys()}
    return {known.get(key, key): value for key, value in given.items()}


def environment_servers() -> str | None:
    """Return the cluster in the environment, which has two names for it. Raises click.UsageError."""
    names = ("ONCELOG_BOOTSTRAP_SERVERS", "ONCELOG_BOOTSTRAP_SERVER")
    return _only_cluster(
        [(f"{name}={os.environ[name]}", os.environ[name]) for name in names if os.environ.get(name)]
    )


def _only_cluster(named: Sequence[tuple[str, str]]) -> str | None:
    """Return the value of (text of the user, value) pairs, None without pairs. Raises click.UsageError."""
    different = {_servers_of(value): way for way, value in named}
    if len(different) > 1:
        raise click.UsageError(f"{' and '.join(different.values())} name different clusters: leave one out")
    return named[0][1] if named else None


def _servers_of(value: str) -> frozenset[str]:
    return frozenset(part.strip().lower() for part in value.split(",") if part.strip())


def cluster_text(client_config: Mapping[str, Any]) -> str:
    """Return the name of the cluster for a confirmation: the address that the command goes to."""
    return f"the cluster at {client_config[_SERVERS]}"


def say_target(client_config: Mapping[str, Any]) -> None:
    """Print the name of the cluster before a destructive command."""
    say(f"on {cluster_text(client_config)}:", err=True)


def _known_keys() -> set[str]:
    from oncelog.config import ADMIN, CONSUMER, PRODUCER

    return {key for table in (ADMIN, PRODUCER, CONSUMER) for key in table.key_names()}


def _environment_properties() -> dict[str, str]:
    known = {key.replace(".", "_").upper(): key for key in _known_keys()}
    found = (
        (known.get(name.removeprefix("ONCELOG_")), value)
        for name, value in os.environ.items()
        if name.startswith("ONCELOG_")
    )
    return {key: value for key, value in found if key}


def only_settings_of(table: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without environment properties of other clients.

    Those of -X stay and are checked.
    """
    environment = _environment_properties()
    return {key: value for key, value in config.items() if table.get(key) or key not in environment}


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "jsonl", "yaml"]),
    default="table",
    show_default=True,
    help="Format on standard output.",
)


def printable(text: str) -> str:
    """Return text with escaped control characters. Names come from the cluster and may be hostile.

    A terminal would execute control sequences in a name. Line ends, tabs and spaces stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in _HARMLESS else char.encode("unicode_escape").decode()
        for char in text
    )


def time_text(timestamp_ms: int | None) -> str | None:
    """Return a time as ISO 8601; None stays None."""
    if timestamp_ms is None:
        return None
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # a client may set any 64-bit timestamp
        return f"{timestamp_ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def say(text: str, *, err: bool = False) -> None:
    """Print a line that may contain names from the cluster."""
    click.echo(printable(text), err=err)


def emit(
    rows: Iterable[Mapping[str, Any]],
    output: str,
    *,
    columns: Sequence[str] | None = None,
    wide: Sequence[str] = (),
) -> None:
    """Print rows. `columns`: by default the keys of the first row. `wide`: additional columns of -o wide."""
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
    """Return the stable end offset of a `PartitionEnds`, and the transaction that holds it back."""
    holder = ends.held_by
    judged = holder.judged if holder else None
    return {
        "stable_end_offset": ends.stable_end,
        "held_back_by": str(holder) if holder else None,
        "hanging": f"{judged.hanging.value}: {judged.reason}" if judged else None,
    }


def _yaml(rows: Sequence[Mapping[str, Any]]) -> str:
    # JSON scalars and flow values are valid YAML: one list item per row, one key per line.
    lines = []
    for row in rows:
        for index, (key, value) in enumerate(row.items()):
            lines.append(f"{'- ' if index == 0 else '  '}{key}: {json.dumps(value, default=str)}\n")
    return "".join(lines) or "[]\n"


def one_line(text: str) -> str:
    """Return printable text without line ends and tabs, for a row of a table."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def padded(text: str, width: int) -> str:
    """Return text followed by spaces up to a width in columns, of which a wide character takes two."""
    from rich.cells import cell_len

    return text + " " * (width - cell_len(text))


def _cell(value: object) -> str:
    return "-" if value is None else one_line(str(value))


def _emit_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None, wide: Sequence[str]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = [*(columns or (list(rows[0]) if rows else [])), *wide]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        numeric = all(isinstance(row.get(name), int) for row in rows)
        table.add_column(
            name.upper().replace("_", " "), justify="right" if numeric else "left", overflow="fold"
        )
    for row in rows:
        # Text, because rich interprets brackets in a str as markup.
        table.add_row(*(Text(_cell(row.get(name))) for name in names))
    # Piped output keeps a row on one line, for grep.
    piped = None if sys.stdout.isatty() else _PIPED_COLUMNS
    Console(width=piped).print(table)
