"""Iceberg tables, read with the package pyiceberg, one data file after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from oncelog.errors import ConfigError, MissingDependency, StorageError
from oncelog.local_audit.tables.arrow_files import ArrowTable, DataFile
from oncelog.local_audit.tables.table import Columns, without_login

_HINT = "version-hint.text"
# Source: Iceberg HadoopTableOperations.getMetadataFile. Old tables have the third form.
_METADATA_ENDINGS = (".metadata.json", ".gz.metadata.json", ".metadata.json.gz")


def open_iceberg(place: str, columns: Columns, topics: Sequence[str]) -> ArrowTable:
    """Return the current snapshot of an Iceberg table.

    `place` is a table's name in the default catalog of pyiceberg's configuration (`lake.payments`), a
    metadata file, or the directory of a table in a Hadoop catalog.

    Raises MissingDependency if the package pyiceberg is missing. Raises ConfigError for a place that is not a
    table, or for a table that the package cannot read (equality deletes).
    """
    if find_spec("pyiceberg") is None:
        raise MissingDependency("iceberg:TABLE needs the package pyiceberg: pip install 'oncelog[iceberg]'")
    try:
        table = _load(place)
        tasks = list(table.scan().plan_files())
    except ConfigError:
        raise
    except Exception as error:  # each kind of catalog raises exceptions of its own packages
        raise ConfigError(f"{place}: cannot read this Iceberg table: {without_login(str(error))}") from error
    tasks.sort(key=lambda task: str(task.file.file_path))
    # Do not use `schema().column_names`: it also names the fields of structs, which are not columns of a
    # batch. See test_fields_and_files_that_cannot_be_read_are_refused.
    names = [field.name for field in table.schema().fields]

    def data_files() -> Iterator[DataFile]:
        for task in tasks:
            yield DataFile(task.file.file_path, names, {}, _batches_in(table, task))

    snapshot = table.current_snapshot()
    version = "no snapshot" if snapshot is None else f"snapshot {snapshot.snapshot_id}"
    return ArrowTable(f"{place}, {version} ({len(tasks)} files)", data_files, columns, topics)


def _load(place: str) -> Any:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.table import StaticTable

    if place.endswith(".metadata.json"):
        return StaticTable.from_metadata(place)
    if "/" in place:
        return StaticTable.from_metadata(_newest_metadata(place.rstrip("/")))
    return load_catalog().load_table(place)


def _newest_metadata(directory: str) -> str:
    """Return the path of the newest metadata file of a table in a Hadoop catalog. Raises ConfigError if it
    cannot be found.
    """
    from pyiceberg.io import load_file_io

    io = load_file_io(location=directory)
    try:
        with io.new_input(f"{directory}/metadata/{_HINT}").open() as stream:
            hint = stream.read().decode().strip()
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} has no metadata/{_HINT}, so its newest metadata file is unknown: give the "
            "table's name in a catalog, or that file (....metadata.json)"
        ) from None
    if not hint.isdecimal():
        raise ConfigError(f"{directory}: {_HINT} contains {hint[:80]!r}, which is not a version")
    version = int(hint)
    # A writer that was killed after its commit has not updated the hint. So look for newer versions, as
    # Iceberg's Java readers do. See test_a_hint_that_is_behind_hides_no_rows.
    path = _metadata_path(io, directory, version)
    while following := _metadata_path(io, directory, version + 1):
        version, path = version + 1, following
    if path is None:
        raise ConfigError(f"{directory} has no metadata file of version {version}, which {_HINT} names")
    return path


def _metadata_path(io: Any, directory: str, version: int) -> str | None:
    """Return the path of the metadata file of a version, which may be compressed. Return None if there is
    none.
    """
    for ending in _METADATA_ENDINGS:
        path = f"{directory}/metadata/v{version}{ending}"
        if io.new_input(path).exists():
            return path
    return None


def _batches_in(table: Any, task: Any) -> Callable[[list[str]], Iterator[Any]]:
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    def batches(names: list[str]) -> Iterator[Any]:
        # pyiceberg loads the chosen columns of the whole data file into memory. It also applies position
        # deletes, so deleted rows are left out.
        scan = ArrowScan(table.metadata, table.io, table.schema().select(*names), AlwaysTrue())
        try:
            yield from scan.to_record_batches([task])
        except (OSError, pa.ArrowException):
            raise
        except Exception as error:  # pyiceberg raises, for example, ValueError for Avro files
            raise StorageError(f"{task.file.file_path}: pyiceberg cannot read this file: {error}") from error

    return batches
