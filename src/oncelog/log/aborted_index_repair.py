"""Restore index entries of aborted transactions from the ABORT markers in the log.

Oncelog up to 0.4.1 lost these entries if compaction's map of keys became full in the middle of a segment.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from oncelog.errors import BrokerError
from oncelog.log.index import AbortedTransaction
from oncelog.log.producers import end_marker
from oncelog.log.scan import HeaderBlock
from oncelog.log.segment import Segment
from oncelog.rules.storage.compaction import Aborted, UnindexedAborts
from oncelog.wire.batch import HEADER_BYTES, read_header
from oncelog.wire.header import CONTROL_BIT, LOG_OVERHEAD_BYTES, TRANSACTIONAL_BIT, verify_crc

# The fields of a header that are needed, and the position of the byte with the bits of both kinds of batches.
_FIELDS = struct.Struct(">qi9xh20xq10x")
_BITS_POSITION = 22
_UNMARKED = bytes(value for value in range(256) if not value & (CONTROL_BIT | TRANSACTIONAL_BIT))


class Restored(NamedTuple):
    """The result of `restore_aborted`.

    `error` is None if all restored entries are on disk. Otherwise some entries are only in memory, and
    `error` says why.
    """

    entry_count: int
    error: OSError | None


def restore_aborted(segments: Iterable[Segment]) -> Restored:
    """Add the missing entries to the transaction indexes of `segments`, and sync the changed index files.

    Raises OSError if the log cannot be read.
    """
    walked = list(segments)
    indexed = {entry.last_offset for segment in walked for entry in segment.transactions.entries}
    aborts = UnindexedAborts(indexed)
    count, failure = 0, None
    for segment in walked:
        if missing := list(_missing(segment, aborts)):
            count += len(missing)
            try:
                segment.transactions.add_missing(AbortedTransaction(*entry) for entry in missing)
            except OSError as error:
                # Continue: a full disk must not prevent the start of the broker, and readers use the entries
                # in memory.
                failure = error
        segment.file.release_handle()
    return Restored(count, failure)


def _missing(segment: Segment, aborts: UnindexedAborts) -> Iterator[Aborted]:
    position = 0
    for block in segment.header_blocks(0):
        if block.position != position:
            aborts.gap()
        position = block.end
        yield from _missing_in_block(segment, block, aborts)
    if position != segment.size_bytes:
        aborts.gap()


def _missing_in_block(segment: Segment, block: HeaderBlock, aborts: UnindexedAborts) -> Iterator[Aborted]:
    if not block.headers[_BITS_POSITION::HEADER_BYTES].translate(None, _UNMARKED):
        return  # quickly, because most blocks have neither a transactional batch nor a marker
    end = block.position
    numbered = enumerate(_FIELDS.iter_unpack(block.headers))
    for number, (base_offset, length, attributes, producer_id) in numbered:
        begin, end = end, end + length + LOG_OVERHEAD_BYTES
        if not attributes & CONTROL_BIT:
            if attributes & TRANSACTIONAL_BIT:
                aborts.data(producer_id, base_offset)
            continue
        header = read_header(block.headers, number * HEADER_BYTES)
        if header.producer_id is None:
            continue
        batch = segment.file.pread(header.size_bytes, begin)
        try:
            # A flipped bit may turn a COMMIT marker into an ABORT marker. An index entry for it would hide
            # committed records, so only a marker with a valid checksum counts. See
            # test_a_damaged_commit_gets_no_index_entry.
            is_whole = verify_crc(batch, 0, header.size_bytes)
            marker = end_marker(header, memoryview(batch)) if is_whole else None
        except BrokerError:
            is_whole, marker = False, None
        if not is_whole:
            aborts.gap()
            continue
        if marker is None:
            continue
        entry = aborts.marker(header.producer_id, header.last_offset, is_abort=not marker.is_commit)
        if entry is not None:
            yield entry
