"""Walk a log file batch by batch, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from oncelog.errors import BrokerError
from oncelog.log.disk import File
from oncelog.wire.batch import HEADER_BYTES, BatchHeader, read_header, verify_crc

CHUNK_BYTES = 1 << 20


class FoundBatch(NamedTuple):
    """`data` is a view that holds the whole batch at `data_position`, valid until the next step."""

    position: int
    header: BatchHeader
    data: memoryview
    data_position: int

    def bytes(self) -> memoryview:
        """The batch alone."""
        return self.data[self.data_position : self.data_position + self.header.size_bytes]


class BadBatch(NamedTuple):
    """The bytes from `position` on are no batch; `reason` says why."""

    position: int
    reason: str


def scan(
    file: File, position: int, end: int, *, verify: bool = False, max_batch_bytes: int | None = None
) -> Iterator[FoundBatch | BadBatch]:
    """Batches from `position` to `end`; a BadBatch is the last item and means a torn or damaged tail.

    `verify` also checks each checksum. `max_batch_bytes` None: any size that fits the file.
    """
    chunk, chunk_position = b"", position
    while position < end:
        if position + HEADER_BYTES > end:
            yield BadBatch(position, f"{end - position} bytes are too few for a batch header")
            return
        start = position - chunk_position
        if start + HEADER_BYTES > len(chunk):
            chunk, chunk_position, start = file.pread(min(CHUNK_BYTES, end - position), position), position, 0
        try:
            header = read_header(chunk, start)
        except BrokerError as error:
            yield BadBatch(position, error.detail)
            return
        size = header.size_bytes
        if position + size > end or (max_batch_bytes is not None and size > max_batch_bytes):
            yield BadBatch(position, f"the batch claims {size} bytes, {end - position} are there")
            return
        if start + size > len(chunk):
            wanted = min(max(CHUNK_BYTES, size), end - position)
            chunk, chunk_position, start = file.pread(wanted, position), position, 0
        if verify and not verify_crc(chunk, start, size):
            yield BadBatch(position, f"the checksum of the batch at offset {header.base_offset} is wrong")
            return
        yield FoundBatch(position, header, memoryview(chunk), start)
        position += size
