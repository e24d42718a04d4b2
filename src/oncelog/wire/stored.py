"""The keys and values that coordinators and group members store in records, as classes made from the tables.

Use `TransactionLogKey(...).to_bytes(version)` to write and `TransactionLogValue.from_bytes(data)` to read.
Names and fields are Kafka's, in snake_case. stored.pyi has the types. `python -m oncelog.wire.stubs` writes
that file.
"""

from __future__ import annotations

from oncelog.wire.message import Data, Part, make_data
from oncelog.wire.schema import parse_data_table
from oncelog.wire.tables import DATA_TABLES

__all__ = ["DATA", "Data", "Part"]

DATA: dict[str, type[Data]] = {
    table.name: make_data(table, __name__) for text in DATA_TABLES for table in parse_data_table(text)
}

globals().update(DATA)
__all__ += list(DATA)
