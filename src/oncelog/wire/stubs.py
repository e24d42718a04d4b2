"""Writes messages.pyi and stored.pyi, the types of the generated classes: `python -m oncelog.wire.stubs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oncelog.wire.schema import Field, Struct, parse_data_table, parse_table, structs_of
from oncelog.wire.tables import DATA_TABLES, TABLES

STUB_FILE = Path(__file__).with_name("messages.pyi")
DATA_STUB_FILE = Path(__file__).with_name("stored.pyi")

_HEAD = """\
# Written by `python -m oncelog.wire.stubs`; do not edit.
from oncelog.wire.message import Api as Api
from oncelog.wire.message import Message as Message
from oncelog.wire.message import Part as Part
from oncelog.wire.primitives import Buffer
from oncelog.wire.schema import NO_ID as NO_ID

API_BY_KEY: dict[int, Api]
API_BY_NAME: dict[str, Api]
"""

_DATA_HEAD = """\
# Written by `python -m oncelog.wire.stubs`; do not edit.
from oncelog.wire.message import Data as Data
from oncelog.wire.message import Part as Part

DATA: dict[str, type[Data]]
"""

_TYPES = {
    "bool": "bool",
    "float64": "float",
    "string": "str",
    "uuid": "bytes",
    "bytes": "bytes",
    "records": "Buffer",
}


def render() -> str:
    """Return the text of messages.pyi."""
    lines: list[str] = []
    for table in (table for text in TABLES for table in parse_table(text)):
        for message in (table.request, table.response):
            lines += ["", *_class(message)]
    return _HEAD + "\n".join(lines) + "\n"


def render_data() -> str:
    """Return the text of stored.pyi."""
    tables = (table for text in DATA_TABLES for table in parse_data_table(text))
    lines = [line for table in tables for line in ("", *_class(table.struct, "Data"))]
    return _DATA_HEAD + "\n".join(lines) + "\n"


def _class(message: Struct, base: str = "Message") -> Iterator[str]:
    yield f"class {message.name}({base}):"
    parts = {part.name: part for part in list(structs_of(message))[1:]}
    for part in parts.values():
        yield f"    class {part.name}(Part):"
        yield from (f"        {line}" for line in _members(part, message.name))
        yield ""
    yield from (f"    {line}" for line in _members(message, message.name))


def _members(struct: Struct, owner: str) -> Iterator[str]:
    fields = [(field.name, _type(field, owner)) for field in struct.fields]
    yield from (f"{name}: {type_}" for name, type_ in fields)
    if fields:
        yield "def __init__("
        yield "    self,"
        yield "    *,"
        yield from (f"    {name}: {type_} = ...," for name, type_ in fields)
        yield ") -> None: ..."
    else:
        yield "def __init__(self) -> None: ..."


def _type(field: Field, owner: str) -> str:
    name = _TYPES.get(field.kind, "int") if field.struct is None else f"{owner}.{field.kind}"
    if field.is_array:
        name = f"list[{name}]"
    may_be_none = field.null_from is not None or (field.struct is not None and not field.is_array)
    return f"{name} | None" if may_be_none else name


if __name__ == "__main__":
    STUB_FILE.write_text(render())
    DATA_STUB_FILE.write_text(render_data())
