"""The bytes of every file equal golden ones, and Apache Kafka's tool reads a directory of Oncelog."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import crc32c
import pytest
from support.log.partitions import (
    NOW_MS,
    TOPIC_ID,
    TP,
    batch,
    config,
    marker,
    open_partition,
    put,
    put_marker,
)

from oncelog.errors import StorageError
from oncelog.log.background import run
from oncelog.log.checkpoint import decode_checkpoint, decode_uuid, encode_checkpoint, encode_uuid
from oncelog.log.snapshot import Snapshots, crc_of, decode_full, decode_snapshot
from oncelog.rules.idempotence.append import ProducerEntry, RememberedBatch
from oncelog.rules.idempotence.producer_state import ProducerTable, pack_entry, unpack_entry
from oncelog.server.disk import RealDisk
from oncelog.testing.memory_disk import MemoryDisk

ENTRY = ProducerEntry(
    3, None, 1700, 1800, None, (RememberedBatch(4, 10, 4, 1600), RememberedBatch(9, 20, 4, 1700))
)
BARE = ProducerEntry(2, 7, 1500, 1600, 5, ())
PACKED = {1: pack_entry(ENTRY), 2: pack_entry(BARE)}


def _written(table: ProducerTable) -> tuple[bytes, bytes]:
    """Write a snapshot.

    Return the bytes of its file in Kafka's format, and of the file with the full state.
    """
    disk = MemoryDisk()
    disk.mkdir("d")
    run(Snapshots(disk, "d").write(5, table.image()))
    assert disk.list("d") == [f"{5:020d}.producers", f"{5:020d}.snapshot"]
    return disk.read(f"d/{5:020d}.snapshot"), disk.read(f"d/{5:020d}.producers")


def _table(entries: dict[int, ProducerEntry]) -> ProducerTable:
    table = ProducerTable()
    for producer_id, entry in entries.items():
        table.put(producer_id, entry)
    return table


@pytest.mark.behaviour("I6", "I20")
def test_a_snapshot_has_kafkas_bytes() -> None:
    data, _ = _written(_table({1: ENTRY, 2: BARE}))
    assert data.hex() == (
        "0001" "1b693b67" "00000002"
        "0000000000000001" "0003" "00000009" "0000000000000014" "00000004" "00000000000006a4"
        "ffffffff" "ffffffffffffffff"
        "0000000000000002" "0002" "ffffffff" "ffffffffffffffff" "00000000" "00000000000005dc"
        "00000007" "0000000000000005"
    )  # fmt: skip
    newest_only = ENTRY._replace(batches=ENTRY.batches[-1:], last_append_ms=99)
    assert decode_snapshot(data, 99) == [(1, newest_only), (2, BARE._replace(last_append_ms=99))]


@pytest.mark.behaviour("I17")
def test_our_file_keeps_everything_and_is_bound_to_its_snapshot() -> None:
    snapshot, data = _written(_table({1: ENTRY, 2: BARE}))
    assert decode_full(data, crc_of(snapshot)) == PACKED
    assert data[6:26].hex() == "1b693b67" "00000002" "0000000000000001" "00000000"  # fmt: skip
    with pytest.raises(StorageError, match="another snapshot"):
        decode_full(data, 78)


def test_a_table_without_producers_is_a_snapshot_as_well() -> None:
    snapshot, data = _written(_table({}))
    assert (decode_snapshot(snapshot), decode_full(data, crc_of(snapshot))) == ([], {})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (struct.pack(">Ii", 7, -1), "says -1 producers"),
        (struct.pack(">Iiq", 7, 1, 5), "says 1 producers"),
        (struct.pack(">IiqH", 7, 1, 5, 3), "do not fill the file"),
        (struct.pack(">IiqH", 7, 1, 5, 3) + b"four", "do not fill the file"),
        (struct.pack(">Ii", 7, 0) + b"more", "do not fill the file"),
    ],
)
def test_a_file_whose_count_does_not_fit_is_refused(body: bytes, text: str) -> None:
    with pytest.raises(StorageError, match=text):
        decode_full(struct.pack(">hI", 1, crc32c.crc32c(body)) + body, 7)


LAST = RememberedBatch(3, 40, 2, NOW_MS)
KINDS = [
    ENTRY._replace(
        coordinator_epoch=coordinator_epoch, current_txn_first_offset=first_offset, batches=batches
    )
    for coordinator_epoch in (None, 5)
    for first_offset in (None, 38)
    for batches in ((), (LAST,), (LAST._replace(timestamp_ms=0), LAST))
]


@pytest.mark.parametrize("entry", KINDS)
def test_no_sealed_file_of_producers_stops_the_start_or_the_next_snapshot(entry: ProducerEntry) -> None:
    """struct.error used to end the start, an append or a snapshot."""
    packed, snapshot = pack_entry(entry), _written(_table({1: ENTRY}))[0]
    entries = [packed[:size] for size in range(len(packed))] + [bytes([16]) + packed[1:], packed + b"more"]
    for malformed in entries:
        if not _is_taken(malformed, snapshot):
            continue
        assert unpack_entry(malformed).batches != entry.batches  # whole batches are missing
        _written(_table({1: unpack_entry(malformed)}))
    assert _is_taken(packed, snapshot) and not _is_taken(packed + b"more", snapshot)


def _is_taken(packed: bytes, snapshot: bytes) -> bool:
    body = struct.pack(">IiqH", crc_of(snapshot), 1, 1, len(packed)) + packed
    try:
        return decode_full(struct.pack(">hI", 1, crc32c.crc32c(body)) + body, crc_of(snapshot)) == {1: packed}
    except StorageError:
        return False


@pytest.mark.parametrize("delta", [-1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("coordinator_epoch", [-1, 5])
def test_any_offset_delta_of_a_snapshot_is_stored_again(delta: int, coordinator_epoch: int) -> None:
    fields = struct.pack(">iqhiqiqiq", 1, 7, 0, 3, 40, delta, NOW_MS, coordinator_epoch, -1)
    data = struct.pack(">hI", 1, crc32c.crc32c(fields)) + fields
    assert _written(_table(dict(decode_snapshot(data))))[0] == data


@pytest.mark.parametrize("which", [0, 1])
def test_every_damaged_byte_is_noticed(which: int) -> None:
    files = _written(_table({1: ENTRY}))
    data, bound_to = files[which], crc_of(files[0])
    decode = [decode_snapshot, lambda raw: decode_full(raw, bound_to)][which]
    assert decode(data)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        with pytest.raises(StorageError):
            decode(bytes(damaged))
        with pytest.raises(StorageError):
            decode(data[:position])


@pytest.mark.behaviour("I19", "I20")
def test_many_producers_of_every_kind() -> None:
    """Plain entries are encoded without a ProducerEntry. The result must be the same as for the others."""
    expected = {}
    for pid in range(4000):
        batches = tuple(RememberedBatch(pid + n, pid * 9 + n, n, 10**12 + n) for n in range(pid % 6))
        batches = tuple(b._replace(last_sequence=None) for b in batches) if pid % 7 == 0 else batches
        coordinator_epoch, first_offset = (None if pid % 5 else pid), (None if pid % 11 else pid)
        expected[pid] = ProducerEntry(pid % 99, coordinator_epoch, 10**12, pid, first_offset, batches)
    snapshot, data = _written(_table(expected))
    full = {pid: unpack_entry(packed) for pid, packed in decode_full(data, crc_of(snapshot)).items()}
    assert full == expected
    newest = {
        pid: entry._replace(last_append_ms=0, batches=_newest(entry)) for pid, entry in expected.items()
    }
    assert dict(decode_snapshot(snapshot)) == newest


def _newest(entry: ProducerEntry) -> tuple[RememberedBatch, ...]:
    # Kafka's format has one timestamp for each producer, that of its last batch.
    return tuple(b._replace(timestamp_ms=entry.last_timestamp_ms) for b in entry.batches[-1:])


def _aged_partition(disk: object, close: bool = True) -> None:
    partition = open_partition(disk, config(index_interval_bytes=100), leader_epoch=2)
    for number in range(6):
        put(partition, batch(number * 2, 2, timestamp_ms=NOW_MS + [0, 9, 3, 30, 20, 25][number]))
    put(partition, batch(0, pid=9, epoch=1, is_transactional=True))
    put_marker(partition, marker(9, commit=False, epoch=1))
    if close:
        partition.close(NOW_MS)


def test_indexes_have_kafkas_bytes() -> None:
    disk = MemoryDisk()
    _aged_partition(disk)
    size = len(batch(0, 2))
    read = lambda suffix: disk.read(f"{TP}/{0:020d}{suffix}")  # noqa: E731
    # A batch gets an entry if more than 100 bytes were appended since the last entry. That is every second
    # batch.
    offsets = list(struct.iter_unpack(">II", read(".index")))
    assert offsets == [(5, 2 * size), (9, 4 * size), (12, 6 * size)]
    times = list(struct.iter_unpack(">qI", read(".timeindex")))
    # Each entry has the largest timestamp so far, and the last offset of its batch.
    assert times == [(NOW_MS + 10, 3), (NOW_MS + 31, 7)]
    assert read(".txnindex") == struct.pack(">hqqqq", 0, 9, 12, 13, 14)
    assert len(read(".log")) == 6 * size + len(batch(0)) + 78


def test_checkpoints_have_kafkas_text() -> None:
    disk = MemoryDisk()
    _aged_partition(disk)
    assert disk.read(f"{TP}/leader-epoch-checkpoint") == b"0\n1\n2 0\n"
    expected = b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw\n"
    assert disk.read(f"{TP}/partition.metadata") == expected
    assert decode_uuid(encode_uuid(TOPIC_ID)) == TOPIC_ID
    assert encode_checkpoint(["t 0 5", "u 1 6"]) == b"0\n2\nt 0 5\nu 1 6\n"


@pytest.mark.parametrize("data", [b"", b"0\n", b"1\n0\n", b"0\n2\nt 0 5\n", b"x\n0\n", b"\xff\n"])
def test_broken_checkpoints_are_noticed(data: bytes) -> None:
    with pytest.raises(StorageError):
        decode_checkpoint(data)


@pytest.mark.parametrize("text", ["", "AAECAwQFBgcICQoLDA0OD", "AAECAwQFBgcICQoLDA0ODwAAA"])
def test_broken_ids_are_noticed(text: str) -> None:
    with pytest.raises(StorageError):
        decode_uuid(text)


def test_apache_kafkas_dump_tool_reads_our_directory(kafka_class_path: str, tmp_path: Path) -> None:
    _aged_partition(RealDisk(tmp_path))
    files = [
        str(path)
        for path in sorted((tmp_path / str(TP)).iterdir())
        if path.suffix in (".log", ".index", ".timeindex", ".txnindex", ".snapshot", ".producers")
    ]
    assert len(files) == 6
    main_class = "org.apache.kafka.tools.DumpLogSegments"
    done = subprocess.run(
        [
            "java",
            "-Xmx256m",
            "-cp",
            kafka_class_path,
            main_class,
            "--print-data-log",
            "--files",
            ",".join(files),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    output = done.stdout
    assert done.returncode == 0, done.stderr[-2000:]
    assert "baseOffset: 12 lastOffset: 12 count: 1 baseSequence: 0 lastSequence: 0 producerId: 9" in output
    assert "endTxnMarker: ABORT" in output
    assert "producerId: 7 producerEpoch: 0 coordinatorEpoch: -1" in output
    assert "offset: 5 position: " in output
    assert f"timestamp: {NOW_MS + 31} offset: 7" in output
    assert "isvalid: false" not in output
    assert "Mismatches" not in output + done.stderr
    assert "Found" not in output
