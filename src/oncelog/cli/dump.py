"""`oncelog dump FILES`: print the contents of a partition's files, like kafka-dump-log."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from oncelog.cli.common import emit, output_option

_WIDE = ("partition_leader_epoch", "timestamp_type", "max_timestamp_ms", "crc")


@click.command("dump")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--print-data-log", "print_records", is_flag=True, help="Also decode and print the records.")
@click.option("--verify-index-only", is_flag=True, help="Check indexes against their log; print only errors.")
@output_option
def command(files: tuple[str, ...], print_records: bool, verify_index_only: bool, output: str) -> None:
    """Print segments (.log), indexes (.index, .timeindex, .txnindex) and producer snapshots (.snapshot,
    .producers), of Oncelog or Apache Kafka.

    Damage is reported with its position on standard error, and the exit code is 1. The last segment of a
    running broker may end in a batch that is being written.
    """
    failed = False
    for path in files:
        if len(files) > 1 and output in ("table", "wide") and not verify_index_only:
            click.echo(f"{path}:")
        rows, error = _read(path, print_records)
        if not verify_index_only:
            _print(rows, output)
        if error is not None:
            failed = True
            click.echo(f"oncelog: {type(error).__name__}: {error}", err=True)
    if failed:
        sys.exit(1)


def _read(path: str, print_records: bool) -> tuple[list[dict[str, Any]], Exception | None]:
    from oncelog.errors import OncelogError
    from oncelog.log.dump import dump_file
    from oncelog.server.disk import RealDisk

    directory, name = os.path.split(os.path.abspath(path))
    rows: list[dict[str, Any]] = []
    try:
        for row in dump_file(RealDisk(directory), name, print_records=print_records):
            rows.append(row)
    except (OncelogError, OSError) as error:
        return rows, error
    return rows, None


def _print(rows: list[dict[str, Any]], output: str) -> None:
    if output not in ("table", "wide"):
        emit(rows, output)
        return
    records = [record for row in rows for record in row.pop("records", ())]
    columns = [name for name in (rows[0] if rows else {}) if name not in _WIDE]
    wide = [name for name in _WIDE if rows and name in rows[0]]
    emit(rows, output, columns=columns, wide=wide)
    if records:
        emit(records, output, columns=sorted({name for record in records for name in record}, key=_rank))


def _rank(name: str) -> tuple[int, str]:
    order = ("offset", "timestamp_ms", "key", "value", "headers", "control", "coordinator_epoch")
    return (order.index(name), name)
