from collections.abc import Sequence
from typing import Any

from oncelog.wire.primitives import Buffer

def encode(
    records: Sequence[Any], base_timestamp_ms: int, offset_deltas: list[int] | None, reserve_bytes: int, /
) -> bytearray | None: ...
def parse(
    data: Buffer,
    position: int,
    count: int,
    base_offset: int,
    base_timestamp_ms: int,
    fixed_time_ms: int | None,
    record_type: type,
    name_errors: str,
    /,
) -> tuple[list[Any], int] | None: ...
