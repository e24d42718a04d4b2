"""The messages of the Kafka protocol as classes (`ProduceRequest`, `FetchResponse`, ...), made from the
tables.

Names and fields are the protocol's, in snake_case. messages.pyi has the types. `python -m oncelog.wire.stubs`
writes that file.
"""

from __future__ import annotations

from oncelog.wire.message import Api, Message, Part, make_api
from oncelog.wire.schema import NO_ID, parse_table
from oncelog.wire.tables import TABLES

__all__ = ["API_BY_KEY", "API_BY_NAME", "NO_ID", "Api", "Message", "Part"]

API_BY_KEY: dict[int, Api] = {
    table.key: make_api(table, __name__) for text in TABLES for table in parse_table(text)
}
API_BY_NAME: dict[str, Api] = {api.name: api for api in API_BY_KEY.values()}

for _api in API_BY_KEY.values():
    for _message in (_api.request, _api.response):
        globals()[_message.__name__] = _message
        __all__ += [_message.__name__]
