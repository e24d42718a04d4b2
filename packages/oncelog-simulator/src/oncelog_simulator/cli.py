"""`oncelog simulate`: a broker, clients, a network, a disk and crashes in one process, all drawn from one
seed.
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import TYPE_CHECKING

import click

from oncelog.cli.main import EXIT_VIOLATIONS
from oncelog.errors import ConfigError

if TYPE_CHECKING:
    from oncelog_simulator.client_simulation import ClientResult
    from oncelog_simulator.scenario import Scenario
    from oncelog_simulator.simulation import Result
    from oncelog_simulator.world import Event


def parse_seeds(text: str) -> range:
    """Return the seeds of `A..B` (both included), or of `N` (the first N seeds from 0).

    Raises ConfigError for any other text.
    """
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match is None:
        raise ConfigError(f"--seeds={text!r}: expected A..B, or how many")
    return range(int(match[1]), int(match[2]) + 1) if match[2] else range(int(match[1]))


@click.command()
@click.option("--seeds", default="200", show_default=True, metavar="A..B|COUNT", help="Seeds to run.")
@click.option("--seed", type=int, help="Run one seed and print its timeline.")
@click.option("--fault-count", type=click.IntRange(0), help="Faults of each seed, instead of 2 to 20.")
@click.option(
    "--workload", help="Run it in every seed: hostile, pipelined, ... (docs/internals/simulation.md)."
)
@click.option("--faults", "kept", metavar="N,N...", help="With --seed: run only these of its faults.")
@click.option("--no-shrink", is_flag=True, help="Do not remove faults from a failing run.")
@click.option(
    "--events",
    type=click.IntRange(0),
    default=60,
    show_default=True,
    help="Print the last N events of a timeline; 0 prints all.",
)
@click.option("--digest", is_flag=True, help="Print a digest of each run, which is the same for equal runs.")
@click.option(
    "--clients",
    type=click.Choice(["blocking", "asyncio", "loops", "backup", "unsynced", "retries", "log"]),
    help="Run another simulation: clients in threads with signals (blocking) or with cancelled calls "
    "(asyncio), loops of oncelog.aio.process (loops), a restored backup, power losses with the default "
    "flush (unsynced), retries of old batches after compaction and power losses (retries), or a log alone "
    "that ends at any operation of its disk (log).",
)
def command(
    seeds: str,
    seed: int | None,
    fault_count: int | None,
    workload: str | None,
    kept: str | None,
    no_shrink: bool,
    events: int,
    digest: bool,
    clients: str | None,
) -> None:
    """Run the real broker, producers, consumers and coordinators against simulated faults.

    The seed determines the run: the same seed gives the same bytes. Exit code 3 means that a run violated a
    promise. Its faults are then removed one by one while the violation remains. The shortened run is printed
    as a timeline.
    """
    from oncelog_simulator.simulation import INDEPENDENT_WORKLOADS, WORKLOADS, run_scenario, scenario_for

    names = [*WORKLOADS, *INDEPENDENT_WORKLOADS]
    if workload not in (None, *names):
        raise ConfigError(f"--workload={workload!r}: expected one of {', '.join(names)}")
    seed_range = parse_seeds(seeds) if seed is None else range(seed, seed + 1)
    began, virtual_s, records, failed = time.process_time(), 0.0, 0, []
    for run_seed in seed_range:
        if clients is not None:
            run = _run_clients(
                run_seed,
                clients,
                kept,
                prints_timeline=seed is not None,
                is_shrunk=not no_shrink,
                events=events,
            )
            if digest:
                click.echo(f"{run_seed} {run.digest}")
            virtual_s, records = virtual_s + run.virtual_s, records + run.record_count
            failed += [run_seed] if run.violations else []
            continue
        result = run_scenario(_with_faults(scenario_for(run_seed, fault_count, workload), kept))
        virtual_s += result.virtual_s
        records += result.record_count
        if digest:
            click.echo(f"{run_seed} {result.digest}")
        if result.violations:
            failed.append(run_seed)
            _print_failure(result, fault_count, workload, is_shrunk=not no_shrink, events=events)
        elif seed is not None:
            _print_result(result, events)
    cpu_s = time.process_time() - began
    click.echo(
        f"{len(seed_range)} seeds, {len(failed)} failed; {records:,} records sent in {virtual_s:,.0f} s"
        f" of virtual time, {cpu_s:.1f} s of processor ({virtual_s / max(cpu_s, 1e-9):,.0f} times real time)"
    )
    if failed:
        raise SystemExit(EXIT_VIOLATIONS)


def _run_clients(
    seed: int, clients: str, kept: str | None, *, prints_timeline: bool, is_shrunk: bool, events: int
) -> ClientResult:
    from oncelog_simulator.asyncio_clients import run_asyncio_clients
    from oncelog_simulator.backup import run_restored_backup
    from oncelog_simulator.blocking_clients import run_blocking_clients
    from oncelog_simulator.default_flush import run_default_flush
    from oncelog_simulator.log_crashes import run_log_crashes
    from oncelog_simulator.old_retries import run_old_retries
    from oncelog_simulator.process_loops import run_process_loops
    from oncelog_simulator.shrink import shrink_run

    interrupted = {
        "blocking": run_blocking_clients,
        "asyncio": run_asyncio_clients,
        "loops": run_process_loops,
    }
    run_scenario = interrupted.get(clients)
    if run_scenario is not None:
        run = shown = run_scenario(seed, _numbers(kept))
    else:
        whole = {
            "backup": run_restored_backup,
            "unsynced": run_default_flush,
            "retries": run_old_retries,
            "log": run_log_crashes,
        }
        run = shown = whole[clients](seed)
    repeat_arguments = f"--clients {clients} --seed {seed}"
    if run.violations:
        click.echo(f"seed {seed} FAILED ({run.kind})")
        if run_scenario is not None and run.faults and kept is None and is_shrunk:
            shown, needed = shrink_run(run, run_scenario)
            repeat_arguments += f" --faults {','.join(map(str, needed)) or ','}"
    if run.violations or prints_timeline:
        for fault in shown.faults:
            click.echo(f"fault   {fault}")
        _print_events(shown.timeline, shown.violations, events)
    if run.violations:
        click.echo(f"again: oncelog simulate {repeat_arguments}\n")
    return run


def _numbers(kept: str | None) -> list[int] | None:
    """Return the numbers of the faults in `--faults`; None to run all faults."""
    return None if kept is None else [int(number) for number in kept.split(",") if number.strip().isdigit()]


def _with_faults(scenario: Scenario, kept: str | None) -> Scenario:
    numbers = _numbers(kept)
    if numbers is None:
        return scenario
    if any(number >= len(scenario.faults) for number in numbers):
        raise ConfigError(
            f"--faults={kept!r}: seed {scenario.seed} has faults 0 to {len(scenario.faults) - 1}"
        )
    return dataclasses.replace(scenario, faults=tuple(scenario.faults[number] for number in numbers))


def _print_failure(
    result: Result, fault_count: int | None, workload: str | None, *, is_shrunk: bool, events: int
) -> None:
    from oncelog_simulator.shrink import shrink
    from oncelog_simulator.simulation import run_scenario, scenario_for

    count = len(result.scenario.faults)
    if is_shrunk:
        result = shrink(result, run_scenario)
    click.echo(f"seed {result.scenario.seed} FAILED with {len(result.scenario.faults)} of its {count} faults")
    _print_result(result, events)
    every = scenario_for(result.scenario.seed, fault_count, workload).faults
    kept = ",".join(str(every.index(fault)) for fault in result.scenario.faults)
    counted = "" if fault_count is None else f"--fault-count {fault_count} "
    counted += "" if workload is None else f"--workload {workload} "
    click.echo(f"again: oncelog simulate --seed {result.scenario.seed} {counted}--faults {kept or ','}\n")


def _print_result(result: Result, events: int) -> None:
    scenario = result.scenario
    click.echo("broker  " + " ".join(f"{key}={value}" for key, value in scenario.broker.items()))
    for fault in scenario.faults:
        click.echo(f"fault   {fault}")
    _print_events(result.timeline, result.violations, events)


def _print_events(timeline: list[Event], violations: list[str], count: int) -> None:
    """Print the last `count` events, or all if `count` is 0, and the violations."""
    skipped = len(timeline) - count if count else 0
    if skipped > 0:
        click.echo(f"        ... {skipped} events before (--events 0 prints all) ...")
    for event in timeline[-count:]:
        click.echo(str(event))
    for violation in violations:
        click.echo(f"VIOLATION {violation}")
