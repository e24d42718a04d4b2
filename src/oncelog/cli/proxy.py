"""`oncelog proxy`: the fault proxy by itself, in front of any Kafka broker."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any

import click

from oncelog.cli.common import printable
from oncelog.explain.diagram import DRAWN_APIS
from oncelog.server.listen_errors import listen_error_text
from oncelog.testing.proxy.event_format import format_line
from oncelog.testing.proxy.events import Direction, Fate, WireEvent
from oncelog.testing.proxy.proxy import Proxy, parse_address
from oncelog.testing.proxy.rules import parse_rule


@click.command("proxy")
@click.option(
    "--listen",
    default="127.0.0.1:9192",
    show_default=True,
    metavar="HOST:PORT",
    help="Port 0 means a free port.",
)
@click.option(
    "--upstream", default="127.0.0.1:9092", show_default=True, metavar="HOST:PORT",
    help="A broker. Each other broker of the cluster gets another port when a response first names it.",
)  # fmt: skip
@click.option("--rule", "rules", multiple=True, metavar="RULE", help="A fault. Repeatable.")
@click.option("--seed", default=0, show_default=True, help="The seed for rules with a probability.")
@click.option(
    "--advertise",
    metavar="HOST",
    help="Host name that clients get for the proxy's ports; default: the host of --listen.",
)
@click.option(
    "-o", "--output", type=click.Choice(["table", "jsonl", "none"]), default="table", show_default=True,
    help="Format of the messages on standard output.",
)  # fmt: skip
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Show every request, not only Produce and those that a rule matched.",
)
def command(
    listen: str,
    upstream: str,
    rules: tuple[str, ...],
    seed: int,
    advertise: str | None,
    output: str,
    show_all: bool,
) -> None:
    """Run a proxy that loses, delays or repeats messages, or cuts connections.

    \b
    A rule is `[request|response] [API] ACTION [option=value ...]`:
      drop       lose the message, and all later ones of the connection, which stays open
      cut        lose the message and close its connection (default: the response is lost)
      delay      wait delay_ms; later messages wait too
      hold       let later requests overtake the message: release_after=N, delay_ms=N
      duplicate  send the request twice; delay_ms or release_after delays the copy
      fail       answer Produce with error=NAME; as a request rule, the broker never gets the request
      throttle   rate_bytes_s=N
    Options of every rule: nth=N (the first match to act on; without count, the only one), count=N
    (the number of matches to act on), probability=P (with --seed). For Produce: topic=NAME.

    \b
    Examples:
      oncelog proxy --rule 'response Produce cut nth=2'
      oncelog proxy --rule 'Produce cut probability=0.05' --rule 'Fetch delay delay_ms=50' --seed 7
      oncelog proxy --rule 'Produce hold nth=2 release_after=1' -o jsonl
    """
    host, port = parse_address(listen)
    stop = threading.Event()
    failures: list[OSError] = []
    show = _printer(output, show_all, stop, failures)
    proxy = Proxy(
        upstream, rules=[parse_rule(text) for text in rules], seed=seed, host=host, port=port,
        advertised_host=advertise, on_event=show,
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        proxy.start()
    except (OSError, UnicodeError) as error:
        raise click.ClickException(listen_error_text(listen, error)) from error
    with proxy:
        click.echo(f"listening on {proxy.bootstrap_servers}", err=True)
        stop.wait()
    click.echo(_summary(proxy.events), err=True)
    if failures:
        raise failures[0]


def _printer(output: str, show_all: bool, stop: threading.Event, failures: list[OSError]) -> Any:
    """Return the function that prints an event, or None if no event is printed.

    If standard output cannot be written, the function appends the error to `failures` and stops the proxy. An
    error in the proxy's thread would end the connection of the message, as if a rule had cut it. Guard:
    test_an_output_that_cannot_be_written_ends_the_proxy.
    """
    if output == "none":
        return None

    def show(event: WireEvent) -> None:
        is_dull = event.fate is Fate.PASSED and event.direction is not Direction.NOTE
        if is_dull and not show_all and event.api not in DRAWN_APIS:
            return
        try:
            click.echo(json.dumps(event.to_dict()) if output == "jsonl" else printable(format_line(event)))
        except BrokenPipeError:
            # The reader of standard output has closed the pipe: end the proxy, without an error.
            stop.set()
        except OSError as error:
            failures.append(error)
            stop.set()

    return show


def _summary(events: list[WireEvent]) -> str:
    struck = sum(event.fate is not Fate.PASSED for event in events)
    return f"{len(events)} messages, {struck} of them with a fate other than passed"
