"""Each bit of each header field is flipped and the checksum corrected.

The audit finds the flip, or a table says why not.
"""

from __future__ import annotations

import pytest
from crc32c import crc32c
from support.spark.topics import records

from oncelog.audit.partition import PartitionAudit
from oncelog.local_audit.segment_files import Damage, walk_segment
from oncelog.local_audit.stored_batches import no_batch, stored_batch
from oncelog.wire.batch import build_batch, stamp
from oncelog.wire.control import encode_end_marker

FIELDS = {
    "base offset": (0, 8),
    "length": (8, 4),
    "leader epoch": (12, 4),
    "magic": (16, 1),
    "crc": (17, 4),
    "unused attributes": (21, 1),
    "attributes": (22, 1),
    "last offset delta": (23, 4),
    "first timestamp": (27, 8),
    "largest timestamp": (35, 8),
    "producer id": (43, 8),
    "producer epoch": (51, 2),
    "base sequence": (53, 4),
    "records count": (57, 4),
}
NOTHING_CONTRADICTS = {"leader epoch", "unused attributes", "first timestamp", "largest timestamp"}
CODEC_BITS, TIMESTAMP_TYPE, TRANSACTIONAL, DELETE_HORIZON = (0, 1, 2), 3, 4, 6
MARKERS = (4, 7)


class Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def pread(self, size: int, position: int) -> bytes:
        return self._data[position : position + size]


def sound_log() -> list[bytearray]:
    """Return batches of two producers, interleaved. One writes plain batches, the other one two
    transactions.
    """

    def data(producer_id: int, epoch: int, sequence: int, count: int) -> bytearray:
        return build_batch(
            records(sequence, count),
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            is_transactional=producer_id == 8,
        )

    batches = [
        *(data(7, 0, 0, 3), data(8, 2, 0, 2), data(7, 0, 3, 2), data(8, 2, 2, 3)),
        *(encode_end_marker(8, 2, True, 0, 0), data(7, 0, 5, 1), data(8, 2, 5, 2)),
        *(encode_end_marker(8, 2, False, 0, 0), data(7, 0, 6, 2)),
    ]
    offset = 0
    for batch in batches:
        stamp(batch, 0, offset, partition_leader_epoch=0)
        offset += int.from_bytes(batch[23:27], "big") + 1
    return batches


def is_clean(batches: list[bytearray]) -> bool:
    log = b"".join(batches)
    audit = PartitionAudit()
    for found in walk_segment(Bytes(log), len(log), 0):  # type: ignore[arg-type]
        if isinstance(found, Damage):
            last = max(found.offset, (found.next_offset or 0) - 1)
            audit.see(no_batch(found.offset, last, found.reason))
        else:
            audit.see(stored_batch(found.data, found.data_position, found.header, None, check_records=True))
    return not audit.finish()[0]


def missed(field: str) -> set[tuple[int, int]]:
    """Return the flips that the audit does not find, as (number of the batch, number of the bit). Bit 0 is
    the field's lowest.
    """
    start, size = FIELDS[field]
    found = set()
    for number in range(len(sound_log())):
        for bit in range(8 * size):
            batches = sound_log()
            batch = batches[number]
            batch[start + size - 1 - bit // 8] ^= 1 << bit % 8
            if field != "crc":
                batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
            if is_clean(batches):
                found.add((number, bit))
    return found


@pytest.mark.behaviour("P5")
@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_of_a_header_is_found_or_documented(field: str) -> None:
    assert is_clean(sound_log())
    unnoticed = missed(field)
    if field in NOTHING_CONTRADICTS:
        assert unnoticed
    elif field == "attributes":
        assert {bit for _, bit in unnoticed}.isdisjoint(CODEC_BITS)
        assert {TIMESTAMP_TYPE, DELETE_HORIZON} <= {bit for _, bit in unnoticed}
        # Flips of this bit take a batch out of its transaction. A transaction without one of its batches
        # still looks sound.
        assert {number for number, bit in unnoticed if bit == TRANSACTIONAL} <= {1, 6, *MARKERS}
    elif field in ("producer id", "producer epoch", "base sequence"):
        # A marker has no sequence. It may also end a transaction that wrote no records to this partition.
        signs = {(number, 8 * FIELDS[field][1] - 1) for number in range(9)}
        assert {number for number, _ in unnoticed - signs} <= {*MARKERS, 6}, unnoticed
        # Without a producer id, a batch counts as unnumbered: that is not a finding, but the verdict is
        # `unproven`.
        assert field == "producer id" or {number for number, _ in unnoticed} <= set(MARKERS), unnoticed
    else:
        assert unnoticed == set()
