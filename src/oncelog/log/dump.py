"""Decode the files of a partition directory, of Apache Kafka or Oncelog, into readable rows.

Every function that yields rows raises StorageError for invalid bytes; the text has their position. For a
producer snapshot, the position is always 0. Source: Kafka's DumpLogSegments.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from oncelog.errors import BrokerError, StorageError
from oncelog.log.disk import Disk
from oncelog.log.scan import BadBatch, ScannedBatch, scan
from oncelog.log.segment import INDEX_SUFFIX, LOG_SUFFIX, TIME_SUFFIX, TXN_SUFFIX, is_stem
from oncelog.log.snapshot import (
    FULL_SUFFIX,
    SNAPSHOT_SUFFIX,
    Producers,
    crc_of,
    decode_full,
    decode_snapshot,
)
from oncelog.rules.idempotence.producer_state import unpack_entry
from oncelog.wire.batch import BatchHeader, verify_crc
from oncelog.wire.control import decode_control
from oncelog.wire.records import iter_records

Row = dict[str, Any]
_OFFSET_ENTRY, _TIME_ENTRY = struct.Struct(">II"), struct.Struct(">qI")
_TXN_ENTRY = struct.Struct(">hqqqq")
_FULL_CRC = struct.Struct(">I")
_FULL_CRC_POSITION = 6


def dump_file(disk: Disk, path: str, *, print_records: bool = False, verify: bool = True) -> Iterator[Row]:
    """Yield the rows of one file, whose suffix determines its format.

    `verify` also compares the entries of an offset or time index with the log file beside it, and the
    checksum in a `.producers` file with its snapshot. Raises StorageError for invalid bytes and for an
    unknown suffix.
    """
    if path.endswith(LOG_SUFFIX):
        yield from dump_log(disk, path, print_records=print_records)
        return
    for suffix, dump in _DUMPS.items():
        if path.endswith(suffix):
            yield from dump(disk, path, verify)
            return
    suffixes = ", ".join((LOG_SUFFIX, *_DUMPS))
    raise StorageError(f"{disk.describe(path)}: unknown file type; use one of {suffixes}")


def dump_log(disk: Disk, path: str, *, print_records: bool = False) -> Iterator[Row]:
    """Yield one row per batch. With `print_records`, a row also has the batch's records."""
    file = disk.open(path)
    try:
        for batch in scan(file, 0, file.size()):
            if isinstance(batch, BadBatch):
                raise StorageError(f"{disk.describe(path)} at position {batch.position}: {batch.reason}")
            try:
                row = _batch_row(batch)
            except BrokerError as error:
                raise StorageError(f"{disk.describe(path)} at position {batch.position}: {error}") from error
            if print_records:
                row["records"] = _record_rows(disk, path, batch)
            yield row
            if not row["is_valid"]:
                raise StorageError(f"{disk.describe(path)} at position {batch.position}: wrong checksum")
    finally:
        file.close()


def _batch_row(batch: ScannedBatch) -> Row:
    header: BatchHeader = batch.header
    return {
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "count": header.records_count,
        "base_sequence": header.base_sequence,
        "last_sequence": header.last_sequence,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "partition_leader_epoch": header.partition_leader_epoch,
        "is_transactional": header.is_transactional,
        "is_control": header.is_control,
        "position": batch.position,
        "timestamp_type": header.timestamp_type.name,
        "max_timestamp_ms": header.max_timestamp_ms,
        "size_bytes": header.size_bytes,
        "compression": header.compression.name.lower(),
        "crc": header.crc,
        "is_valid": verify_crc(batch.data, batch.data_position, header.size_bytes),
    }


def _record_rows(disk: Disk, path: str, batch: ScannedBatch) -> list[Row]:
    try:
        if batch.header.is_control:
            control = decode_control(batch.bytes(), verify=False)
            if control is None:
                return []
            kind = control.type.name if control.type is not None else "unknown"
            return [
                {"offset": control.offset, "control": kind, "coordinator_epoch": control.coordinator_epoch}
            ]
        return [
            {
                "offset": record.offset,
                "timestamp_ms": record.timestamp_ms,
                "key": _text(record.key),
                "value": _text(record.value),
                "headers": {name: _text(value) for name, value in record.headers},
            }
            for records in iter_records(batch.bytes(), verify=False, name_errors="backslashreplace")
            for record in records
        ]
    except BrokerError as error:
        raise StorageError(f"{disk.describe(path)} at position {batch.position}: {error}") from error


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="backslashreplace")


def _base_offset(disk: Disk, path: str) -> int:
    stem = path.rsplit("/", 1)[-1].split(".", 1)[0]
    if not is_stem(stem):
        raise StorageError(f"{disk.describe(path)}: the name must begin with the segment's base offset")
    return int(stem)


def _entries(disk: Disk, path: str, layout: struct.Struct) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (position, fields) of each entry of an index file. The zeros that Kafka preallocates at its end
    are skipped.
    """
    data = disk.read(path)
    whole = len(data) - len(data) % layout.size
    filled = len(data.rstrip(b"\0"))
    for position in range(0, whole, layout.size):
        if position < filled:
            yield position, layout.unpack_from(data, position)
    if whole != len(data):
        raise StorageError(
            f"{disk.describe(path)} at position {whole}: the last entry is incomplete "
            f"({len(data) - whole} bytes)"
        )


def _dump_index(disk: Disk, path: str, verify: bool) -> Iterator[Row]:
    base = _base_offset(disk, path)
    log_path = path.removesuffix(INDEX_SUFFIX) + LOG_SUFFIX
    log = disk.open(log_path) if verify and disk.exists(log_path) else None
    previous = -1
    try:
        for position, (relative, log_position) in _entries(disk, path, _OFFSET_ENTRY):
            yield {"offset": base + relative, "position": log_position}
            if relative <= previous:
                raise StorageError(f"{disk.describe(path)} at position {position}: offsets do not increase")
            previous = relative
            if log is None:
                continue
            batch = next(scan(log, log_position, log.size()), None)
            if not isinstance(batch, ScannedBatch) or batch.header.last_offset != base + relative:
                raise StorageError(
                    f"{disk.describe(path)} at position {position}: the log has no batch at "
                    f"position {log_position} that ends at offset {base + relative}"
                )
    finally:
        if log is not None:
            log.close()


def _dump_times(disk: Disk, path: str, verify: bool) -> Iterator[Row]:
    base = _base_offset(disk, path)
    log_path = path.removesuffix(TIME_SUFFIX) + LOG_SUFFIX
    batches = _timestamps_of(disk, log_path) if verify and disk.exists(log_path) else None
    previous = None
    for position, (timestamp_ms, relative) in _entries(disk, path, _TIME_ENTRY):
        yield {"timestamp_ms": timestamp_ms, "offset": base + relative}
        if previous is not None and timestamp_ms <= previous:
            raise StorageError(f"{disk.describe(path)} at position {position}: timestamps do not increase")
        previous = timestamp_ms
        if batches is not None and batches.get(base + relative) != timestamp_ms:
            raise StorageError(
                f"{disk.describe(path)} at position {position}: no batch ending at offset {base + relative}"
                f" has the timestamp {timestamp_ms}"
            )


def _timestamps_of(disk: Disk, log_path: str) -> dict[int, int]:
    log = disk.open(log_path)
    try:
        batches = (item for item in scan(log, 0, log.size()) if isinstance(item, ScannedBatch))
        return {batch.header.last_offset: batch.header.max_timestamp_ms for batch in batches}
    finally:
        log.close()


def _dump_transactions(disk: Disk, path: str, verify: bool) -> Iterator[Row]:
    for position, (version, *fields) in _entries(disk, path, _TXN_ENTRY):
        if version != 0:
            raise StorageError(f"{disk.describe(path)} at position {position}: version {version} is unknown")
        yield dict(
            zip(("producer_id", "first_offset", "last_offset", "last_stable_offset"), fields, strict=True)
        )


def _dump_snapshot(disk: Disk, path: str, verify: bool) -> Iterator[Row]:
    yield from _producer_rows(_decoded(disk, path, decode_snapshot), has_append_time=False)


def _dump_full(disk: Disk, path: str, verify: bool) -> Iterator[Row]:
    def decode(data: bytes) -> Producers:
        bound_to = _FULL_CRC.unpack_from(data, _FULL_CRC_POSITION)[0] if len(data) >= 10 else 0
        snapshot = path.removesuffix(FULL_SUFFIX) + SNAPSHOT_SUFFIX
        if verify and disk.exists(snapshot):
            bound_to = crc_of(disk.read(snapshot))
        return [(pid, unpack_entry(packed)) for pid, packed in decode_full(data, bound_to).items()]

    yield from _producer_rows(_decoded(disk, path, decode), has_append_time=True)


def _decoded(disk: Disk, path: str, decode: Callable[[bytes], Producers]) -> Producers:
    try:
        return decode(disk.read(path))
    except (StorageError, struct.error) as error:
        raise StorageError(f"{disk.describe(path)} at position 0: {error}") from error


def _producer_rows(producers: Producers, *, has_append_time: bool) -> Iterator[Row]:
    """Yield one row per remembered batch, and one row for a producer without remembered batches."""
    for producer_id, entry in producers:
        shared = {
            "producer_id": producer_id,
            "producer_epoch": entry.producer_epoch,
            "coordinator_epoch": entry.coordinator_epoch,
            "current_txn_first_offset": entry.current_txn_first_offset,
            "last_timestamp_ms": entry.last_timestamp_ms,
            "last_append_ms": entry.last_append_ms if has_append_time else None,
        }
        if not entry.batches:
            yield shared | dict.fromkeys(("first_sequence", "last_sequence", "last_offset", "offset_delta"))
        for batch in entry.batches:
            yield shared | {
                "first_sequence": batch.first_sequence,
                "last_sequence": batch.last_sequence,
                "last_offset": batch.last_offset,
                "offset_delta": batch.offset_delta,
            }


_DUMPS: dict[str, Callable[[Disk, str, bool], Iterator[Row]]] = {
    INDEX_SUFFIX: _dump_index,
    TIME_SUFFIX: _dump_times,
    TXN_SUFFIX: _dump_transactions,
    SNAPSHOT_SUFFIX: _dump_snapshot,
    FULL_SUFFIX: _dump_full,
}
