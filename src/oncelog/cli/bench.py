"""`oncelog bench`: measure, keep the raw samples, write the table and the picture."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from oncelog.cli.common import emit, output_option


@click.group("bench")
def command() -> None:
    """Measure. Each measurement keeps its raw samples as JSON and writes its section of a page."""


@command.command("idempotence")
@click.option(
    "--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Pairs of off and on."
)
@click.option(
    "--records",
    default=200_000,
    show_default=True,
    type=click.IntRange(min=10),
    help="Per run at full speed.",
)
@click.option("--record-bytes", default=1_024, show_default=True, type=click.IntRange(min=1))
@click.option("--partitions", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--paced-seconds",
    default=4.0,
    show_default=True,
    type=click.FloatRange(min=0.05),
    help="Length of a latency run.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("bench/results/idempotence.json"),
    show_default=True,
    help="Where the raw samples go.",
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("docs/benchmarks.md"),
    show_default=True,
    help="Page whose section is written anew; the picture goes beside it.",
)
@output_option
def idempotence(
    repeats: int,
    records: int,
    record_bytes: int,
    partitions: int,
    paced_seconds: float,
    results: Path,
    page: Path,
    output: str,
) -> None:
    """The cost of idempotence: throughput, latency, processor time and memory, off and on.

    Our producer and confluent-kafka (when installed) load a broker of this machine, off and on in turns.
    """
    from oncelog.bench.idempotence import Plan, available_clients, measure
    from oncelog.demo.showing import Showing

    plan = Plan(
        available_clients(),
        repeats=repeats,
        records=records,
        record_bytes=record_bytes,
        partitions=partitions,
        paced_seconds=paced_seconds,
    )
    with Showing() as showing, showing.step("Measuring", len(list(plan.samples()))) as advance_to:
        result = measure(plan, advance_to)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(result, indent=1) + "\n")
    write_page(page, results)
    emit(_rounded(result["medians"]), output)


def write_page(page: Path, results: Path) -> None:
    """Render the section and the picture from a JSON file that a measurement left."""
    from oncelog.bench.page import idempotence_picture, idempotence_section, put_section

    result = json.loads(results.read_text())
    picture = page.with_name("benchmarks-idempotence.svg")
    source = f"[raw samples]({os.path.relpath(results, page.parent)})"
    put_section(page, "idempotence", idempotence_section(result, picture=picture.name, source=source))
    picture.write_text(idempotence_picture(result))


def _rounded(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
