"""`oncelog conform`: run the scenarios of idempotence and transactions on any broker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from oncelog.cli.common import (
    bootstrap_options,
    can_move_cursor,
    emit,
    only_settings_of,
    output_option,
    say,
    say_in_place,
)
from oncelog.cli.interrupt import clean_up_on_termination

if TYPE_CHECKING:
    from oncelog.conform.scenario_reader import Scenario
    from oncelog.conform.suite import Outcome, Suite

EXIT_FAILED, EXIT_TIMEOUT = 3, 4
DEFAULT_PREFIX = "oncelog-conform"
_NOT_PASSED = ("section", "scenario", "version", "result", "reason")
_WIDE = ("step", "expected", "received")


@click.command("conform")
@bootstrap_options
@click.option("--list", "is_list", is_flag=True, help="List the scenarios and exit.")
@click.option(
    "--section", "sections", multiple=True, metavar="NAME", help="Only this section of --list. Repeatable."
)
@click.option(
    "--newest",
    is_flag=True,
    help="Run each scenario only in the newest version that the broker offers, not in all.",
)
@click.option(
    "--prefix",
    default=DEFAULT_PREFIX,
    show_default=True,
    help="Names of topics, groups and transactional ids begin with this, and with a number of the run.",
)
@click.option("--keep", is_flag=True, help="Keep the topics and groups instead of deleting them.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.1),
    default=30.0,
    show_default=True,
    help="Longest time in seconds for one scenario.",
)
@click.option(
    "--max-time",
    type=click.FloatRange(0.1),
    default=900.0,
    show_default=True,
    help="Longest time in seconds for the whole run.",
)
@output_option
def command(
    client_config: dict[str, Any],
    is_list: bool,
    sections: tuple[str, ...],
    newest: bool,
    prefix: str,
    keep: bool,
    timeout: float,
    max_time: float,
    output: str,
) -> None:
    """Run scenarios of idempotence and transactions on any broker of Kafka's protocol.

    A scenario sends requests and compares the responses, and the stored records, with those of Apache Kafka.
    It uses topics, groups and transactional ids of its own, and assumes the broker's default settings. A
    result is `pass`, `fail`, `skipped` with the reason, or `differs`: the broker has a deviation that
    docs/differences.md allows and names.

    \b
    oncelog conform -b kafka:9092
    oncelog conform -b kafka:9092 --section idempotence --newest
    oncelog conform -b kafka:9092 -o json > results.json

    Transactional ids cannot be deleted; brokers forget unused ones after transactional.id.expiration.ms.

    Exit codes: 0 no scenario failed, 1 no broker answered, 3 a scenario failed, 4 the time was over.
    """
    try:
        import yaml  # noqa: F401
    except ImportError:
        raise click.ClickException("PyYAML is missing: pip install 'oncelog[conform]'") from None
    from oncelog.conform.scenario_reader import read_scenarios

    scenarios = _chosen(read_scenarios(), sections)
    if is_list:
        emit([_listed(scenario) for scenario in scenarios], output)
        return
    suite = _connect(client_config, prefix, timeout, max_time)
    outcomes: list[Outcome] = []
    # CI systems end a job that takes too long with SIGTERM. Guard:
    # test_a_run_that_is_terminated_leaves_no_topics.
    with clean_up_on_termination():
        try:
            suite.prepare()
            for outcome in suite.run(scenarios, newest_only=newest, keep=keep):
                outcomes.append(outcome)
                _show_progress(outcomes)
        finally:
            if not keep:
                _clean_up(suite)
    _show(outcomes, output)
    if any(outcome.result == "fail" for outcome in outcomes):
        raise SystemExit(EXIT_FAILED)
    if suite.stopped:
        raise SystemExit(EXIT_TIMEOUT)


def _chosen(scenarios: Sequence[Scenario], sections: Sequence[str]) -> list[Scenario]:
    known = list(dict.fromkeys(scenario.file for scenario in scenarios))
    for section in sections:
        if section not in known:
            raise click.BadParameter(
                f"{section!r}: expected one of {', '.join(known)}", param_hint="--section"
            )
    return [scenario for scenario in scenarios if not sections or scenario.file in sections]


def _listed(scenario: Scenario) -> dict[str, Any]:
    versions = scenario.versions
    tested = f"{scenario.api.name} {versions[0]}-{versions[-1]}" if scenario.api and versions else None
    return {
        "section": scenario.file,
        "scenario": scenario.title,
        "versions": tested,
        "behaviours": " ".join(scenario.rows) or None,
        "differs": scenario.differs,
    }


def _connect(client_config: dict[str, Any], prefix: str, timeout: float, max_time: float) -> Suite:
    from oncelog.client.connection.cluster import parse_bootstrap
    from oncelog.client.connection.security import client_security
    from oncelog.config import ADMIN
    from oncelog.conform.raw_connection import Endpoint
    from oncelog.conform.suite import Limits, Suite

    settings = ADMIN.parse(only_settings_of(ADMIN, client_config))
    security = client_security(settings)
    addresses = parse_bootstrap(settings["bootstrap.servers"])
    endpoints = [Endpoint(host, port, settings, security) for host, port in addresses]
    return Suite(endpoints, prefix, Limits(timeout, max_time))


def _show_progress(outcomes: Sequence[Outcome]) -> None:
    if sys.stderr.isatty() and can_move_cursor():
        last = outcomes[-1]
        failed = sum(outcome.result == "fail" for outcome in outcomes)
        say_in_place(f"{len(outcomes)} run, {failed} failed: {last.section}")


def _clean_up(suite: Suite) -> None:
    from oncelog.errors import OncelogError

    if sys.stderr.isatty() and can_move_cursor():
        say_in_place("")
    try:
        suite.clean_up()
    except (OncelogError, OSError) as error:
        say(f"topics that begin with {suite.names.prefix} were not all deleted: {error}", err=True)


def _show(outcomes: Sequence[Outcome], output: str) -> None:
    if output not in ("table", "wide"):
        emit([outcome.to_row() for outcome in outcomes], output)
        return
    emit(section_counts(outcomes), "table")
    rows = joined_rows([outcome for outcome in outcomes if outcome.result != "pass"])
    if rows:
        click.echo()
        emit(rows, output, columns=_NOT_PASSED, wide=_WIDE)
    for row in rows:
        if row["result"] == "fail" and output == "table":
            say(f"\n{row['section']}: {row['scenario']}" + (f" ({row['version']})" if row["version"] else ""))
            say(f"  step      {row['step']}")
            say(f"  expected  {row['expected'] or '-'}")
            say(f"  received  {row['received'] or row['reason']}")


def section_counts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return a row for each section with the number of runs by result, and a row with the sums."""
    from oncelog.conform.suite import RESULTS

    def row(section: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        results = [outcome.result for outcome in outcomes]
        return {"section": section, **{result: results.count(result) for result in RESULTS}}

    sections = dict.fromkeys(outcome.section for outcome in outcomes)
    rows = [row(name, [outcome for outcome in outcomes if outcome.section == name]) for name in sections]
    return [*rows, row("all", outcomes)]


def joined_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the outcomes as rows. Versions of a scenario with the same result and reason share a row."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for outcome in outcomes:
        reason = outcome.reason
        if outcome.result == "skipped" and reason:
            # Drop ", not 12" from "the broker offers Produce 3-11, not 12", so that such outcomes share a
            # row.
            reason = reason.partition(", not ")[0]
        key = (outcome.section, outcome.scenario, outcome.result, reason)
        if key not in rows:
            rows[key] = outcome.to_row() | {"reason": reason}
        elif outcome.version is not None:
            rows[key]["version"] += f", {outcome.version.rpartition(' ')[2]}"
    return list(rows.values())
