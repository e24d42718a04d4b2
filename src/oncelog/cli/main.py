"""The command `oncelog`. Each subcommand is a file, imported when it is called, so that `serve` starts fast.

Other packages add subcommands through the entry point group `oncelog.commands`.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from oncelog import compiled
from oncelog.errors import BrokerError, ConfigError, MisuseError, OncelogError, TimedOut

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SECTIONS = {
    "Records": {
        "produce": "Send lines or files as records.",
        "consume": "Print records, or write them into Parquet files.",
        "load": "Load files, exactly once over any number of runs.",
    },
    "Cluster": {
        "topics": "List, describe, create, alter, trim and delete topics; show their sizes.",
        "groups": "List, describe, reset and delete consumer groups.",
        "producers": "Show the producer state of partitions.",
        "transactions": "List and describe transactions; find and abort hanging ones.",
        "cluster": "Show brokers, features and versions.",
        "configs": "Describe and alter settings of topics and brokers.",
        "acls": "List, add and remove ACLs.",
        "users": "List, set and delete SCRAM users.",
        "quotas": "List, set and remove client quotas.",
        "profile": "Keep the addresses and settings of clusters under names.",
        "web": "Serve web pages about a cluster's transactions, producers and groups.",
    },
    "Broker and files": {
        "serve": "Run the broker.",
        "dump": "Print segment files batch by batch.",
        "proxy": "Run a proxy that loses, delays or repeats messages, or cuts connections.",
    },
    "Exactly once": {
        "audit": "Check that topics or segment files contain each record once.",
        "conform": "Run scenarios of idempotence and transactions on any broker.",
        "explain": "Run a fault story and draw the messages that crossed the wire.",
        "trial": "Run a Spark pipeline under kills and lost answers, and count lost and doubled rows.",
        "pipeline": "Run a Spark streaming query and restart it after failures.",
    },
}
"""The commands of each section of --help, in the order of --help."""

COMMANDS = {name: text for commands in SECTIONS.values() for name, text in commands.items()}

MOVED = {
    "bench": "oncelog-bench",
    "demo": "oncelog-demo",
    "dev": "oncelog-devtools",
    "simulate": "oncelog-simulator",
}
"""Commands that were part of this package up to 0.5, and the packages that contain them now."""

EXIT_ERROR, EXIT_USAGE, EXIT_VIOLATIONS, EXIT_TIMEOUT, EXIT_BROKEN_PIPE = 1, 2, 3, 4, 141
_STANDARD_ERROR = 2
"""The highest descriptor of a standard stream."""


def _added() -> dict[str, EntryPoint]:
    # Imported here: it takes a third of the processor time of a short command.
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in sorted(entry_points(group="oncelog.commands"))}


def _load(entry: EntryPoint) -> click.Command:
    """Import a command that another package provides. Raises ClickException if the import fails."""
    try:
        command: click.Command = entry.load()
    except Exception as error:
        package = f" of the package {entry.dist.name}" if entry.dist is not None else ""
        reason = f"{type(error).__name__}: {error}"
        raise click.ClickException(f"the command {entry.name}{package} cannot be loaded: {reason}") from error
    return command


def _help_line(entry: EntryPoint) -> str:
    # A broken package must not hide the help of all other commands. See
    # test_an_added_command_that_cannot_be_imported_does_not_break_the_others.
    try:
        return _load(entry).get_short_help_str(200)
    except click.ClickException as error:
        return f"({error.message})"


class _LazyGroup(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Use the exit code of a program ended by SIGPIPE, not 0: the command may not have completed its
            # work.
            _give_up_output()
            raise SystemExit(EXIT_BROKEN_PIPE) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        is_known = name in COMMANDS or name.startswith("-") or ctx.resilient_parsing or name in _added()
        if not is_known:
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            if name in MOVED:
                hint = f" It is in the package {MOVED[name]}, which is not installed."
            else:
                hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *_added()]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            command: click.Command = importlib.import_module(f"oncelog.cli.{name}").command
            return command
        entry = _added().get(name)
        if entry is None:
            return None
        try:
            return _load(entry)
        except click.ClickException:
            if ctx.resilient_parsing:  # in shell completion, omit the command
                return None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])
        if added := _added():
            with formatter.section("Commands of other packages"):
                formatter.write_dl([(name, _help_line(entry)) for name, entry in added.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="oncelog", message=f"%(prog)s, version %(version)s, {compiled.form}")
def cli() -> None:
    """Exactly-once Kafka messaging for Python: a broker, clients, a Spark source and sink, and a log audit.

    \b
    Exit codes: 0 clean, 1 error, 2 usage, 3 an audit found violations or a scenario failed, 4 time-out.
    """


def main() -> None:
    """Run the command line.

    An OncelogError or OSError becomes one line on standard error and an exit code.
    """
    _occupy_standard_streams()
    _escape_what_cannot_be_encoded()
    try:
        cli(standalone_mode=True)
    except (ConfigError, MisuseError) as error:
        _fail(error, EXIT_USAGE)
    except TimedOut as error:
        _fail(error, EXIT_TIMEOUT)
    except OncelogError as error:
        _fail(error, EXIT_ERROR)
    except OSError as error:
        # For example: standard output, or the file of an option such as --svg, cannot be written.
        _give_up_output()
        _fail(error, EXIT_ERROR)


def _occupy_standard_streams() -> None:
    """Open the null device as each standard stream that is closed.

    Otherwise the next file or socket would get the descriptor of that stream. Text for the stream would then
    go into that file or socket, and libuv aborts the process when it is closed. Guard:
    test_closed_standard_streams_do_not_abort_a_command.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        # Processes that this one starts inherit the standard streams.
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # Python has set the streams that were closed to None. Standard input stays None: `produce` then has no
    # lines to read.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _escape_what_cannot_be_encoded() -> None:
    """Make standard output escape characters that its encoding lacks, as standard error does, instead of
    failing.

    Names and values come from the cluster, and the locale may be ASCII or Latin-1. Guard:
    test_what_standard_output_cannot_encode_is_escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _give_up_output() -> None:
    """Replace standard output by the null device if it cannot be flushed, so that the flush at exit does not
    fail as well.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception, code: int) -> None:
    from oncelog.cli.common import say

    # The text of a BrokerError already begins with the error's name.
    kind = "" if isinstance(error, BrokerError) else f"{type(error).__name__}: "
    say(f"oncelog: {kind}{error}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
