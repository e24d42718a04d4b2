"""The keys and values of records that coordinators and group members store, generated from the tables.

`TransactionLogKey(...).to_bytes(version)`, `TransactionLogValue.from_bytes(data)`, ... Names and fields are
Kafka's, in snake_case. stored.pyi has the types; `python -m oncelog.wire.stubs` writes it.
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
