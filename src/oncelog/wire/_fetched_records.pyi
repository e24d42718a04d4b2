from collections.abc import Callable
from typing import Any

from oncelog.types import Record
from oncelog.wire.header import BatchHeader
from oncelog.wire.primitives import Buffer

_BytesColumn = tuple[int, bytes | None, bytes, bytes]
_Columns = tuple[int, _BytesColumn, _BytesColumn, bytes, int, bytes | None, bytes, bytes, bytes]

def plain_batches(
    data: Buffer, position: int, batches: list[Any], header_type: type, batch_type: type, verdict: object, /
) -> int: ...
def batch_rows(
    data: Buffer,
    batches: list[Any],
    index: int,
    rows: list[Record],
    max_records: int,
    min_offset: int,
    verdict: object,
    crc32c: Callable[[memoryview], int] | None,
    record_type: type,
    topic: str,
    partition: int,
    timestamp_types: tuple[object, ...],
    name_errors: str,
    /,
) -> tuple[int, int, int]: ...
def rows(
    payload: Buffer,
    position: int,
    count: int,
    base_offset: int,
    base_timestamp_ms: int,
    fixed_timestamp_ms: int | None,
    min_offset: int,
    record_type: type,
    topic: str,
    partition: int,
    timestamp_type: object,
    name_errors: str,
    /,
) -> tuple[list[Record], int] | None: ...
def columns(
    data: Buffer,
    batches: list[tuple[int, BatchHeader]],
    payloads: list[Buffer] | None,
    first_offset: int,
    last_offset: int,
    crc32c: Callable[[memoryview], int] | None,
    /,
) -> _Columns | None: ...
