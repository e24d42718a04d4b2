"""The `oncelog bench` command: measure, store the raw samples, write the tables and the pictures."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from oncelog.cli.common import emit, output_option, parse_properties

_results_option = click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("bench/results"),
    show_default=True,
    help="Directory for the raw samples, one JSON file per measurement.",
)
_page_option = click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("docs/benchmarks.md"),
    show_default=True,
    help="Page whose sections are rewritten; the pictures are written beside it.",
)
_repeats_option = click.option(
    "--repeats",
    type=click.IntRange(min=1),
    help="Number of interleaved samples of each kind.  [default: of the plan, mostly 5]",
)
_quick_option = click.option(
    "--quick", is_flag=True, help="Run for seconds only; the figures are not meaningful."
)


class _Measurements(click.Group):
    """A command group with one command per measurement.

    A measurement is imported when its command is used.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        from oncelog_bench.framework import NAMES

        return [*NAMES, "all", "targets"]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        from oncelog_bench.framework import NAMES

        return _command_of(name) if name in NAMES else super().get_command(ctx, name)


@click.group("bench", cls=_Measurements)
def command() -> None:
    """Run benchmarks. Each measurement stores its raw samples as JSON and writes its section of a page."""
    # Brokers and clients start from bytecode, as they do for users. If this variable is set, each process
    # compiles all sources again, and a start takes twice as long.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # All processes run what `make setup` builds, except the broker COMPILED.
    os.environ.setdefault("ONCELOG_PURE_PYTHON", "mypyc")


def _command_of(name: str) -> click.Command:
    from oncelog_bench.framework import load

    measurement = load(name)
    sizes = ", ".join(f"{field.name}={_text(value)}" for field, value in _sizes(measurement.Plan()))

    @click.command(
        name, help=f"{measurement.SUMMARY}\n\nSizes for -X: {sizes}.", short_help=measurement.SUMMARY
    )
    @_repeats_option
    @_quick_option
    @click.option("-X", "sizes", multiple=True, metavar="SIZE=VALUE", help="Override a size, e.g. repeats=9.")
    @_results_option
    @_page_option
    @output_option
    def run(
        repeats: int | None, quick: bool, sizes: tuple[str, ...], results: Path, page: Path, output: str
    ) -> None:
        result = _measure([name], repeats, quick, sizes, results, page)
        emit(_rounded(result["medians"]), output)

    return run


def _sizes(plan: Any) -> list[tuple[Any, Any]]:
    return [(field, getattr(plan, field.name)) for field in dataclasses.fields(plan)]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@command.command("all")
@_repeats_option
@_quick_option
@_results_option
@_page_option
@output_option
def everything(repeats: int | None, quick: bool, results: Path, page: Path, output: str) -> None:
    """Run every measurement, one after the other. Then print the table of targets."""
    from oncelog_bench.framework import NAMES
    from oncelog_bench.page import target_rows

    _measure(NAMES, repeats, quick, (), results, page)
    emit(target_rows(results), output)


@command.command("targets")
@_results_option
@_page_option
@output_option
def targets(results: Path, page: Path, output: str) -> None:
    """Rewrite the page from the stored results, and print the targets. Nothing is measured."""
    from oncelog_bench.page import target_rows, write_page

    write_page(page, results)
    emit(target_rows(results), output)


def _measure(
    names: Sequence[str], repeats: int | None, quick: bool, sizes: Sequence[str], results: Path, page: Path
) -> dict[str, Any]:
    """Run the measurements in `names`, and return the last result. Write the files after each measurement."""
    from oncelog_devtools.progress import Progress

    from oncelog_bench.brokers import kept
    from oncelog_bench.framework import load, plan_with
    from oncelog_bench.page import write_page

    overrides = {**({"repeats": str(repeats)} if repeats else {}), **parse_properties(sizes)}
    result: dict[str, Any] = {}
    _check_writable(results)
    with Progress() as progress, kept():
        for name in names:
            measurement = load(name)
            plan = plan_with(measurement.QUICK if quick else measurement.Plan(), overrides)
            with progress.step(f"Measuring {name}", plan.samples_count) as advance_to:
                result = measurement.measure(plan, advance_to)
            for side, reason in result["left_out"].items():
                click.echo(f"{name}: {side} was left out: {reason}", err=True)
            results.mkdir(parents=True, exist_ok=True)
            (results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            write_page(page, results)
    return result


def _check_writable(directory: Path) -> None:
    """Raise click.UsageError if results cannot be stored in `directory`.

    Do not create the directory yet, because a measurement may still fail.
    """
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise click.UsageError(f"--results {directory}: {existing} is not a writable directory")


def _rounded(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
